"""From one attention call to its statistics: invariances, and cases worked by hand that need no reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import reference
import torch
from torch import Tensor

from sinklab.hooks.seam import AttentionCall
from sinklab.sinks.projections import project
from sinklab.sinks.statistics import attention_statistics, finish
from sinklab.sinks.stream import HeadGeometry, measure
from sinklab.sinks.tiles import Workspace

B, H, N, D, C = 2, 3, 24, 6, 18
EVERY = [*reference.FLOATS]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def call_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> AttentionCall:
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    call = AttentionCall(q=q, k=k, v=v, mask=mask, is_causal=False, scale=scale, grouped=k.shape[1] != q.shape[1])
    return call.with_z(call.run())


def given(seed: int = 0) -> AttentionCall:
    return call_of(2 * draw(B, H, N, D, seed=seed), draw(B, H, N, D, seed=seed + 1), draw(B, H, N, D, seed=seed + 2))


def geometry(seed: int = 9, scale: float = 1.0) -> HeadGeometry:
    return HeadGeometry.of(scale * draw(H, C, D, seed=seed))


def statistics(call: AttentionCall, own: HeadGeometry | None = None) -> dict[str, Tensor]:
    return attention_statistics(call, own or geometry())[0]


def equal(a: dict[str, Tensor], b: dict[str, Tensor], *names: str) -> None:
    for name in names or EVERY:
        torch.testing.assert_close(
            a[name], b[name], rtol=2e-5, atol=1e-7, msg=lambda said, name=name: f"{name}: {said}"
        )


def test_several_calls_finished_together_are_each_as_if_alone() -> None:
    calls = [given(seed) for seed in (0, 10, 20)]
    together = finish([measure(call, geometry(seed))[0] for seed, call in enumerate(calls)])
    for seed, call in enumerate(calls):
        equal({name: values[seed] for name, values in together.items()}, statistics(call, geometry(seed)))


def test_reordering_the_tokens_moves_the_sink_and_changes_no_number() -> None:
    call, order = given(), torch.randperm(N, generator=torch.Generator().manual_seed(4))
    moved = call_of(call.q[:, :, order], call.k[:, :, order], call.v[:, :, order])
    before, after = statistics(call), statistics(moved)
    equal(before, after)
    assert torch.equal(order[after["sink_index"]], before["sink_index"])


def test_adding_one_vector_to_every_key_changes_no_number() -> None:
    """A softmax does not see what is added to a whole row of logits."""
    call = given()
    equal(statistics(call), statistics(call_of(call.q, call.k + 3 * draw(D, seed=5), call.v)))


@pytest.mark.parametrize("factor", [1e-6, 1e-3, 1e4])
def test_the_size_of_the_values_scales_norms_and_no_ratio(factor: float) -> None:
    """A LayerScale of 1e-5, or values in the thousands, change what is added and not what kind of sink it is."""
    call = given()
    before, after = statistics(call), statistics(call_of(call.q, call.k, call.v * factor))
    after |= {name: after[name] / factor for name in ("value_norm_head", "update_norm")}
    equal(before, after)
    scaled = statistics(call, geometry(scale=factor))
    equal(before, scaled | {"update_norm": scaled["update_norm"] / factor})


def test_turning_the_residual_stream_changes_no_number() -> None:
    turn = torch.linalg.qr(draw(C, C, seed=7).double()).Q
    weight = draw(H, C, D, seed=9).double()
    equal(statistics(given()), statistics(given(), HeadGeometry.of(turn @ weight)))


def test_one_uniform_row_for_every_query_has_the_entropy_of_n_keys_and_stable_rank_one() -> None:
    call = call_of(torch.zeros(1, H, N, D), draw(1, H, N, D), draw(1, H, N, D, seed=2))
    found = statistics(call)
    torch.testing.assert_close(found["entropy"], torch.full((1, H), math.log(N), dtype=torch.float64))
    torch.testing.assert_close(found["inflow"], torch.full((1, H), 1 / N, dtype=torch.float64))
    torch.testing.assert_close(found["stable_rank"], torch.ones(1, H, dtype=torch.float64), rtol=1e-5, atol=0)
    assert found["sink_index"].tolist() == [[0] * H]  # a tie goes to the lowest index
    assert found["inflow_margin"].abs().max() < 1e-7


def test_a_perfect_sink_writes_its_own_value_to_every_query() -> None:
    """Lemma 1 at ε = 0: o_i = v_s. And lemma 2: the update has rank one."""
    q, k, v = torch.ones(1, H, N, D), torch.zeros(1, H, N, D), draw(1, H, N, D)
    k[:, :, 7] = 200.0
    found, weight = statistics(call_of(q, k, v)), draw(H, C, D, seed=9)
    expected = torch.einsum("hcd,hd->hc", weight, v[0, :, 7]).norm(dim=-1)
    torch.testing.assert_close(found["update_norm"][0].float(), expected, rtol=1e-5, atol=0)
    assert found["sink_index"].tolist() == [[7] * H] and 1 - 1e-4 < found["min_attention"].min() <= 1
    assert found["routed_count"].tolist() == [[N] * H]
    assert (found["stable_rank"] - 1).abs().max() < 1e-6 and found["entropy"].max() == 0.0


@pytest.mark.parametrize("size", [0.0, 0.05, 1.0])
def test_the_value_ratios_compare_the_sink_with_the_mean_of_the_others(size: float) -> None:
    q, k, v = torch.ones(1, 1, N, D), torch.zeros(1, 1, N, D), torch.nn.functional.normalize(draw(1, 1, N, D), dim=-1)
    k[:, :, 3] = 20.0
    v[:, :, 3] *= size
    found = attention_statistics(call_of(q, k, v), HeadGeometry.of(torch.eye(D)[None]))[0]
    assert found["sink_index"].item() == 3
    for name in ("value_ratio_head", "value_ratio_out", "value_norm_head"):
        assert found[name].item() == pytest.approx(size, abs=1e-6)


def test_the_key_with_the_largest_inflow_need_not_be_the_one_that_most_queries_choose() -> None:
    """The rule speaks of the former: 18 of 20 queries give key 0 a half or more, and key 1 draws more in all."""
    logits = torch.zeros(20, 3)
    logits[:, 0], logits[:, 1], logits[:, 2] = math.log(0.501), math.log(0.498), math.log(0.001)
    logits[18:, 0], logits[18:, 1], logits[18:, 2] = -30.0, 0.0, -30.0
    found = attention_statistics(
        call_of(logits[None, None], torch.eye(3)[None, None], draw(1, 1, 3, 3), scale=1.0),
        HeadGeometry.of(torch.eye(3)[None]),
    )[0]
    assert found["sink_index"].item() == 1
    assert found["routed_count"].item() == 2
    assert found["queries"].item() == 20


def test_counts_are_integers_so_that_eighteen_of_twenty_is_nine_tenths() -> None:
    logits = torch.zeros(20, 4)
    logits[:18, 2], logits[18:, 0] = 10.0, 10.0
    found = attention_statistics(
        call_of(logits[None, None], torch.eye(4)[None, None], draw(1, 1, 4, 4), scale=1.0),
        HeadGeometry.of(torch.eye(4)[None]),
    )[0]
    assert (found["routed_count"].dtype, found["queries"].dtype) == (torch.int64, torch.int64)
    assert (found["routed_count"].item(), found["queries"].item(), found["sink_index"].item()) == (18, 20, 2)


BREAK: dict[str, Callable[[AttentionCall], Tensor]] = {"q": lambda c: c.q, "k": lambda c: c.k, "v": lambda c: c.v}


@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", BREAK)
def test_a_head_with_one_bad_number_is_marked_and_has_no_numbers_and_its_neighbours_keep_theirs(
    where: str, what: float
) -> None:
    """Complaint 20: counted and failed, never replaced."""
    call = given()
    before = statistics(call)
    BREAK[where](call)[1, 2, 5, 3] = what
    after = statistics(call_of(call.q, call.k, call.v))
    bad = torch.zeros(B, H, dtype=torch.bool)
    bad[1, 2] = True
    assert torch.equal(after["finite"], ~bad)
    for name in EVERY:
        assert torch.isnan(after[name][bad]).all(), name
        torch.testing.assert_close(after[name][~bad], before[name][~bad], rtol=1e-6, atol=1e-9)
    assert after["sink_index"][bad].tolist() == [-1]
    assert after["routed_count"][bad].tolist() == after["queries"][bad].tolist() == [0]


def test_a_bad_weight_marks_its_head_in_every_image() -> None:
    weight = draw(H, C, D, seed=9)
    weight[1, 4, 2] = math.nan
    found = statistics(given(), HeadGeometry.of(weight))
    assert found["finite"].tolist() == [[True, False, True]] * B


@pytest.mark.parametrize("size", [3e3, 1e5])
def test_logits_beyond_what_half_precision_holds_are_measured(size: float) -> None:
    """Complaint 20: a softmax in float16 would overflow at 65,504."""
    q, k, v = draw(1, H, N, D).half(), draw(1, H, N, D, seed=1).half(), draw(1, H, N, D, seed=2).half()
    call = AttentionCall(
        q=q * math.sqrt(size), k=k * math.sqrt(size), v=v, mask=None, is_causal=False, scale=1.0, grouped=False
    )
    found, z = attention_statistics(call, geometry(), compute_z=True)
    assert bool(found["finite"].all()) and bool(torch.isfinite(z).all())
    assert found["entropy"].max() < 0.5


def test_z_computed_in_the_same_pass_is_the_kernels() -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float64, 1e-12)):
        q, k, v = (draw(B, H, N, D, seed=i).to(dtype) for i in range(3))
        call = call_of(q, k, v)
        _, z = attention_statistics(call, HeadGeometry.of(draw(H, C, D), dtype=dtype), compute_z=True)
        assert call.z is not None and z.dtype == dtype and z.shape == call.z.shape
        torch.testing.assert_close(z, call.z, rtol=tolerance, atol=tolerance)


def test_measuring_keeps_no_graph() -> None:
    call = call_of(*(draw(1, H, N, D, seed=i).requires_grad_() for i in range(3)))
    assert not any(values.requires_grad for values in statistics(call).values())


@pytest.mark.parametrize("factor", [1e-10, 1e-13, 1e-21, 1e-30, 1e18, 1e20, 1e30])
@pytest.mark.parametrize("fused", [True, False], ids=["z of the kernel", "z computed"])
def test_the_scale_of_the_values_changes_no_ratio_and_no_rank(factor: float, fused: bool) -> None:
    """Dead heads are heads: neither the squares of fp32 nor a clamp may decide what they compute."""
    call = given()
    before = statistics(call)
    scaled = call_of(call.q, call.k, call.v * factor)
    after, _ = attention_statistics(scaled, geometry(), compute_z=not fused)
    assert after["finite"].all()
    equal(before, after, "value_ratio_head", "value_ratio_out", "stable_rank", "rank1_energy", "stable_rank_head")
    for name in ("value_norm_head", "update_norm"):
        torch.testing.assert_close(after[name], before[name] * factor, rtol=2e-5, atol=0)


def test_one_dead_head_among_others_is_measured_like_them_and_changes_none() -> None:
    call = given()
    alone = statistics(call)
    v = call.v.clone()
    v[1, 2] *= 2.0**-90
    after = statistics(call_of(call.q, call.k, v))
    for name in ("value_ratio_head", "value_ratio_out", "stable_rank", "stable_rank_head"):
        torch.testing.assert_close(after[name], alone[name], rtol=2e-5, atol=0)
        others = torch.ones(B, H, dtype=torch.bool)
        others[1, 2] = False
        assert torch.equal(after[name][others], alone[name][others])


def test_a_power_of_two_changes_no_bit_of_a_ratio() -> None:
    call = given()
    before, after = statistics(call), statistics(call_of(call.q, call.k, call.v * 2.0**-60))
    for name in ("value_ratio_head", "value_ratio_out", "stable_rank", "stable_rank_head"):
        assert torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_no_stable_rank_lies_below_one(scale: float) -> None:
    q, k = draw(8, H, N, D), torch.zeros(8, H, N, D)
    v = scale * draw(8, H, 1, D, seed=3).expand(-1, -1, N, -1)  # every update is the same: rank one, but for rounding
    found = statistics(call_of(q, k, v))
    assert float(found["stable_rank"].min()) >= 1 and float(found["stable_rank_head"].min()) >= 1
    assert float(found["rank1_energy"].max()) <= 1


def test_where_the_other_values_are_exactly_zero_the_ratio_is_a_large_number_and_not_a_nan() -> None:
    q = torch.zeros(1, H, N, D)
    v = torch.zeros(1, H, N, D)
    v[:, :, 0] = 1.0
    found = statistics(call_of(q, q, v))
    assert found["finite"].all() and (found["value_ratio_head"] > 1e11).all()


def test_heads_brought_to_size_unasked_are_measured_to_the_bit_as_those_that_need_not() -> None:
    """What a GPU does for every head is done on a CPU for those out of range: neither changes a bit of the others."""
    call = given()
    v = call.v.clone()
    v[0, 1] *= 1e-25
    call = call_of(call.q, call.k, v)
    tiling = Workspace().tiling(call, want_z=False)
    assert call.z is not None
    asked, unasked = (project(call, call.z, geometry().factor, None, tiling, unasked=how) for how in (False, True))
    for name in ("value_norms", "projected_norms", "update"):
        assert torch.equal(getattr(asked, name), getattr(unasked, name)), name
    ranks = [
        g.diagonal(dim1=-2, dim2=-1).sum(-1) / torch.linalg.matrix_norm(g, 2) for g in (asked.grams, unasked.grams)
    ]
    torch.testing.assert_close(*ranks, rtol=1e-6, atol=0)


@pytest.mark.parametrize("exponent", [-300, -120, 0, 120, 300])
def test_a_float64_model_may_have_any_scale(exponent: int) -> None:
    q, k, v = (draw(B, H, N, D, seed=seed).double() for seed in (0, 1, 2))
    own = HeadGeometry.of(draw(H, C, D, seed=9), dtype=torch.float64)
    before, after = (statistics(call_of(q, k, v * 10.0**power), own) for power in (0, exponent))
    for name in ("value_ratio_head", "value_ratio_out", "stable_rank"):
        torch.testing.assert_close(after[name], before[name], rtol=1e-9, atol=0)
