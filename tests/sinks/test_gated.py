"""Heads behind an output gate: the gated numbers are those of σ(gate) ⊙ z, projected and recomputed in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sinklab
from sinklab.hooks.manager import HookManager
from sinklab.hooks.site import find_sites
from sinklab.models.vit import ViT, ViTShape
from sinklab.sinks.reader import StatisticsReader
from sinklab.sinks.table import GATED, head_schema

SHAPE: dict[str, Any] = {"image": 32, "patch": 8, "dim": 24, "depth": 2, "heads": 3, "registers": 1}


def drawn(gate: str, **changes: Any) -> ViT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        vit = ViT(ViTShape(**SHAPE | {"gate": gate} | changes)).eval()
        for parameter in vit.parameters():
            torch.nn.init.normal_(parameter, std=0.3)  # a gate that has opened, and heads that differ
    return vit


def pixels() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))


def read(vit: ViT, fast: bool = False) -> dict[str, Tensor]:
    reader = StatisticsReader(find_sites(vit), fast=fast)
    with torch.no_grad(), HookManager(vit, reader, attend=reader.attend if fast else None) as hooks:
        hooks.run(pixels())
        return reader.take()[1]


def naive(vit: ViT) -> dict[str, Tensor]:
    """[B L H] of each gated number, straight from the definitions, every pair of tokens built."""
    double = vit.double()
    x, rows = double.embed(pixels().double()), []
    for block in double.blocks:
        attention: Any = block.attn
        h = block.norm1(x)
        q, k, v = attention.heads(h)
        pattern = attention.pattern(h)
        z, gate = pattern @ v, attention.gate(h).expand(v.shape)
        weight = attention.proj.weight.unflatten(1, (3, -1)).transpose(0, 1)  # [H C D]
        weight = weight * block.ls1.gamma[None, :, None]
        update = torch.einsum("bhqd,hcd->bhqc", gate * z, weight)
        handed = torch.einsum("bhqd,bhnd,hcd->bhqnc", gate, v, weight)  # what i takes of j, for full attention
        size = handed.square().sum(-1).mean(2).sqrt()  # [B H N]
        sink = pattern.mean(2).argmax(-1, keepdim=True)
        own = size.gather(-1, sink)[..., 0]
        sigma = torch.linalg.svdvals(update)
        rows.append(
            {
                "value_ratio_gated": own / ((size.sum(-1) - own) / (size.shape[-1] - 1)),
                "update_norm_gated": update.norm(dim=-1).mean(-1),
                "stable_rank_gated": sigma.square().sum(-1) / sigma[..., 0].square(),
            }
        )
        x = block(x)
    vit.float()
    return {name: torch.stack([row[name] for row in rows], 1) for name in GATED}


@pytest.mark.parametrize("gate", ["elementwise", "headwise"])
@pytest.mark.parametrize("fast", [False, True])
def test_the_gated_numbers_are_those_of_the_gated_z_projected(gate: str, fast: bool) -> None:
    with torch.no_grad():
        found, expected = read(drawn(gate), fast), naive(drawn(gate))
    for name in GATED:
        assert torch.allclose(found[name], expected[name], rtol=2e-5), name


def test_one_number_a_head_and_query_leaves_the_ratio_and_changes_the_norm() -> None:
    found = read(drawn("headwise"))
    assert torch.allclose(found["value_ratio_gated"], found["value_ratio_out"], rtol=1e-5)
    assert (found["update_norm_gated"] < found["update_norm"]).all()


def test_an_open_gate_changes_nothing() -> None:
    vit = drawn("elementwise")
    for block in vit.blocks:
        torch.nn.init.zeros_(block.attn.gate.weight)
        torch.nn.init.constant_(block.attn.gate.bias, 30.0)
    found = read(vit)
    for gated, plain in zip(GATED, ("value_ratio_out", "update_norm", "stable_rank"), strict=True):
        assert torch.allclose(found[gated], found[plain], rtol=1e-5)


def test_without_a_gate_there_is_no_such_column(tmp_path: Path) -> None:
    assert not set(GATED) & read(drawn("none")).keys()
    for gate, more in (("none", ()), ("elementwise", GATED)):
        model = sinklab.attach(drawn(gate))
        run = sinklab.diagnose(model, "demo", tmp_path / gate, size=32, limit=2)
        assert list(run.heads.columns) == head_schema(more).names
        assert ("gated_update" in run.config["model"]) == (gate != "none")
        page = (run.path / "report.html").read_text(encoding="utf-8")
        assert ("as gated" in page) == (gate != "none")
