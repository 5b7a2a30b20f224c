"""What is read from a head table, against tables small enough to count by hand and loops simple enough to trust."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from head_rows import event, head_row, head_table, not_finite, random_table, small_table

from sinklab.errors import InputError
from sinklab.sinks.classify import SinkDefinition
from sinklab.sinks.rule import SinkRule, table_rules
from sinklab.sinks.table import (
    counts_per_image,
    head_schema,
    head_summary,
    kind_by_layer,
    sensitivity,
    sink_table,
    summarise,
)

RELAXED, CAUSAL, COUNTS = SinkRule.relaxed(), SinkDefinition.causal(), SinkDefinition.counts()


@pytest.fixture
def small() -> pd.DataFrame:
    return small_table()


def test_the_schema_holds_every_column_of_a_run_once_and_keeps_whole_numbers_whole():
    schema = head_schema()
    expected = (
        "image image_index layer head tokens queries sink_index sink_kind sink_row sink_column inflow inflow_margin"
    )
    expected += " routed_count routed_fraction min_attention entropy value_norm_head value_ratio_head value_ratio_out"
    expected += " update_norm stable_rank rank1_energy stable_rank_head token_norm_ratio finite"
    assert schema.names == expected.split()
    assert [schema.field(name).type for name in ("routed_count", "queries", "sink_index")] == [pa.int32()] * 3
    assert head_table(head_row(0, 0, 0)).dtypes["inflow"] == np.float32


def test_the_sink_table_holds_the_events_with_both_classes(small: pd.DataFrame):
    sinks = sink_table(small.sample(frac=1, random_state=0), RELAXED)
    places = [tuple(row) for row in sinks[["image_index", "layer", "head"]].to_numpy()]
    assert places == [(0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 1, 0)]
    assert sinks["class_causal"].tolist() == ["nop", "broadcast", "broadcast", "nop", "intermediate"]
    assert sinks["class_counts"].tolist() == ["nop", "broadcast", "nop", "nop", "broadcast"]
    assert list(sinks) == [*small.columns, "class_causal", "class_counts"]


def test_the_head_summary_of_the_small_table_is_what_one_counts_by_hand(small: pd.DataFrame):
    summary = head_summary(small, RELAXED).set_index(["layer", "head"])
    assert summary["images"].tolist() == [3, 3, 3, 3]
    assert summary["events"].tolist() == [2, 0, 2, 1]
    assert summary["frequency"].tolist() == pytest.approx([2 / 3, 0, 2 / 3, 1 / 3])
    assert summary["kind"].tolist() == ["cls", "none", "register", "patch"]  # register and patch tie in (1, 0)
    assert summary["class_causal"].tolist() == ["nop", "none", "broadcast", "broadcast"]  # a tie in (1, 0) again
    assert summary["class_counts"].tolist() == ["nop", "none", "broadcast", "nop"]
    assert summary["not_finite"].tolist() == [0, 0, 0, 1]
    mean = (0.97 + 0.97 + 0.1) / 3, 0.1, (0.97 + 0.97 + 0.1) / 3, (0.97 + 0.1) / 2  # the last: of its finite rows
    assert summary["mean_inflow"].tolist() == pytest.approx(mean)
    assert summary["median_stable_rank"].tolist() == pytest.approx([1.0, math.nan, 1.5, 1.0], nan_ok=True)
    assert summary.loc[(1, 1), "median_value_ratio_out"] == pytest.approx(0.8)
    assert summary[["nop_causal", "broadcast_causal", "intermediate_causal"]].to_numpy().tolist() == [
        [2, 0, 0],
        [0, 0, 0],
        [0, 1, 1],
        [0, 1, 0],
    ]


def test_the_head_summary_agrees_with_a_loop_over_heads():
    table = random_table(3, images=40)
    sinks = sink_table(table, RELAXED)
    for row in head_summary(table, RELAXED).to_dict("records"):
        own = table[(table["layer"] == row["layer"]) & (table["head"] == row["head"])]
        events = sinks[(sinks["layer"] == row["layer"]) & (sinks["head"] == row["head"])]
        assert len(events) > 1
        assert (row["images"], row["events"]) == (len(own), len(events))
        assert row["mean_inflow"] == pytest.approx(own["inflow"].astype("float64").mean())
        for name in ("value_ratio_head", "value_ratio_out", "stable_rank", "token_norm_ratio"):
            assert row[f"median_{name}"] == pytest.approx(np.median(events[name]), rel=1e-6)
        assert (events["sink_kind"] == row["kind"]).sum() == events["sink_kind"].value_counts().max()
        for name in ("causal", "counts"):
            for label in ("nop", "broadcast", "intermediate"):
                assert row[f"{label}_{name}"] == (events[f"class_{name}"] == label).sum()
            assert row[f"{row[f'class_{name}']}_{name}"] == events[f"class_{name}"].value_counts().max()


def test_an_event_without_a_stable_rank_is_left_out_of_the_median_alone():
    rows = [head_row(i, 1, 0, **event("cls", 0.0, 0.0, rank)) for i, rank in enumerate([math.nan, 1.0, 1.2])]
    summary = head_summary(head_table(*rows), RELAXED)
    assert summary["events"].item() == 3
    assert summary["median_stable_rank"].item() == pytest.approx(1.1)


def test_the_kind_of_the_largest_inflow_is_counted_by_layer_over_finite_heads(small: pd.DataFrame):
    kinds = kind_by_layer(small).set_index(["layer", "kind"])
    assert kinds["pairs"].tolist() == [2, 0, 4, 0, 1, 4]  # cls, register, patch in layers 0 and 1; one not finite
    assert kinds["share"].tolist() == pytest.approx([2 / 6, 0, 4 / 6, 0, 1 / 5, 4 / 5])
    assert kinds.loc[(0, "cls"), "inflow"] == pytest.approx(0.97)
    assert math.isnan(kinds.loc[(0, "register"), "inflow"])
    assert kinds.loc[(1, "patch"), "inflow"] == pytest.approx((0.97 + 0.97 + 0.1 + 0.1) / 4)


def test_the_summary_of_the_small_table_is_what_one_counts_by_hand(small: pd.DataFrame):
    summary = summarise(small, RELAXED, CAUSAL)
    assert [summary[name] for name in ("images", "layers", "heads", "pairs", "rows")] == [3, 2, 2, 4, 12]
    assert summary["definition"]["name"] == "causal"
    assert summary["events"]["total"] == 5
    assert summary["events"]["per_image"] == pytest.approx(5 / 3)
    assert {blocks: part["total"] for blocks, part in summary["events"]["by_blocks"].items()} == {"0": 2, "1+": 3}
    kinds = {kind: part["total"] for kind, part in summary["events"]["by_kind"].items()}
    assert kinds == {"cls": 2, "register": 1, "patch": 2}
    assert summary["heads_that_sink"] == {"in_any_image": 3, "in_half_of_images": 2}
    causal, counts = summary["by_definition"]["causal"], summary["by_definition"]["counts"]
    assert [causal[label]["total"] for label in ("nop", "broadcast", "intermediate")] == [2, 2, 1]
    assert [counts[label]["total"] for label in ("nop", "broadcast", "intermediate")] == [3, 2, 0]
    assert causal["nop"]["by_blocks"]["1+"] == {"total": 0, "per_image": 0.0}
    assert causal["steady_heads"] == {"nop": 1, "broadcast": 1, "intermediate": 0}
    assert [(head["layer"], head["head"]) for head in causal["strongest_heads"]["broadcast"]] == [(1, 0), (1, 1)]
    assert [(head["layer"], head["head"]) for head in counts["strongest_heads"]["nop"]] == [(0, 0), (1, 1)]
    assert causal["strongest_heads"]["nop"][0]["kind"] == "cls"
    assert summary["not_finite"] == {"rows": 1, "images": 1, "heads": [[1, 1, 1]]}


def test_nearness_counts_events_within_a_fifth_of_each_threshold():
    # causal thresholds .2, .5 and rank 1.5: near are [.16, .24], [.4, .6], [1.2, 1.8]; rule .9: [.72, 1.08]
    rows = [head_row(i, 1, 0, **event("cls", 1.0, ratio)) for i, ratio in enumerate([0.15, 0.17, 0.23, 0.25, 0.45])]
    rows += [
        head_row(9, 1, 0, **event("cls", 1.0, 0.9, rank=1.6)),
        head_row(10, 1, 0, routed_fraction=0.8, routed_count=8),
    ]
    nearness = summarise(head_table(*rows), RELAXED, CAUSAL)["nearness"]
    assert [(near["column"], near["threshold"], near["events"]) for near in nearness["causal"]] == [
        ("value_ratio_out", 0.2, 2),
        ("value_ratio_out", 0.5, 1),
        ("stable_rank", 1.5, 1),
    ]
    assert [near["events"] for near in nearness["counts"]] == [0, 0]
    assert nearness["rule"] == [
        {"column": "routed_fraction", "threshold": 0.9, "share": 0.2, "events": 6, "near_misses": 1}
    ]


def test_the_strongest_heads_are_at_most_eight_by_frequency_then_inflow():
    rows = [
        head_row(image, 1, head, **event("cls", 1.0, 1.0, inflow=0.6 + 0.01 * head))
        for head in range(12)
        for image in range(2)
        if not (head == 11 and image == 1)
    ]
    rows.append(head_row(1, 1, 11))
    heads = summarise(head_table(*rows), RELAXED, CAUSAL)["by_definition"]["causal"]["strongest_heads"]["broadcast"]
    assert [head["head"] for head in heads] == [10, 9, 8, 7, 6, 5, 4, 3]  # head 11 sinks in one image of two


def test_a_head_that_sinks_in_exactly_half_of_its_images_is_steady():
    rows = [head_row(0, 1, 0, **event("cls", 0.1, 0.1)), head_row(1, 1, 0)]
    rows += [head_row(0, 1, 1, **event("cls", 0.1, 0.1)), head_row(1, 1, 1), head_row(2, 1, 1)]
    summary = summarise(head_table(*rows), RELAXED, CAUSAL)
    assert summary["heads_that_sink"] == {"in_any_image": 2, "in_half_of_images": 1}
    assert summary["by_definition"]["causal"]["steady_heads"]["nop"] == 1


def test_a_definition_with_its_own_name_stands_beside_the_two(small: pd.DataFrame):
    own = SinkDefinition(name="own", axis="value_ratio_out", stable_rank=3.0)
    found = summarise(small, RELAXED, own)["by_definition"]
    assert [found[name]["broadcast"]["total"] for name in ("causal", "counts", "own")] == [2, 2, 3]


def without_events(_: pd.DataFrame) -> pd.DataFrame:
    return head_table(*(head_row(image, layer, 0) for image in range(2) for layer in range(2)))


def without_rows(table: pd.DataFrame) -> pd.DataFrame:
    return table.iloc[:0]


def of_one_image(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["image_index"] == 0]


def of_nothing_finite(_: pd.DataFrame) -> pd.DataFrame:
    return head_table(not_finite(0, 0, 0), not_finite(0, 1, 0))


@pytest.mark.parametrize("cut", [without_events, without_rows, of_one_image, of_nothing_finite])
@pytest.mark.parametrize("rule", [*table_rules()[:2], SinkRule.mass()])
def test_everything_holds_for_tables_with_little_in_them(small: pd.DataFrame, cut, rule: SinkRule):
    table = cut(small)
    events, images = int(rule.events(table).sum()), table["image_index"].nunique()
    assert len(sink_table(table, rule)) == events
    assert len(counts_per_image(table)) == 5 * 2 * 2 * 4 * 4
    assert sensitivity(table, rule).groupby("definition")["events"].sum()["counts"] == 20 * events
    assert len(head_summary(table, rule)) == len(table[["layer", "head"]].drop_duplicates())
    assert kind_by_layer(table)["pairs"].sum() == table["finite"].sum()
    summary = summarise(table, rule, COUNTS)
    assert (summary["images"], summary["events"]["total"]) == (images, events)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary  # plain JSON, no NaN


def test_the_order_of_rows_changes_no_number():
    table = random_table(4, images=60)
    table["inflow"] = 10 ** np.random.default_rng(4).uniform(-18, 0, len(table))  # sums that rounding would change
    mixed = table.sample(frac=1, random_state=1)
    for read in (head_summary, sensitivity, sink_table):
        pd.testing.assert_frame_equal(read(mixed, RELAXED), read(table, RELAXED), check_exact=True)
    pd.testing.assert_frame_equal(kind_by_layer(mixed), kind_by_layer(table), check_exact=True)
    pd.testing.assert_frame_equal(counts_per_image(mixed), counts_per_image(table), check_exact=True)
    assert summarise(mixed, RELAXED, CAUSAL) == summarise(table, RELAXED, CAUSAL)


def test_a_table_without_the_needed_columns_is_refused_by_name(small: pd.DataFrame):
    with pytest.raises(InputError, match="token_norm_ratio"):
        head_summary(small.drop(columns="token_norm_ratio"), RELAXED)
