"""Sink counts of a network in training: a planted sink is counted where it is, and nothing stays attached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sinklab.models.vit import ViT, ViTShape
from sinklab.watching import sink_scores

LABELS = ("nop", "broadcast", "intermediate")


def network(**changes: Any) -> ViT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = ViTShape(**{"image": 32, "patch": 8, "dim": 16, "depth": 3, "heads": 2, "layer_scale": 1.0, **changes})
        return ViT(shape).eval()


def pixels() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def plant(vit: ViT, layer: int) -> None:
    """All heads of a layer attend to CLS alone: its normed token is the one with a large first channel."""
    block: Any = vit.blocks[layer]
    with torch.no_grad():
        vit.cls_token.zero_()
        vit.cls_token[..., 0] = 200.0
        block.attn.qkv.weight.zero_()
        block.norm1.weight.fill_(1.0)
        block.attn.qkv.bias.zero_()
        block.attn.qkv.bias[[0, 8]] = 20.0  # every query looks along each head's first channel
        block.attn.qkv.weight[[16, 24], 0] = 20.0  # where only CLS has a key


def test_without_a_sink_no_event_is_counted() -> None:
    scores = sink_scores(network(), pixels())
    assert all(scores[f"{rule}_{label}"] == 0 for rule in ("relaxed", "strict") for label in LABELS)
    assert {f"max_inflow_{layer}" for layer in range(3)} <= scores.keys()
    assert scores["max_inflow_1"] < 0.2


@pytest.mark.parametrize("gate", ["none", "elementwise"])
def test_a_planted_sink_is_counted_in_every_head_of_its_block(gate: str) -> None:
    vit = network(qkv_bias=True, gate=gate)
    plant(vit, 1)
    scores = sink_scores(vit, pixels())
    assert sum(scores[f"relaxed_{label}"] for label in LABELS) == 2  # two heads, in every image
    assert scores["relaxed_nop"] == 2  # its values are zero
    assert scores["max_inflow_1"] > 0.95


def test_nothing_stays_attached() -> None:
    vit = network()
    before = vit(pixels())
    sink_scores(vit, pixels())
    assert torch.equal(vit(pixels()), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in vit.modules())
    assert isinstance(vit.blocks[0], nn.Module)
