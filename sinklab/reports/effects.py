"""The saved tables of a patched run, and the rows that the causal section shows of them; nothing is computed anew.

tables/effects.csv holds means with their intervals, tables/causal_verdicts.csv what follows from them, run.json under
"patch" how they were made. All three are written by `sinklab patch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.reports.nouns import IMAGES, Words
from sinklab.reports.saved import PATCHED, reading
from sinklab.reports.sections import records
from sinklab.reports.tables import each_row

if TYPE_CHECKING:
    import pandas as pd

CAUSAL_CLASSES = ("nop", "broadcast")
EDIT_MEANING = {
    "zero": "the sink’s value is set to zero",
    "null": "every reader finds its own phases in place of the sink’s, which is exactly no contribution",
    "mean": "the sink’s value becomes the head’s mean sink value over held-out {nouns}",
    "donor": "the sink’s value becomes the sink’s value in another {noun}, the donor",
    "ordinary": "the sink’s value becomes that of {an_ordinary} of the donor",
    "route": "the sink is removed as a key; each query’s other attention is scaled up to sum to 1",
    "zero_ordinary": "the value of {an_ordinary}, not the sink’s, is set to zero (zero_ordinary in the tables)",
}
"""What each edit does, for `Words.say`."""
CONTRASTS = ("ordinary - zero", "route - zero", "donor - ordinary", "zero - donor", "zero - mean", "route - donor",
             "route - mean")  # fmt: skip
MEASURES = {
    "patch_change": ("{moved_title}", "relative change"),
    "cls_change": ("{first_title}", "relative change"),
    "shared_energy": ("Shared", "part of the change, 0 to 1"),
    "donor_cosine": ("Towards donor", "cosine, −1 to 1"),
    "kl": ("KL", "base ‖ edited, nats"),
    "top1_same": ("Same top-1", "share of {nouns}"),
    "ce_change": ("Cross-entropy", "change, nats"),
    "task_mse": ("Task MSE", "against its target"),
    "donor_target_mse": ("Donor-target MSE", "against the donor’s"),
    "no_payload_mse": ("No-payload MSE", "against x"),
    "delta_rms_nop": ("ΔRMS, NOP", "NOP queries"),
    "delta_rms_active": ("ΔRMS, active", "active queries"),
    "delta_rms": ("ΔRMS", "recipients"),
    "donor_improvement": ("Donor improvement", "nearer its target"),
}
"""Every measure's heading and unit, for `Words.say`, in the order of the columns; the last are a task's own."""
MAIN = "patch_change"
BLOCKS = ("1+", "0", "all")
PLACE: dict[str, tuple[str, ...]] = {"level": ("head", "class"), "class": (), "blocks": BLOCKS}
KEYS = PLACE | {"kind": ("edit", "contrast"), "name": (), "measure": tuple(MEASURES)}
VERDICT_KEYS = PLACE | {"verdict": ("nop", "broadcast", "neither", "undecided"), "agrees": ("True", "False", ""),
                        "reason": ()}  # fmt: skip
"""The columns of words, each with what may stand in it; () for anything."""
VERDICT_NUMBERS = dict.fromkeys(("layer", "head", "images", "heads"), "int64")
NUMBERS = VERDICT_NUMBERS | {"joint": "int64"} | dict.fromkeys(("mean", "sem", "low", "high"), "float64")


@dataclass(frozen=True, kw_only=True)
class Causal:
    """What a patched run saved."""

    patch: dict[str, Any]
    """run.json's entry."""
    effects: pd.DataFrame
    verdicts: pd.DataFrame
    """`agrees` is "True", "False", or "" where the verdict is undecided."""
    words: Words = IMAGES

    @property
    def edits(self) -> list[str]:
        """The edits that were measured, in the section's order; edits of other names after them."""
        seen = list(dict.fromkeys(self.effects.loc[self.effects["kind"] == "edit", "name"]))
        return [name for name in EDIT_MEANING if name in seen] + sorted(set(seen) - set(EDIT_MEANING))

    def headings(self, measure: str) -> tuple[str, str]:
        """What a column of a measure is called, and its unit."""
        heading, unit = MEASURES[measure]
        return self.words.say(heading), self.words.say(unit)

    @property
    def measures(self) -> list[str]:
        """The measures that have a value somewhere; a model without a [CLS] or a classifier lacks some."""
        seen = set(self.effects.loc[self.effects["mean"].notna(), "measure"])
        return [name for name in MEASURES if name in seen]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One mean with its 95 % interval, all NaN where there is none."""

    mean: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    heads: int = 0
    images: int = 0


def read_causal(path: Path, config: dict[str, Any]) -> Causal | None:
    """The causal tables of the run in `path`; None unless it was patched.

    An unfinished patching may lack them: None. Raises InputError for a damaged table and for one that a complete
    patching lacks.
    """
    patch = config.get("patch")
    if not isinstance(patch, dict):
        return None
    read = _read(path / "tables/effects.csv", NUMBERS, KEYS)
    verdicts = _read(path / "tables/causal_verdicts.csv", VERDICT_NUMBERS, VERDICT_KEYS)
    due = {"effects": read, "causal_verdicts": verdicts}
    if is_plan(patch) and verdicts is not None:
        due.pop("causal_verdicts")  # edits of one's own plan have no verdict
    missing = [name for name, table in due.items() if table is None or not len(table)]
    if missing and patch.get("status") == "complete":
        raise InputError(
            f"{path} was patched, but {path / 'tables' / (missing[0] + '.csv')} is missing or has no rows, and the "
            f"report needs it: {PATCHED} writes it again."
        )
    if missing or read is None or verdicts is None:
        return None
    order = ["level", "class", "layer", "head"]
    verdicts = verdicts.sort_values([*order, "blocks"], ignore_index=True)
    places = {name: place for place, name in enumerate((*EDIT_MEANING, *CONTRASTS))}
    read = read.assign(place=read["name"].map(places).fillna(len(places)))
    read = read.sort_values([*order, "joint", "blocks", "kind", "place", "name", "measure"], ignore_index=True)
    return Causal(patch=patch, effects=read.drop(columns="place"), verdicts=verdicts, words=Words.of(config))


def _read(path: Path, numbers: dict[str, str], words: dict[str, tuple[str, ...]]) -> pd.DataFrame | None:
    """A table with its columns checked: `numbers` and their types, `words` and what they may be (() for anything)."""
    import pandas as pd

    if not path.is_file():
        return None
    with reading(path, PATCHED):
        try:
            # null is the name of an edit, and an empty field is what has no number
            table = pd.read_csv(path, dtype=dict.fromkeys(words, str), keep_default_na=False, na_values=[""])
        except pd.errors.EmptyDataError:
            return pd.DataFrame(columns=[*words, *numbers])
        table = table[[*words, *numbers]].astype(numbers).fillna(dict.fromkeys(("agrees", "reason") & words.keys(), ""))
        for name, allowed in words.items():
            wrong = table[name].isna() | (bool(allowed) & ~table[name].isin(allowed))
            if wrong.any():
                raise ValueError(f"{table.loc[wrong, name].iloc[0]!r} is no {name}")
        return table


def is_plan(patch: dict[str, Any]) -> bool:
    """Whether the edits were those of a plan (`sinklab patch --plan`), and not the classes' own."""
    return bool(plan_of(patch))


def plan_of(patch: dict[str, Any]) -> list[dict[str, Any]]:
    """The plan's edits as they were written down; none for a run patched without one."""
    settings = patch.get("settings")
    options = settings.get("options") if isinstance(settings, dict) else None
    plan = options.get("plan") if isinstance(options, dict) else None
    return [edit for edit in plan if isinstance(edit, dict)] if isinstance(plan, list) else []


def plan_cells(causal: Causal) -> dict[str, Cell]:
    """The effect of a plan's edits, made together, by measure."""
    effects = causal.effects
    rows = effects[(effects["level"] == "class") & (effects["class"] == "plan") & (effects["name"] == "plan")]
    return {name: _cells(rows[rows["measure"] == name])["plan"] for name in MEASURES if (rows["measure"] == name).any()}


def shown_blocks(causal: Causal, name: str) -> str:
    """The blocks that speak for a class: "1+" where its mean exists, else "0", else "all"; "" without any mean."""
    rows = _class_rows(causal, name)
    return next((blocks for blocks in BLOCKS if (rows["blocks"] == blocks).any()), "")


def _class_rows(causal: Causal, name: str) -> pd.DataFrame:
    effects = causal.effects
    return effects[(effects["level"] == "class") & (effects["class"] == name) & (effects["joint"] == 0)]


def class_cells(causal: Causal, name: str, blocks: str, measure: str = MAIN, kind: str = "edit") -> dict[str, Cell]:
    """The class's cell for every edit, or for every contrast."""
    rows = _class_rows(causal, name)
    return _cells(rows[(rows["blocks"] == blocks) & (rows["measure"] == measure) & (rows["kind"] == kind)])


def class_groups(causal: Causal, name: str) -> list[dict[str, Any]]:
    """The class's table: one entry for layers ≥ 1 and one for layer 0, each with its rows of edits and contrasts.

    A row has `name`, `cells` (one per measure of `causal.measures`), `heads` and `images` (of patch_change).
    """
    present = set(_class_rows(causal, name)["blocks"])
    wanted = [blocks for blocks in BLOCKS[:2] if blocks in present] or [each for each in BLOCKS if each in present]
    groups = []
    for blocks in wanted:
        group: dict[str, Any] = {"blocks": blocks}
        for kind in ("edit", "contrast"):
            columns = [class_cells(causal, name, blocks, measure, kind) for measure in causal.measures]
            named = list(dict.fromkeys(each for column in columns for each in column))
            group[kind] = [_row(each, columns) for each in named]
        groups.append(group)
    return groups


def _row(name: str, columns: Sequence[dict[str, Cell]]) -> dict[str, Any]:
    cells = [column.get(name, Cell()) for column in columns]
    known = next((cell for cell in cells if cell.heads), Cell())
    return {"name": name, "cells": cells, "heads": known.heads, "images": known.images}


def head_rows(causal: Causal) -> list[dict[str, Any]]:
    """One row per edited head, by class, layer and head: its effects (`cells`, one an edit), verdict and reason."""
    effects = causal.effects
    effects = effects[(effects["level"] == "head") & (effects["kind"] == "edit") & (effects["measure"] == MAIN)]
    effects = effects[effects["class"].isin(CAUSAL_CLASSES)]
    verdicts = causal.verdicts[causal.verdicts["level"] == "head"]
    said = {_place(row): row for row in records(verdicts[verdicts["class"].isin(CAUSAL_CLASSES)])}
    places = {_place(row) for row in records(effects)} | set(said)
    rows = []
    for place in sorted(places, key=lambda each: (CAUSAL_CLASSES.index(each[0]), *each[1:])):
        name, layer, head = place
        cells = _cells(effects[(effects["class"] == name) & (effects["layer"] == layer) & (effects["head"] == head)])
        verdict = said.get(place, {})
        row = {"class": name, "layer": layer, "head": head}
        row["images"] = max([cell.images for cell in cells.values()], default=int(verdict.get("images", 0)))
        row["cells"] = [cells.get(edit, Cell()) for edit in causal.edits]
        row["verdict"] = verdict.get("verdict", "undecided")
        row["agrees"] = verdict.get("agrees", "")
        rows.append(row | {"reason": verdict.get("reason", "no verdict was saved")})
    return rows


def _place(row: dict[str, Any]) -> tuple[str, int, int]:
    return str(row["class"]), int(row["layer"]), int(row["head"])


def joint_table(causal: Causal) -> pd.DataFrame:
    """The effects of heads edited together, long: class, joint (how many heads), name, mean, low, high, …"""
    effects = causal.effects
    rows = effects[(effects["joint"] > 0) & (effects["kind"] == "edit") & (effects["measure"] == MAIN)]
    rows = rows[rows["class"].isin(CAUSAL_CLASSES) & rows["name"].isin(causal.edits)]
    rows = rows.drop_duplicates(["class", "joint", "name"])
    columns = ["class", "joint", "name", "measure", "images", "heads", "mean", "low", "high"]
    return rows[columns].reset_index(drop=True)


def joint_rows(causal: Causal, name: str) -> list[dict[str, Any]]:
    """One row per k: the effect of editing the class's k first heads together (`cells`, one an edit)."""
    mine = joint_table(causal)
    mine = mine[mine["class"] == name]
    rows = []
    for count in sorted(int(each) for each in mine["joint"].unique()):
        cells = _cells(mine[mine["joint"] == count])
        row = {"joint": count, "cells": [cells.get(edit, Cell()) for edit in causal.edits]}
        rows.append(row | {"images": max((cell.images for cell in cells.values()), default=0)})
    return rows


def effects_table(causal: Causal) -> pd.DataFrame:
    """What Fig. 6 draws, row by row: `drawn` is "bar" (a class mean) or "dot" (a head)."""
    import pandas as pd

    effects = causal.effects
    rows = effects[(effects["joint"] == 0) & (effects["kind"] == "edit") & (effects["measure"] == MAIN)]
    parts = []
    for name in CAUSAL_CLASSES:
        mine = rows[rows["class"] == name]
        blocks = shown_blocks(causal, name)
        bars = mine[(mine["level"] == "class") & (mine["blocks"] == blocks)]
        parts += [bars.assign(drawn="bar"), mine[mine["level"] == "head"].assign(drawn="dot")]
    columns = ["drawn", "class", "blocks", "layer", "head", "name", "measure", "images", "heads", "mean", "low", "high"]
    return pd.concat(parts, ignore_index=True)[columns]


def _cells(rows: pd.DataFrame) -> dict[str, Cell]:
    """Cells by the name of the edit or contrast; of several rows with one name the first counts."""
    cells: dict[str, Cell] = {}
    for row in each_row(rows):
        cell = Cell(mean=row.mean, low=row.low, high=row.high, heads=int(row.heads), images=int(row.images))
        cells.setdefault(str(row.name), cell)
    return cells
