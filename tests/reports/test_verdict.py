"""The verdict against the summary, which is counted elsewhere, and against what was planted."""

from __future__ import annotations

import re
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
    return verdict, " ".join(verdict.lines)


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


def test_each_line_names_the_heads_of_one_class_and_the_token() -> None:
    verdict, _ = verdict_on(synthetic_heads(images=tuple("abcd"), layers=3, heads=4))
    many, nop, broadcast, other = verdict.lines
    assert "<strong>3 of 12 heads</strong> sink in at least one of 4 images" in many
    assert "1 is intermediate" in many and many.endswith("neither NOP nor broadcast: L0H1.")
    assert "1 is a NOP" in nop and nop.endswith("L1H0; the sink is [CLS].")
    assert "1 is a broadcast" in broadcast and broadcast.endswith("L1H2; the sink is a patch.")
    assert other == "By the other definition, “counts”, all 3 heads keep their class."
    assert not any(mean in " ".join(verdict.lines) for mean in ("on average", "per image", "An image has"))


def test_a_head_of_another_class_by_the_other_definition_is_named() -> None:
    moved = Plant(layer=0, head=0, ratio_out=0.1, ratio_head=0.3)
    verdict, _ = verdict_on(synthetic_heads(images=("a", "b"), plants=(moved, BROADCAST)))
    assert "L0H0 turns from NOP to intermediate; the other head keeps its class." in verdict.lines[-1]


def test_of_many_heads_a_line_names_eight_and_counts_the_rest() -> None:
    crowd = [Plant(layer=layer, head=head) for layer in range(3) for head in range(4)]
    verdict, _ = verdict_on(synthetic_heads(images=("a", "b"), layers=3, heads=4, plants=crowd))
    assert len(re.findall(r"L\dH\d", verdict.lines[1])) == 8 and "and 4 more, in layers 0–2" in verdict.lines[1]


def test_a_class_of_few_events_on_two_kinds_of_token_counts_both() -> None:
    patch = Plant(layer=0, head=2, kind="patch", frequency=0.5)
    verdict, _ = verdict_on(synthetic_heads(images=tuple("abcd"), plants=(NOP, patch)))
    assert verdict.lines[1].endswith("the sink is [CLS] in 4 events and a patch in 2.")


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
    none = verdict_on(synthetic_heads(images=("a",), plants=()))[1]
    assert "In the one image measured, none of 6 heads met the rule" in none


def test_one_sinking_head_is_spoken_of_in_one_clause() -> None:
    line = verdict_on(synthetic_heads(images=("a", "b"), plants=(NOP,)))[0].lines[0]
    assert "sinks in at least one of 2 images and does so in half of the images or more." in line.striptags()


@pytest.mark.parametrize("plants", [(NOP,), (BROADCAST,)], ids=["nop", "broadcast"])
def test_a_class_without_heads_is_said_to_have_none(plants: Sequence[Plant]) -> None:
    text = verdict_on(synthetic_heads(images=("a", "b"), plants=plants))[1]
    assert ("No head is a broadcast" in text) == (plants == (NOP,))
    assert ("no head is a NOP" in text) == (plants == (BROADCAST,))


def test_no_line_breaks_its_own_tags() -> None:
    """Markup's own replace escapes what it puts in."""
    verdict, _ = verdict_on(synthetic_heads(images=("a", "b"), plants=(BROADCAST,)))
    assert 'By the definition “causal”, <strong class="nop-text">no head is a NOP</strong>.' in verdict.lines[1]
    assert not any("&gt;" in line for line in verdict.lines)


def test_a_run_of_the_first_layer_alone_has_a_whole_verdict() -> None:
    text = verdict_on(synthetic_heads(images=("a", "b"), layers=1, plants=(BETWEEN,)))[1]
    assert "L0H1" in text and "nan" not in text.lower() and "–" not in text


def test_a_small_number_is_not_rounded_to_nothing() -> None:
    heads = synthetic_heads(images=("a", "b"), plants=())
    heads["min_attention"] = heads["min_attention"] * 0 + 0.0034
    assert "gave 0.0034 of its attention" in verdict_on(heads, SinkRule.strict())[1]
