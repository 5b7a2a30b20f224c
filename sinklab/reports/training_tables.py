"""The tables on a training's page, ours beside the paper's, as the template wants them: words and formatted cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, isinf, isnan, log10
from typing import TYPE_CHECKING, Any

from sinklab.reports import toy_paper
from sinklab.reports.sections import records
from sinklab.reports.training_figures import arm_name
from sinklab.reports.wording import number

if TYPE_CHECKING:
    import pandas as pd

EDIT_NAME = {
    "baseline": "unedited",
    "zero_ordinary": "control",
    "route_clamped": "route, clamped",
    "attention_off": "attention off",
}
EDITS_2 = ("baseline", "zero", "donor", "ordinary", "route", "route_clamped")
SMALLEST_PLACE = 5
"""Decimals behind which a table does not go."""
LEAST = 0.5 * 10.0**-SMALLEST_PLACE
MSE = "Task MSE: mean square of output − target."
DELTA = "ΔRMS: root mean square of edited − unedited output"
EDITS_3 = ("zero", "donor", "ordinary", "zero_ordinary", "route", "attention_off")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A number of ours, and the paper's beneath it; empty where there is none."""

    ours: str
    paper: str = ""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A table: column heads (words, small words), and rows (group or "", name, cells)."""

    title: str
    caption: str
    source: str
    """The CSV file with its numbers."""
    heads: list[tuple[str, str]]
    rows: list[tuple[str, str, list[Cell]]]


def shown_tables(kind: str, saved: Mapping[str, pd.DataFrame]) -> list[Shown]:
    """The tables of a task's page; saved: name → table of the run's tables/."""
    if kind == "nop":
        return [_table_2(saved["table2"])]
    if kind == "broadcast":
        return [_table_3(saved["table3"])]
    if kind == "pathway":
        return [_pathway(saved["pathway"]), _pathway_seeds(saved["pathway"])]
    return [_branch(saved["training"])]


def claim_rows(claims: pd.DataFrame) -> list[dict[str, Any]]:
    """One entry a claim: its words, its limit in words, and (seed, value, whether it holds) of every seed."""
    entries = []
    for name, mine in claims.groupby("claim", sort=False):
        first = mine.iloc[0]
        seeds = [(int(row["seed"]), number(row["value"], 3), bool(row["holds"])) for row in records(mine)]
        limit = limit_words(float(first["low"]), float(first["high"]))
        entries.append({"name": str(name), "limit": limit, "seeds": seeds, "holds": all(held for *_, held in seeds)})
    return entries


def limit_words(low: float, high: float) -> str:
    """ "≥ 0.95", "0.5 to 2", "exactly 0"."""
    if low == high:
        return f"exactly {low:g}"
    if isinf(high):
        return f"≥ {low:g}"
    return f"≤ {high:g}" if isinf(low) else f"{low:g} to {high:g}"


def _table_2(table: pd.DataFrame) -> Shown:
    means = table[table["level"] == "mean"]
    columns = {"task_mse": ("Task MSE", ""), "delta_rms_nop": ("ΔRMS", "NOP queries"),
               "delta_rms_active": ("ΔRMS", "active queries")}  # fmt: skip
    rows = []
    for row in records(means[means["edit"].isin(EDITS_2)]):
        cells = [cell(row, name, toy_paper.TABLE_2.get(row["edit"], {}).get(name)) for name in columns]
        rows.append(("", EDIT_NAME.get(row["edit"], row["edit"]), cells))
    return Shown(
        title="The sink’s value and place, edited (Table 2)",
        caption=f"{_ours(means)}. Donor and ordinary values come from another sequence: its sink’s, and "
        "its token 1’s. Route hides the sink’s logit; clamped, it divides the other weights by their sum but no less "
        "than 1e-12, and a query that gave the sink everything is then left with little. That donor changes nothing is "
        f"so by construction: the sink’s token is empty in every sequence. {MSE} {DELTA}, by group of queries.",
        source="tables/table2.csv",
        heads=list(columns.values()),
        rows=rows,
    )


def _table_3(table: pd.DataFrame) -> Shown:
    means = table[table["level"] == "mean"]
    columns = {"task_mse": ("Task MSE", ""), "donor_target_mse": ("Donor-target MSE", "against x + donor’s p"),
               "delta_rms": ("ΔRMS", "recipients"), "shared_energy": ("Shared energy", "of the change"),
               "donor_cosine": ("Donor cosine", "")}  # fmt: skip
    rows = []
    for row in records(means):
        layer, edit = int(row["layer"]), str(row["edit"])
        if layer < 0 or edit in EDITS_3:
            group = f"Edit in layer {layer}" if layer >= 0 else ""
            printed = toy_paper.TABLE_3.get((layer, edit), {})
            rows.append((group, EDIT_NAME.get(edit, edit), [cell(row, name, printed.get(name)) for name in columns]))
    return Shown(
        title="The source’s value and place, edited (Table 3)",
        caption=f"{_ours(means)}. In which layer the broadcast lands depends on the seed, so the paper’s layers, of "
        "one model, need not be ours; the paper counts them from 1. The control zeroes an ordinary token’s value. "
        f"{MSE} Donor-target MSE: the same against x + the donor’s payload. {DELTA}, over recipients (all but "
        "j*). Shared energy: the share of that change’s energy which the recipients of a sequence have in common. "
        "Donor cosine: of the recipients’ mean change with p_donor − p_own.",
        source="tables/table3.csv",
        heads=list(columns.values()),
        rows=rows,
    )


def pathway_columns(table: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Column → its head, of tables/pathway.csv."""
    layers = sorted(str(name) for name in table if str(name).startswith("inflow_") and not str(name).endswith("_sem"))
    last = f"layer {layers[-1].removeprefix('inflow_')}"
    return {
        "task_mse": ("Task MSE", ""),
        **{name: ("Inflow", f"layer {name.removeprefix('inflow_')}") for name in layers},
        "delta_mse_without_attention": ("ΔMSE", f"without attention, {last}"),
        "delta_mse_without_global": ("ΔMSE", f"without the pathway, {last}"),
        "donor_cosine_sink": ("Donor cosine", f"via the sink, {last}"),
        "donor_cosine_global": ("Donor cosine", f"via g, {last}"),
    }


def _pathway(table: pd.DataFrame) -> Shown:
    means, columns = table[table["level"] == "mean"], pathway_columns(table)
    uniform = means["arm"].str.contains("uniform").any()
    printed = toy_paper.E1 if uniform else toy_paper.PATHWAY
    where = "App. E.1" if uniform else "Fig. 7B"
    rows = [("", arm_name(row["arm"]),
             [cell(row, name, printed.get(row["arm"], {}).get(name)) for name in columns])
            for row in records(means)]  # fmt: skip
    return Shown(
        title=f"Where the broadcast goes, arm by arm ({where})",
        caption=f"{_ours(means)}. ΔMSE is the task’s error without the branch less the error with it. The paper counts "
        "layers from 1.",
        source="tables/pathway.csv",
        heads=list(columns.values()),
        rows=rows,
    )


def _pathway_seeds(table: pd.DataFrame) -> Shown:
    seeds, columns = table[table["level"] == "seed"], pathway_columns(table)
    rows = [(f"Seed {int(row['seed'])}", arm_name(row["arm"]), [cell(row, name) for name in columns])
            for row in records(seeds)]  # fmt: skip
    return Shown(
        title="The same, seed by seed",
        caption="Arms of one seed share the task, the batches and the first weights; ± is the standard error over "
        "batches of fresh sequences.",
        source="tables/pathway.csv",
        heads=list(columns.values()),
        rows=rows,
    )


def _branch(training: pd.DataFrame) -> Shown:
    columns = {"branch_mse": ("MSE of the update", ""), "sink_score": ("Sink score", "largest inflow"),
               "value_ratio": ("Value ratio", "of the sink"),
               "attention_flagged": ("Attention to it", "flagged tokens"),
               "attention_other": ("Attention to it", "other tokens"),
               "sigma1_share": ("σ₁² / Σσ²", "of Θ")}  # fmt: skip
    rows = []
    for arm, mine in training.groupby("arm", sort=False):
        found = mine.groupby("metric")["mean"].agg(["mean", "sem"])
        cells = {name: found.loc[name] for name in columns if name in found.index}
        flat = {
            key: value
            for name, row in cells.items()
            for key, value in ((name, row["mean"]), (f"{name}_sem", row["sem"]))
        }
        rows.append(("", arm_name(str(arm)), [cell(flat, name) for name in columns]))
    return Shown(
        title="What each training came to",
        caption=f"{_over_seeds(int(training['seed'].nunique()))}. The sink is the position with the largest "
        "inflow over all sequences; its value ratio is its projected value’s length over the others’ mean.",
        source="tables/training.csv",
        heads=list(columns.values()),
        rows=rows,
    )


def cell(row: Mapping[str, Any], name: str, paper: float | None = None) -> Cell:
    """ "0.0234 ± 0.0004", and "0.0187" of the paper's."""
    mean, sem = float(row.get(name, float("nan"))), float(row.get(f"{name}_sem", float("nan")))
    return Cell(ours=with_error(mean, sem), paper="" if paper is None else plain(paper))


def with_error(mean: float, sem: float) -> str:
    """ "0.0234 ± 0.0004": both to the place of the error's first digit, or second where that is a 1."""
    if isnan(mean) or not sem >= LEAST:
        return plain(mean)
    power = floor(log10(sem))
    places = min(max((1 if sem / 10.0**power < 2 else 0) - power, 0), SMALLEST_PLACE)
    return f"{mean:,.{places}f} ± {sem:.{places}f}"


def plain(value: float) -> str:
    """Three digits, in decimals as far as SMALLEST_PLACE; one digit and a power of ten below."""
    if 0 < abs(value) < LEAST:
        return f"{value:.0e}"
    return f"{value:.{SMALLEST_PLACE}f}" if 0 < abs(value) < 0.001 else number(value, 3)


def _ours(means: pd.DataFrame) -> str:
    return _over_seeds(int(means["seeds"].max()))


def _over_seeds(seeds: int) -> str:
    return f"Means over {seeds} seeds ± standard error" if seeds > 1 else "Means of one seed"


def grouped(rows: Sequence[tuple[str, str, list[Cell]]]) -> list[tuple[str, list[tuple[str, list[Cell]]]]]:
    """Rows by their group, in order."""
    groups: dict[str, list[tuple[str, list[Cell]]]] = {}
    for group, name, cells in rows:
        groups.setdefault(group, []).append((name, cells))
    return list(groups.items())
