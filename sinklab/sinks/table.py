"""The head table and what is read from it: its schema, its events, one row per head, a summary.

The head table has one row per (image, layer, head), in the columns of `head_schema`. Everything here is arithmetic on
such tables; it holds for tables without rows or without events, and gives the same numbers in any order of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sinklab.models.tokens import kinds_among
from sinklab.sinks.classify import CLASSES, SinkDefinition, both_definitions, with_own
from sinklab.sinks.counts import BLOCKS, counts_per_image, images_in, most_common, sensitivity, tally
from sinklab.sinks.rule import SinkRule, require_columns

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow

__all__ = [
    "counts_per_image",
    "head_schema",
    "head_summary",
    "kind_by_layer",
    "sensitivity",
    "sink_table",
    "summarise",
]

ROW_ORDER = ["image_index", "layer", "head"]
MEDIANS = ["value_ratio_head", "value_ratio_out", "stable_rank", "token_norm_ratio"]
GATED = ("value_ratio_gated", "update_norm_gated", "stable_rank_gated")
"""Further columns at the end where a gate multiplies z before the output projection; see `sinks.gated`."""
STRONGEST = 8
"""How many heads of each class a summary lists."""
NEAR = 0.2
"""A number is near a threshold t if it lies in [t·(1 − NEAR), t·(1 + NEAR)]."""


def head_schema(more: Sequence[str] = ()) -> pyarrow.Schema:
    """Names, order and types of the head table's columns; `heads/part-*.parquet` are written with it.

    `more` are float columns at the end that only some models have (`GATED`).
    """
    import pyarrow as pa

    columns = {"image": pa.string(), "image_index": pa.int64(), "layer": pa.int16(), "head": pa.int16()}
    columns |= dict.fromkeys(("tokens", "queries", "sink_index"), pa.int32())
    columns |= {"sink_kind": pa.string(), "sink_row": pa.int16(), "sink_column": pa.int16()}
    columns |= dict.fromkeys(("inflow", "inflow_margin"), pa.float32()) | {"routed_count": pa.int32()}
    attention = ("routed_fraction", "min_attention", "entropy")
    value = ("value_norm_head", "value_ratio_head", "value_ratio_out")
    update = ("update_norm", "stable_rank", "rank1_energy", "stable_rank_head", "token_norm_ratio")
    columns |= dict.fromkeys((*attention, *value, *update), pa.float32()) | {"finite": pa.bool_()}
    columns |= dict.fromkeys(more, pa.float32())
    return pa.schema(list(columns.items()))


def sink_table(
    heads: pd.DataFrame, rule: SinkRule, definitions: Sequence[SinkDefinition] | None = None
) -> pd.DataFrame:
    """The rows of `heads` that are events under `rule`, by image, layer and head, with their classes.

    Adds a column `class_<name>` for each definition (by default `class_causal` and `class_counts`): "nop",
    "broadcast" or "intermediate".
    """
    require_columns(heads, ROW_ORDER, "a sink table")
    events = heads[rule.events(heads)].sort_values(ROW_ORDER, kind="stable", ignore_index=True)
    for definition in both_definitions() if definitions is None else definitions:
        events[f"class_{definition.name}"] = definition.classify(events)
    return events


def kind_by_layer(heads: pd.DataFrame) -> pd.DataFrame:
    """Which kind of token has the largest inflow, layer by layer (the paper's Fig. 4); no rule is involved.

    Columns layer, kind (all three in every layer), pairs (finite (image, head) pairs whose sink is of that kind),
    share (of the layer's finite pairs; NaN if it has none), inflow (mean inflow of those pairs; NaN if none).
    """
    import pandas as pd

    require_columns(heads, [*ROW_ORDER, "sink_kind", "inflow", "finite"], "a table of kinds by layer")
    finite = _ordered(heads[heads["finite"].astype(bool)], ["layer", "sink_kind", "inflow"])
    grouped = finite["inflow"].astype("float64").groupby([finite["layer"], finite["sink_kind"]])
    table = pd.DataFrame({"pairs": grouped.size(), "inflow": grouped.mean()}).rename_axis(["layer", "kind"])
    wanted = [sorted(heads["layer"].unique()), kinds_among(heads["sink_kind"].unique())]
    table = table.reindex(pd.MultiIndex.from_product(wanted, names=["layer", "kind"]))
    table["pairs"] = table["pairs"].fillna(0).astype("int64")
    table["share"] = table["pairs"] / table.groupby(level="layer")["pairs"].transform("sum")
    return table.reset_index()[["layer", "kind", "pairs", "share", "inflow"]]


def head_summary(
    heads: pd.DataFrame, rule: SinkRule, definitions: Sequence[SinkDefinition] | None = None
) -> pd.DataFrame:
    """One row per (layer, head): how often it sinks, how strongly, on what, and as what.

    `images` are the head's rows, `frequency` = events / images, `mean_inflow` is over all finite rows. The medians are
    over events (NaN without one; a stable rank that is NaN is left out). `kind` is the events' most common token kind
    and `class_causal`, `class_counts` their most common class, "none" without events; a tie goes to the earlier of
    cls, register, patch and of nop, broadcast, intermediate. `not_finite` counts the rows that are not finite.
    """
    import pandas as pd

    require_columns(heads, [*ROW_ORDER, "sink_kind", "inflow", "finite", *MEDIANS], "a head summary")
    key = ["layer", "head"]
    wanted = [*key, "sink_kind", "inflow", "finite", "event", *MEDIANS]
    table = _ordered(heads.assign(event=rule.events(heads)), wanted)
    grouped = table.groupby(key, sort=True)
    events = table[table["event"]]
    summary = pd.DataFrame({"images": grouped.size(), "events": grouped["event"].sum().astype("int64")})
    summary["frequency"] = summary["events"] / summary["images"]
    summary["mean_inflow"] = table["inflow"].astype("float64").groupby([table[name] for name in key]).mean()
    medians = events.groupby(key)[MEDIANS].median().astype("float64").reindex(summary.index)
    summary = summary.join(medians.add_prefix("median_"))
    kinds = kinds_among(heads["sink_kind"].unique())
    summary["kind"] = most_common(tally(events, events["sink_kind"], kinds, summary.index), kinds)
    for definition in both_definitions() if definitions is None else definitions:
        classes = tally(events, definition.classify(events), CLASSES, summary.index)
        for c, label in enumerate(CLASSES):
            summary[f"{label}_{definition.name}"] = classes[:, c]
        summary[f"class_{definition.name}"] = most_common(classes, CLASSES)
    summary["not_finite"] = summary["images"] - grouped["finite"].sum().astype("int64")
    return summary.reset_index()


def summarise(heads: pd.DataFrame, rule: SinkRule, definition: SinkDefinition, noun: str = "image") -> dict[str, Any]:
    """The findings of a run as plain numbers, lists and words for summary.json (None where undefined).

    images, layers, heads (the most in a layer), pairs ((layer, head) pairs), rows · rule, definition (with sentence) ·
    events {total, per_image, by_blocks, by_kind} · heads_that_sink {in_any_image, in_half_of_images} ·
    by_definition {"causal", "counts": {sentence, nop, broadcast, intermediate: {total, per_image, by_blocks, by_kind},
    steady_heads {class: how many}, strongest_heads {class: [head, …]}}} ·
    nearness {"rule", "causal", "counts": [{column, threshold, …}]} · not_finite {rows, images, heads}.

    A head is steady if it is sunk in at least half of its images; it counts under its most common class. The strongest
    heads of a class go by frequency, then mean inflow, then layer and head. A `definition` with a name of its own
    stands beside the two.
    """
    definitions = {known.name: known for known in with_own(definition)}
    table = head_summary(heads, rule, list(definitions.values()))
    counts = counts_per_image(heads, [rule], list(definitions.values()))
    events = heads[rule.events(heads)]
    half = (table["events"] > 0) & (2 * table["events"] >= table["images"])
    by_definition = {}
    for name, known in definitions.items():
        own = counts[counts["definition"] == name]
        classes = {label: _split(own[own["class"] == label]) for label in CLASSES}
        steady = {label: int((half & (table[f"class_{name}"] == label)).sum()) for label in CLASSES}
        strongest = {label: _strongest(table, name, label) for label in CLASSES}
        chosen = {"steady_heads": steady, "strongest_heads": strongest}
        by_definition[name] = {"sentence": known.sentence(), **classes, **chosen}
    return {
        "images": images_in(heads),
        "layers": int(table["layer"].nunique()),
        "heads": int(table.groupby("layer").size().max()) if len(table) else 0,
        "pairs": len(table),
        "rows": len(heads),
        "rule": rule.as_dict(noun),
        "definition": definition.as_dict(),
        "events": _split(counts[(counts["definition"] == definition.name) & (counts["class"] == "all")]),
        "heads_that_sink": {"in_any_image": int((table["events"] > 0).sum()), "in_half_of_images": int(half.sum())},
        "by_definition": by_definition,
        "nearness": {"rule": _near_rule(heads, rule)} | {k: _near(events, d) for k, d in definitions.items()},
        "not_finite": _not_finite(heads, table),
    }


def _ordered(heads: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Those columns with the rows by image, layer and head, so that no sum depends on the order they came in."""
    import numpy as np

    image, layer, head = (heads[name].to_numpy() for name in ROW_ORDER)
    return heads[columns].iloc[np.lexsort((head, layer, image))]


def _split(counts: pd.DataFrame) -> dict[str, Any]:
    """One class of `counts_per_image`: its total, by blocks and by kind (over all blocks)."""
    whole = counts[counts["kind"] == "all"]
    blocks = {blocks: _amount(whole[whole["blocks"] == blocks]) for blocks in BLOCKS}
    kinds = {kind: _amount(counts[counts["kind"] == kind]) for kind in counts["kind"].unique() if kind != "all"}
    return {**_amount(whole), "by_blocks": blocks, "by_kind": kinds}


def _amount(rows: pd.DataFrame) -> dict[str, Any]:
    """The events of some rows and how many that is per image; None where nothing was measured."""
    total, images, measured = int(rows["events"].sum()), int(rows["images"].max()), rows["per_image"].notna().any()
    return {"total": total, "per_image": total / images if images and measured else None}


def _strongest(table: pd.DataFrame, definition: str, label: str) -> list[dict[str, Any]]:
    """The heads whose most common class is `label`, the most frequent first."""
    column = f"class_{definition}"
    order = ["frequency", "mean_inflow", "layer", "head"]
    rows = table[table[column] == label].sort_values(order, ascending=[False, False, True, True])
    names = [*order, "kind", column]
    return [
        {"class" if name == column else name: _plain(row[name]) for name in names}
        for row in rows.head(STRONGEST)[names].to_dict("records")
    ]


def _plain(value: Any) -> Any:
    """A JSON value: no numpy type, no NaN."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _near_rule(heads: pd.DataFrame, rule: SinkRule) -> list[dict[str, Any]]:
    """Heads near the rule's threshold, events above it and near misses below it."""
    column, threshold = {
        "relaxed": ("routed_fraction", rule.fraction),
        "strict": ("min_attention", 1 - rule.epsilon),
        "mass": ("inflow", rule.threshold),
    }[rule.name]
    finite = heads["finite"].astype(bool)
    near = heads[column].astype("float64").between((1 - NEAR) * threshold, (1 + NEAR) * threshold) & finite
    holds = rule.events(heads)
    counts = {"events": int((near & holds).sum()), "near_misses": int((near & ~holds).sum())}
    return [{"column": column, "threshold": threshold, "share": NEAR, **counts}]


def _near(events: pd.DataFrame, definition: SinkDefinition) -> list[dict[str, Any]]:
    """Events near each threshold of a definition."""
    thresholds = [(definition.axis, definition.nop), (definition.axis, definition.broadcast)]
    thresholds += [] if definition.stable_rank is None else [("stable_rank", definition.stable_rank)]
    near = []
    for column, threshold in thresholds:
        inside = events[column].astype("float64").between((1 - NEAR) * threshold, (1 + NEAR) * threshold)
        near.append({"column": column, "threshold": threshold, "share": NEAR, "events": int(inside.sum())})
    return near


def _not_finite(heads: pd.DataFrame, table: pd.DataFrame) -> dict[str, Any]:
    """Rows that hold NaN or Inf: how many, in how many images, and in which heads [layer, head, images]."""
    rows = heads[~heads["finite"].astype(bool)]
    pairs = table[table["not_finite"] > 0][["layer", "head", "not_finite"]]
    return {
        "rows": len(rows),
        "images": int(rows["image_index"].nunique()),
        "heads": [[int(value) for value in row] for row in pairs.to_numpy()],
    }
