"""The tables of a run of the controlled tasks, from its evaluations: Tables 2 and 3, Fig. 7B, claims, and curves.

Each table has a row for every seed (`level` "seed": the mean and standard error over batches of fresh sequences) and
one for all (`level` "mean": over seeds). A column NAME has its standard error in NAME_sem. Layers count from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING, Any

from sinklab.training.toy_claims import Rows, claims
from sinklab.training.toy_config import Member, NopBranchConfig, PathwayConfig
from sinklab.training.toy_measure import WHOLE

if TYPE_CHECKING:
    import pandas as pd

NOP_METRICS = ("task_mse", "delta_rms_nop", "delta_rms_active")
NOP_ATTENTION = ("attention_nop", "attention_active", "value_norm_sink", "value_norm_other", "value_ratio")
BROADCAST_METRICS = (
    *("task_mse", "donor_target_mse", "no_payload_mse", "local_rms", "delta_rms"),
    *("shared_energy", "donor_cosine", "donor_improvement", "closed_form_error"),
)
CURVES = ("total", "loss", "penalty", "rate")


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluated:
    """One member of a run with what was measured of it."""

    member: Member
    rows: Rows
    """Of `toy_measure.evaluate`."""
    metrics: Sequence[Mapping[str, float]]
    """Lines of metrics.jsonl."""

    def number(self, layer: int, edit: str, metric: str) -> tuple[float, float]:
        """Mean and standard error over the evaluation's batches; NaN where there is no such row."""
        for row in self.rows:
            if (row["layer"], row["edit"], row["metric"]) == (layer, edit, metric):
                return _real(row["mean"]), _real(row["sem"])
        return math.nan, math.nan


def tables(kind: str, evaluated: Sequence[Evaluated], sweep: str | None = None) -> dict[str, pd.DataFrame]:
    """Name → table: training, curves and claims for every task, and the paper's own tables for those that have one."""
    made = {
        "training": training_table(evaluated),
        "curves": curve_table(evaluated, sweep),
        "claims": claim_table(kind, evaluated),
    }
    if kind == "nop":
        made["table2"] = table_2(evaluated)
    if kind == "broadcast":
        made["table3"] = table_3(evaluated)
    if kind == "pathway":
        made["pathway"] = pathway_table(evaluated)
    return made


def training_table(evaluated: Sequence[Evaluated]) -> pd.DataFrame:
    """Every number of every evaluation: seed, arm, layer (-1: the whole model), edit, metric, mean, sem."""
    import pandas as pd

    return pd.DataFrame(
        [{"seed": one.member.seed, "arm": one.member.arm, **row} for one in evaluated for row in one.rows]
    )


def curve_table(evaluated: Sequence[Evaluated], sweep: str | None = None) -> pd.DataFrame:
    """One row a line of the metrics: step, member, seed, arm, point, loss, …, and the layers' sink scores.

    `point` is the frequency p or the damping γ of a sweep, and empty without one.
    """
    import pandas as pd

    rows = []
    for one in evaluated:
        about = {"member": one.member.name, "seed": one.member.seed, "arm": one.member.arm}
        about["point"] = point_of(one.member, sweep)
        rows += [{"step": int(line["step"]), **about, **_but_step(line)} for line in one.metrics]
    table = pd.DataFrame(rows)
    first = ["step", "member", "seed", "arm", "point", *(name for name in CURVES if name in table)]
    return table[first + sorted(str(name) for name in table if name not in first)]


def point_of(member: Member, sweep: str | None) -> float:
    """Where a member of a sweep stands on it."""
    if sweep is None or not isinstance(member.config, NopBranchConfig):
        return math.nan
    return member.config.damping if sweep == "damping" else 1 - NormalDist().cdf(member.config.threshold)


def claim_table(kind: str, evaluated: Sequence[Evaluated]) -> pd.DataFrame:
    """What each seed was to show: seed, claim, value, low, high, holds. Empty where its arms were not trained."""
    import pandas as pd

    rows = []
    for seed, members in by_seed(evaluated).items():
        if comparable(kind, members):
            for claim in claims(kind, {one.member.arm: one.rows for one in members}):
                limits = {"low": claim.low, "high": claim.high}
                rows.append({"seed": seed, "claim": claim.name, "value": claim.value, **limits, "holds": claim.holds})
    return pd.DataFrame(rows, columns=["seed", "claim", "value", "low", "high", "holds"])


def comparable(kind: str, members: Sequence[Evaluated]) -> bool:
    """Whether the arms and the layer are there that the task's claims speak of."""
    if kind != "pathway":
        return True
    config = members[0].member.config
    assert isinstance(config, PathwayConfig)
    return {"global", "global+penalty"} <= {one.member.arm for one in members} and config.layers > 1


def by_seed(evaluated: Iterable[Evaluated]) -> dict[int, list[Evaluated]]:
    """The members of each seed, in order."""
    groups: dict[int, list[Evaluated]] = {}
    for one in evaluated:
        groups.setdefault(one.member.seed, []).append(one)
    return groups


def table_2(evaluated: Sequence[Evaluated]) -> pd.DataFrame:
    """Table 2: one row an edit of the sink, and below `baseline` where attention goes and what it finds there."""
    edits = ("baseline", "zero", "donor", "ordinary", "route", "route_clamped")
    rows = []
    for one in evaluated:
        for edit in edits:
            names = NOP_METRICS + (NOP_ATTENTION if edit == "baseline" else ())
            found = {name: one.number(0, edit, name) for name in names}
            rows.append(({"edit": edit}, one.member.seed, found))
    return over_seeds(rows)


def table_3(evaluated: Sequence[Evaluated]) -> pd.DataFrame:
    """Table 3: one row a layer and edit of the source; layer -1 is the unedited model."""
    rows = []
    for one in evaluated:
        whole = {name: one.number(WHOLE, "baseline", name) for name in BROADCAST_METRICS[:3]}
        rows.append(({"layer": WHOLE, "edit": "baseline"}, one.member.seed, whole))
        places = dict.fromkeys((row["layer"], row["edit"]) for row in one.rows if row["layer"] >= 0)
        for layer, edit in places:
            names = BROADCAST_METRICS if edit != "baseline" else LAYER_METRICS
            found = {name: one.number(layer, edit, name) for name in names}
            rows.append(({"layer": layer, "edit": edit}, one.member.seed, found))
    return over_seeds(rows)


LAYER_METRICS = ("attention_on_source", "sink_match", "value_norm_source", "value_norm_other", "stable_rank", "inflow")
"""What the unedited layer of `table_3` tells."""


def pathway_table(evaluated: Sequence[Evaluated]) -> pd.DataFrame:
    """Fig. 7B, one row an arm: task_mse, inflow_0, inflow_1, …; of the last layer delta_mse_without_attention,
    delta_mse_without_global, donor_cosine_sink, donor_cosine_global.

    A ΔMSE is the edited model's task error less the unedited one's. Its standard error over batches is that of a
    difference of independent means, an upper bound: both are taken on the same batches.
    """
    rows = []
    for one in evaluated:
        config = one.member.config
        assert isinstance(config, PathwayConfig)
        last, plain = config.layers - 1, one.number(WHOLE, "baseline", "task_mse")
        found = {"task_mse": plain}
        found |= {f"inflow_{layer}": one.number(layer, "baseline", "inflow") for layer in range(config.layers)}
        for name, edit in (("attention", "attention_off"), ("global", "pathway_off")):
            edited = one.number(last, edit, "task_mse")
            found[f"delta_mse_without_{name}"] = edited[0] - plain[0], math.hypot(edited[1], plain[1])
        found["donor_cosine_sink"] = one.number(last, "donor", "donor_cosine")
        found["donor_cosine_global"] = one.number(last, "donor_state", "donor_cosine")
        rows.append(({"arm": one.member.arm}, one.member.seed, found))
    return over_seeds(rows)


Found = tuple[dict[str, Any], int, dict[str, tuple[float, float]]]
"""What a row is about, its seed, and name → (mean, standard error)."""


def over_seeds(rows: Sequence[Found]) -> pd.DataFrame:
    """A row a seed, and after them a row for all: mean and standard error over seeds (0 for one seed alone)."""
    import pandas as pd

    names = list(dict.fromkeys(name for _, _, found in rows for name in found))
    written = [{"level": "seed", **about, "seed": seed, "seeds": 1, **_columns(found)} for about, seed, found in rows]
    groups: dict[tuple[Any, ...], list[Found]] = {}
    for row in rows:
        groups.setdefault(tuple(row[0].values()), []).append(row)
    for held in groups.values():
        means = {name: _over([found[name][0] for _, _, found in held if name in found]) for name in names}
        written.append({"level": "mean", **held[0][0], "seeds": len(held), **_columns(means)})
    table = pd.DataFrame(written)
    table["seed"] = table["seed"].astype("Int64")
    return table


def _over(values: Sequence[float]) -> tuple[float, float]:
    real = [value for value in values if not math.isnan(value)]
    if not real:
        return math.nan, math.nan
    return fmean(real), stdev(real) / math.sqrt(len(real)) if len(real) > 1 else 0.0


def _columns(found: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    return {key: value for name, (mean, sem) in found.items() for key, value in ((name, mean), (f"{name}_sem", sem))}


def _real(value: float | None) -> float:
    """What JSON has no word for is saved as null."""
    return math.nan if value is None else float(value)


def _but_step(line: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name != "step"}
