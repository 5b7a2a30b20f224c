"""What the page says of a layer's branches: the common-mode share of what they add, and what editing them does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.reports.saved import PATCHED, reading

if TYPE_CHECKING:
    import pandas as pd

SHARES, EFFECTS = "tables/common_mode.csv", "tables/branch_effects.csv"
UPDATE_NAME = {
    "attention": "attention",
    "attention_ungated": "attention, gate left out",
    "pathway": "global pathway",
}
EDIT_NAME = {
    "attention_off": "attention off",
    "pathway_off": "pathway off",
    "donor_state": "donor’s state in the pathway",
}
MEASURES = ("patch_change", "shared_energy", "donor_cosine")


def read_branches(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """For the template: `updates` and `shares` (rows of the common mode), `effects`, `sentence`, `files`; None where
    the run has neither table. Raises InputError for a damaged one."""
    import pandas as pd

    told: dict[str, Any] = {"updates": [], "shares": [], "effects": [], "sentence": "", "files": []}
    if (folder / SHARES).is_file():
        with reading(folder / SHARES):
            table = pd.read_csv(folder / SHARES)
            told["updates"] = [(name, UPDATE_NAME[name]) for name in UPDATE_NAME if name in set(table["update"])]
            told["shares"] = _shares(table)
            told["files"].append(SHARES)
    about = config.get("branches")
    if about and (folder / EFFECTS).is_file():
        with reading(folder / EFFECTS, PATCHED):
            told["effects"] = _effects(pd.read_csv(folder / EFFECTS))
            told["sentence"] = str(about["sentence"])
            told["files"].append(EFFECTS)
    return told if told["files"] else None


def _shares(table: pd.DataFrame) -> list[dict[str, Any]]:
    """One entry a layer: `layer`, `images`, and the row of each update it has."""
    rows = []
    for layer, own in table.groupby("layer", sort=True):
        by = {str(row["update"]): {str(key): value for key, value in row.items()} for row in own.to_dict("records")}
        rows.append({"layer": layer, "images": int(own["images"].max()), "by": by})
    return rows


def _effects(table: pd.DataFrame) -> list[dict[str, Any]]:
    """One entry a (layer, edit): its name, images, and (mean, sem) of each measure or None."""
    rows = []
    for (layer, edit), own in table.groupby(["layer", "edit"], sort=False):
        cells = {str(row["measure"]): (float(row["mean"]), float(row["sem"])) for row in own.to_dict("records")}
        images = int(own["images"].max())
        measures = [cells.get(name) for name in MEASURES]
        rows.append({"layer": layer, "edit": EDIT_NAME[str(edit)], "images": images, "measures": measures})
    return rows
