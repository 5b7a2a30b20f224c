"""The controlled models run openly, layer by layer, with one layer's computation changed as asked.

The models' own forward hides its pattern inside one fused call; here it is written out, so that a value, a route or a
branch can be edited and everything can be read. Unedited it gives the models' own output, up to rounding.

Letters: B batch, N tokens, C model dim, G dim of the global state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from sinklab.models.pathway import GlobalPathway
from sinklab.models.toy import ToyBlock, ToyModel


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerEdit:
    """What is changed in one layer; by default nothing."""

    value: Callable[[Tensor], Tensor] | None = None
    """v [B N C] → what the head reads in its place; the pattern stays."""
    without: Tensor | None = None
    """[B], the key that no query may attend to; the rest of each row is renormalised."""
    attention: bool = True
    """False drops attention's update and keeps the pathway's."""
    pathway: bool = True
    """False drops the pathway's update, which equals g ← 0."""
    state: Tensor | None = None
    """[B G], in place of the pathway's own g."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRecord:
    """What one layer computed."""

    x: Tensor
    """[B N C], the stream before it."""
    h: Tensor
    """[B N C], what attention and pathway read."""
    pattern: Tensor
    """A [B N N], query by key."""
    value: Tensor
    """v [B N C], as edited."""
    update: Tensor
    """Attention's update [B N C]."""
    shared: Tensor | None
    """The pathway's update [B N C]; None where there is none."""


def run_block(block: ToyBlock, x: Tensor, edit: LayerEdit | None = None) -> tuple[Tensor, LayerRecord]:
    """The stream after the layer, and what happened in it."""
    edit, before = edit or LayerEdit(), x
    h, head = block.normalised(x), block.attention
    scores = head.q_proj(h) @ head.k_proj(h).mT / h.shape[-1] ** 0.5  # [B N N]
    if edit.without is not None:
        closed = torch.nn.functional.one_hot(edit.without, h.shape[1]).bool()
        scores = scores.masked_fill(closed[:, None], -torch.inf)
    pattern = torch.softmax(scores, dim=-1)
    value = head.v_proj(h)
    if edit.value is not None:
        value = edit.value(value)
    update = head.out_proj(pattern @ value) if edit.attention else torch.zeros_like(x)
    shared = None if block.pathway is None else block.pathway(h, edit.state)
    if shared is not None and not edit.pathway:
        shared = torch.zeros_like(shared)
    x = x + update if shared is None else x + update + shared
    if block.mlp is not None:
        x = x + block.mlp(block.norm2(x))
    return x, LayerRecord(x=before, h=h, pattern=pattern, value=value, update=update, shared=shared)


def layers_of(model: ToyModel) -> list[ToyBlock]:
    """The model's blocks."""
    return [cast(ToyBlock, block) for block in model.blocks]


def run_model(
    model: ToyModel, x: Tensor, edits: Mapping[int, LayerEdit] | None = None, *, start: int = 0
) -> tuple[Tensor, list[LayerRecord]]:
    """The model's output with the layers in `edits` changed, and the records of the layers from `start` on.

    x [B N C] is the stream before layer `start`.
    """
    records = []
    for layer, block in enumerate(layers_of(model)[start:]):
        x, record = run_block(block, x, (edits or {}).get(start + layer))
        records.append(record)
    return x, records


def replaced(at: Tensor, vectors: Tensor | float) -> Callable[[Tensor], Tensor]:
    """An edit of values: in row b, what stands at token at[b] becomes vectors[b] [B C], or a number."""

    def change(value: Tensor) -> Tensor:
        value = value.clone()
        value[torch.arange(len(value), device=value.device), at] = vectors
        return value

    return change


def picked(tensor: Tensor, at: Tensor) -> Tensor:
    """Row b's token at[b]: [B N C] → [B C]."""
    return tensor[torch.arange(len(tensor), device=tensor.device), at]


def value_norms(block: ToyBlock, record: LayerRecord) -> Tensor:
    """‖W_O v_j‖ [B N]."""
    norms: Tensor = block.attention.out_proj(record.value).norm(dim=-1)
    return norms


def inflow(pattern: Tensor) -> Tensor:
    """What each token receives, averaged over the queries [B N]."""
    return pattern.mean(-2)


def sink_scores(model: ToyModel, x: Tensor, *, fixed: bool) -> dict[str, float]:
    """The largest inflow a layer: sink_0, sink_1, …

    `fixed` asks for a sink at one position of all sequences (inflow is averaged over them before the largest is taken,
    App. A.2); otherwise each sequence has its own.
    """
    _, records = run_model(model, x)
    received = [inflow(record.pattern) for record in records]
    best = [(flow.mean(0).max() if fixed else flow.max(-1).values.mean()) for flow in received]
    return {f"sink_{layer}": float(value) for layer, value in enumerate(best)}


def pathway_of(block: ToyBlock) -> GlobalPathway:
    """The block's pathway, which must be there."""
    assert block.pathway is not None
    return block.pathway
