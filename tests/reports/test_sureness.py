"""What the verdict hangs on: near a limit as summary.json counts it, mixed heads, few events, other limits."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from synthetic_run import BETWEEN, BROADCAST, NOP, Plant, synthetic_heads

from sinklab.reports.sureness import how_sure, near_any, near_limits, near_misses
from sinklab.reports.tables import head_table
from sinklab.sinks.classify import SinkDefinition, both_definitions
from sinklab.sinks.rule import SinkRule
from sinklab.sinks.table import sensitivity, sink_table, summarise

CAUSAL, RELAXED = SinkDefinition.causal(), SinkRule.relaxed()
CROWD = (NOP, BROADCAST, BETWEEN, Plant(layer=2, head=0, ratio_out=0.21, ratio_head=0.45, stable_rank=1.6))


def lines_of(heads: pd.DataFrame) -> str:
    table = head_table(heads, sink_table(heads, RELAXED), RELAXED, both_definitions())
    return " ".join(how_sure(heads, table, sensitivity(heads, RELAXED), RELAXED, CAUSAL))


@pytest.mark.parametrize("definition", both_definitions(), ids=lambda each: each.name)
@pytest.mark.parametrize("rule", [RELAXED, SinkRule.strict(), SinkRule.mass()], ids=lambda each: each.name)
def test_near_is_what_the_summary_calls_near(rule: SinkRule, definition: SinkDefinition) -> None:
    heads = synthetic_heads(images=tuple("abcde"), layers=3, heads=4, plants=CROWD)
    heads.loc[heads.index[:7], "routed_fraction"] = np.float32(0.8)
    nearness = summarise(heads, rule, definition)["nearness"]
    counted = [int(mask.sum()) for mask in near_limits(heads[rule.events(heads)], definition).values()]
    assert counted == [limit["events"] for limit in nearness[definition.name]]
    assert near_misses(heads, rule) == nearness["rule"][0]["near_misses"]


def test_an_event_near_two_limits_counts_once() -> None:
    heads = synthetic_heads(images=("a", "b"), plants=(Plant(layer=0, head=0, ratio_out=0.5, stable_rank=1.5),))
    assert near_any(heads[RELAXED.events(heads)], CAUSAL) == 2
    assert "2 of 2 events lie within" in lines_of(heads)


def test_a_head_of_mixed_class_is_named_with_its_counts() -> None:
    heads = synthetic_heads(images=tuple("abcde"), plants=(NOP,))
    sunk = heads.index[(heads["layer"] == 1) & (heads["head"] == 0)]
    heads.loc[sunk[:2], "value_ratio_out"] = np.float32(0.3)
    assert "L1H0 is a NOP in 3 of its 5 events." in lines_of(heads)


def test_classes_far_from_every_limit_stay_as_they_are() -> None:
    text = lines_of(synthetic_heads(images=tuple("abcdefgh"), plants=(Plant(layer=1, head=0, ratio_out=0.02),)))
    assert "Of 8 events none lies within" in text and "Every head has one class in all its events." in text
    assert "The 8 NOP events stay 8 with the limit at 0.1 to 0.3." in text and "rests on" not in text


def test_heads_that_rest_on_few_events_are_named() -> None:
    rare = [Plant(layer=1, head=head, frequency=0.25) for head in (0, 2)]
    text = lines_of(synthetic_heads(images=tuple("abcdefgh"), plants=rare))
    assert "L1H0 and L1H2 rest on 4 events of layer 1 together, none on more than 2." in text


def test_a_run_without_events_has_nothing_to_be_sure_of() -> None:
    assert lines_of(synthetic_heads(images=("a",), plants=())) == ""
