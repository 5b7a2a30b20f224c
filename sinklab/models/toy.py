"""The controlled tasks' networks: one attention head that learns to do nothing, and two layers that broadcast.

    h = LN(x + positions)                       only what attention sees is normalised and knows its place
    x ← x + o,   o = W_O · softmax(QKᵀ/√D) V    one scaled_dot_product_attention call a layer
    x ← x + W_OG g · γ                          the global pathway, where there is one (`models.pathway`)
    x ← x + MLP(LN(x))                          where there is an MLP

The residual stream is the raw input. Letters: B batch, N tokens, C model dim (also the one head's dim).
"Attention Sinks", App. A.1, A.3, A.4 and Eq. 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sinklab.errors import InputError
from sinklab.models.pathway import GlobalPathway

POSITION_STD = 0.02


class ToyAttention(nn.Module):
    """One head without biases: [B N C] → [B N C]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_heads = 1
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (proj(h).unsqueeze(1) for proj in (self.q_proj, self.k_proj, self.v_proj))  # [B 1 N C]
        z = F.scaled_dot_product_attention(q, k, v).squeeze(1)  # [B N C]
        update: Tensor = self.out_proj(z)
        return update


class ToyBlock(nn.Module):
    """One layer. `positions` [N C] and `bos` [C], where a layer has them, are seen by its attention only."""

    def __init__(self, tokens: int, dim: int, hidden: int = 0, *, positions: bool = False, bos: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = ToyAttention(dim)
        self.after_attention = nn.Identity()  # the stream with the attention's update and nothing else yet
        self.pathway: GlobalPathway | None = None
        self.norm2 = nn.LayerNorm(dim) if hidden else nn.Identity()
        self.mlp: nn.Module | None = (
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) if hidden else None
        )
        self.positions = nn.Parameter(POSITION_STD * torch.randn(tokens, dim)) if positions else None
        self.bos = nn.Parameter(POSITION_STD * torch.randn(dim)) if bos else None

    def normalised(self, x: Tensor) -> Tensor:
        """h [B N C]: what attention and pathway read."""
        if self.positions is not None:
            x = x + self.positions
        if self.bos is not None:
            x = x + F.pad(self.bos[None], (0, 0, 0, x.shape[1] - 1))  # at token 0 only
        h: Tensor = self.norm1(x)
        return h

    def forward(self, x: Tensor, updates: list[tuple[Tensor, Tensor | None]] | None = None) -> Tensor:
        """The stream after this layer [B N C]; `updates` is given this layer's (attention's, pathway's) update."""
        h = self.normalised(x)
        o = self.attention(h)
        o_global = None if self.pathway is None else self.pathway(h)
        if updates is not None:
            updates.append((o, o_global))
        x = self.after_attention(x + o)
        if o_global is not None:
            x = x + o_global
        return x if self.mlp is None else x + self.mlp(self.norm2(x))


class ToyModel(nn.Module):
    """Layers one after the other. `forward` returns the stream after the last [B N C]."""

    def __init__(self, blocks: list[ToyBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, updates: list[tuple[Tensor, Tensor | None]] | None = None) -> Tensor:
        """`updates` collects, layer by layer, the (attention's, pathway's or None) update [B N C]."""
        for block in self.blocks:
            x = block(x, updates)
        return x


class NopModel(ToyModel):
    """The adaptive-NOP head: x + W_O(A V), no MLP, with positions and a beginning-of-sequence vector at token 0."""

    def __init__(self, tokens: int = 32, dim: int = 64) -> None:
        super().__init__([ToyBlock(tokens, dim, positions=True, bos=True)])


class BroadcastModel(ToyModel):
    """The broadcast model: layers of attention and MLP, positions before the first attention only.

    Args:
        pathway: None for attention alone, "learned" for the global pathway with its recipient gate γ, "uniform" for
            γ ≡ 1. What attention and MLP are drawn from does not depend on it: the pathways are drawn last.
    """

    def __init__(
        self, tokens: int = 32, dim: int = 64, *, hidden: int = 256, layers: int = 2, pathway: str | None = None
    ) -> None:
        super().__init__([ToyBlock(tokens, dim, hidden, positions=layer == 0) for layer in range(layers)])
        if pathway is not None:
            for block in self.blocks:
                assert isinstance(block, ToyBlock)
                block.pathway = GlobalPathway(dim, dim, gate=pathway)


def build_toy(kind: str, arm: str, numbers: Mapping[str, Any]) -> ToyModel:
    """The model of a task (nop, nop-branch, broadcast, pathway) and arm, with first weights from torch's own state.

    `numbers` holds tokens and dim and, but for the NOP tasks, hidden and layers. An arm's name says what it has: with
    "global" a pathway, with "uniform" one with γ ≡ 1. Raises InputError for another task.
    """
    tokens, dim = int(numbers["tokens"]), int(numbers["dim"])
    if kind in ("nop", "nop-branch"):
        return NopModel(tokens, dim)
    if kind not in ("broadcast", "pathway"):
        raise InputError(f"A controlled model is of nop, nop-branch, broadcast or pathway, not of {kind!r}.")
    gate = None if "global" not in arm else "uniform" if "uniform" in arm else "learned"
    hidden, layers = int(numbers["hidden"]), int(numbers["layers"])
    return BroadcastModel(tokens, dim, hidden=hidden, layers=layers, pathway=gate)
