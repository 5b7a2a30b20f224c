"""What cannot be read is refused with a sentence that names it and says what would fit."""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch
from families import WIDTH, OwnAttention, Patches, fresh, module, openclip_tower, pixels, timm_vit
from torch import nn

from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.proof import prove
from sinklab.hooks.site import find_sites


class Watch(Reader):
    """Wants every call and keeps none."""

    def attention(self, site: Any, call: Any) -> None:
        pass


def test_dropout_in_training_is_refused() -> None:
    model = timm_vit(drop_rate=0.1).train()
    with pytest.raises(InputError, match="training mode with dropout"), HookManager(model, Watch()):
        pass


def test_eager_attention_is_refused_with_what_to_do() -> None:
    """Complaints 2, 3: look at what runs, not at what the configuration says."""
    model = fresh("hf dinov2")
    model.set_attn_implementation("eager")
    with pytest.raises(NotFoundError, match="attn_implementation='sdpa'"), HookManager(model, Watch()) as hooks:
        hooks.run(pixels("hf dinov2"))


def test_timm_without_fused_attention_is_refused_with_what_to_do() -> None:
    """Complaints 1, 4."""
    model = fresh("timm dinov2")
    model.blocks[1].attn.fused_attn = False
    with (
        torch.inference_mode(),
        pytest.raises(NotFoundError, match=r"blocks\.1\.attn.*fused_attn"),
        HookManager(model, Watch()) as hooks,
    ):
        hooks.run(pixels("timm dinov2"))


def test_differential_attention_is_refused() -> None:
    model = timm_vit(attn_layer="diff").eval()
    with pytest.raises((InputError, NotFoundError)), torch.inference_mode():
        prove(model, pixels("timm dinov2", batch=1))


def test_a_block_that_never_runs_the_model_is_an_error() -> None:
    """Complaint 16: a recorder that recorded nothing is an error."""
    with pytest.raises(NotFoundError, match="Nothing was read"), HookManager(module("timm dinov2"), Watch()):
        pass


def test_a_scripted_model_is_refused() -> None:
    with pytest.raises(InputError, match="TorchScript"):
        find_sites(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)))


@pytest.mark.parametrize("what", ["ResPostBlock", "ParallelScalingBlock"])
def test_blocks_that_cannot_be_decomposed_by_head_are_refused(what: str) -> None:
    from timm.models import vision_transformer

    model = timm_vit(block_fn=getattr(vision_transformer, what)).eval()
    with pytest.raises((InputError, NotFoundError), match=r"post-norm|No attention layer"), torch.inference_mode():
        prove(model, pixels("timm dinov2", batch=1))


class Windowed(nn.Module):
    """A block whose attention sees each half of the tokens as an image of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mixer = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), OwnAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.norm1(x).reshape(-1, 8, WIDTH)).reshape(x.shape)
        return x + self.norm2(x)


def test_attention_in_windows_is_refused_as_one_layer() -> None:
    model = Patches(Windowed).eval()
    with pytest.raises(InputError, match="a window"), torch.inference_mode():
        prove(model, pixels("a user's own", batch=1))


@pytest.mark.parametrize("what", ["norm after W_O", "norm after the sum"])
def test_a_norm_outside_the_attention_is_refused(what: str) -> None:
    """Complaint 11: heads plus bias must be what the block adds."""
    if what == "norm after W_O":
        model, x = openclip_tower(custom={"scale_attn": True}).eval(), pixels("openclip", batch=1)
    else:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=False, batch_first=True)
        model, x = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval(), torch.randn(1, 7, 32)
    with pytest.raises(InputError, match="post-norm"), torch.inference_mode():
        prove(model, x)


def test_scaled_cosine_attention_is_refused() -> None:
    with pytest.raises(InputError, match="cosine"):
        find_sites(openclip_tower(custom={"scale_cosine_attn": True}))


def test_averaged_weights_are_refused() -> None:
    """Complaint 7: need_weights=True would hand out the mean over heads."""
    model = fresh("openclip")

    def attention(self: Any, q_x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.attn(q_x, q_x, q_x, need_weights=True)[0]

    block = model.transformer.resblocks[0]
    block.attention = types.MethodType(attention, block)
    with pytest.raises(InputError, match="need_weights"), torch.inference_mode(), HookManager(model, Watch()) as hooks:
        hooks.run(pixels("openclip"))


def test_wrongly_declared_heads_are_refused() -> None:
    """Complaint 14."""
    model = fresh("timm dinov2")
    model.blocks[0].attn.qkv = nn.Linear(32, 96)
    attention = model.blocks[0].attn
    attention.num_heads = 2
    sites = find_sites(model)
    attention.num_heads, attention.head_dim = 4, 8
    handle = types.SimpleNamespace(module=model, sites=sites)
    manager = HookManager(handle, Watch())
    with pytest.raises(InputError, match="declares 2 heads"), torch.inference_mode(), manager:
        model(pixels("timm dinov2"))


def test_a_model_that_gives_nan_alone_proves_nothing_and_claims_no_error_of_zero() -> None:
    """Nothing can be compared, and that is said; a model of which one head is NaN is compared in the others."""
    model: Any = fresh("timm dinov2")
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[0, 0] = torch.nan
    one_head = prove(model, pixels("timm dinov2"))
    assert [proof.compared for proof in one_head] == [True, True]
    with torch.no_grad():
        model.patch_embed.proj.weight.fill_(torch.nan)
    for proof in prove(model, pixels("timm dinov2")):
        assert not proof.compared and "nothing compared" in proof.note
        assert all(math.isnan(error) for error in (proof.difference, proof.row_sums, proof.kernel, proof.update or 0))
