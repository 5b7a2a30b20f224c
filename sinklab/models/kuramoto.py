"""The phase-state language model: every token is k angles, and attention pulls them together.

    ψ(θ) = [cos θ, sin θ]
    g^q, g^k = ρ(W_q ψ), ρ(W_k ψ)                     ρ(y) = softplus(y) / mean_j softplus(y)_j
    φ_t = θ_t + ω t
    s_tu = τ/√k Σ_j g^q_tj g^k_uj cos(φ_tj − φ_uj)     = τ/√k ⟨q_t, k_u⟩,  q = g^q ψ(φ), k = g^k ψ(φ)
    G_t = Σ_u A_tu ψ(θ_u)                              A = softmax over u ≤ t: one scaled_dot_product_attention call
    a_t = −sin θ_t · Re G_t + cos θ_t · Im G_t         = Σ_u A_tu sin(θ_u − θ_t)
    θ ← θ + bound(v ⊙ a),  v = W_v ψ(θ)
    θ ← θ + bound(SwiGLU(θ))
    logit_c = σ/√k Σ_j cos(θ_j − Φ_cj) + b_c           Φ: the embedding

There is no value or output projection and no normalisation. Kuramoto Attention (arXiv 2606.11585), Secs. 2.1 to 2.3;
what is ours is said in `lm_config.KuramotoConfig`. Phases, sines and cosines stay in float32 (or float64) under
autocast. Letters: B batch, N tokens, k phases, H heads, V symbols.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sinklab.models.generation import KeyValues, causality
from sinklab.models.lm_config import KuramotoConfig


def lift(theta: Tensor) -> Tensor:
    """ψ: angles [... k] → [... 2k], all cosines first."""
    return torch.cat([theta.cos(), theta.sin()], -1)


class Gates(nn.Module):
    """ψ [B N 2k] → g^q, g^k [B N k]: positive, with mean 1 over a token's own coordinates."""

    def __init__(self, phases: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * phases, 2 * phases, bias=bias)  # W_q above W_k

    def forward(self, psi: Tensor) -> tuple[Tensor, Tensor]:
        g = F.softplus(self.linear(psi).to(psi.dtype)).unflatten(-1, (2, -1))  # [B N 2 k]
        g_query, g_key = (g / g.mean(-1, keepdim=True)).unbind(-2)
        return g_query, g_key


class Bound(nn.Module):
    """An update x [B N k] made no longer than the learned radii r [k]; its slope at 0 is r."""

    def __init__(self, config: KuramotoConfig) -> None:
        super().__init__()
        self.kind = config.bound
        inverse = config.radius + math.log(-math.expm1(-config.radius))  # of softplus
        self.free_radius = nn.Parameter(torch.full((config.phases,), inverse)) if self.kind != "none" else None

    @property
    def radius(self) -> Tensor:
        """r [k]."""
        assert self.free_radius is not None, "an update without bound has no radius"
        return F.softplus(self.free_radius)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "none":
            return x
        if self.kind == "elementwise":
            return self.radius * x.tanh()
        m = (x.square().mean(-1, keepdim=True) + 1e-12).sqrt()  # the root has no slope at 0, where tokens often are
        return self.radius * x * (m.tanh() / m)


class PhaseAttention(nn.Module):
    """θ [B N k] → the bounded increment of attention [B N k]."""

    kind = "phase"

    def __init__(self, config: KuramotoConfig, gates: Gates | None) -> None:
        super().__init__()
        k = config.phases
        self.num_heads, self.phases = config.heads, k
        self.scale = (k // config.heads) ** -0.5
        self.rotated_values, self.projected = config.values == "rotated", config.tangent == "projected"
        self.temperature = nn.Parameter(torch.full((config.heads,), config.temperature))
        rates = config.rope_base ** (-torch.arange(k) / k)
        self.frequencies: Tensor | None = None
        if config.frequencies == "learned":
            self.frequencies = nn.Parameter(rates)
        elif config.frequencies == "fixed":
            self.register_buffer("frequencies", rates)
        self._gates = (gates,)  # in a tuple: where layers share them they are the model's child, not each layer's
        self.velocity = nn.Linear(2 * k, k, bias=config.biases) if config.velocity == "linear" else None
        self.read = nn.Identity()  # hook point: G [B N 2k], real parts first
        self.tangent = nn.Identity()  # hook point: a [B N k]
        self.bound = Bound(config)

    @property
    def gates(self) -> Gates | None:
        """What makes g^q and g^k; None where both are 1."""
        return self._gates[0]

    def turned(self, psi: Tensor, start: int) -> Tensor:
        """ψ(θ) → ψ(φ), φ = θ + ωt, for tokens from position `start` on; both [B N 2k]."""
        if self.frequencies is None:
            return psi
        wide = torch.float32 if psi.device.type == "mps" else torch.float64  # large angles lose digits in float32
        t = torch.arange(start, start + psi.shape[1], device=psi.device, dtype=wide)
        angle = torch.remainder(t[:, None] * self.frequencies.to(wide), 2 * math.pi).to(psi.dtype)  # [N k]
        turn_cos, turn_sin = angle.cos(), angle.sin()
        cos, sin = psi.chunk(2, -1)
        return torch.cat([cos * turn_cos - sin * turn_sin, sin * turn_cos + cos * turn_sin], -1)

    def by_head(self, pairs: Tensor) -> Tensor:
        """[B N 2k] → [B H N 2k/H]."""
        batch, tokens, _ = pairs.shape
        split = pairs.view(batch, tokens, 2, self.num_heads, -1).permute(0, 3, 1, 2, 4)
        return split.reshape(batch, self.num_heads, tokens, -1)

    def together(self, z: Tensor) -> Tensor:
        """[B H N 2k/H] → [B N 2k]."""
        batch, heads, tokens, _ = z.shape
        return z.view(batch, heads, tokens, 2, -1).permute(0, 2, 3, 1, 4).reshape(batch, tokens, -1)

    def forward(self, theta: Tensor, past: KeyValues | None = None) -> Tensor:
        psi = lift(theta)
        turned = self.turned(psi, 0 if past is None else past.seen)
        own = turned if self.rotated_values else psi
        query, key = turned, turned
        if self.gates is not None:
            g_query, g_key = self.gates(psi)
            query, key = turned * torch.cat([g_query, g_query], -1), turned * torch.cat([g_key, g_key], -1)
        q, k, v = self.by_head(query) * self.temperature[:, None, None], self.by_head(key), self.by_head(own)
        if past is not None:
            k, v = past.extend(k, v)
        causal = causality(q.shape[2], k.shape[2], q.device)
        z = F.scaled_dot_product_attention(q, k, v, scale=self.scale, **causal)  # [B H N 2k/H]
        field = self.read(self.together(z))  # G
        real, imaginary = field.to(psi.dtype).chunk(2, -1)
        cos, sin = own.to(field.dtype).to(psi.dtype).chunk(2, -1)  # rounded as v was: attending to oneself gives 0
        a = imaginary * cos - real * sin if self.projected else real + imaginary
        a = self.tangent(a)
        x = a if self.velocity is None else self.velocity(psi).to(psi.dtype) * a
        increment: Tensor = self.bound(x)
        return increment


class PhaseSwiGLU(nn.Module):
    """θ [B N k] → the bounded increment of the token's own network [B N k]; no biases."""

    def __init__(self, config: KuramotoConfig) -> None:
        super().__init__()
        self.lifted = config.ffn == "lift"
        self.gate_and_up = nn.Linear(config.phases * (2 if self.lifted else 1), 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.phases, bias=False)
        self.bound = Bound(config)

    def forward(self, theta: Tensor) -> Tensor:
        gate, up = self.gate_and_up(lift(theta) if self.lifted else theta).chunk(2, -1)
        increment: Tensor = self.bound(self.down(F.silu(gate) * up).to(theta.dtype))
        return increment


class PhaseBlock(nn.Module):
    """One layer, θ [B N k] → θ [B N k]."""

    def __init__(self, config: KuramotoConfig, gates: Gates | None) -> None:
        super().__init__()
        self.norm1 = nn.Identity()  # there is no norm; hooks find what attention reads here
        self.attention = PhaseAttention(config, gates)
        self.after_attention = nn.Identity()  # θ with attention's increment and nothing else yet
        self.mlp = PhaseSwiGLU(config) if config.ffn != "none" else None
        self.wrap = config.wrap

    def forward(self, theta: Tensor, past: KeyValues | None = None) -> Tensor:
        if self.wrap:
            theta = torch.remainder(theta + math.pi, 2 * math.pi) - math.pi
        theta = theta + self.attention(self.norm1(theta), past)
        theta = self.after_attention(theta)
        return theta if self.mlp is None else theta + self.mlp(theta)


class Kuramoto(nn.Module):
    """Tokens [B N] → logits [B N V], first weights from torch's own random state."""

    def __init__(self, config: KuramotoConfig, symbols: int) -> None:
        super().__init__()
        self.config, self.symbols = config, symbols
        self.phases = nn.Embedding(symbols, config.phases)  # Φ [V k]
        self.target_phases = None if config.tied else nn.Embedding(symbols, config.phases)
        sets = {"shared": 1, "layer": config.layers, "none": 0}[config.gates]
        self.gates = nn.ModuleList(Gates(config.phases, config.biases) for _ in range(sets))
        own: list[Gates | None] = [*self.gates] * (config.layers // max(sets, 1)) or [None] * config.layers  # type: ignore[list-item]
        self.blocks = nn.ModuleList(PhaseBlock(config, gates) for gates in own)
        self.readout_scale = nn.Parameter(torch.tensor(config.readout_scale))  # σ
        self.readout_bias = nn.Parameter(torch.zeros(symbols))  # b
        for table in (self.phases, self.target_phases):
            if table is not None and config.phase_init == "uniform":
                nn.init.uniform_(table.weight, -math.pi, math.pi)
            elif table is not None:
                nn.init.normal_(table.weight, std=config.phase_std)

    def states(self, tokens: Tensor, past: Sequence[KeyValues] | None = None) -> Tensor:
        """θ [B N k] after the last layer; with `past`, of tokens that follow those already in it."""
        theta: Tensor = self.phases(tokens)
        for index, block in enumerate(self.blocks):
            theta = block(theta) if past is None else block(theta, past[index])
        return theta

    def final(self, tokens: Tensor, past: Sequence[KeyValues] | None = None) -> Tensor:
        """The lift of the last phases [B N 2k], which the readout is linear in."""
        return lift(self.states(tokens, past))

    def readout(self, final: Tensor) -> Tensor:
        """ψ [... 2k] → logits [... V]."""
        targets = self.phases if self.target_phases is None else self.target_phases
        scale = self.readout_scale / self.config.phases**0.5
        return F.linear(final * scale, lift(targets.weight)).to(final.dtype) + self.readout_bias

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.final(tokens))
