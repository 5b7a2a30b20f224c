"""Sinks per image over the variants of a training: the paper's Tables 14 and 15, each cell a mean over seeds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sinklab.reports.tables import labelled, report_rules, rule_label
from sinklab.sinks.classify import SinkDefinition, with_own
from sinklab.sinks.counts import counts_per_image
from sinklab.sinks.rule import SinkRule

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.run import Run

KEYS = ["run", "arm", "seed"]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One diagnosed run among those that are compared."""

    run: Run
    source: str
    """The folder that was named."""
    arm: str
    """What is averaged over seeds: VARIANT-SIZE of a member, or the model's name."""
    seed: int


def arm_and_seed(name: str) -> tuple[str, int]:
    """ "RUN/seed-2/baseline-tiny" → ("baseline-tiny", 2); another name is an arm of its own, seed 0."""
    seed = re.search(r"(?:^|/)seed-(\d+)(?:/|$)", name)
    return (name.rpartition("/")[2], int(seed[1])) if seed else (name, 0)


def rules_of(runs: Sequence[Compared]) -> list[str]:
    """The rules under which the runs were diagnosed, each once."""
    return sorted({str({key: value for key, value in one.run.config["rule"].items() if key != "sentence"})
                   for one in runs})  # fmt: skip


def sink_counts(runs: Sequence[Compared]) -> pd.DataFrame:
    """`counts_per_image` of every run under every rule of Table 15, with KEYS before it."""
    import pandas as pd

    parts = []
    for one in runs:
        rule = SinkRule.from_dict(one.run.config["rule"])
        definitions = with_own(SinkDefinition.from_saved(one.run.config["definition"]))
        counts = counts_per_image(one.run.heads, report_rules(rule), definitions)
        parts.append(labelled(counts, run=one.source, arm=one.arm, seed=one.seed))
    return pd.concat(parts, ignore_index=True)


def table_14(counts: pd.DataFrame, rule: str) -> pd.DataFrame:
    """Sinks per image under one rule, layers ≥ 1: (run,) arm, definition, kind, then the classes, means over seeds."""
    own = counts[(counts["blocks"] == "1+") & (counts["rule"] == rule)]
    if rule == "strict":
        own = own[own["epsilon"] == own["epsilon"].max()]
    seen = own[own["class"] == "all"].groupby("kind")["events"].sum()
    own = own[own["kind"].map(lambda kind: kind == "all" or seen[kind] > 0)]
    return _over_seeds(own, ["definition", "kind"])


def table_15(counts: pd.DataFrame) -> pd.DataFrame:
    """Sinks per image under every rule, layers ≥ 1, any token: (run,) arm, rule, definition, then the classes."""

    own = counts[(counts["blocks"] == "1+") & (counts["kind"] == "all")]
    labels = [rule_label(rule, epsilon) for rule, epsilon in zip(own["rule"], own["epsilon"], strict=True)]
    return _over_seeds(own.assign(rule=labels), ["rule", "definition"])


def _over_seeds(counts: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """[(run,) arm, *keys, nop, broadcast, intermediate, all, seeds]: means over seeds of the events per image.

    Seeds of an arm that lie in several folders are one arm's; only where a seed comes twice is `run` a column.
    """
    trained = counts[KEYS].drop_duplicates()
    arm = ["run", "arm"] if trained.duplicated(["arm", "seed"]).any() else ["arm"]
    means: Any = counts.groupby([*arm, *keys, "class"], sort=False)["per_image"].mean().unstack("class")
    seeds = counts.groupby([*arm, *keys], sort=False)["seed"].nunique().rename("seeds")
    order = seeds.index  # as they came, not by the alphabet
    table = means[["nop", "broadcast", "intermediate", "all"]].reindex(order).join(seeds).reset_index()
    table.columns.name = None
    return table
