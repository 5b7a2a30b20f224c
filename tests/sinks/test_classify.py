"""NOP, broadcast or neither: both definitions at their edges, and where they part."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from reference import reference_statistics

from sinklab.errors import InputError, NotFoundError
from sinklab.sinks.classify import SinkDefinition, both_definitions

CAUSAL, COUNTS = SinkDefinition.causal(), SinkDefinition.counts()


def rows(head: float | list, output: float | list, rank: float | list) -> pd.DataFrame:
    """Rows with a value ratio in head space, one after the output projection, and a stable rank."""
    return pd.DataFrame(
        {"value_ratio_head": np.atleast_1d(head), "value_ratio_out": np.atleast_1d(output), "stable_rank": rank}
    )


def row_of_head(value: list[list[float]], weight: list[list[float]], sink_logit: float) -> pd.DataFrame:
    """The row of a head with the values and W_O given, all of whose queries give key 0 the logit `sink_logit`."""
    values, output = torch.tensor(value).double(), torch.tensor(weight).double()
    tokens = len(values)
    keys = torch.zeros(tokens, 1).double()
    keys[0] = sink_logit
    q, k, v = torch.ones(1, 1, tokens, 1).double(), keys[None, None], values[None, None]
    found = reference_statistics(q, k, v, weight=output, scale=1.0)
    assert found["sink_index"][0, 0] == 0
    return rows(*(found[name][0, 0] for name in ("value_ratio_head", "value_ratio_out", "stable_rank")))


@pytest.mark.parametrize(
    ("ratio", "rank", "expected"),
    [
        (0.2, 9.0, "nop"),
        (np.nextafter(0.2, 1), 1.0, "intermediate"),
        (np.nextafter(0.5, 0), 1.0, "intermediate"),
        (0.5, 1.0, "broadcast"),
        (0.5, 1.5, "broadcast"),
        (0.5, np.nextafter(1.5, 2), "intermediate"),
        (7.0, 4.0, "intermediate"),
        (0.0, 1.0, "nop"),
    ],
)
def test_the_causal_definition_reads_the_output_ratio_and_the_rank(ratio: float, rank: float, expected: str):
    assert CAUSAL.classify(rows(1.0, ratio, rank)).tolist() == [expected]


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.2, "nop"),
        (np.nextafter(0.2, 1), "intermediate"),
        (np.nextafter(0.5, 0), "intermediate"),
        (0.5, "broadcast"),
    ],
)
def test_the_counting_definition_reads_the_head_ratio_alone(ratio: float, expected: str):
    assert COUNTS.classify(rows(ratio, 0.0, 50.0)).tolist() == [expected]


def test_the_two_definitions_disagree_where_the_output_projection_drops_the_sink_s_value():
    # Norms 1, 1, 1 in head space: ratio 1, a broadcast by counting. W_O keeps the second channel, where v_s = (1, 0)
    # has nothing: u_s = 0, a NOP by the causal definition.
    row = row_of_head([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]], sink_logit=5.0)
    assert (COUNTS.classify(row).item(), CAUSAL.classify(row).item()) == ("broadcast", "nop")


def test_the_two_definitions_disagree_the_other_way_where_the_projection_makes_a_small_value_large():
    # Norms .1 against 1: ratio .1, a NOP by counting. W_O multiplies the sink's channel by 10 and so u_s is as
    # large as the others, and the update, nearly all from s, is nearly of rank one.
    row = row_of_head([[0.1, 0.0], [0.0, 1.0], [0.0, 1.0]], [[10.0, 0.0], [0.0, 1.0]], sink_logit=5.0)
    assert row["value_ratio_out"].item() == pytest.approx(1.0)
    assert (COUNTS.classify(row).item(), CAUSAL.classify(row).item()) == ("nop", "broadcast")


def test_a_zero_update_is_a_nop_by_both_and_never_a_causal_broadcast():
    row = row_of_head([[0.0], [0.0], [0.0]], [[1.0]], sink_logit=5.0)
    assert math.isnan(row["stable_rank"].item())
    assert (COUNTS.classify(row).item(), CAUSAL.classify(row).item()) == ("nop", "nop")
    assert CAUSAL.classify(rows(1.0, 1.0, math.nan)).tolist() == ["intermediate"]


def test_labels_keep_the_index_and_hold_for_a_table_without_rows():
    table = rows([0.1, 0.3, 0.9], [0.1, 0.3, 0.9], [1.0, 1.0, 1.0]).set_index(pd.Index([5, 2, 9]))
    for definition in both_definitions():
        labels = definition.classify(table)
        assert labels.to_dict() == {5: "nop", 2: "intermediate", 9: "broadcast"}
        assert labels.name == f"class_{definition.name}"
        assert definition.classify(table.iloc[:0]).tolist() == []


def test_every_row_has_exactly_one_class_and_looser_thresholds_never_lose_a_member():
    generator = np.random.default_rng(0)
    table = rows(*(generator.uniform(0, 1.5, 400) for _ in range(2)), generator.uniform(1, 3, 400))
    tight = SinkDefinition(name="tight", axis="value_ratio_out", nop=0.1, broadcast=0.7, stable_rank=1.2)
    loose = SinkDefinition(name="loose", axis="value_ratio_out", nop=0.3, broadcast=0.4, stable_rank=2.0)
    assert set(tight.classify(table)) == {"nop", "broadcast", "intermediate"}
    for label in ("nop", "broadcast"):
        assert (loose.classify(table) == label)[tight.classify(table) == label].all()


def test_a_ratio_under_another_name_serves_as_axis():
    phases = SinkDefinition(name="phases", axis="contribution_ratio", stable_rank=1.5)
    table = pd.DataFrame({"contribution_ratio": [0.1, 0.6], "stable_rank": [1.0, 1.2]})
    assert phases.classify(table).tolist() == ["nop", "broadcast"]


def test_a_definition_is_found_by_its_name_and_an_unknown_name_lists_them():
    assert SinkDefinition.named("causal") == CAUSAL
    assert SinkDefinition.named("counts") == COUNTS
    with pytest.raises(NotFoundError, match="causal, counts"):
        SinkDefinition.named("paper")


@pytest.mark.parametrize("options", [{"nop": 0.5}, {"nop": -0.1}, {"broadcast": 0.1}, {"stable_rank": 0.9}])
def test_thresholds_that_overlap_or_cannot_hold_are_refused(options: dict[str, float]):
    with pytest.raises(InputError, match="'own'"):
        SinkDefinition(name="own", axis="value_ratio_out", **options)


def test_a_table_without_the_axis_is_refused_by_name():
    with pytest.raises(InputError, match="value_ratio_out"):
        CAUSAL.classify(pd.DataFrame({"value_ratio_head": [1.0]}))


def test_the_sentence_says_axis_and_thresholds():
    assert all(word in CAUSAL.sentence() for word in ("output-projected", "0.2", "0.5", "1.5", "causal"))
    assert "stable rank" not in COUNTS.sentence()


@pytest.mark.parametrize("changed", [{"nop": 0.1}, {"stable_rank": 2.0}, {"axis": "value_ratio_head"}])
def test_a_published_name_cannot_stand_for_other_thresholds(changed: dict):
    with pytest.raises(InputError, match="name of its own"):
        replace(CAUSAL, **changed)
    assert replace(CAUSAL, name="mine", **changed).name == "mine"


@pytest.mark.parametrize("name", ["", "two words", "my-own", "2nd", "rule", "a.b"])
def test_a_name_that_cannot_stand_in_the_name_of_a_column_is_refused(name: str):
    with pytest.raises(InputError, match="named"):
        SinkDefinition(name=name, axis="value_ratio_out")


@pytest.mark.parametrize("definition", [CAUSAL, COUNTS, replace(CAUSAL, name="mine", nop=0.05)])
def test_a_saved_definition_is_read_back_whole(definition: SinkDefinition):
    assert SinkDefinition.from_saved(json.loads(json.dumps(definition.as_dict()))) == definition


def test_a_run_of_old_kept_the_name_alone():
    assert SinkDefinition.from_saved("counts") == COUNTS
    with pytest.raises(NotFoundError, match="no definition"):
        SinkDefinition.from_saved("mine")
