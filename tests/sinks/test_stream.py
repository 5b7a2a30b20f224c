"""The tiled statistics against whole maps in float64, wherever a mask, a shape or a number can make it awkward."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

from sinklab.hooks.seam import AttentionCall
from sinklab.sinks import stream
from sinklab.sinks.statistics import attention_statistics
from sinklab.sinks.stream import HeadGeometry

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


def test_ties_go_to_the_lowest_index() -> None:
    q, k, v = qkv()
    k[:] = k[:, :, :1]
    found, _ = both(torch.zeros_like(q), k, v)
    assert (found["sink_index"] == 0).all() and (found["inflow_margin"] == 0).all()


@pytest.mark.parametrize("size", [(64, 1), (4096, 3), (1 << 22, 7), (1 << 22, 1 << 20)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_tiling_changes_nothing(size: tuple[int, int], is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = both(*qkv(), is_causal=is_causal)
    monkeypatch.setattr(stream, "TILE_BYTES", size[0])
    monkeypatch.setattr(stream, "TILE_ROWS", size[1])
    found, truth = both(*qkv(), is_causal=is_causal)
    agree(found, truth)
    np.testing.assert_array_equal(found["routed_count"], expected["routed_count"])


@pytest.mark.parametrize("tokens", [2, 17, 257, 1370])
def test_no_tile_ever_holds_all_rows_of_a_head(tokens: int) -> None:
    q = torch.zeros(1, 4, tokens, 8)
    call = AttentionCall(q=q, k=q, v=q, mask=None, is_causal=False, scale=1.0, grouped=False)
    tiles = stream._tiles(call)
    assert max(rows.stop - rows.start for _, rows in tiles) < tokens
    covered = torch.zeros(4, tokens)
    for heads, rows in tiles:
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
