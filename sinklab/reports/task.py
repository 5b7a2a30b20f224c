"""What a controlled task itself says of the edits: its errors and changes, from tables/task_effects.csv as saved."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.reports.effects import EDIT_MEANING
from sinklab.reports.saved import PATCHED, reading
from sinklab.reports.wording import plural

if TYPE_CHECKING:
    import pandas as pd

METRICS = {
    "task_mse": ("Task MSE", "the mean squared error against the task’s target"),
    "donor_target_mse": ("Donor-target MSE", "the same against x + the donor’s payload"),
    "no_payload_mse": ("No-payload MSE", "the same against x, as if there were no payload"),
    "delta_rms_nop": ("ΔRMS, NOP", "the root mean square of the output’s change over the queries with nothing to do"),
    "delta_rms_active": ("ΔRMS, active", "the same over the queries with something to do"),
    "delta_rms_recipients": ("ΔRMS", "the root mean square of the output’s change over the recipients"),
    "shared_energy": ("Shared energy", "the part of the output’s change that all ordinary tokens have in common"),
    "payload_cosine": ("Payload cosine", "the cosine of the recipients’ mean change with p_donor − p_own"),
    "closed_form_error": ("Closed form", "the largest gap of an edit from A (u′ − u), Eq. 14, relative to the update"),
    "donor_improvement": ("Donor improvement", "how much nearer the output comes to the donor’s target"),
}
"""Every metric's heading and what it is, in the order of the columns."""
PLACES = ["layer", "head", "class"]
WORDS = ["class", "edit", "metric"]
WHOLE = ["layer", "head", "batches", "sequences"]
COLUMNS = [*PLACES, "edit", "metric", "mean", "sem", "batches", "sequences"]


def read_task(folder: Path) -> pd.DataFrame | None:
    """One row per (layer, head, edit, metric) with mean and standard error; None for a run without.

    Raises InputError for a damaged table.
    """
    import pandas as pd

    path = folder / "tables/task_effects.csv"
    if not path.is_file():
        return None
    with reading(path, PATCHED):
        table = pd.read_csv(path, dtype=dict.fromkeys(WORDS, str))[COLUMNS]
        table = table.astype(dict.fromkeys(("mean", "sem"), "float64") | dict.fromkeys(WHOLE, "int64"))
        if table[WORDS].isna().any(axis=None) or table.duplicated(["layer", "head", "edit", "metric"]).any():
            raise ValueError("a row lacks its class, edit or metric, or stands there twice")
    return table if len(table) else None


def task_tables(table: pd.DataFrame) -> list[dict[str, Any]]:
    """One entry a (layer, head): `layer`, `head`, `class`, `metrics` (heading and meaning), `rows`,
    `spread` (whether there are standard errors, which one batch has not) and `counted`.

    A row has `edit` and `cells`, (mean, standard error) one a metric or None where it was not measured.
    """
    found = []
    for _, rows in table.groupby(PLACES, sort=True):
        first = rows.iloc[0]
        metrics = _in_order(METRICS, rows["metric"])
        cell = {(row.edit, row.metric): (row.mean, row.sem) for row in rows.itertuples(index=False)}
        edits = _in_order(("baseline", *EDIT_MEANING), rows["edit"])
        batches, sequences = int(rows["batches"].max()), int(rows["sequences"].max())
        found.append(
            {
                "layer": int(first["layer"]),
                "head": int(first["head"]),
                "class": str(first["class"]),
                "metrics": [METRICS.get(name, (name, "")) for name in metrics],
                "rows": [{"edit": edit, "cells": [cell.get((edit, name)) for name in metrics]} for edit in edits],
                "spread": bool(rows["sem"].notna().any()),
                "counted": f"{plural(batches, 'batch', 'batches')}, {plural(sequences, 'sequence')}",
            }
        )
    return found


def _in_order(known: Iterable[str], seen: Iterable[str]) -> list[str]:
    """Names that occur, those that are known first and in their order, then the others as they came."""
    seen = list(dict.fromkeys(seen))
    first = [name for name in known if name in seen]
    return first + [name for name in seen if name not in first]
