"""The report's tables against counts that are known because the sinks were planted."""

from __future__ import annotations

import pandas as pd
import pytest
from synthetic_run import BROADCAST, NOP, Plant, synthetic_heads, synthetic_spectrum

from sinklab.reports import tables
from sinklab.sinks.classify import SinkDefinition, both_definitions
from sinklab.sinks.rule import SinkRule
from sinklab.sinks.table import counts_per_image, sensitivity, sink_table

RULE = SinkRule.relaxed()
IMAGES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def heads() -> pd.DataFrame:
    """NOP in layer 1 on all four images, broadcast in layer 1 on two, an intermediate sink in layer 0 on all."""
    return synthetic_heads(images=IMAGES)


def head_table(heads: pd.DataFrame) -> pd.DataFrame:
    return tables.head_table(heads, sink_table(heads, RULE), RULE, both_definitions())


def test_table_14_counts_the_planted_sinks_per_image(heads: pd.DataFrame) -> None:
    table = tables.table_14(counts_per_image(heads, [RULE])).set_index(["blocks", "definition", "kind"])
    later = table.loc[("1+", "causal", "all")]
    assert (later["nop"], later["broadcast"], later["intermediate"], later["all"]) == (1.0, 0.5, 0.0, 1.5)
    assert table.loc[("1+", "causal", "patch"), "all"] == 0.5  # the broadcast's sink
    first = table.loc[("0", "counts", "all")]
    assert (first["nop"], first["intermediate"], first["all"], first["events"]) == (0.0, 1.0, 1.0, 4)


def test_layer_0_is_counted_apart_and_last(heads: pd.DataFrame) -> None:
    blocks = list(dict.fromkeys(tables.table_14(counts_per_image(heads, [RULE]))["blocks"]))
    assert blocks == ["1+", "0"]


def test_a_kind_of_token_that_is_never_a_sink_has_no_row(heads: pd.DataFrame) -> None:
    only = synthetic_heads(images=IMAGES, plants=(NOP,))
    assert set(tables.table_14(counts_per_image(only, [RULE]))["kind"]) == {"all", "cls"}


def test_strict_rules_keep_only_heads_where_every_query_is_routed(heads: pd.DataFrame) -> None:
    table = tables.table_15(counts_per_image(heads, tables.report_rules(RULE))).set_index(["blocks", "rule_label"])
    assert table.loc[("1+", "relaxed"), "all"] == 1.5
    for epsilon in ("0.5", "0.3", "0.2", "0.1"):
        assert table.loc[("1+", f"strict, ε = {epsilon}"), "all"] == 0.0
        assert table.loc[("0", f"strict, ε = {epsilon}"), "all"] == 1.0  # planted with a minimum of .95


def test_the_rules_of_table_15_keep_the_threshold_at_which_queries_were_counted() -> None:
    rules = tables.report_rules(SinkRule.relaxed(attention=0.7, fraction=0.8))
    assert (rules[0].name, rules[0].attention, rules[0].fraction) == ("relaxed", 0.7, 0.8)
    assert [rule.epsilon for rule in rules[1:]] == [0.5, 0.3, 0.2, 0.1]


@pytest.mark.parametrize("rule", [SinkRule.mass(0.4), SinkRule.strict(0.25)])
def test_a_run_under_another_rule_finds_its_own_row_in_table_15(rule: SinkRule) -> None:
    assert rule in tables.report_rules(rule) and len(tables.report_rules(rule)) == 6


@pytest.mark.parametrize("definition", both_definitions(), ids=lambda each: each.name)
def test_the_framed_cells_of_the_sensitivity_table_are_the_classes_themselves(
    heads: pd.DataFrame, definition: SinkDefinition
) -> None:
    grid = tables.sensitivity_grid(sensitivity(heads, RULE), definition)
    own = grid[grid["published"]].set_index("class")["events"]
    classes = definition.classify(sink_table(heads, RULE)).value_counts()
    assert len(own) == 2
    assert own.to_dict() == {name: classes.get(name, 0) for name in ("nop", "broadcast")}


def test_more_generous_thresholds_never_make_a_class_smaller(heads: pd.DataFrame) -> None:
    grid = tables.sensitivity_grid(sensitivity(heads, RULE), SinkDefinition.causal())
    nop = grid[grid["class"] == "nop"].sort_values("threshold")["events"]
    wide = grid[(grid["class"] == "broadcast") & (grid["stable_rank_threshold"] == 2.0)].sort_values("threshold")
    assert nop.is_monotonic_increasing and wide["events"].is_monotonic_decreasing


def test_a_head_says_how_often_its_sink_is_of_the_commonest_kind() -> None:
    heads = synthetic_heads(images=IMAGES, plants=(NOP,))
    moved = (heads["layer"] == 1) & (heads["head"] == 0) & (heads["image"] == "d")
    heads.loc[moved, "sink_kind"] = "patch"
    row = head_table(heads).set_index(["layer", "head"]).loc[(1, 0)]
    assert (row["kind"], row["kind_share"]) == ("cls", 0.75)


def test_the_inflow_of_a_heads_events_leaves_its_other_images_out(heads: pd.DataFrame) -> None:
    row = head_table(heads).set_index(["layer", "head"]).loc[(BROADCAST.layer, BROADCAST.head)]
    events = sink_table(heads, RULE).query("layer == 1 and head == 2")["inflow"].astype("float64")
    assert row["event_inflow"] == pytest.approx(events.mean(), rel=1e-12) and len(events) == 2
    assert row["mean_inflow"] < row["event_inflow"]


def test_a_route_uses_the_token_norm_of_the_events_where_there_are_any() -> None:
    heads = synthetic_heads(images=IMAGES, plants=(Plant(layer=1, head=0, frequency=0.5, token_norm=40.0),))
    routes = tables.route_table(head_table(heads), synthetic_spectrum(2, 3)).set_index(["layer", "head"])
    assert routes.loc[(1, 0), "token_norm_ratio"] > 30  # the median over all four images would be near 20
    assert routes.loc[(0, 0), "token_norm_ratio"] == pytest.approx(1.0, abs=0.1)
    assert (routes["sigma_ratio"] > 1).all()


def test_a_run_without_a_spectrum_still_has_token_norms(heads: pd.DataFrame) -> None:
    routes = tables.route_table(head_table(heads), None)
    assert routes["sigma1_share"].isna().all() and routes["token_norm_ratio"].notna().all() and len(routes) == 6


def test_no_table_depends_on_the_order_of_rows(heads: pd.DataFrame) -> None:
    mixed = heads.sample(frac=1, random_state=3)
    pd.testing.assert_frame_equal(head_table(heads), head_table(mixed))
    rules = tables.report_rules(RULE)
    pd.testing.assert_frame_equal(
        tables.table_15(counts_per_image(heads, rules)), tables.table_15(counts_per_image(mixed, rules))
    )
