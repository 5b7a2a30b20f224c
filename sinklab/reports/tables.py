"""The report's tables, each a pure function of saved tables: DataFrames in, a DataFrame out, nothing read or written.

What is counted is counted by `sinklab.sinks.table`; here it is put in the shape in which it is read. A table that
depends on a rule or on a definition names it in a column, so that a CSV file says by itself how it was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sinklab.models.tokens import KINDS, SEQUENCE_KINDS
from sinklab.sinks.rule import SinkRule
from sinklab.sinks.table import GATED, head_summary

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.sinks.classify import SinkDefinition

PAIR = ["layer", "head"]
SPECTRUM = ["layer", "head", "sigma_1", "sigma_2", "sigma_sum", "frobenius", "sigma1_share"]


def head_table(
    heads: pd.DataFrame, sinks: pd.DataFrame, rule: SinkRule, definitions: Sequence[SinkDefinition]
) -> pd.DataFrame:
    """`head_summary` of the run, one row per (layer, head), with what the report shows beside it.

    Adds `event_inflow` (mean inflow of the events), `kind_share` (share of the events whose sink is of the kind in
    `kind`) and medians over events of the gated numbers, where the run has them, all NaN without events; and
    `usual_token_norm_ratio` (median over all finite rows). sinks: the events.
    """
    table = head_summary(heads, rule, list(definitions))
    ordered = sinks.sort_values(["image_index", *PAIR])
    inflow = ordered.astype({"inflow": "float64"}).groupby(PAIR)["inflow"].mean().rename("event_inflow")
    kinds = sinks.groupby([*PAIR, "sink_kind"]).size().groupby(level=PAIR)
    finite = heads[heads["finite"].astype(bool)]
    usual = finite.groupby(PAIR)["token_norm_ratio"].median().astype("float64").rename("usual_token_norm_ratio")
    gated = sinks.groupby(PAIR)[[name for name in GATED if name in sinks]].median().astype("float64")
    share = (kinds.max() / kinds.sum()).astype("float64").rename("kind_share")
    for column in (gated.add_prefix("median_"), inflow, share, usual):
        table = table.merge(column.reset_index(), "left", PAIR)
    return table


def report_rules(rule: SinkRule) -> list[SinkRule]:
    """The rules of Table 15 for a run under `rule`: relaxed, the run's own if it is another, strict at .5 .3 .2 .1.

    The relaxed rule takes the run's attention threshold, the only one at which its head table counted queries.
    """
    rules = [replace(rule, name="relaxed")]
    strict = [replace(rule, name="strict", epsilon=epsilon) for epsilon in (0.5, 0.3, 0.2, 0.1)]
    if rule.name == "mass" or (rule.name == "strict" and rule not in strict):
        rules.append(rule)
    return rules + strict


def rule_label(name: str, epsilon: float, own: SinkRule | None = None) -> str:
    """ "relaxed", "strict, ε = 0.3", or "mass"; of the run's own rule with all that is chosen in it, "mass ≥ 0.3"."""
    if name == "strict":
        return f"strict, ε = {epsilon:g}"
    return own.label if own is not None and own.name == name else name


def table_14(counts: pd.DataFrame) -> pd.DataFrame:
    """Sinks per image under one rule, by blocks, definition and kind of the sink token.

    counts: rows of `counts_per_image` for one rule. Columns blocks ("1+" first), definition, kind ("all" first), then
    nop, broadcast, intermediate, all (events per image) and events, images. Kinds that never occur are left out.
    """
    keys = ["blocks", "definition", "kind"]
    wide = counts.pivot(index=keys, columns="class", values="per_image")
    whole = counts[counts["class"] == "all"].set_index(keys)[["events", "images"]]
    table = wide[["nop", "broadcast", "intermediate", "all"]].join(whole).reset_index()
    total = counts[counts["class"] == "all"].groupby("kind")["events"].sum()
    table = table[(table["kind"] == "all") | (table["kind"].map(total) > 0)]
    return _ordered_by(
        table, blocks=("1+", "0"), definition=("causal", "counts"), kind=("all", *KINDS, *SEQUENCE_KINDS)
    )


def table_15(counts: pd.DataFrame, first: str = "cls", own: SinkRule | None = None) -> pd.DataFrame:
    """Sinks per image under every rule, by blocks.

    counts: `counts_per_image`; own: the run's rule, whose thresholds its label says. Columns blocks ("1+" first), rule,
    epsilon, rule_label, then nop_<definition> and broadcast_<definition> for each definition, all, all_on_cls (events
    per image, whatever the class), images. `first` is the kind of the model's first prefix token, in place of cls:
    all_on_bos for "bos", no column for "".
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for (blocks, rule, epsilon), group in counts.groupby(["blocks", "rule", "epsilon"], sort=False, dropna=False):
        cell = group.set_index(["definition", "class", "kind"])["per_image"]
        row = {
            "blocks": blocks,
            "rule": rule,
            "epsilon": epsilon,
            "rule_label": rule_label(str(rule), float(str(epsilon)), own),
        }
        names = list(dict.fromkeys(group["definition"]))
        for name in names:
            row |= {f"{each}_{name}": cell[name, each, "all"] for each in ("nop", "broadcast")}
        row |= {"all": cell[names[0], "all", "all"]}
        row |= {f"all_on_{first}": cell.get((names[0], "all", first), 0.0)} if first else {}
        rows.append(row | {"images": int(group["images"].max())})
    return _ordered_by(pd.DataFrame(rows), blocks=("1+", "0"))


def sensitivity_grid(sensitivity: pd.DataFrame, definition: SinkDefinition) -> pd.DataFrame:
    """The sensitivity table of one definition, both blocks together, in events per image; counts beside it.

    NOP counts depend on the NOP threshold alone and broadcast counts on the other two, so one row per threshold says
    all that the full grid does: columns class, threshold, stable_rank_threshold, events, per_image, published.
    """
    import pandas as pd

    rows = sensitivity[sensitivity["definition"] == definition.name]
    parts = []
    for name, threshold, ranked in (("nop", "nop_threshold", False), ("broadcast", "broadcast_threshold", True)):
        keys = ["blocks", threshold] + (["stable_rank_threshold"] if ranked else [])
        part = rows.groupby(keys, dropna=False).agg(events=(name, "first"), images=("images", "first"))
        part = part.reset_index().rename(columns={threshold: "threshold"})
        part.insert(0, "class", name)
        keys = ["class", "threshold"] + (["stable_rank_threshold"] if ranked else [])
        parts.append(
            part.groupby(keys, dropna=False).agg(events=("events", "sum"), images=("images", "max")).reset_index()
        )
    table = pd.concat([part.reindex(columns=["class", "threshold", "stable_rank_threshold", "events", "images"])
                       for part in parts], ignore_index=True)  # fmt: skip
    table["per_image"] = table["events"] / table["images"].where(table["images"] > 0)
    own = {"nop": (definition.nop, None), "broadcast": (definition.broadcast, definition.stable_rank)}
    table["published"] = False
    for name, (limit, rank) in own.items():
        chosen = (table["class"] == name) & (table["threshold"] == limit)
        table.loc[chosen & (True if rank is None else table["stable_rank_threshold"] == rank), "published"] = True
    return table


def route_table(heads: pd.DataFrame, spectrum: pd.DataFrame | None) -> pd.DataFrame:
    """Lemma 3, one row per (layer, head): the sink token's norm and the spectrum of Θ = W_Q W_Kᵀ.

    heads: `head_table`; spectrum: tables/spectrum.csv, or None for a run that kept none (its columns are then NaN).
    `token_norm_ratio` is the median over the head's events, or over all its images for a head without events.
    """
    import pandas as pd

    if spectrum is None:
        spectrum = pd.DataFrame({name: pd.Series(dtype="float64") for name in SPECTRUM})
    table = heads[
        [*PAIR, "images", "events", "kind", *(str(name) for name in heads if str(name).startswith("class_"))]
    ].copy()
    ratio = heads["median_token_norm_ratio"].where(heads["events"] > 0, heads["usual_token_norm_ratio"])
    table["token_norm_ratio"] = ratio
    table = table.merge(spectrum[SPECTRUM], "left", PAIR)
    table["sigma_ratio"] = table["sigma_1"] / table["sigma_2"].where(table["sigma_2"] > 0)
    return table


def each_row(table: pd.DataFrame) -> Iterator[Any]:
    """The rows as named tuples, of any type: a column's values are what the table's makers promised."""
    yield from table.itertuples(index=False)


def labelled(table: pd.DataFrame, **labels: Any) -> pd.DataFrame:
    """The table with a constant column in front for each label, e.g. rule="relaxed", definition="causal"."""
    table = table.copy()
    for place, (name, value) in enumerate(labels.items()):
        table.insert(place, name, value)
    return table


def _ordered_by(table: pd.DataFrame, **orders: Sequence[str]) -> pd.DataFrame:
    """Rows in the order of the named values of some columns; other values after them; otherwise as they came."""
    for name, order in reversed(orders.items()):
        places = table[name].map({value: place for place, value in enumerate(order)}).fillna(len(order))
        table = table.loc[places.sort_values(kind="stable").index]
    return table.reset_index(drop=True)
