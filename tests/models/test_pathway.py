"""The common-mode penalty (Eq. 5), held to what it must be on updates whose common share is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sinklab.errors import InputError
from sinklab.models.pathway import broadcast_penalty, common_mode

FORMS = [(ratio, denominator) for ratio in ("batch", "example") for denominator in ("gradient", "stopgrad")]


def update(seed: int = 0) -> Tensor:
    return torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(o: Tensor, **form: str) -> Tensor:
    o = o.clone().requires_grad_()
    (found,) = torch.autograd.grad(common_mode(o, **form), o)
    return found


@pytest.mark.parametrize(("ratio", "denominator"), FORMS)
def test_an_update_that_all_tokens_share_has_penalty_one(ratio: str, denominator: str) -> None:
    o = update()[:, :1].expand(3, 8, 5)
    assert float(common_mode(o, ratio=ratio, denominator=denominator)) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(("ratio", "denominator"), FORMS)
def test_a_centred_update_has_penalty_zero(ratio: str, denominator: str) -> None:
    o = update() - update().mean(1, keepdim=True)
    assert float(common_mode(o, ratio=ratio, denominator=denominator)) == pytest.approx(0, abs=1e-20)


@pytest.mark.parametrize("ratio", ["batch", "example"])
@pytest.mark.parametrize("scale", [0.1, 7.0])
def test_the_penalty_does_not_see_the_updates_scale(ratio: str, scale: float) -> None:
    assert float(common_mode(scale * update(), ratio=ratio)) == pytest.approx(float(common_mode(update(), ratio=ratio)))


def test_the_gradient_is_orthogonal_to_the_update_so_that_shrinking_it_gains_nothing() -> None:
    o = update()
    assert abs(float((gradient(o) * o).sum())) < 1e-11  # 1e-12 in the denominator breaks the invariance that much


def test_each_examples_own_ratio_has_a_gradient_orthogonal_to_that_example() -> None:
    o = update()
    assert float((gradient(o, ratio="example") * o).sum((1, 2)).abs().max()) < 1e-11


@pytest.mark.parametrize("ratio", ["batch", "example"])
def test_with_a_stopped_gradient_shrinking_the_update_pays(ratio: str) -> None:
    o = update()
    along = float((gradient(o, ratio=ratio, denominator="stopgrad") * o).sum())
    assert along == pytest.approx(2 * float(common_mode(o, ratio=ratio)))  # the numerator is quadratic in o


def test_the_numerator_is_the_energy_of_the_projection_on_what_tokens_have_in_common() -> None:
    o = update()
    projection = torch.full((8, 8), 1 / 8, dtype=o.dtype)  # P_com = 11ᵀ/N
    expected = (projection @ o).square().sum() / o.square().sum()
    assert float(common_mode(o)) == pytest.approx(float(expected))


def test_the_batch_form_is_a_ratio_of_means_and_not_a_mean_of_ratios() -> None:
    common, centred = torch.ones(1, 4, 2), 10 * torch.tensor([1.0, -1.0, 1.0, -1.0])[None, :, None].expand(1, 4, 2)
    o = torch.cat([common, centred]).double()
    assert float(common_mode(o)) == pytest.approx(1 / 101)
    assert float(common_mode(o, ratio="example")) == pytest.approx(1 / 2)


def test_layers_are_averaged_or_summed() -> None:
    first, second = update(0), update(1)
    mean, total = broadcast_penalty([first, second]), broadcast_penalty([first, second], reduce="sum")
    assert float(mean) == pytest.approx((float(common_mode(first)) + float(common_mode(second))) / 2)
    assert float(total) == pytest.approx(2 * float(mean))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratio": "token"}, "batch, example"),
        ({"denominator": "none"}, "gradient, stopgrad"),
        ({"reduce": "max"}, "sum"),
    ],
)
def test_an_unknown_form_is_refused_by_name(options: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        broadcast_penalty([update()], **options)


def test_no_layers_are_refused() -> None:
    with pytest.raises(InputError, match="one layer at least"):
        broadcast_penalty([])
