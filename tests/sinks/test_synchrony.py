"""What attention does to phases, against hand-worked cases and the definitions written out in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from phase_models import ids, kuramoto
from torch import Tensor

from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.phase import Phase
from sinklab.hooks.seam import AttentionCall
from sinklab.hooks.site import find_sites
from sinklab.models.lm_config import ABLATIONS
from sinklab.sinks.phase import SynchronyReader
from sinklab.sinks.phase_measures import MEASURES, WAYS
from sinklab.sinks.synchrony import factors, ways


def read(model: Any, x: Tensor) -> dict[int, dict[str, Tensor]]:
    reader = SynchronyReader()
    with torch.no_grad(), HookManager(model, reader) as hooks:
        hooks.run(x)
    return reader.found


def phase_and(model: Any) -> Phase:
    found = find_sites(model)[0].parts.phase
    assert found is not None
    return found


class States(Reader):
    """θ before, between and after, and the pattern, of layer 1."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    def resid_pre(self, site: Any, x: Tensor) -> None:
        self.held["before"] = x

    def resid_mid(self, site: Any, x: Tensor) -> None:
        self.held["between"] = x

    def resid_post(self, site: Any, x: Tensor) -> None:
        self.held["after"] = x

    def attention(self, site: Any, call: AttentionCall) -> None:
        self.held["A"] = call.pattern()


def written_out(model: Any, x: Tensor, head: int) -> dict[str, float]:
    """The measures of layer 1 and one head of a single window, as complex numbers."""
    states = States()
    with torch.no_grad(), HookManager(model, states, layers=[1]) as hooks:
        hooks.run(x)
    held, own = states.held, slice(3 * head, 3 * head + 3)
    before, between, after = (held[name][0, :, own] for name in ("before", "between", "after"))
    theta = held["before"][0]
    v = model.blocks[1].attention.velocity(torch.cat([theta.cos(), theta.sin()], -1))[:, own]
    z, pattern = torch.exp(1j * before), held["A"][0, head]
    g = (pattern.to(z.dtype) @ z)[1:]
    alike = torch.stack([z[: t + 1].mean(0) for t in range(1, len(z))])
    a = (g * torch.exp(-1j * before[1:])).imag
    x_all = []
    for h in range(2):
        part = held["before"][0][:, 3 * h : 3 * h + 3]
        pull = (held["A"][0, h].to(z.dtype) @ torch.exp(1j * part) * torch.exp(-1j * part)).imag
        speed = model.blocks[1].attention.velocity(torch.cat([theta.cos(), theta.sin()], -1))
        x_all.append(pull * speed[:, 3 * h : 3 * h + 3])
    m = torch.cat(x_all, -1)[1:].square().mean(-1).sqrt()
    return {
        "order": float(g.abs().mean()),
        "order_reference": float(alike.abs().mean()),
        "agreement_before": float((before[1:] - g.angle()).cos().mean()),
        "agreement_after": float((between[1:] - g.angle()).cos().mean()),
        "repulsion": float((v < 0).double().mean()),
        "saturated": float((m.tanh() >= 0.9).double().mean()),
        "global_order_before": float(z.mean(0).abs().mean()),
        "global_order_after": float(torch.exp(1j * after).mean(0).abs().mean()),
        "update_rms": float((v[1:] * a).square().mean(-1).sqrt().mean()),
    }


@pytest.mark.parametrize("head", [0, 1])
def test_the_measures_are_those_of_complex_numbers(head: int) -> None:
    model, x = kuramoto(phase_std=1.5, shake=1.0), ids(batch=1)
    found = read(model, x)[1]
    for name, expected in written_out(model, x, head).items():
        assert float(found[name][0, head]) == pytest.approx(expected, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("changes", [{}, {"wrap": True}, *ABLATIONS.values()])
def test_every_token_is_in_exactly_one_way(changes: dict[str, Any]) -> None:
    for found in read(kuramoto(**changes), ids()).values():
        assert set(found) == set(MEASURES)
        shares = torch.stack([found[name] for name in (*WAYS, "acts")])
        assert bool((shares >= 0).all()) and torch.allclose(shares.sum(0), torch.ones(2, 2).double())


def test_one_window_does_not_know_of_the_others() -> None:
    model, x = kuramoto(), ids(batch=3)
    together, alone = read(model, x), read(model, x[1:2])
    for layer, found in together.items():
        for name, values in found.items():
            torch.testing.assert_close(values[1:2], alone[layer][name], rtol=1e-10, atol=1e-12)


def sizes_of(weights: list[float], theta: list[float], v: float) -> Tensor:
    """The four sizes of the last token of a line of tokens of one phase each."""
    model = kuramoto(heads=1, phases=1, layers=1)
    angles = torch.tensor(theta, dtype=torch.float64)
    z = torch.stack([angles.cos(), angles.sin()], -1)
    paid = torch.tensor(weights, dtype=torch.float64)
    rest = paid[:-1].sum()
    resultant = (paid[:-1, None] * z[:-1]).sum(0) / rest.clamp_min(1e-300)
    speed = torch.tensor([v], dtype=torch.float64)
    return factors(rest, resultant, z[-1], speed, phase_and(model))


@pytest.mark.parametrize(
    ("weights", "theta", "v", "way"),
    [
        ([0.0, 0.0, 1.0], [1.0, 2.0, 0.0], 1.0, "at_rest_self"),
        ([0.01, 0.01, 0.98], [1.0, 2.0, 0.0], 1.0, "at_rest_self"),
        ([0.5, 0.5, 0.0], [0.01, -0.01, 0.0], 1.0, "at_rest_locked"),
        ([1.0, 0.0, 0.0], [math.pi, 1.0, 0.0], 1.0, "at_rest_locked"),
        ([0.5, 0.5, 0.0], [math.pi / 2, -math.pi / 2, 0.0], 1.0, "at_rest_cancelled"),
        ([0.5, 0.5, 0.0], [1.0, 2.0, 0.0], 0.01, "at_rest_velocity"),
        ([0.5, 0.5, 0.0], [1.0, 2.0, 0.0], 0.0, "at_rest_velocity"),
        ([0.5, 0.5, 0.0], [1.0, 2.0, 0.0], -1.0, "acts"),
    ],
)
def test_each_way_of_doing_nothing_is_told_from_the_others(
    weights: list[float], theta: list[float], v: float, way: str
) -> None:
    """An opposite partner is locked too: it pulls neither way."""
    found = ways(sizes_of(weights, theta, v))
    assert [name for name, value in found.items() if float(value)] == [way]


def test_the_sizes_of_one_token_multiply_to_its_update() -> None:
    weights, theta, v = [0.2, 0.5, 0.3], [1.0, 2.5, 0.4], -0.7
    update = v * sum(w * math.sin(t - theta[-1]) for w, t in zip(weights, theta, strict=True))
    assert float(sizes_of(weights, theta, v).prod()) == pytest.approx(abs(update))
