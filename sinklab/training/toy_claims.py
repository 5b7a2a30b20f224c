"""What the controlled tasks are to show, checked on a trained model's evaluation.

Absolute errors vary between seeds, so arms are compared with arms of the same seed and edits with edits of one model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sinklab.training.toy_measure import WHOLE, look_up

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement, and the number that decides it."""

    name: str
    value: float
    low: float = float("-inf")
    high: float = float("inf")

    @property
    def holds(self) -> bool:
        """Whether low ≤ value ≤ high."""
        return self.low <= self.value <= self.high


def nop_claims(rows: Rows) -> list[Claim]:
    """NOP: attention goes to the sink when nothing is to be done, and the sink holds nothing (Table 2)."""

    def change(edit: str) -> float:
        return look_up(rows, 0, edit, "delta_rms_nop")

    def growth(edit: str) -> float:
        return look_up(rows, 0, edit, "task_mse") - look_up(rows, 0, "baseline", "task_mse")

    return [
        Claim(name="attention to the sink, NOP queries", value=look_up(rows, 0, "baseline", "attention_nop"), low=0.95),
        Claim(
            name="attention to the sink, active queries",
            value=look_up(rows, 0, "baseline", "attention_active"),
            high=0.05,
        ),
        Claim(name="value ratio of the sink", value=look_up(rows, 0, "baseline", "value_ratio"), high=0.05),
        Claim(name="change by the donor's value (0 by construction)", value=change("donor"), low=0.0, high=0.0),
        Claim(name="change by zero, over change by route", value=change("zero") / change("route"), high=0.1),
        Claim(name="change by zero, over change by ordinary", value=change("zero") / change("ordinary"), high=0.1),
        # 3.8 in the paper's Table 2, whose route is the clamped one: see `toy_measure.nop_numbers`
        Claim(
            name="error added by ordinary, over error added by route, clamped",
            value=growth("ordinary") / growth("route_clamped"),
            low=2.0,
        ),
        Claim(
            name="change by zero, over change by route, clamped",
            value=change("zero") / change("route_clamped"),
            high=0.1,
        ),
    ]


def best_layer(rows: Rows) -> int:
    """The layer with the larger donor cosine."""
    layers = {row["layer"] for row in rows if row["edit"] == "donor"}
    return max(layers, key=lambda layer: look_up(rows, layer, "donor", "donor_cosine"))


def broadcast_claims(rows: Rows) -> list[Claim]:
    """Broadcast: one layer's sink carries the payload to all tokens (Table 3)."""
    layer = best_layer(rows)
    return [
        Claim(name="donor cosine", value=look_up(rows, layer, "donor", "donor_cosine"), low=0.85),
        Claim(
            name="shared energy of the donor's change", value=look_up(rows, layer, "donor", "shared_energy"), low=0.99
        ),
        Claim(name="stable rank of the update", value=look_up(rows, layer, "baseline", "stable_rank"), high=1.2),
        Claim(
            name="value ratio of the source", value=look_up(rows, layer, "baseline", "value_ratio"), low=0.5, high=2.0
        ),
    ]


def pathway_claims(arms: Mapping[str, Rows], *, layer: int = 1) -> list[Claim]:
    """Pathway: alone it leaves layer 2's sink; with the penalty it takes the sink's work over (Fig. 7B)."""

    def excess(edit: str) -> float:
        penalised = arms["global+penalty"]
        return look_up(penalised, layer, edit, "task_mse") - look_up(penalised, WHOLE, "baseline", "task_mse")

    return [
        Claim(name="inflow, pathway alone", value=look_up(arms["global"], layer, "baseline", "inflow"), low=0.5),
        Claim(
            name="inflow, pathway and penalty",
            value=look_up(arms["global+penalty"], layer, "baseline", "inflow"),
            high=0.15,
        ),
        Claim(
            name="error without attention, over error without the pathway",
            # a pathway that does no work decides nothing: not a number, which no limit holds
            value=excess("attention_off") / excess("pathway_off") if excess("pathway_off") > 0 else float("nan"),
            high=0.05,
        ),
    ]


def claims(kind: str, arms: Mapping[str, Rows]) -> list[Claim]:
    """The claims of one seed of nop, broadcast or pathway from its arms' evaluations; none for other kinds."""
    if kind == "nop":
        return nop_claims(arms["nop"])
    if kind == "broadcast":
        return broadcast_claims(arms["broadcast"])
    return pathway_claims(arms) if kind == "pathway" else []
