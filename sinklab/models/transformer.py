"""The transformer that the phase-state model is held against: pre-RMSNorm, RoPE, SwiGLU, tied embedding, no biases.

    h = RMSNorm(x);   q, k = RoPE(W_Q h), RoPE(W_K h);   v = W_V h
    x ← x + W_O · softmax(q kᵀ/√D over u ≤ t) v          one scaled_dot_product_attention call a layer
    x ← x + W_down(silu(W_gate h) ⊙ W_up h),  h = RMSNorm(x)
    logits = RMSNorm(x) Eᵀ                               E: the embedding

Letters: B batch, N tokens, C model dim, H heads, D head dim, V symbols.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sinklab.models.generation import KeyValues, causality
from sinklab.models.lm_config import TransformerConfig


def turns(positions: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [N D/2] of RoPE's angles at positions [N] (float64, where the device has it)."""
    rates = base ** (-torch.arange(0, dim, 2, device=positions.device, dtype=positions.dtype) / dim)
    angle = positions[:, None] * rates
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rope(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of channels (j, j + D/2) of x [B H N D] by its angle."""
    cos, sin = turn
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class CausalAttention(nn.Module):
    """h [B N C] → update [B N C]."""

    kind = "softmax"

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.heads, config.dim // config.heads
        self.base = config.rope_base
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(config.dim, config.dim, bias=False) for _ in range(4)
        )

    def forward(self, h: Tensor, past: KeyValues | None = None) -> Tensor:
        batch, tokens, _ = h.shape
        shape = (batch, tokens, self.num_heads, self.head_dim)
        q, k, v = (proj(h).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))  # [B H N D]
        start = 0 if past is None else past.seen
        wide = torch.float32 if h.device.type == "mps" else torch.float64
        positions = torch.arange(start, start + tokens, device=h.device, dtype=wide)
        turn = turns(positions, self.head_dim, self.base, h.dtype)
        q, k = rope(q, turn).to(v.dtype), rope(k, turn).to(v.dtype)
        if past is not None:
            k, v = past.extend(k, v)
        z = F.scaled_dot_product_attention(q, k, v, **causality(tokens, k.shape[2], q.device))  # [B H N D]
        update: Tensor = self.out_proj(z.transpose(1, 2).reshape(batch, tokens, -1))
        return update


class SwiGLU(nn.Module):
    """h [B N C] → [B N C]."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        gate, up = self.gate_and_up(h).chunk(2, -1)
        update: Tensor = self.down(F.silu(gate) * up)
        return update


class TransformerBlock(nn.Module):
    """One layer, x [B N C] → x [B N C]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = CausalAttention(config)
        self.after_attention = nn.Identity()  # the stream with attention's update and nothing else yet
        self.norm2 = nn.RMSNorm(config.dim, eps=1e-6)
        self.mlp = SwiGLU(config.dim, config.hidden)

    def forward(self, x: Tensor, past: KeyValues | None = None) -> Tensor:
        x = self.after_attention(x + self.attention(self.norm1(x), past))
        x = x + self.mlp(self.norm2(x))
        return x


class Transformer(nn.Module):
    """Tokens [B N] → logits [B N V], first weights from torch's own random state."""

    def __init__(self, config: TransformerConfig, symbols: int) -> None:
        super().__init__()
        self.config, self.symbols = config, symbols
        self.embedding = nn.Embedding(symbols, config.dim)  # E
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        std = config.init / config.dim**0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # what adds to the stream is drawn smaller, as 2L such updates add up
                adds = name.endswith(("out_proj.weight", "down.weight"))
                nn.init.normal_(weight, std=std / (2 * config.layers) ** 0.5 if adds else std)

    def final(self, tokens: Tensor, past: Sequence[KeyValues] | None = None) -> Tensor:
        """The normalised stream after the last layer [B N C], which the readout is linear in."""
        x: Tensor = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x) if past is None else block(x, past[index])
        normalised: Tensor = self.norm(x)
        return normalised

    def readout(self, final: Tensor) -> Tensor:
        """[... C] → logits [... V]."""
        return F.linear(final, self.embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.final(tokens))
