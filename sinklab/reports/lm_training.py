"""The page of a language model training: bits a byte, learning rates, ablations, samples, and what the sinks are.

Everything is read from the run's tables, run.json, the samples, and the tables of diagnosed models below the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.reports import lm_captions, lm_sinks
from sinklab.reports.lm_figures import ablation_rows
from sinklab.reports.saved import reading
from sinklab.reports.sections import records
from sinklab.reports.wording import DASH, fixed, joined, number, percent, plural
from sinklab.training.compare import training_table

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.reports.captions import Drawn
    from sinklab.run import Run

TABLES = ("training", "curves", "points", "differences")
PLACES = 3
"""Decimals of bits a byte: a difference of seeds is a few thousandths."""
KURAMOTO = "Kuramoto Attention: Synchronizing Self-Attention on the Torus"


def gather(run: Run, writer: str) -> tuple[dict[str, pd.DataFrame], list[Drawn], dict[str, Any]]:
    """(the tables, the figures, what the template needs). `writer` is what writes a damaged table again."""
    saved: dict[str, pd.DataFrame] = {}
    for name in TABLES:
        with reading(run.path / f"tables/{name}.csv", writer):
            saved[name] = training_table(run) if name == "training" else run.table(name)
    config = run.config
    members = members_of(config)
    sinks = lm_sinks.read_sinks(run.path, members)
    with reading(run.path / "training", writer):
        samples = _samples(run.path, saved["training"], members)
    with reading(run.path / "tables", writer):
        drawn = lm_captions.draw_all(saved, config["settings"]["sweep"])
        shown = _shown(run.path, config, saved, sinks, samples)
    if len(sinks):
        saved["sinks"] = sinks
    return saved, drawn, shown


def members_of(config: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """Member → model and seed, from its name "seed-0/phase-tiny" or "seed-0/phase-tiny/lr=0.001"."""
    found = {}
    for name in config["members"]:
        seed, model, *_ = str(name).split("/")
        found[str(name)] = (model, int(seed.removeprefix("seed-")))
    return found


def _samples(folder: Path, training: pd.DataFrame, members: dict[str, tuple[str, int]]) -> list[dict[str, str]]:
    """Member and text, bits that are no UTF-8 and letters that are no text made visible; none of what diverged."""
    rows = zip(members, records(training), strict=True)  # training.csv has the members in their order
    return [
        {"member": name, "bpc": fixed(row["validation_bpc"], PLACES), "text": legible(path.read_bytes())}
        for name, row in rows
        if row["validation_bpc"] == row["validation_bpc"]
        for path in [folder / "training" / name / "sample.txt"]
    ]


def legible(content: bytes) -> str:
    """Bytes as text that a page shows and does not obey; lines may end."""
    from sinklab.errors import printable

    return printable(content.decode("utf-8", "replace"), keep="\n\t")


def _shown(
    folder: Path,
    config: dict[str, Any],
    saved: dict[str, pd.DataFrame],
    sinks: pd.DataFrame,
    samples: list[dict[str, str]],
) -> dict[str, Any]:
    configs = list(dict.fromkeys(saved["training"]["config"].astype(str)))
    return {
        "title": f"Language models: {joined(configs) if len(configs) < 4 else plural(len(configs), 'model')}",
        "subtitle": subtitle(config),
        "verdict": [*verdict_lines(saved), *([lm_sinks.families_sentence(sinks)] if len(sinks) else [])],
        "budget": budget_sentences(config),
        "facts": facts(config),
        "results": result_rows(saved, config.get("timings", {})),
        "differences": difference_rows(saved["differences"]),
        "seeds": sorted(int(seed) for seed in saved["differences"]["seed"].unique()),
        "samples": samples,
        "sink_sentence": lm_sinks.families_sentence(sinks) if len(sinks) else "",
        "sinks": lm_sinks.sink_rows(sinks, folder) if len(sinks) else [],
        "phases": lm_sinks.phase_sentences(folder, sinks) if len(sinks) else [],
        "judged": lm_sinks.judged_by(sinks) if len(sinks) else "",
        "notes": [str(note) for note in config.get("notes", [])],
        "kuramoto": KURAMOTO,
    }


def subtitle(config: dict[str, Any]) -> str:
    """ "6 trainings · 3 seeds · sweep over lr · text stdlib"."""
    settings = config["settings"]
    swept = [f"sweep over {settings['sweep']}"] if settings["sweep"] else []
    named = f"text {settings['text']['name']}"
    return " · ".join(
        [plural(len(config["members"]), "training"), plural(len(settings["seeds"]), "seed"), *swept, named]
    )


def budget_sentences(config: dict[str, Any]) -> list[str]:
    """One sentence a budget: steps, sequences, and how often that goes through the text."""
    settings = config["settings"]
    split = settings["text"]["splits"]["train"]
    length = int(split[1]) - int(split[0])
    groups: dict[tuple[int, int, int], list[str]] = {}
    for name, own in settings["configs"].items():
        groups.setdefault((own["steps"], own["batch"], own["context"]), []).append(str(name))
    return [
        f"{joined(names) if len(groups) > 1 else 'Every model'}: {plural(steps, 'step')} of "
        f"{plural(batch, 'sequence')} of {plural(context, 'byte')}, {number(steps * batch * context / length, 2)} "
        f"times through the {length:,} bytes of the training split."
        for (steps, batch, context), names in groups.items()
    ]


def facts(config: dict[str, Any]) -> list[tuple[str, str]]:
    """What fixes the training, in words."""
    settings = config["settings"]
    text, own = settings["text"], next(iter(settings["configs"].values()))
    sizes = [f"{name} {int(last) - int(first):,}" for name, (first, last) in text["splits"].items()]
    symbols = len(text.get("symbols", []))
    return [
        ("Text", f"{text['name']}: {joined(sizes)} bytes, {plural(symbols, 'symbol')}, SHA-256 {text['sha256'][:12]}…"),
        ("Seeds", ", ".join(map(str, settings["seeds"]))),
        ("Optimizer", f"AdamW {own['betas'][0]:g}, {own['betas'][1]:g}, weight decay {own['weight_decay']:g} on "
                      f"matrices, clip {own['clip']:g}, warm-up {percent(own['warmup'])}, cosine to "
                      f"{percent(own['floor'])}"),
        ("Evaluation", f"the best weights by the validation split, whole splits, a window of {own['context']} bytes "
                       f"that moves on by {own['stride']}"),
        ("Machine", f"{settings['device']}, {plural(int(config.get('threads', 1)), 'thread')}, "
                    f"{plural(int(config.get('processes', 1)), 'process', 'processes')}"
                    f"{', compiled' if settings['compile'] else ''}{', bfloat16' if own['bf16'] else ''}"),
        ("Command", " ".join(config.get("command", [])) or "from Python"),
    ]  # fmt: skip


def verdict_lines(saved: dict[str, pd.DataFrame]) -> list[str]:
    """Who has fewer bits a byte, seed by seed; what was chosen; which part is worth most."""
    points, differences = saved["points"], saved["differences"]
    best = points[points["chosen"]]
    said = [f"{row['config']} {fixed(row['validation_bpc_median'], PLACES)}" for row in records(best)
            if "+" not in row["config"]]  # fmt: skip
    lines = [f"Validation bits a byte, median over seeds: {joined(said)}."] if said else []
    rows = differences[(differences["measure"] == "validation_bpc")]
    for (config, against), mine in rows.groupby(["config", "against"], sort=False):
        if "+" not in str(config):
            lines.append(_difference_words(str(config), str(against), mine["difference"]))
    if (points.groupby("config").size() > 1).any():
        rates = joined([f"{row['lr']:g} for {row['config']}" for row in records(best)])
        lines.append(f"Learning rate chosen by validation: {rates}.")
    dearest = ablation_rows(differences)
    if len(dearest):
        medians = dearest.groupby("config", sort=False)["difference"].median()
        costs = joined([f"{str(name).partition('+')[2]} {signed(value)}" for name, value in medians.items()])
        lines.append(f"What an ablation costs, in bits a byte against the whole model: {costs}.")
    return lines


def _difference_words(config: str, against: str, values: pd.Series[float]) -> str:
    if len(values) == 1:
        return f"{config} − {against}, of the one seed that both have: {signed(values.iloc[0])}."
    less = int((values < 0).sum())
    return (
        f"{config} − {against}, seed by seed: median {signed(values.median())}, from "
        f"{signed(values.min())} to {signed(values.max())}; less in {less} of "
        f"{plural(len(values), 'seed')}."
    )


def result_rows(saved: dict[str, pd.DataFrame], timings: dict[str, Any]) -> list[dict[str, Any]]:
    """The table of results, a row a model and learning rate, in words; what was chosen is marked."""
    points = saved["points"]
    swept = bool((points.groupby("config").size() > 1).any())
    return [
        {
            "config": row["config"],
            "lr": f"{row['lr']:g}",
            "chosen": swept and bool(row["chosen"]),
            "steps": f"{row['steps']:,}",
            "parameters": DASH if row["parameters"] != row["parameters"] else f"{int(row['parameters']):,}",
            "seeds": str(row["seeds"]) + (f" of {row['seeds'] + row['diverged']}" if row["diverged"] else ""),
            **{f"{split}_mean": mean_and_std(row, f"{split}_bpc") for split in ("validation", "test")},
            **{f"{split}_median": fixed(row[f"{split}_bpc_median"], PLACES) for split in ("validation", "test")},
            "pace": pace(saved["training"], timings, row["config"], row["lr"], swept),
        }
        for row in records(points)
    ]


def signed(value: float) -> str:
    """ "+0.015", "−0.002"."""
    return f"{float(value):+.{PLACES}f}".replace("-", "−")


def mean_and_std(row: dict[str, Any], name: str, places: int = PLACES) -> str:
    """ "2.013 ± 0.012"; the mean alone for one seed."""
    mean, std = fixed(row[f"{name}_mean"], places), row[f"{name}_std"]
    return mean if std != std else f"{mean} ± {fixed(std, places)}"


def pace(training: pd.DataFrame, timings: dict[str, Any], config: str, lr: float, swept: bool) -> str:
    """Tokens a second while training, the median over seeds; a dash where none was trained in one go."""
    speed = tokens_per_second(training, timings, config, lr, swept)
    return DASH if speed is None else f"{speed:,.0f}"


def tokens_per_second(
    training: pd.DataFrame, timings: dict[str, Any], config: str, lr: float, swept: bool
) -> float | None:
    """The median over seeds of run.json's timings; None without any."""
    from statistics import median

    ending = f"{config}/lr={lr:g}" if swept else config
    seeds = training.loc[training["config"] == config, "seed"].unique()
    told = [timings.get(f"seed-{int(seed)}/{ending}", {}).get("tokens_per_second") for seed in seeds]
    known = [float(each) for each in told if each]
    return median(known) if known else None


def difference_rows(differences: pd.DataFrame) -> list[dict[str, Any]]:
    """A row a pair of models and measure: each seed's difference and the median."""
    rows = []
    for (config, against, measure), mine in differences.groupby(["config", "against", "measure"], sort=False):
        by_seed = {int(row["seed"]): signed(row["difference"]) for row in records(mine)}
        rows.append(
            {
                "pair": f"{config} − {against}",
                "split": str(measure).removesuffix("_bpc"),
                "by_seed": by_seed,
                "median": signed(mine["difference"].median()),
                "mean": signed(mine["difference"].mean()),
            }
        )
    return rows
