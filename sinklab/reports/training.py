"""`write_training_report`: from a training's saved tables to figures/* and one self-contained report.html.

Nothing here runs a model or loads torch, and the same run gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from sinklab.errors import InputError
from sinklab.reports import captions, lm_training, training_captions, vit_training
from sinklab.reports.page import PAPER
from sinklab.reports.saved import reading
from sinklab.reports.stale import remove_stale_figures
from sinklab.reports.training_tables import claim_rows, grouped, shown_tables
from sinklab.reports.wording import fixed, joined, number, percent, plural
from sinklab.training.compare import training_table

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.run import Run

TITLE = {
    "nop": "Adaptive NOP: a sink that hands out nothing",
    "nop-branch": "Adaptive NOP, supervised on the branch",
    "broadcast": "Broadcast: a sink that hands one vector to all",
    "pathway": "Global pathway: the broadcast without a sink",
}
SAVED = {
    "nop": ("table2",),
    "nop-branch": (),
    "broadcast": ("table3", "qk_pca", "stable_ranks"),
    "pathway": ("pathway", "stable_ranks"),
}
"""Tables of each task beside those of ALWAYS."""
ALWAYS = ("training", "curves", "claims", "spectrum_training")
TABLES_WRITTEN = ("sinks", "members", "variants", "curves", "layers", "validation", "table14", "table15")
"""What a page's own tables can be: a training of vision transformers has all but the first from its members' files."""
WRITER = "sinklab train, with the options of the training and --resume,"


def is_training(run: Run) -> bool:
    """Whether a run is a training, and not a diagnosis."""
    return run.config.get("purpose") == "training"


def kind_of(run: Run) -> str | None:
    """What a training trained, such as "lm" or "vit"; None where run.json does not say."""
    settings = run.config.get("settings")
    kind = settings.get("kind") if isinstance(settings, dict) else None
    return kind if isinstance(kind, str) else None


def shown_unfinished(run: Run) -> bool:
    """Whether a run has a page before it is complete: a training of vision transformers, which takes days."""
    return is_training(run) and kind_of(run) == "vit"


def shows_sinks(run: Run) -> bool:
    """Whether a run is a training whose page says what its models' sinks are, once they are diagnosed."""
    return shown_unfinished(run) or (
        is_training(run) and run.config.get("status") == "complete" and kind_of(run) == "lm"
    )


def write_training_report(run: Run) -> Path:
    """Write RUN/figures/*.{svg,png,csv} and RUN/report.html of a finished training; returns the page's path.

    One of vision transformers may be unfinished. Raises InputError for a run that is unfinished or damaged.
    """
    if not is_training(run):
        raise InputError(f"The run {run.path} is not a training: it is reported on with sinklab report.")
    if run.config.get("status") != "complete" and not shown_unfinished(run):
        raise InputError(
            f"The training {run.path} is not complete (status: {run.config.get('status')}): go on with --resume first."
        )
    page, drawn, written = _made(run)
    for name in TABLES_WRITTEN:
        if name in written:
            run.write_table(f"tables/{name}.csv", written[name])
        elif name in ("table14", "table15"):  # of diagnoses that are there no more
            (run.path / f"tables/{name}.csv").unlink(missing_ok=True)
    for figure in drawn:
        run.write_text(f"figures/{figure.name}.svg", figure.svg)
        run.write_bytes(f"figures/{figure.name}.png", figure.png)
        run.write_table(f"figures/{figure.name}.csv", figure.table)
    run.write_text("report.html", page)
    remove_stale_figures(run.path, {f"{each.name}.{end}" for each in drawn for end in ("svg", "png", "csv")})
    return run.path / "report.html"


def _made(run: Run) -> tuple[str, list[captions.Drawn], dict[str, pd.DataFrame]]:
    """The page, its figures, and the tables that are to be written beside it."""
    if kind_of(run) == "vit":
        saved, drawn, shown = vit_training.gather(run, WRITER)
        with reading(run.path / "run.json", WRITER):
            named = [*(["training"] if shown["has_training"] else []), *saved]
            return filled("training_vit.html.j2", run.config, drawn, named, shown), drawn, saved
    with reading(run.path / "run.json", WRITER):
        kind, sweep = str(run.config["settings"]["kind"]), run.config["settings"]["sweep"]
    if kind != "lm" and kind not in SAVED:
        known = ", ".join((*SAVED, "lm", "vit"))
        raise InputError(f"There is no report of trainings of the kind {kind!r}, only of {known}.")
    if kind == "lm":
        saved, drawn, shown = lm_training.gather(run, WRITER)
        with reading(run.path / "run.json", WRITER):
            page = filled("training_lm.html.j2", run.config, drawn, saved, shown)
        return page, drawn, {name: table for name, table in saved.items() if name == "sinks"}
    saved = {}
    for name in (*ALWAYS, *SAVED[kind]):
        with reading(run.path / f"tables/{name}.csv", WRITER):
            saved[name] = training_table(run) if name == "training" else run.table(name)
    with reading(run.path / "tables", WRITER):
        drawn = training_captions.draw_all(kind, saved, sweep, int(run.config["settings"]["config"]["tokens"]))
        return render(run.config, kind, saved, drawn), drawn, {}


def render(config: dict[str, Any], kind: str, saved: dict[str, pd.DataFrame], drawn: list[captions.Drawn]) -> str:
    """The page of a controlled task as text."""
    claims, tables = claim_rows(saved["claims"]), shown_tables(kind, saved)
    shown = {
        "title": TITLE[kind],
        "subtitle": _subtitle(config),
        "verdict": _verdict(claims, _leading(drawn, kind, config["settings"]["sweep"])),
        "budget": [
            budget_sentence(config["budget"], config["settings"]["sweep"]),
            *task_sentences(config["settings"]["config"]),
        ],
        "facts": _facts(config),
        "claims": claims,
        "tables": tables,
        "beside": any(cell.paper for table in tables for _, _, cells in table.rows for cell in cells),
        "grouped": grouped,
    }
    return filled("training.html.j2", config, drawn, saved, shown)


def filled(
    template: str,
    config: dict[str, Any],
    drawn: list[captions.Drawn],
    tables: Iterable[str],
    shown: dict[str, Any],
) -> str:
    """A template of the page as text; every name that a user chose is escaped."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    assets = files("sinklab") / "assets"
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=FunctionLoader(lambda name: (assets / name).read_text(encoding="utf-8")),
    )  # fmt: skip
    environment.filters["fixed"] = fixed
    return environment.get_template(template).render(
        style=Markup((assets / "report.css").read_text(encoding="utf-8")),
        paper=PAPER,
        sinklab=config.get("sinklab", ""),
        drawn=drawn,
        files=[*tables],
        **shown,
    )


def budget_sentence(budget: dict[str, Any], sweep: str | None = None) -> str:
    """ "The laptop budget: 400 steps of 64 fresh sequences for each training, <1 % of the paper's." """
    changed = [f"{name} = {_listed(value)}" for name, value in budget["changed"].items()]
    changes = f" with {joined(changed)}" if changed else ""
    share = budget["of_paper"]
    compared = "as many as the paper’s" if share == 1 else f"{number(100 * share, 2)} % of the paper’s sequences"
    each = "each point of the sweep" if sweep else "each training"
    return (
        f"The “{budget['variant']}” budget{changes}: {plural(budget['steps'], 'step')} of "
        f"{plural(budget['batch'], 'fresh sequence')} for {each}, {compared}."
    )


def task_sentences(config: dict[str, Any]) -> list[str]:
    """In what a config's task is another than the paper's."""
    told = []
    if config.get("dedicated"):
        told.append(
            "Every sequence begins with an empty token that the loss leaves out, which the paper’s branch-supervised "
            "task has not: with it a sink forms in few steps (dedicated = true)."
        )
    if config.get("centred"):
        told.append(
            "The task’s direction has no part along (1, …, 1), which LayerNorm would hide from the model; the paper’s "
            "has one (centred = true)."
        )
    return told


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _subtitle(config: dict[str, Any]) -> str:
    settings, budget = config["settings"], config["budget"]
    swept = [f"sweep over {settings['sweep']}"] if settings["sweep"] else []
    parts = [plural(len(config["members"]), "training"), plural(len(settings["seeds"]), "seed"), *swept]
    return " · ".join(
        [
            *parts,
            f"{budget['variant']} budget: {plural(budget['steps'], 'step')} of {plural(budget['batch'], 'sequence')}",
        ]
    )


def _verdict(claims: list[dict[str, Any]], leading: list[captions.Drawn]) -> list[str]:
    lines = []
    if claims:
        held, seeds = [claim for claim in claims if claim["holds"]], len(claims[0]["seeds"])
        where = "on every seed" if seeds > 1 else "on its seed"
        if len(held) == len(claims):
            lines.append(f"All {len(claims)} claims of the task hold {where}.")
        else:
            failed = joined([claim["name"] for claim in claims if not claim["holds"]])
            lines.append(f"{len(held)} of the task’s {len(claims)} claims hold {where}; these do not: {failed}.")
    return lines + [figure.alt for figure in leading]


def _leading(drawn: list[captions.Drawn], kind: str, sweep: str | None) -> list[captions.Drawn]:
    """The figures whose numbers, in words, stand in the verdict: what the task is about, which comes first."""
    return drawn if kind == "nop-branch" and sweep is None else drawn[:1]


def _facts(config: dict[str, Any]) -> list[tuple[str, str]]:
    settings, budget = config["settings"], config["budget"]
    own, timings = settings["config"], config.get("timings", {})
    batches, size = budget["evaluation"]
    facts = [
        ("Seeds", ", ".join(map(str, settings["seeds"]))),
        ("Sequences", f"{plural(own['tokens'], 'token')} of {own['dim']} channels"),
        ("Optimizer", f"AdamW, learning rate {own['lr']:g}, weight decay {own['weight_decay']:g}, "
                      f"warm-up {percent(own['warmup'])}, linear decay over the last {percent(own['decay'])}"),
        ("Evaluation", f"{plural(batches, 'batch', 'batches')} of {plural(size, 'sequence')} that no training saw"),
    ]  # fmt: skip
    if "penalty" in own:
        facts.append(("Penalty", f"λ = {own['penalty']:g}, {own['penalty_layers']} over layers, ratio by "
                                 f"{own['penalty_ratio']}, denominator {own['penalty_denominator']}"))  # fmt: skip
    if budget["chosen"]:
        facts.append(("Chosen", "; ".join(f"{name} = {_listed(value)}" for name, value in budget["chosen"].items())))
    if timings:
        seconds = [one["train_cpu_seconds"] for one in timings.values()]
        facts.append(("Cost", f"{number(sum(seconds) / len(seconds), 2)} CPU seconds a training, {settings['device']}, "
                              f"{plural(int(config.get('threads', 1)), 'thread')}"))  # fmt: skip
    return [*facts, ("Command", " ".join(config.get("command", [])) or "from Python")]
