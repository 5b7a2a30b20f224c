"""The three rules at their edges, and what they say of maps worked by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from reference import reference_statistics

from sinklab.errors import InputError, NotFoundError
from sinklab.sinks.rule import SinkRule, table_rules


def head_rows(**columns: list) -> pd.DataFrame:
    """Rows of a head table with the columns given, finite unless said otherwise."""
    table = pd.DataFrame(columns)
    return table if "finite" in table else table.assign(finite=True)


def row_of_map(pattern: list[list[float]]) -> pd.DataFrame:
    """The head-table row of one head with the attention map given (rows sum to 1, no zeros)."""
    logits = torch.tensor(pattern, dtype=torch.float64).log()
    tokens = logits.shape[1]
    values = torch.ones(1, 1, tokens, 1)
    found = reference_statistics(
        logits[None, None], torch.eye(tokens).double()[None, None], values, weight=torch.ones(1, 1), scale=1.0
    )
    names = ("finite", "queries", "sink_index", "routed_count", "min_attention", "inflow")
    return pd.DataFrame({name: found[name].reshape(-1) for name in names})


@pytest.mark.parametrize(
    ("routed", "queries", "event"),
    [(18, 20, True), (17, 20, False), (9, 10, True), (231, 257, False), (232, 257, True), (900_000, 1_000_000, True)],
)
def test_the_relaxed_rule_compares_counts_as_exact_fractions(routed: int, queries: int, event: bool):
    # .9 of 257 is 231.3, so 231 is too few; 18 of 20 is exactly .9, although in float32 18/20 < 0.9.
    assert float(np.float32(18) / np.float32(20)) < 0.9
    rows = head_rows(
        routed_count=np.array([routed], "int32"),
        queries=np.array([queries], "int32"),
        routed_fraction=[routed / queries],
    )
    assert SinkRule.relaxed().events(rows).tolist() == [event]


def test_the_relaxed_rule_agrees_with_whole_number_arithmetic_at_every_count():
    queries = np.repeat(np.arange(1, 61), 61)
    routed = np.tile(np.arange(61), 60)
    routed = np.minimum(routed, queries)
    for tenths in (1, 3, 7, 9, 10):
        events = SinkRule.relaxed(fraction=tenths / 10).events(head_rows(routed_count=routed, queries=queries))
        np.testing.assert_array_equal(events, 10 * routed >= tenths * queries)


def test_a_fraction_with_many_digits_does_not_overflow():
    rows = head_rows(routed_count=[333_333, 333_334], queries=[1_000_000, 1_000_000])
    assert SinkRule.relaxed(fraction=1 / 3).events(rows).tolist() == [False, True]


@pytest.mark.parametrize("epsilon", [0.5, 0.3, 0.2, 0.1, 0.0])
def test_the_strict_rule_holds_at_its_threshold_and_not_below(epsilon: float):
    rows = head_rows(min_attention=[1 - epsilon, np.nextafter(1 - epsilon, 0), 1.0])
    assert SinkRule.strict(epsilon).events(rows).tolist() == [True, False, True]


def test_a_smaller_epsilon_never_adds_an_event():
    rows = head_rows(min_attention=np.random.default_rng(0).random(500).astype("float32"))
    events = [SinkRule.strict(epsilon).events(rows) for epsilon in (0.5, 0.3, 0.2, 0.1)]
    assert events[0].sum() > events[-1].sum() > 0
    for wider, narrower in itertools.pairwise(events):
        assert (wider | ~narrower).all()


def test_float32_columns_are_compared_with_the_threshold_as_given():
    # float32(0.7) is 0.69999999, below the 0.7 asked for; float32(0.3) is 0.30000001, above 0.3
    assert SinkRule.strict(0.3).events(head_rows(min_attention=np.array([0.7], "float32"))).tolist() == [False]
    assert SinkRule.mass(0.3).events(head_rows(inflow=np.array([0.3], "float32"))).tolist() == [True]


def test_the_mass_rule_asks_for_inflow_alone():
    rows = head_rows(inflow=[0.29, 0.3, 0.9], min_attention=[1.0, 0.0, 0.0], routed_count=[9, 0, 0], queries=[9, 9, 9])
    assert SinkRule.mass().events(rows).tolist() == [False, True, True]


@pytest.mark.parametrize("rule", [SinkRule.relaxed(), SinkRule.strict(), SinkRule.mass()])
def test_a_row_that_is_not_finite_is_never_an_event(rule: SinkRule):
    rows = head_rows(
        routed_count=[0, 9, 9],
        queries=[0, 9, 9],
        min_attention=[math.nan, 1.0, 1.0],
        inflow=[math.nan, 1.0, 1.0],
        finite=[False, False, True],
    )
    assert rule.events(rows).tolist() == [False, False, True]


@pytest.mark.parametrize("rule", table_rules() + [SinkRule.mass()])
def test_events_keep_the_index_and_hold_for_a_table_without_rows(rule: SinkRule):
    rows = head_rows(routed_count=[9, 0], queries=[9, 9], min_attention=[0.95, 0.1], inflow=[0.9, 0.2])
    rows.index = pd.Index([7, 3])
    events = rule.events(rows)
    assert events.to_dict() == {7: True, 3: False}
    assert events.dtype == bool
    assert rule.events(rows.iloc[:0]).tolist() == []


def test_the_key_with_the_largest_inflow_need_not_be_the_one_that_nine_of_ten_queries_choose():
    # Nine queries give .51 to t = 0 and .49 to u = 1, the tenth gives u nearly all. Inflow of t: 9 * .51 / 10 = .459;
    # of u: (9 * .49 + 1) / 10 = .541. So s = u, to which 1 query of 10 is routed: no event, though t has 9 of 10.
    row = row_of_map([[0.51, 0.49]] * 9 + [[1e-9, 1 - 1e-9]])
    assert (row["sink_index"].item(), row["routed_count"].item(), row["queries"].item()) == (1, 1, 10)
    assert row["inflow"].item() == pytest.approx(0.541)
    assert SinkRule.relaxed().events(row).tolist() == [False]
    assert SinkRule.mass().events(row).tolist() == [True]


def test_a_key_that_half_of_every_query_goes_to_is_the_one_the_strict_rule_speaks_of():
    generator = np.random.default_rng(1)
    for _ in range(50):
        pattern = generator.dirichlet(np.full(6, 0.3), size=8) + 1e-6
        pattern[:, 4] += generator.uniform(1.0, 5.0, 8)  # at least half once the row is normalised
        row = row_of_map((pattern / pattern.sum(axis=1, keepdims=True)).tolist())
        assert row["sink_index"].item() == 4
        assert SinkRule.strict(0.5).events(row).tolist() == [bool(row["min_attention"].item() >= 0.5)]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"epsilon": 0.51}, "epsilon"),
        ({"epsilon": -0.1}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"attention": 0.49}, "attention"),
        ({"attention": 1.01}, "attention"),
        ({"fraction": 0.0}, "fraction"),
        ({"fraction": 1.5}, "fraction"),
        ({"threshold": 0.0}, "inflow"),
        ({"threshold": 1.1}, "inflow"),
    ],
)
def test_a_threshold_out_of_range_is_refused_with_its_name_and_number(options: dict[str, float], word: str):
    with pytest.raises(InputError, match=word) as refusal:
        SinkRule(**options)
    assert str(next(iter(options.values()))) in str(refusal.value)


def test_an_unknown_rule_is_refused_with_the_names_there_are():
    with pytest.raises(NotFoundError, match="relaxed, strict, mass"):
        SinkRule(name="loose")


def test_a_table_without_the_columns_of_a_rule_is_refused_by_name():
    with pytest.raises(InputError, match="routed_count, queries"):
        SinkRule.relaxed().events(head_rows(inflow=[0.5]))


@pytest.mark.parametrize("rule", [*table_rules(), SinkRule.mass(0.25), SinkRule.relaxed(0.6, 0.75)])
def test_a_rule_comes_back_from_what_it_saved(rule: SinkRule):
    assert SinkRule.from_dict(rule.as_dict()) == rule


def test_the_sentence_says_the_thresholds_in_use():
    assert "0.75" in SinkRule.relaxed(0.6, 0.75).sentence() and "0.6" in SinkRule.relaxed(0.6, 0.75).sentence()
    assert "0.9" in SinkRule.strict(0.1).sentence()
    assert "0.25" in SinkRule.mass(0.25).sentence()


def test_the_rules_of_the_paper_s_table_are_relaxed_and_four_strict_ones():
    assert [(rule.name, rule.epsilon) for rule in table_rules()[1:]] == [
        ("strict", 0.5),
        ("strict", 0.3),
        ("strict", 0.2),
        ("strict", 0.1),
    ]
    assert table_rules()[0] == SinkRule.relaxed()
