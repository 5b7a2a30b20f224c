"""Largest eigenvalues, head factors and the spectrum of Θ against full decompositions in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sinklab.sinks.spectrum import head_factor, largest_eigenvalue, theta_spectrum


def psd(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues, in float64."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)).Q
    return (basis * values.double()) @ basis.T


SPECTRA = {
    "flat": torch.ones(64),
    "nearly flat": 1 - 0.01 * torch.rand(64, generator=torch.Generator().manual_seed(1)),
    "two equal": torch.cat([torch.tensor([1.0, 1.0]), torch.full((62,), 0.1)]),
    "two nearly equal": torch.cat([torch.tensor([1.0, 0.9999]), torch.full((62,), 0.5)]),
    "slow decay": 0.95 ** torch.arange(64),
    "fast decay": 0.3 ** torch.arange(64),
    "rank one": torch.cat([torch.tensor([1.0]), torch.zeros(63)]),
    "one by one": torch.tensor([2.5]),
}


@pytest.mark.parametrize("name", list(SPECTRA))
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_the_largest_eigenvalue_is_certified(name: str, scale: float) -> None:
    gram = torch.stack([psd(SPECTRA[name], seed) for seed in range(3)]) * scale
    found = largest_eigenvalue(gram.float())
    torch.testing.assert_close(found, torch.linalg.eigvalsh(gram.float().double())[:, -1], rtol=1e-6, atol=0)


def test_many_kinds_at_once_do_not_disturb_each_other() -> None:
    """More than one chunk; zero, NaN, Inf, certified and doubtful matrices side by side."""
    kinds = [psd(values) for name, values in SPECTRA.items() if name != "one by one"]
    gram = torch.stack(
        [*kinds, torch.zeros(64, 64), torch.full((64, 64), torch.nan), torch.full((64, 64), torch.inf)] * 9
    )
    found = largest_eigenvalue(gram.float())
    expected = [torch.linalg.eigvalsh(kind)[-1] for kind in kinds]
    for position, value in enumerate(found.tolist()):
        kind = position % (len(kinds) + 3)
        if kind < len(kinds):
            assert value == pytest.approx(float(expected[kind]), rel=1e-6)
        else:
            assert value == 0.0 if kind == len(kinds) else value != value


@pytest.mark.parametrize("case", ["full rank", "fewer rows than D", "zero"])
def test_the_factor_measures_projected_norms(case: str) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(3, 5 if case == "fewer rows than D" else 40, 8, generator=generator, dtype=torch.float64)
    weight = weight * 0 if case == "zero" else weight
    factor, scale = head_factor(weight)
    x = torch.randn(3, 10, 8, generator=generator, dtype=torch.float64)
    expected = torch.einsum("hcd,hnd->hnc", weight, x).norm(dim=-1)
    torch.testing.assert_close((x @ factor).norm(dim=-1) * scale[:, None], expected, rtol=1e-9, atol=1e-9)


def test_weights_that_are_not_finite_give_a_factor_that_is_not() -> None:
    weight = torch.ones(2, 4, 3)
    weight[1, 0, 0] = torch.nan
    factor, _ = head_factor(weight)
    assert torch.isfinite(factor[0]).all() and torch.isnan(factor[1]).all()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_theta_has_the_singular_values_of_the_whole_matrix(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(4 * 6, 30, generator=generator, dtype=torch.float64)
    key = torch.randn(kv_heads * 6, 30, generator=generator, dtype=torch.float64)
    found = theta_spectrum(query, key, 4, kv_heads)
    for head in range(4):
        own = key.unflatten(0, (kv_heads, 6))[head // (4 // kv_heads)]
        theta = query.unflatten(0, (4, 6))[head].T @ own  # [C C]
        torch.testing.assert_close(found[head], torch.linalg.svdvals(theta)[:6])
