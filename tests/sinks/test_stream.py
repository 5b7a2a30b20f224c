"""The tiled statistics against whole maps in float64, wherever a mask, a shape or a number can make it awkward."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

from sinklab.hooks.seam import AttentionCall
from sinklab.sinks import tiles
from sinklab.sinks.statistics import attention_statistics
from sinklab.sinks.stream import HeadGeometry, measure
from sinklab.sinks.tiles import Workspace

FLOATS = [name for name in reference.FLOATS if name != "inflow_margin"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv(
    batch: int = 2, heads: int = 3, tokens: int = 40, dim: int = 8, sharp: float = 2.0
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (draw(batch, heads, tokens, dim, seed=i) for i in range(3))
    return q * sharp, k, v


def weight(heads: int = 3, dim: int = 8, width: int = 20) -> Tensor:
    return draw(width, heads * dim, seed=9)


def both(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, is_causal: bool = False, w: Tensor | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(streamed, reference), the streamed with z from the real kernel."""
    grouped = k.shape[1] != q.shape[1]
    z = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped
    )
    scale = 1 / math.sqrt(q.shape[-1])
    call = AttentionCall(q=q, k=k, v=v, mask=mask, is_causal=is_causal, scale=scale, grouped=grouped, z=z)
    w = weight(q.shape[1], v.shape[-1]) if w is None else w
    geometry = HeadGeometry.of(w.unflatten(1, (q.shape[1], -1)).transpose(0, 1), dtype=q.dtype)
    found, _ = attention_statistics(call, geometry)
    truth = reference.reference_statistics(q, k, v, mask=mask, is_causal=is_causal, weight=w)
    return {name: values.numpy() for name, values in found.items()}, truth


def agree(found: dict[str, np.ndarray], truth: dict[str, np.ndarray], rtol: float = 1e-4) -> None:
    np.testing.assert_array_equal(found["finite"], truth["finite"])
    clear = ~(truth["inflow_margin"] < 1e-6)
    for name in ("sink_index", "queries"):
        np.testing.assert_array_equal(found[name][clear], truth[name][clear], err_msg=name)
    for name in FLOATS:
        np.testing.assert_allclose(found[name][clear], truth[name][clear], rtol=rtol, atol=1e-9, err_msg=name)


def hiding(kind: str, tokens: int = 40) -> dict[str, object]:
    allowed = draw(2, 1, tokens, tokens, seed=5) > -0.5
    if kind == "causal":
        return {"is_causal": True}
    if kind == "boolean":
        return {"mask": allowed}
    if kind == "added":
        return {"mask": draw(1, 3, tokens, tokens, seed=6)}
    if kind == "two dimensions":
        return {"mask": allowed[0, 0]}
    if kind == "padding, as Hugging Face writes it":
        padded = torch.zeros(2, 1, 1, tokens)
        padded[0, ..., 30:] = torch.finfo(torch.float32).min
        return {"mask": padded.expand(2, 3, tokens, tokens)}
    rows = torch.zeros(2, 1, tokens, tokens)
    rows[:, :, 4] = -math.inf
    rows[:, :, 7, 1:] = -math.inf
    return {"mask": rows}


@pytest.mark.parametrize(
    "kind", ["causal", "boolean", "added", "two dimensions", "padding, as Hugging Face writes it", "rows without keys"]
)
def test_masked_calls_are_measured_as_the_definitions_say(kind: str) -> None:
    agree(*both(*qkv(), **hiding(kind)))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["one query", "more keys", "fewer keys", "N < D", "grouped", "value dim of its own"])
def test_shapes_need_not_be_square(case: str) -> None:
    q, k, v = qkv()
    if case == "one query":
        q = q[:, :, :1]
    elif case == "more keys":
        q = q[:, :, :7]
    elif case == "fewer keys":
        k, v = k[:, :, :5], v[:, :, :5]
    elif case == "N < D":
        q, k, v = q[:, :, :4], k[:, :, :4], v[:, :, :4]
    elif case == "grouped":
        k, v = k[:, :1], v[:, :1]
    else:
        v = v[..., :5]
    agree(*both(q, k, v))


def test_one_token_alone_has_no_sink() -> None:
    q, k, v = (x[:, :, :1] for x in qkv())
    found, truth = both(q, k, v)
    agree(found, truth)
    assert not found["finite"].any() and (found["sink_index"] == -1).all()


def test_a_zero_update_has_no_stable_rank_and_is_still_finite() -> None:
    q, k, v = qkv()
    v[:, 1] = 0
    found, truth = both(q, k, v)
    agree(found, truth)
    assert np.isnan(found["stable_rank"][:, 1]).all() and found["finite"].all()
    assert (found["value_ratio_out"][:, 1] == 0).all()


@pytest.mark.parametrize("where", ["q", "k", "v", "W"])
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
def test_one_bad_number_marks_its_head_and_no_other(where: str, what: float) -> None:
    """Complaint 20: never replaced by a number."""
    q, k, v = qkv()
    w = weight()
    {"q": q, "k": k, "v": v}.get(where, w)[(0, 1, 3, 2) if where != "W" else (0, 10)] = what
    found, truth = both(q, k, v, w=w)
    np.testing.assert_array_equal(found["finite"], truth["finite"])
    assert found["finite"][1, 0] and not found["finite"][0, 1]
    for name in FLOATS:
        assert np.isnan(found[name][~found["finite"]]).all()
        assert np.isfinite(found[name][found["finite"]]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_in_fp32(dtype: torch.dtype) -> None:
    """Complaint 20: against float64 maps of the same rounded q, k, v; z itself is rounded by the kernel."""
    found, truth = both(*(x.to(dtype) for x in qkv()))
    for name in ("inflow", "entropy", "min_attention", "value_ratio_head", "value_ratio_out"):
        np.testing.assert_allclose(found[name], truth[name], rtol=1e-4, err_msg=name)
    for name in ("update_norm", "stable_rank", "stable_rank_head"):
        np.testing.assert_allclose(found[name], truth[name], rtol=1e-2, err_msg=name)


def test_a_float64_model_is_measured_in_float64() -> None:
    found, truth = both(*(x.double() for x in qkv()), w=weight().double())
    agree(found, truth, rtol=1e-6)  # what a largest eigenvalue is certified to
    for name in ("inflow", "entropy", "min_attention", "value_ratio_out", "update_norm"):
        np.testing.assert_allclose(found[name], truth[name], rtol=1e-12, err_msg=name)


def test_nearly_one_hot_rows_keep_their_small_entropy() -> None:
    """Where lse − Σ A·S would cancel: entropies of 1e-3 nats at logits of 50."""
    q, k, v = qkv(tokens=60)
    q = torch.zeros_like(q) + 4.0
    k[:, :, 7] += 4.0
    found, truth = both(q, k, v)
    assert truth["entropy"].min() < 1e-3
    agree(found, truth)


@pytest.mark.parametrize("case", ["all large", "all very negative", "sharp", "one-hot to 1e-6", "one head only"])
def test_logits_of_any_size_are_measured(case: str) -> None:
    """Powers of the logits as they are would overflow or vanish here."""
    q, k, v = qkv(tokens=60, sharp=1.0)
    if case in ("all large", "all very negative"):
        q[..., 0], k[..., 0] = (25.0 if case == "all large" else -25.0), 25.0
    elif case == "sharp":
        q *= 60
    elif case == "one-hot to 1e-6":
        q[..., 0], k[:, :, 7] = 4.0, draw(8, seed=3) * 0.1
        k[:, :, 7, 0] = 14.0
    else:
        q[0, 1] *= 300
    found, truth = both(q, k, v)
    assert case != "one-hot to 1e-6" or truth["entropy"].max() < 1e-4
    agree(found, truth)


@pytest.mark.parametrize("sharp", [1.0, 300.0])
@pytest.mark.parametrize("kind", ["plain", "causal", "added", "rows without keys"])
def test_z_of_the_same_pass_is_the_kernels(kind: str, sharp: float) -> None:
    q, k, v = qkv(sharp=sharp)
    given: dict[str, Any] = {"mask": None, "is_causal": False} | (hiding(kind) if kind != "plain" else {})
    z = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=given["mask"], is_causal=given["is_causal"])
    call = AttentionCall(q=q, k=k, v=v, scale=1 / math.sqrt(8), grouped=False, **given)
    geometry = HeadGeometry.of(weight().unflatten(1, (3, 8)).transpose(0, 1))
    _, found = attention_statistics(call, geometry, compute_z=True)
    torch.testing.assert_close(found, z, rtol=1e-4, atol=1e-4 if sharp > 1 else 1e-6)


def test_memory_serves_calls_of_all_kinds_one_after_the_other() -> None:
    """Written to in inference mode and outside, for other shapes and dtypes, with a mask and without."""
    space, geometry = Workspace(), HeadGeometry.of(weight().unflatten(1, (3, 8)).transpose(0, 1))
    for turn, batch in enumerate([2, 2, 1, 2, 2]):
        q, k, v = (x.bfloat16() if turn == 3 else x for x in qkv(batch=batch))
        call = AttentionCall(q=q, k=k, v=v, mask=None, is_causal=turn == 1, scale=0.3, grouped=False)
        with torch.inference_mode(turn % 2 == 0):
            read = call.with_z(v) if turn == 4 else call
            shared, z = measure(read, geometry, compute_z=turn != 4, space=space)
        alone, _ = measure(call.with_z(z), geometry)
        torch.testing.assert_close(shared.inflow, alone.inflow)
        torch.testing.assert_close(shared.paid, alone.paid)


def test_ties_go_to_the_lowest_index() -> None:
    q, k, v = qkv()
    k[:] = k[:, :, :1]
    found, _ = both(torch.zeros_like(q), k, v)
    assert (found["sink_index"] == 0).all() and (found["inflow_margin"] == 0).all()


@pytest.mark.parametrize("size", [(64, 1), (4096, 3), (1 << 22, 7), (1 << 22, 1 << 20)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_tiling_changes_nothing(size: tuple[int, int], is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = both(*qkv(), is_causal=is_causal)
    monkeypatch.setattr(tiles, "TILE_BYTES", size[0])
    monkeypatch.setattr(tiles, "TILE_ROWS", size[1])
    found, truth = both(*qkv(), is_causal=is_causal)
    agree(found, truth)
    np.testing.assert_array_equal(found["routed_count"], expected["routed_count"])


@pytest.mark.parametrize("tokens", [2, 17, 257, 1370])
def test_no_tile_ever_holds_all_rows_of_a_head(tokens: int) -> None:
    covered = torch.zeros(4, tokens)
    for heads, cuts in tiles.plan(4, tokens, tokens, tiles.TILE_BYTES, tiles.TILE_ROWS):
        for rows in cuts:
            assert rows.stop - rows.start < tokens
            covered[heads, rows] += 1
    assert (covered == 1).all()


def test_an_image_is_measured_alike_in_any_batch() -> None:
    q, k, v = qkv(batch=5)
    together, _ = both(q, k, v)
    for image in range(5):
        alone, _ = both(*(x[image : image + 1] for x in (q, k, v)))
        for name, values in alone.items():
            np.testing.assert_allclose(values[0], together[name][image], rtol=1e-5, atol=1e-7, err_msg=name)


def test_the_tensors_that_are_read_are_not_changed() -> None:
    q, k, v = qkv()
    before = [x.clone() for x in (q, k, v)]
    both(q, k, v)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))
