"""Effects against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from sinklab.interventions.effect import answers, effects

# [CLS] and three patches, C = 2
BEFORE = torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 5.0], [5.0, 0.0]])


def found(
    after: torch.Tensor, counted: list[bool] | None = None, toward: torch.Tensor | None = None
) -> dict[str, float]:
    mask = torch.tensor([counted or [False, True, True, True]])
    return {k: float(v) for k, v in effects(BEFORE, after[None], mask, cls=0, toward_donor=toward).items()}


def test_one_vector_added_to_every_patch_is_all_shared() -> None:
    """Each patch has norm 5 and moves by (3, 4)·0.1: relative change 0.5/5; n‖mean‖²/Σ = 1."""
    after = BEFORE.clone()
    after[1:] += torch.tensor([0.3, 0.4])
    numbers = found(after, toward=torch.tensor([6.0, 8.0]))
    assert numbers["patch_change"] == pytest.approx(0.1, rel=1e-6)
    assert numbers["shared_energy"] == pytest.approx(1.0, rel=1e-6)
    assert numbers["donor_cosine"] == pytest.approx(1.0, rel=1e-6)
    assert numbers["cls_change"] == 0.0
    assert found(after, toward=torch.tensor([-4.0, 3.0]))["donor_cosine"] == pytest.approx(0.0, abs=1e-6)


def test_changes_that_cancel_share_nothing() -> None:
    after = BEFORE.clone()
    after[1] += torch.tensor([0.5, 0.0])
    after[2] -= torch.tensor([0.5, 0.0])
    numbers = found(after, counted=[False, True, True, False])
    assert numbers["patch_change"] == pytest.approx(0.1, rel=1e-6)
    assert numbers["shared_energy"] == pytest.approx(0.0, abs=1e-12)


def test_a_third_of_the_patches_moving_is_a_third_shared() -> None:
    after = BEFORE.clone()
    after[3] += torch.tensor([0.0, 3.0])
    numbers = found(after)
    assert numbers["patch_change"] == pytest.approx(math.sqrt(9 / 3) / 5, rel=1e-6)
    assert numbers["shared_energy"] == pytest.approx(1 / 3, rel=1e-6)


def test_a_change_of_rounding_size_has_no_shape() -> None:
    after = BEFORE.clone()
    after[1:] += 4e-7 * BEFORE[1:]
    numbers = found(after)
    assert 0 < numbers["patch_change"] < 1e-6 and math.isnan(numbers["shared_energy"])


def test_tokens_that_do_not_count_change_nothing() -> None:
    """The sink and the prefix tokens are left out."""
    after = BEFORE.clone()
    after[0] += 7.0
    after[2] += 100.0
    numbers = found(after, counted=[False, True, False, True])
    assert numbers["patch_change"] == 0.0 and math.isnan(numbers["shared_energy"])
    assert numbers["cls_change"] == pytest.approx(math.sqrt(98), rel=1e-6)


def test_what_is_not_defined_is_not_a_number() -> None:
    numbers = found(BEFORE.clone())
    assert numbers["patch_change"] == 0.0 and math.isnan(numbers["donor_cosine"])
    none = effects(BEFORE, BEFORE[None], torch.ones(1, 4, dtype=torch.bool), cls=None, toward_donor=None)
    assert math.isnan(float(none["cls_change"]))
    nothing = effects(
        torch.zeros(4, 2), torch.ones(1, 4, 2), torch.ones(1, 4, dtype=torch.bool), cls=0, toward_donor=None
    )
    assert float(nothing["patch_change"]) == pytest.approx(math.sqrt(2) / 1e-12)


def test_the_answer_of_a_classifier() -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4): KL = log 2 − ½ log 3 + … = ½ log(4/3); label 0 costs log 2 more."""
    before, after = torch.tensor([0.0, 0.0]), torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    numbers = answers(before, after, [0] * len(after))
    assert numbers["kl"].tolist() == pytest.approx([0.5 * math.log(4 / 3), 0.0], abs=1e-7)
    assert numbers["ce_change"].tolist() == pytest.approx([math.log(2.0), 0.0], abs=1e-7)
    assert numbers["top1_same"].tolist() == [0.0, 1.0]
    assert bool(torch.isnan(answers(before, after, [None] * len(after))["ce_change"]).all())
    sure = answers(torch.tensor([0.0, -torch.inf]), torch.tensor([[0.0, 0.0]]), [None])
    assert float(sure["kl"]) == pytest.approx(math.log(2.0))
