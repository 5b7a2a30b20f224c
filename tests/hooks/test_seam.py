"""The intercepted call says what the kernel computes; the stand-in computes what nn.MultiheadAttention computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import WIDTH, fresh, module, openclip_tower, pixels
from torch import Tensor, nn

from sinklab.errors import InputError
from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.proof import prove
from sinklab.hooks.seam import AttentionCall, read_call
from sinklab.hooks.site import Site
from sinklab.hooks.stand_in import stand_in, standing_in

B, H, N, D = 2, 4, 9, 8


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": draw(B, 1, N, N, seed=3) > -0.5},
    "boolean of two dimensions": {"attn_mask": draw(N, N, seed=4) > -0.5},
    "a bias a head": {"attn_mask": draw(1, H, N, N, seed=5)},
    "three dimensions": {"attn_mask": draw(H, N, N, seed=6)},
    "the lowest number": {"attn_mask": (draw(B, 1, 1, N, seed=7) > 0.8) * torch.finfo(torch.float32).min},
    "a scale": {"scale": 0.7},
    "a query that sees nothing": {
        "attn_mask": torch.ones(N, N, dtype=torch.bool).index_fill(0, torch.tensor(3), False)
    },
}


def calling(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> AttentionCall:
    return read_call((q, k, v), options)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [H, 2, 1])
def test_the_pattern_times_the_values_is_the_kernels_output(mask: str, kv_heads: int) -> None:
    """Complaint 13: a query head reads the key/value head that the kernel gives it."""
    q, k, v = draw(B, H, N, D), draw(B, kv_heads, N, D, seed=1), draw(B, kv_heads, N, D, seed=2)
    options = MASKS[mask] | ({"enable_gqa": True} if kv_heads < H else {})
    call = calling(q, k, v, **options)
    z = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(call.pattern(dtype=torch.float32) @ v[:, call.kv_head], z, rtol=1e-4, atol=1e-5)
    assert torch.equal(call.run(), z)


@pytest.mark.parametrize("mask", MASKS)
def test_rows_of_the_pattern_are_rows_of_the_whole(mask: str) -> None:
    call = calling(draw(B, H, N, D), draw(B, H, N, D, seed=1), draw(B, H, N, D, seed=2), **MASKS[mask])
    for rows in (slice(0, 4), slice(4, 9), slice(0, None, 3)):
        torch.testing.assert_close(call.pattern(rows), call.pattern()[:, :, rows])


def test_patterns_are_non_negative_and_rows_sum_to_one_or_to_nothing() -> None:
    """Complaint 8."""
    call = calling(
        draw(B, H, N, D), draw(B, H, N, D, seed=1), draw(B, H, N, D, seed=2), **MASKS["a query that sees nothing"]
    )
    sums = call.pattern().sum(-1)
    assert call.pattern().min() >= 0
    assert (sums[:, :, 3] == 0).all()
    assert (sums[:, :, [0, 1, 2, 4, 5, 6, 7, 8]] - 1).abs().max() < 1e-12


def test_positional_arguments_are_read_as_torch_reads_them() -> None:
    q, k, v, mask = draw(B, H, N, D), draw(B, H, N, D, seed=1), draw(B, H, N, D, seed=2), draw(N, N, seed=3)
    call = read_call((q, k, v, mask, 0.0, False), {"scale": 0.3})
    assert call.q is q and call.k is k and call.v is v and call.mask is mask
    assert (call.is_causal, call.scale) == (False, 0.3)
    assert read_call((), {"query": q, "key": k, "value": v}).scale == pytest.approx(1 / math.sqrt(D))


def mha(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(WIDTH, H, **{"batch_first": True, **options})
    for value in made.parameters():
        value.data = draw(*value.shape, seed=8) * 0.3
    return made.eval().requires_grad_(False)


HIDDEN = draw(N, N, seed=9) > 0.6
PADDED = torch.zeros(B, N, dtype=torch.bool).index_fill(1, torch.tensor([7, 8]), True)
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a boolean mask": {"attn_mask": HIDDEN},
    "an additive mask": {"attn_mask": draw(N, N, seed=10)},
    "a mask an image and head": {"attn_mask": draw(B * H, N, N, seed=11) > 0.6},
    "padding": {"key_padding_mask": PADDED},
    "padding and a mask": {"key_padding_mask": PADDED, "attn_mask": HIDDEN},
    "causal": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(N), "is_causal": True},
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_stand_in_computes_what_multihead_attention_computes(asked: str, batch_first: bool) -> None:
    """Complaint 6: z cannot be had by hooking, so the attention is computed visibly, with the same parameters."""
    own = mha(batch_first=batch_first)
    x = draw(B, N, WIDTH) if batch_first else draw(N, B, WIDTH)
    expected, _ = own(x, x, x, need_weights=False, **ASKED[asked])
    found, weights = stand_in(own)(x, x, x, need_weights=False, **ASKED[asked])
    assert weights is None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"kdim": 12, "vdim": 20}, {"bias": False}])
def test_the_stand_in_attends_to_other_tokens_too(options: dict[str, Any]) -> None:
    own = mha(**options)
    query, key = draw(B, 3, WIDTH), draw(B, N, options.get("kdim", WIDTH), seed=1)
    value = draw(B, N, options.get("vdim", WIDTH), seed=2)
    expected, _ = own(query, key, value, need_weights=False)
    found, _ = stand_in(own)(query, key, value, need_weights=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_standing_in_ends_where_it_began_also_after_an_error_and_nested() -> None:
    own = mha()
    fast = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(RuntimeError), standing_in([own]), standing_in([own]):
        assert "forward" in own.__dict__ and not torch.backends.mha.get_fastpath_enabled()
        raise RuntimeError
    assert "forward" not in own.__dict__ and torch.backends.mha.get_fastpath_enabled() == fast


def test_a_forward_that_somebody_else_hung_on_the_instance_comes_back() -> None:
    """Complaint 15."""
    own = mha()
    theirs = own.forward
    own.forward = theirs  # type: ignore[method-assign]
    with standing_in([own]):
        assert own.forward is not theirs
    assert own.__dict__["forward"] == theirs


class Masks(Reader):
    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attention(self, site: Site, call: AttentionCall) -> None:
        self.calls.append(call)


@pytest.mark.parametrize("padded", [False, True])
def test_torchs_own_encoder_is_read_though_it_skips_even_a_replaced_attention(padded: bool) -> None:
    """Complaint 6: nn.TransformerEncoder has a fast path of its own beside nn.MultiheadAttention's."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, H, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().requires_grad_(False)
    x, options = draw(B, N, WIDTH), {"src_key_padding_mask": PADDED} if padded else {}
    reader = Masks()
    with torch.inference_mode():
        plain = encoder(x, **options)
        with HookManager(encoder, reader) as hooks:
            attached = hooks.run(x, **options)
        assert len(prove(encoder, x, **options)) == 2
    assert len(reader.calls) == 2
    torch.testing.assert_close(attached, plain, rtol=1e-4, atol=1e-5)
    if padded:
        assert reader.calls[0].pattern()[..., 7:].max() == 0


def test_a_mask_given_to_a_timm_model_is_part_of_the_pattern() -> None:
    model, tokens = module("timm dinov2"), 17
    hidden = torch.ones(tokens, tokens, dtype=torch.bool)
    hidden[:, 5] = False
    reader = Masks()
    with torch.inference_mode(), HookManager(model, reader) as hooks:
        attached = hooks.model.forward_features(pixels("timm dinov2"), attn_mask=hidden)
        plain = model.forward_features(pixels("timm dinov2"), attn_mask=hidden)
    assert torch.equal(attached, plain)
    assert reader.calls[0].pattern()[..., 5].max() == 0


def test_a_pooling_multihead_attention_beside_readable_blocks_does_not_fail_the_proof() -> None:
    """open_clip pools with nn.MultiheadAttention, whose fast path is off while any function mode is active."""
    tower = openclip_tower(custom={}, attentional_pool=True, attn_pooler_queries=3, attn_pooler_heads=2)
    with torch.inference_mode():
        assert len(prove(tower.eval(), pixels("openclip"))) == 2


def test_attending_in_place_of_the_kernel_changes_the_output_as_the_z_it_returns() -> None:
    model, x = fresh("timm dinov2"), pixels("timm dinov2")
    with torch.inference_mode():
        plain = model(x)
        with HookManager(model, attend=lambda site, call: call.run()) as hooks:
            assert torch.equal(hooks.run(x), plain)
        for block in model.blocks:
            block.attn.proj.weight.zero_()
        expected = model(x)
        for block, own in zip(model.blocks, fresh("timm dinov2").blocks, strict=True):
            block.attn.proj.weight.copy_(own.attn.proj.weight)
        with HookManager(model, attend=lambda site, call: torch.zeros_like(call.v)) as hooks:
            torch.testing.assert_close(hooks.run(x), expected)


def test_an_unbatched_call_is_refused_with_its_shape() -> None:
    with pytest.raises(InputError, match=r"shape \(4, 9, 8\)"):
        calling(draw(H, N, D), draw(H, N, D), draw(H, N, D))


def test_a_call_is_told_in_one_line_of_shapes() -> None:
    q, v = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 5, 8)
    call = AttentionCall(q=q, k=v, v=v, mask=None, is_causal=True, scale=0.125, grouped=True)
    assert repr(call) == (
        "AttentionCall(q=[2, 4, 5, 8], k=[2, 2, 5, 8], v=[2, 2, 5, 8], mask=None, z=None, scale=0.125, is_causal, "
        "float32 on cpu)"
    )


def test_a_pattern_carries_gradients_where_q_does() -> None:
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    call = AttentionCall(q=q, k=q, v=q, mask=None, is_causal=False, scale=0.5, grouped=False)
    assert call.pattern().dtype == torch.float64 and call.pattern().requires_grad
    assert call.pattern(slice(1, 2), dtype=torch.float32).shape == (1, 1, 1, 3)
