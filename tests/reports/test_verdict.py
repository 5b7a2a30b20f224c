"""The paragraph against the summary, which is counted elsewhere, and against what was planted."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import pytest
from synthetic_run import BETWEEN, BROADCAST, NOP, Plant, synthetic_heads

from sinklab.reports.tables import head_table
from sinklab.reports.verdict import Verdict, give_verdict
from sinklab.sinks.classify import SinkDefinition, both_definitions
from sinklab.sinks.rule import SinkRule
from sinklab.sinks.table import counts_per_image, sink_table, summarise


def verdict_on(
    heads: pd.DataFrame, rule: SinkRule | None = None, definition: SinkDefinition | None = None
) -> tuple[Verdict, str]:
    rule, definition = rule or SinkRule.relaxed(), definition or SinkDefinition.causal()
    table = head_table(heads, sink_table(heads, rule), rule, both_definitions())
    verdict = give_verdict(heads, table, counts_per_image(heads, [rule]), rule, definition)
    return verdict, " ".join(verdict.sentences)


@pytest.mark.parametrize("definition", both_definitions(), ids=lambda each: each.name)
@pytest.mark.parametrize("rule", [SinkRule.relaxed(), SinkRule.strict(), SinkRule.mass()], ids=lambda each: each.name)
def test_the_verdicts_numbers_are_those_of_the_summary(rule: SinkRule, definition: SinkDefinition) -> None:
    heads = synthetic_heads(images=tuple("abcde"), layers=4, heads=4, plants=(NOP, BROADCAST, BETWEEN))
    numbers = verdict_on(heads, rule, definition)[0].numbers
    summary = summarise(heads, rule, definition)
    assert numbers["images"] == summary["images"] and numbers["pairs"] == summary["pairs"]
    assert numbers["events"] == summary["events"]["total"]
    assert numbers["sinking"] == summary["heads_that_sink"]["in_any_image"]
    assert numbers["steady"] == summary["heads_that_sink"]["in_half_of_images"]
    for name in ("nop", "broadcast", "intermediate"):
        counted = summary["by_definition"][definition.name]
        assert numbers[name]["events"] == counted[name]["total"]
        assert numbers[name]["steady"] == counted["steady_heads"][name]
        assert numbers[name]["per_image"] == counted[name]["by_blocks"]["1+"]["per_image"]
        assert numbers[name]["per_image_layer_0"] == counted[name]["by_blocks"]["0"]["per_image"]


def test_the_verdict_says_how_many_as_what_where_and_on_which_token() -> None:
    _, text = verdict_on(synthetic_heads(images=tuple("abcd"), layers=3, heads=4))
    assert "<strong>3 of 12 heads</strong> sink" in text
    assert "1 is a NOP" in text and "1 is a broadcast" in text and "1 is neither" in text
    assert "The NOP head lies in layer 1; the sink is [CLS] in 100" in text
    assert "The broadcast head lies in layer 1; the sink is a patch in 100" in text
    assert "<strong>1.00 NOP, 0.50 broadcast and 1.50 sinks of any kind</strong>" in text
    assert "layer 0, counted apart, adds 0.00, 0.00 and 1.00" in text


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (SinkRule.relaxed(), "of the queries gave their dominant key"),
        (SinkRule.strict(), "the least attentive query gave"),
        (SinkRule.mass(), "the dominant key received"),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_a_model_without_sinks_is_told_so_and_which_head_came_nearest(rule: SinkRule, words: str) -> None:
    verdict, text = verdict_on(synthetic_heads(images=("a", "b"), plants=()), rule)
    assert verdict.headline == "No head sinks" and "In none of 2 images" in text
    assert words in text and verdict.numbers["events"] == 0


def test_a_model_that_is_nowhere_finite_is_not_called_free_of_sinks() -> None:
    everywhere = [(layer, head) for layer in range(2) for head in range(3)]
    verdict, text = verdict_on(synthetic_heads(images=("a",), broken=everywhere))
    assert verdict.headline == "Nothing could be measured" and "Nearest" not in text


def test_one_image_is_spoken_of_as_one_image() -> None:
    assert "in the one image measured" in verdict_on(synthetic_heads(images=("a",)))[1]


@pytest.mark.parametrize("plants", [(NOP,), (BROADCAST,)], ids=["nop", "broadcast"])
def test_a_class_without_heads_is_said_to_have_none(plants: Sequence[Plant]) -> None:
    text = verdict_on(synthetic_heads(images=("a", "b"), plants=plants))[1]
    assert ("none is a broadcast" in text) == (plants == (NOP,))
    assert ("none is a NOP" in text) == (plants == (BROADCAST,))


def test_a_run_of_the_first_layer_alone_counts_in_the_first_layer() -> None:
    text = verdict_on(synthetic_heads(images=("a", "b"), layers=1, plants=(BETWEEN,)))[1]
    assert "in layer 0, the only one measured" in text and "nan" not in text.lower() and "–" not in text
