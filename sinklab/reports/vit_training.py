"""The page of a vision transformer training: what was trained, how it went, and what the models' sinks are.

Everything is read from run.json, the members' own files, and the tables of diagnosed models below the run; a run that
is not finished is shown as far as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.reports import vit_captions, vit_sinks
from sinklab.reports.lm_training import mean_and_std
from sinklab.reports.palette import KIND_NAME
from sinklab.reports.saved import reading
from sinklab.reports.sections import records
from sinklab.reports.vit_setup import budget_sentences, difference_rows, facts, subtitle
from sinklab.reports.wording import DASH, THIN, each_or_ends, fixed, joined, number, plural, some
from sinklab.training import vit_files as files
from sinklab.training import vit_tables as tables

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.reports.captions import Drawn
    from sinklab.run import Run

PERCENT = f"{THIN}%"
LEJEPA = "LeJEPA: Provable and Scalable Self-Supervised Learning Without the Heuristics"


def gather(run: Run, writer: str) -> tuple[dict[str, pd.DataFrame], list[Drawn], dict[str, Any]]:
    """(the tables to save, the figures, what the template needs). `writer` is what writes a damaged file again."""
    config = run.config
    with reading(run.path / "run.json", writer):
        members, complete = files.planned(config), config.get("status") == "complete"
    told = []
    for member in members:
        with reading(run.path / files.FOLDER / member.name, writer):
            told.append(files.read_told(member, run.path / files.FOLDER / member.name, complete=complete))
    makers: dict[str, Callable[[Sequence[files.Told]], pd.DataFrame]] = {
        "members": tables.members_table,
        "curves": tables.curves_table,
        "layers": tables.layers_table,
        "validation": tables.validation_table,
        "ends": tables.ends_table,
    }
    with reading(run.path / files.FOLDER, writer):
        saved = {name: make(told) for name, make in makers.items()}
        saved["variants"] = tables.variants_table(saved["members"])
    sinks = vit_sinks.read_sinks(run.path, [one.name for one in told])
    pathway = vit_sinks.pathway_shares(run.path, sinks)
    ends = saved.pop("ends").merge(pathway, "left", ["member", "layer"])
    with reading(run.path / files.FOLDER, writer):
        chance = guessing(run.path, told)
        drawn = vit_captions.draw_all(saved, ends, attending_alike(config), chance)
    with reading(run.path / "run.json", writer):
        shown = _shown(run.path, config, saved, told, sinks, chance)
    for name, table in (("table14", sinks.table_14), ("table15", sinks.table_15)):
        if table is not None:
            saved[name] = table
    return saved, drawn, shown


def guessing(folder: Path, told: Sequence[files.Told]) -> float | None:
    """One over the number of classes, by the first finished member's model.json; None without classes."""
    for one in told:
        path = folder / files.FOLDER / one.name / "model.json"
        if one.finished and path.is_file():
            classes = json.loads(path.read_text(encoding="utf-8"))["classes"]
            return 1 / len(classes) if classes else None
    return None


def attending_alike(config: dict[str, Any]) -> dict[str, float]:
    """VARIANT-SIZE → one over its number of tokens: the inflow of each where all are attended to alike."""
    return {
        str(name): 1 / ((own["image"] // own["patch"]) ** 2 + 1 + own["registers"])
        for name, own in config["settings"]["configs"].items()
    }


def _shown(
    folder: Path,
    config: dict[str, Any],
    saved: dict[str, pd.DataFrame],
    told: Sequence[files.Told],
    sinks: vit_sinks.Sinks,
    chance: float | None,
) -> dict[str, Any]:
    configs = list(config["settings"]["configs"])
    rules, table_15 = ([], []) if sinks.table_15 is None else vit_sinks.table_15_groups(sinks.table_15)
    finished = [one.name for one in told if one.finished]
    registers = {str(name): int(own["registers"]) for name, own in config["settings"]["configs"].items()}
    return {
        "title": f"Vision transformers: {joined(configs) if len(configs) < 4 else plural(len(configs), 'variant')}",
        "subtitle": subtitle(config, told),
        "verdict": [
            *finished_words(told),
            *verdict_lines(saved, config, chance),
            *filter(None, [vit_sinks.sinks_sentence(sinks)]),
        ],
        "unfinished": unfinished_sentences(config, told),
        "notes": notes(config, told),
        "budget": budget_sentences(config, told),
        "facts": facts(config, saved["members"]),
        "configs": configs,
        "differences": difference_rows(config["settings"]["configs"]),
        "results": result_rows(saved),
        "sinks": sinks,
        "sink_words": sinks.words() if sinks.table_14 is not None else "",
        "sink_images": sinks.images() if sinks.table_15 is not None else "",
        "missing": vit_sinks.missing_sentence(sinks, finished),
        "table_14": [] if sinks.table_14 is None else vit_sinks.table_14_groups(sinks.table_14, registers),
        "rules": rules,
        "table_15": table_15,
        "diagnosed": vit_sinks.member_lines(folder, sinks),
        "has_training": (folder / "tables/training.csv").is_file(),
        "kind_name": KIND_NAME,
        "lejepa": LEJEPA,
    }


def unfinished_sentences(config: dict[str, Any], told: Sequence[files.Told]) -> list[str]:
    """Which trainings are not at their end, and what goes on with them; nothing for a finished run."""
    if config.get("status") == "complete":
        return []
    onward = "The command that made the run goes on with it, with --resume."
    left = [one for one in told if not one.finished]
    if not left:
        return ["All trainings are finished, but the run was stopped before its table was written.", onward]
    named = [f"{one.name} ({f'step {one.done:,} of {one.steps:,}' if one.done else 'no step kept'})" for one in left]
    done = len(told) - len(left)
    return [
        f"{done} of {plural(len(told), 'training')} {'is' if done == 1 else 'are'} finished. Not finished: "
        f"{some(named)}.",
        "Tables, and numbers at the end, are of the finished ones; curves are of all, as far as they are, and a mean "
        "over seeds ends with the first of them that does.",
        onward,
    ]


def finished_words(told: Sequence[files.Told]) -> list[str]:
    """How much of the run the verdict is of; nothing where it is of all, or of nothing."""
    done = sum(one.finished for one in told)
    if done in (0, len(told)):
        return []
    return [f"{done} of {plural(len(told), 'training')} {'is' if done == 1 else 'are'} finished: what follows is "
            f"{'its' if done == 1 else 'theirs'}."]  # fmt: skip


def notes(config: dict[str, Any], told: Sequence[files.Told]) -> list[str]:
    """The run's notes, unreadable pictures, and curves that have lost lines."""
    unreadable = [
        f"{name}: {plural(len(each), 'picture')} could not be read and {'was' if len(each) == 1 else 'were'} skipped."
        for name, each in config.get("unreadable", {}).items()
        if each
    ]
    return [*map(str, config.get("notes", [])), *unreadable, *files.cut_short(told)]


def verdict_lines(saved: dict[str, pd.DataFrame], config: dict[str, Any], chance: float | None) -> list[str]:
    """Who has the best probe, whose attention shares most, and how large an inflow is; of the finished trainings."""
    variants = [row for row in records(saved["variants"]) if row["seeds"]]
    if not variants:
        return ["No training is finished yet."]
    best = sorted(variants, key=lambda row: -row["probe_accuracy_mean"])
    means = ", means over seeds" if max(row["seeds"] for row in variants) > 1 else ""
    lines = []
    if best[0]["probe_accuracy_mean"] == best[0]["probe_accuracy_mean"]:  # not NaN: there are classes
        said = each_or_ends([f"{row['config']} {_accuracy(row)}" for row in best], _of(best, "probe_accuracy_mean"))
        guess = f"; guessing has {fixed(100 * chance, 1)}{PERCENT}" if chance is not None else ""
        lines.append(f"Accuracy of the online probe{means}: {said}{guess}.")
    said = each_or_ends(
        [f"{row['config']} {fixed(row['common_mode_mean'])}" for row in variants], _of(variants, "common_mode_mean")
    )
    lines.append(f"Common-mode share of attention’s update in blocks from 1 on{means}: {said}.")
    inflows = [row for row in variants if row["max_inflow_mean"] == row["max_inflow_mean"]]
    if inflows:
        alike = attending_alike(config)
        least = " or ".join(sorted({number(alike[row["config"]]) for row in inflows}))
        said = each_or_ends(
            [f"{row['config']} {number(row['max_inflow_mean'])}" for row in inflows], _of(inflows, "max_inflow_mean")
        )
        lines.append(
            f"Largest mean inflow of a head in blocks from 1 on{means}: {said}, where tokens that are all attended to "
            f"alike have {least}."
        )
    return lines


def _of(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def _accuracy(row: dict[str, Any]) -> str:
    return mean_and_std({name: 100 * row[name] for name in ("probe_accuracy_mean", "probe_accuracy_std")},
                        "probe_accuracy", 1) + PERCENT  # fmt: skip


def result_rows(saved: dict[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """The table of results in words: a row a variant and, where it has several seeds, below it a row a seed."""
    rows = []
    for row in records(saved["variants"]):
        mine = records(saved["members"][saved["members"]["config"] == row["config"]])
        seeds = [
            {
                "name": f"seed {one['seed']}",
                "accuracy": fixed(100 * one["probe_accuracy"], 1),
                "loss": fixed(one["probe_loss"], 3),
                "common_mode": fixed(one["common_mode"], 3),
                "inflow": fixed(one["max_inflow"], 3),
                "block": "" if one["max_inflow"] != one["max_inflow"] else f"block {int(one['max_inflow_layer'])}",
                "steps": f"{one['steps']:,}" if one["finished"] else f"{one['done']:,} of {one['steps']:,}",
            }
            for one in mine
        ]
        rows.append(
            {
                "config": row["config"],
                "accuracy": _accuracy(row).removesuffix(PERCENT),
                "loss": mean_and_std(row, "probe_loss"),
                "common_mode": mean_and_std(row, "common_mode"),
                "inflow": mean_and_std(row, "max_inflow"),
                "block": seeds[0]["block"] if len(mine) == 1 else "",
                "parameters": DASH if row["parameters"] != row["parameters"] else f"{int(row['parameters']):,}",
                "seeds": str(row["seeds"]) + (f" of {row['planned']}" if row["seeds"] < row["planned"] else ""),
                "steps": seeds[0]["steps"] if len(mine) == 1 else f"{mine[0]['steps']:,}",
                "by_seed": seeds if len(mine) > 1 else [],
            }
        )
    return rows
