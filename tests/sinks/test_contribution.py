"""Contributions of keys where values are phases, against the definition written out pair by pair in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from phase_models import handle, ids, kuramoto
from torch import Tensor

from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.seam import AttentionCall
from sinklab.hooks.site import find_sites
from sinklab.sinks import contribution
from sinklab.sinks.reader import StatisticsReader
from sinklab.sinks.spectrum import largest_eigenvalue


class Seen(Reader):
    """Each layer's phases and pattern."""

    def __init__(self) -> None:
        self.theta: dict[int, Tensor] = {}
        self.pattern: dict[int, Tensor] = {}

    def resid_pre(self, site: Any, x: Tensor) -> None:
        self.theta[site.layer] = x.clone()

    def attention(self, site: Any, call: AttentionCall) -> None:
        self.pattern[site.layer] = call.pattern()


def read(model: Any, x: Tensor, *, fast: bool = False) -> tuple[dict[str, Tensor], Seen]:
    sites, seen = find_sites(model), Seen()
    reader = StatisticsReader(sites, fast=fast)
    with torch.no_grad(), HookManager(model, seen) as hooks:
        hooks.run(x)
    with torch.no_grad(), HookManager(model, reader, attend=reader.attend if fast else None) as hooks:
        hooks.run(x)
    return reader.take()[1], seen


def pairwise(theta: Tensor, v: Tensor, sink: int) -> float:
    """The contribution ratio of one head: θ, v [N m], token by token; query 0 sees one key and does not count."""

    def mean(key: int) -> float:
        sizes = [(v[i] * (theta[key] - theta[i]).sin()).norm() for i in range(max(sink, key, 1), len(theta))]
        return float(torch.stack(sizes).mean())

    others = [mean(key) for key in range(len(theta)) if key != sink]
    return mean(sink) / (sum(others) / len(others))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_the_ratio_and_the_update_are_those_of_all_pairs(heads: int, fast: bool) -> None:
    model, x = kuramoto(heads=heads, phase_std=1.5), ids(batch=2, tokens=11)
    found, seen = read(model, x, fast=fast)
    for layer, block in enumerate(model.blocks):
        theta = seen.theta[layer]
        v = block.attention.velocity(torch.cat([theta.cos(), theta.sin()], -1))
        size = 6 // heads
        for image in range(2):
            for head in range(heads):
                own = slice(head * size, (head + 1) * size)
                angles, speed = theta[image, :, own], v[image, :, own]
                place = (image, layer, head)
                sink = int(found["sink_index"][place])
                expected = pairwise(angles, speed, sink)
                assert float(found["value_ratio_out"][place]) == pytest.approx(expected, rel=1e-7, abs=1e-7)
                pull = (angles[None] - angles[:, None]).sin()  # [i j m]
                a = torch.einsum("ij,ijm->im", seen.pattern[layer][image, head], pull)
                assert float(found["update_norm"][place]) == pytest.approx(float((speed * a)[1:].norm(dim=-1).mean()))


@pytest.mark.parametrize("heads", [1, 2])
def test_the_rank_is_that_of_the_resultant(heads: int) -> None:
    model, x = kuramoto(heads=heads, phase_std=1.5), ids(batch=1)
    found, seen = read(model, x)
    size = 6 // heads
    for layer in range(2):
        for head in range(heads):
            angles = seen.theta[layer][0, :, head * size : (head + 1) * size]
            g = seen.pattern[layer][0, head] @ torch.cat([angles.cos(), angles.sin()], -1)
            sigma = torch.linalg.svdvals(g[1:])
            expected = float(sigma.square().sum() / sigma[0] ** 2)
            assert float(found["stable_rank"][0, layer, head]) == pytest.approx(expected)
            assert float(found["stable_rank_head"][0, layer, head]) == pytest.approx(expected)


def test_every_phase_has_the_same_norm_so_the_value_ratio_is_one() -> None:
    found, _ = read(kuramoto(phase_std=2.0), ids())
    for name in ("value_ratio_head", "token_norm_ratio"):
        torch.testing.assert_close(found[name], torch.ones_like(found[name]), rtol=0, atol=1e-12)
    assert float(found["value_ratio_out"].std()) > 0.01


def test_a_perfect_sink_is_of_rank_one_in_the_resultant_and_of_more_in_the_tangent() -> None:
    """All attend to token 0: G is the same for all, but each is pulled from where it stands."""
    torch.manual_seed(0)
    theta = 2 * math.pi * torch.rand(40, 5, dtype=torch.float64)
    z = torch.cat([theta.cos(), theta.sin()], -1)
    g = z[:1].expand(40, -1)
    a = (theta[:1] - theta).sin()
    ranks = [float(m.square().sum() / largest_eigenvalue((m.T @ m)[None])) for m in (g, a)]
    assert ranks[0] == pytest.approx(1) and ranks[1] > 2


def test_a_sink_with_the_readers_own_phases_contributes_nothing() -> None:
    model = kuramoto(layers=1)
    model.phases.weight.data[:] = model.phases.weight[:1]  # every symbol the same phases
    found, _ = read(model, ids())
    assert float(found["update_norm"].abs().max()) < 1e-12
    model.phases.weight.data[1:] += 1.0  # symbol 0 differs from all others
    x = ids() % (11 - 1) + 1
    x[:, 0] = 0
    sites = find_sites(model)
    locked = contribution.contributions(*_call(model, x), torch.ones(2, 2, 13, dtype=torch.bool))[0]
    assert len(sites) == 1 and float(locked[:, :, 1:].max()) < 1e-7 < 0.1 < float(locked[:, :, 0].min())


def _call(model: Any, x: Tensor) -> tuple[Any, Any, Tensor]:
    held: dict[str, Any] = {}

    class Held(Reader):
        def resid_pre(self, site: Any, x: Tensor) -> None:
            held["v"] = site.parts.phase.velocity(x)

        def attention(self, site: Any, call: AttentionCall) -> None:
            held["call"], held["phase"] = call, site.parts.phase

    with torch.no_grad(), HookManager(model, Held(), layers=[0]) as hooks:
        hooks.run(x)
    return held["call"], held["phase"], held["v"]


def test_the_tiles_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = kuramoto(), ids()
    whole, _ = read(model, x)
    monkeypatch.setattr(contribution, "TILE_BYTES", 8 * 13 * 2 * 3)  # three rows at a time
    torch.testing.assert_close(read(model, x)[0], whole, rtol=1e-7, atol=0, equal_nan=True)


def test_where_nothing_is_projected_a_key_gives_all_readers_the_same() -> None:
    """a = Re G + Im G: what key j adds to reader i is v_i ⊙ (cos θ_j + sin θ_j)."""
    model, x = kuramoto(heads=1, tangent="none"), ids(batch=1)
    call, phase, v = _call(model, x)
    means, number = contribution.contributions(call, phase, v, torch.ones(1, 1, 13, dtype=torch.bool))
    cos, sin = call.v[0, 0].chunk(2, -1)
    for key in range(13):
        sizes = (v[0, key:] * (cos[key] + sin[key])).norm(dim=-1)
        assert float(means[0, 0, key]) == pytest.approx(float(sizes.mean())) and int(number[0, 0, key]) == 13 - key


def test_a_run_says_what_a_sinks_size_is_measured_by() -> None:
    assert {site["axis"] for site in handle(kuramoto()).describe()["sites"]} == {"contribution"}


def test_the_doctor_finds_float32_close_to_float64() -> None:
    from sinklab.sinks.doctor import examine

    found = examine(handle(kuramoto(dtype=torch.float32)), ids(batch=1))
    assert found.not_finite == 0 and found.moved == 0
    assert max(drift.worst for drift in found.drifts) < 1e-2
