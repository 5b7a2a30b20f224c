"""Counts per image and the sensitivity grid: by hand, and as sums that have to come out."""

from __future__ import annotations

import pandas as pd
import pytest
from head_rows import random_table, small_table

from sinklab.errors import InputError
from sinklab.sinks.classify import SinkDefinition
from sinklab.sinks.counts import counts_per_image, sensitivity
from sinklab.sinks.rule import SinkRule, table_rules

RELAXED, CAUSAL, COUNTS = SinkRule.relaxed(), SinkDefinition.causal(), SinkDefinition.counts()


@pytest.fixture
def small() -> pd.DataFrame:
    return small_table()


def looked_up(table: pd.DataFrame, **where: str) -> pd.Series:
    """The one row of a count table with the values given."""
    for name, value in where.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


def test_counts_are_per_image_of_the_head_table_with_or_without_events(small: pd.DataFrame):
    counts = counts_per_image(small)
    assert (counts["images"] == 3).all()
    counts = counts[counts["rule"] == "relaxed"]
    expected = {  # (definition, blocks, class, kind): events, by the fixture's description
        ("causal", "0", "nop", "cls"): 2,
        ("causal", "0", "nop", "all"): 2,
        ("causal", "1+", "nop", "all"): 0,
        ("causal", "1+", "broadcast", "register"): 1,
        ("causal", "1+", "broadcast", "patch"): 1,
        ("causal", "1+", "intermediate", "patch"): 1,
        ("causal", "1+", "all", "all"): 3,
        ("counts", "1+", "nop", "patch"): 1,
        ("counts", "1+", "broadcast", "all"): 2,
        ("counts", "1+", "intermediate", "all"): 0,
        ("counts", "1+", "all", "cls"): 0,
    }
    for (definition, blocks, label, kind), events in expected.items():
        row = looked_up(counts, definition=definition, blocks=blocks, kind=kind, **{"class": label})
        assert (row["events"], row["per_image"]) == (events, pytest.approx(events / 3)), (definition, blocks, label)


def test_every_combination_has_a_row_and_the_parts_sum_to_the_totals():
    table = random_table(0)
    counts = counts_per_image(table, [*table_rules(), SinkRule.mass()])
    assert len(counts) == 6 * 2 * 2 * 4 * 4
    assert counts["epsilon"].notna().sum() == 4 * 64
    key = ["rule", "epsilon", "definition", "blocks"]
    for part in ("class", "kind"):
        other = "kind" if part == "class" else "class"
        sums = counts[counts[part] != "all"].groupby([*key, other], dropna=False)["events"].sum()
        totals = counts[counts[part] == "all"].set_index([*key, other])["events"]
        pd.testing.assert_series_equal(sums.sort_index(), totals.sort_index())
    for rule in table_rules():
        same = (counts["rule"] == rule.name) & (counts["class"] == "all") & (counts["kind"] == "all")
        same &= counts["epsilon"].isna() if rule.name == "relaxed" else counts["epsilon"] == rule.epsilon
        assert counts[same & (counts["definition"] == "causal")]["events"].sum() == rule.events(table).sum()


def test_blocks_that_were_not_measured_have_no_number_per_image(small: pd.DataFrame):
    counts = counts_per_image(small[small["layer"] > 0], [RELAXED])
    assert counts[counts["blocks"] == "0"]["per_image"].isna().all()
    assert counts[counts["blocks"] == "0"]["events"].sum() == 0
    assert counts[counts["blocks"] == "1+"]["per_image"].notna().all()


def test_the_sensitivity_grid_always_sums_to_the_events_and_holds_the_published_row():
    table = random_table(1)
    grid = sensitivity(table, RELAXED)
    assert (grid["nop"] + grid["broadcast"] + grid["intermediate"] == grid["events"]).all()
    totals = grid.groupby(["definition", "blocks"])["events"].unique()
    assert all(len(events) == 1 for events in totals)
    assert totals["causal", "0"][0] + totals["causal", "1+"][0] == RELAXED.events(table).sum()
    for definition in (CAUSAL, COUNTS):
        published = grid[grid["published"] & (grid["definition"] == definition.name)]
        labels = definition.classify(table[RELAXED.events(table)])
        assert len(published) == 2
        for name in ("nop", "broadcast", "intermediate"):
            assert published[name].sum() == (labels == name).sum()
    assert grid[grid["definition"] == "counts"]["stable_rank_threshold"].isna().all()


def test_a_definitions_own_thresholds_are_on_its_grid_once_per_block():
    own = SinkDefinition(name="own", axis="value_ratio_out", nop=0.45, broadcast=0.55, stable_rank=1.1)
    table = random_table(1)
    grid = sensitivity(table, RELAXED, [own, CAUSAL])
    published = grid[grid["published"] & (grid["definition"] == "own")]
    assert sorted(published["blocks"]) == ["0", "1+"]
    labels = own.classify(table[RELAXED.events(table)])
    assert published["nop"].sum() == (labels == "nop").sum() > 0
    assert (grid["nop_threshold"] < grid["broadcast_threshold"]).all()
    pd.testing.assert_frame_equal(
        grid[grid["definition"] == "causal"].reset_index(drop=True), sensitivity(table, RELAXED, [CAUSAL])
    )


def test_a_higher_threshold_moves_the_sensitivity_counts_one_way_only():
    grid = sensitivity(random_table(2), RELAXED)
    grid = grid[(grid["definition"] == "causal") & (grid["blocks"] == "1+")]
    for _, rows in grid.groupby(["broadcast_threshold", "stable_rank_threshold"]):
        assert rows.sort_values("nop_threshold")["nop"].is_monotonic_increasing
    for _, rows in grid.groupby(["nop_threshold", "stable_rank_threshold"]):
        assert rows.sort_values("broadcast_threshold")["broadcast"].is_monotonic_decreasing
    for _, rows in grid.groupby(["nop_threshold", "broadcast_threshold"]):
        assert rows.sort_values("stable_rank_threshold")["broadcast"].is_monotonic_increasing


def test_a_table_without_images_is_refused_by_name(small: pd.DataFrame):
    with pytest.raises(InputError, match="image_index"):
        counts_per_image(small.drop(columns="image_index"))
