"""What the sinks of a vision transformer training's models are, once `sinklab diagnose RUN` has looked at them.

Read from RUN/diagnosed/MEMBER, counted as `sinklab compare` counts: the paper's Tables 14 and 15 over variants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.reports.branches import SHARES
from sinklab.reports.lm_sinks import DIAGNOSED, WRITER
from sinklab.reports.palette import CLASS_NAME
from sinklab.reports.saved import reading
from sinklab.reports.sections import records
from sinklab.reports.spoken import verdict_lines
from sinklab.reports.variants import (
    CELLS,
    Compared,
    arm_and_seed,
    differing_images,
    not_finite_sentences,
    rules_of,
    sink_counts,
    table_14,
    table_15,
)
from sinklab.reports.wording import DASH, NAMED, THIN, each_or_ends, fixed, joined, plural
from sinklab.run import Run

if TYPE_CHECKING:
    import pandas as pd

SHOWN = ("nop", "broadcast", "all")
"""What a cell of Table 15 has of a variant under a rule."""


@dataclass(frozen=True, kw_only=True)
class Sinks:
    """The finished diagnoses below a run, and their tables; none where rules or images differ: such counts do not
    compare."""

    runs: list[Compared]
    members: list[str]
    """Of `runs`, in their order."""
    table_14: pd.DataFrame | None = None
    table_15: pd.DataFrame | None = None
    rules: Sequence[str] = ()
    """More than one: what was judged under them is not tabulated."""
    differing: str = ""
    """What the models were diagnosed on, where that was not the same images; then there are no tables either."""
    not_finite: Sequence[str] = ()
    """Of each model with heads that are not finite, how many they are."""

    @property
    def rule(self) -> str:
        return self.runs[0].rule.label

    def words(self) -> str:
        """ "relaxed rule; 16 images a model"."""
        return f"{self.rule} rule; {self.images()} a model"

    def images(self) -> str:
        """ "16 images", or "12 to 16 images"."""
        counts = sorted({int(one.run.heads["image_index"].nunique()) for one in self.runs})
        return plural(counts[0], "image") if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} images"


def read_sinks(folder: Path, members: Sequence[str]) -> Sinks:
    """The diagnoses of these members that are complete. Raises InputError for one that is damaged."""
    runs, names = [], []
    for name in members:
        path = folder / DIAGNOSED / name
        if not (path / "run.json").is_file():
            continue
        with reading(path, WRITER):
            run = Run.open(path)
            if run.config.get("status") == "complete":
                arm, seed = arm_and_seed(name)
                runs.append(Compared(run=run, source=folder.as_posix(), arm=arm, seed=seed, member=name))
                names.append(name)
    with reading(folder / DIAGNOSED, WRITER):
        rules = rules_of(runs)
        differing = differing_images(runs)
        if len(rules) != 1 or differing:
            return Sinks(runs=runs, members=names, rules=rules, differing=differing)
        counts = sink_counts(runs)
        return Sinks(
            runs=runs,
            members=names,
            table_14=table_14(counts, runs[0].rule.name),
            table_15=table_15(counts),
            rules=rules,
            not_finite=[sentence.removeprefix(f"{folder.as_posix()}/") for sentence in not_finite_sentences(counts)],
        )


def pathway_shares(folder: Path, sinks: Sinks) -> pd.DataFrame:
    """[member, layer, pathway]: the common-mode share of each block's pathway, of the models that have one."""
    import pandas as pd

    parts = [pd.DataFrame(columns=["member", "layer", "pathway"])]
    for name in sinks.members:
        path = folder / DIAGNOSED / name / SHARES
        if path.is_file():
            with reading(path, WRITER):
                table = pd.read_csv(path)
                table = table[table["update"] == "pathway"].astype({"layer": "int64", "share": "float64"})
                own = table[["layer", "share"]].rename(columns={"share": "pathway"}).assign(member=name)
                parts += [own] if len(own) else []
    return parts[0] if len(parts) == 1 else pd.concat(parts[1:], ignore_index=True)[["member", "layer", "pathway"]]


def sinks_sentence(sinks: Sinks) -> str:
    """Table 14's totals in a sentence, by the definition that the runs were judged by; "" without the table."""
    table = sinks.table_14
    if table is None:
        return ""
    own = _definition(sinks)
    rows = [row for row in records(table) if row["kind"] == "all" and row["definition"] == own]
    said = [
        f"{row['arm']} {fixed(row['nop'])} {CLASS_NAME['nop']} and {fixed(row['broadcast'])} {CLASS_NAME['broadcast']} "
        f"of {fixed(row['all'])}"
        for row in rows
    ]
    told = "; ".join(said) if len(said) <= NAMED else each_or_ends(said, [float(row["all"]) for row in rows])
    return f"Sinks an image in blocks from 1 on, {sinks.rule} rule, definition “{own}”: {told}."


def _definition(sinks: Sinks) -> str:
    from sinklab.sinks.classify import SinkDefinition

    return SinkDefinition.from_saved(sinks.runs[0].run.config["definition"]).name


def table_14_groups(table: pd.DataFrame, registers: Mapping[str, int]) -> list[tuple[str, list[dict[str, Any]]]]:
    """(definition, its rows, a variant after the other, any token first): arm, kind, the classes, seeds.

    `registers` is how many a variant has: of those without, and without a sink there, the row is left out.
    """
    groups = []
    for name, mine in table.groupby("definition", sort=False):
        told = [row | {f"{name}_words": cell(row, name) for name in CELLS} for row in records(mine)]
        rows = [row for row in told if row["kind"] != "register" or row["all"] or registers.get(row["arm"], 0)]
        order = list(dict.fromkeys(row["arm"] for row in rows))
        rows.sort(key=lambda row: (order.index(row["arm"]), row["kind"] != "all"))
        groups.append((str(name), rows))
    return groups


def cell(row: Mapping[str, Any], name: str) -> str:
    """ "0.25 ± 0.10"; the mean alone for one seed."""
    mean, std = fixed(row[name]), row[f"{name}_std"]
    return mean if std != std else f"{mean}{THIN}±{THIN}{fixed(std)}"


def table_15_groups(table: pd.DataFrame) -> tuple[list[str], list[tuple[str, list[dict[str, Any]]]]]:
    """(the rules, and of each definition a row a variant: its name and "NOP / broadcast / all" under each rule)."""
    rules = list(dict.fromkeys(str(name) for name in table["rule"]))
    groups = []
    for definition, mine in table.groupby("definition", sort=False):
        rows = []
        for arm, own in mine.groupby("arm", sort=False):
            cells = {str(row["rule"]): " / ".join(cell(row, name) for name in SHOWN) for row in records(own)}
            rows.append({"arm": str(arm), "cells": [cells.get(rule, DASH) for rule in rules]})
        groups.append((str(definition), rows))
    return rules, groups


def member_lines(folder: Path, sinks: Sinks) -> list[dict[str, str]]:
    """A line a diagnosed model: its name, what its own verdict says, and the way to its report ("" without one)."""
    said = []
    for name, one in zip(sinks.members, sinks.runs, strict=True):
        page = f"{DIAGNOSED}/{name}/report.html"
        with reading(one.run.path, WRITER):
            words = verdict_lines(one.run)[0]
        said.append({"member": name, "words": words, "report": page if (folder / page).is_file() else ""})
    return said


def missing_sentence(sinks: Sinks, finished: Sequence[str]) -> str:
    """Which finished models were not diagnosed; "" where all were."""
    left = [name for name in finished if name not in sinks.members]
    if not left or not sinks.members:
        return ""
    return f"Not diagnosed yet: {joined(left) if len(left) < 7 else plural(len(left), 'model')}."
