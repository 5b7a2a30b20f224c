"""Hugging Face's and the hub's spellings of one network, there and back."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor

from sinklab.models import rename

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}


def network(swiglu: bool, registers: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    if registers:
        config = transformers.Dinov2WithRegistersConfig(**SMALL, use_swiglu_ffn=swiglu)
        return transformers.Dinov2WithRegistersModel(config)
    return transformers.Dinov2Model(transformers.Dinov2Config(**SMALL, use_swiglu_ffn=swiglu))


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("registers", [False, True])
def test_new_and_old_names_become_the_same_hub_names(swiglu: bool, registers: bool) -> None:
    hub = rename.hub_from_huggingface(network(swiglu, registers).state_dict())
    assert {"cls_token", "mask_token", "pos_embed", "norm.weight", "blocks.1.attn.qkv.weight"} <= hub.keys()
    assert ("blocks.0.mlp.w12.weight" in hub) == swiglu
    assert not [name for name in hub if "layer" in name or "embeddings" in name]
    old = rename.huggingface_from_hub(hub)
    assert "encoder.layer.0.attention.attention.query.weight" in old
    assert same(rename.hub_from_huggingface(old), hub)


def test_registers_in_timm_carry_the_same_sums() -> None:
    state = rename.hub_from_huggingface(network(False, True).state_dict())
    timm, aside = rename.timm_from_hub(state)
    assert aside == ("mask_token",)
    assert torch.equal(timm["cls_token"], state["cls_token"] + state["pos_embed"][:, :1])
    assert torch.equal(timm["pos_embed"], state["pos_embed"][:, 1:])
    assert torch.equal(timm["reg_token"], state["register_tokens"])


def test_names_that_are_not_chunked_stay() -> None:
    state = {"blocks.3.norm1.weight": torch.ones(1), "norm.weight": torch.ones(1)}
    assert rename.joined_chunks(state).keys() == state.keys()


def test_a_classifiers_prefix_is_taken_off_and_its_head_named() -> None:
    config = transformers.Dinov2Config(**SMALL)
    held, outside, prefix = rename.without_prefix(
        transformers.Dinov2ForImageClassification(config).state_dict(), "w.bin"
    )
    assert prefix == "dinov2."
    assert set(outside) == {"classifier.weight", "classifier.bias"}
    assert held.keys() == transformers.Dinov2Model(config).state_dict().keys()
