"""Multi-head attention as the networks under study have it: an output gate where one is asked for, and other kernels.

    q, k, v = W_QKV h              split into heads
    z = kernel(q, k, v)            softmax: one scaled_dot_product_attention call, and the only one
    z ← z ⊙ σ(W_θ h + b)           the G1 output gate (Qiu et al. 2025), where there is one
    o = W_O concat(z) + b_O

The kernels that are not softmax build their pattern in full; `Attention.pattern` gives it, and its rows need not sum to
one. Letters: B batch, N tokens, C model dim, H heads, D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sinklab.errors import InputError

GATES = ("none", "elementwise", "headwise")
GATE_STD = 1e-6
GATE_BIAS = 2.0
"""σ(2) = 0.881: the gate starts almost open, and the same for all tokens."""


class Softmax(nn.Module):
    """Rows sum to one. The fused kernel, which never holds a pattern."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """z [B H N D]."""
        return F.scaled_dot_product_attention(q, k, v)

    def pattern(self, logits: Tensor) -> Tensor:
        """Scaled logits q·k/√D [B H N N] → weights of the same shape."""
        return torch.softmax(logits, dim=-1)


class Patterned(nn.Module):
    """A kernel that is its pattern: z = pattern(q kᵀ/√D) v. What a row may sum to is said by each."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """z [B H N D]."""
        return self.pattern(scaled_logits(q, k)) @ v

    def pattern(self, logits: Tensor) -> Tensor:
        """Scaled logits [B H N N] → weights of the same shape."""
        raise NotImplementedError


class ClippedSoftmax(Patterned):
    """clip((ζ − γ) · softmax + γ, 0, 1), Bondarenko et al. 2023: exact zeros without infinite logits. With ζ = 1
    no weight is above softmax's own, so rows sum to at most 1."""

    def __init__(self, heads: int, *, stretch: float = 1.0, shift: float = -0.03) -> None:
        """ζ is `stretch` (1 or more), γ is `shift` (0 or less)."""
        super().__init__()
        self.stretch, self.shift = stretch, shift

    def pattern(self, logits: Tensor) -> Tensor:
        return ((self.stretch - self.shift) * torch.softmax(logits, dim=-1) + self.shift).clamp(0, 1)


class Relu(Patterned):
    """relu(logits) / N, Wortsman et al. 2023. Rows sum to any number from 0 on."""

    def __init__(self, heads: int) -> None:
        super().__init__()

    def pattern(self, logits: Tensor) -> Tensor:
        return torch.relu(logits) / logits.shape[-1]


class Sigmoid(Patterned):
    """σ(logits − log N), Ramapuram et al. 2025. Rows sum to between 0 and N."""

    def __init__(self, heads: int) -> None:
        super().__init__()

    def pattern(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits - math.log(logits.shape[-1]))


class Polynomial(Patterned):
    """logits³ / √N, after Saratchandran et al. 2024. Weights have signs, and rows sum to any number."""

    def __init__(self, heads: int, *, power: int = 3) -> None:
        super().__init__()
        self.power = power

    def pattern(self, logits: Tensor) -> Tensor:
        return logits**self.power / logits.shape[-1] ** 0.5


class SinkLogit(Patterned):
    """Softmax with one more, learned logit a head that has no key and no value. Rows sum to less than one: the mass
    that is missing went nowhere, which is what a NOP sink is for."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.zeros(heads))

    def pattern(self, logits: Tensor) -> Tensor:
        nowhere = self.logit.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
        return torch.softmax(torch.cat([nowhere, logits], dim=-1), dim=-1)[..., 1:]


KERNELS: dict[str, type[Patterned] | None] = {
    "softmax": None,
    "clipped": ClippedSoftmax,
    "relu": Relu,
    "sigmoid": Sigmoid,
    "polynomial": Polynomial,
    "sink-logit": SinkLogit,
}


class OutputGate(nn.Linear):
    """σ(W_θ h + b): h [B N C] → a factor [B H N D] ("elementwise") or [B H N 1] ("headwise") on z."""

    multiplies_z = True
    """Whoever measures may take what it returns for the factor on z, head by head."""

    def __init__(self, dim: int, heads: int, kind: str) -> None:
        super().__init__(dim, dim if kind == "elementwise" else heads)
        self.heads = heads
        self.reset_gate()

    def reset_gate(self) -> None:
        """Almost open, and as good as blind to h."""
        nn.init.normal_(self.weight, std=GATE_STD)
        nn.init.constant_(self.bias, GATE_BIAS)

    def forward(self, h: Tensor) -> Tensor:
        opened = torch.sigmoid(super().forward(h))
        return opened.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B H N D or 1]


class SpectralScale(nn.Module):
    """σReparam (Zhai et al. 2023) of one weight: γ W / σ₁(W), with σ₁ by one step of the power iteration a forward."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("direction", F.normalize(torch.randn(rows), dim=0))
        self.direction: Tensor

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            right = F.normalize(weight.T @ self.direction, dim=0)
            left = F.normalize(weight @ right, dim=0)
            if self.training:
                self.direction.copy_(left)
        return self.gain * weight / (left @ weight @ right)


class Attention(nn.Module):
    """h [B N C] → the update o [B N C].

    Args:
        gate: "none", "elementwise" (C gates a token) or "headwise" (H gates a token).
        kernel: one of `KERNELS`.
        spectral: σReparam on the weights of queries and keys.

    Raises InputError for an unknown gate or kernel, or a width that the heads do not divide.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        qkv_bias: bool = False,
        gate: str = "none",
        kernel: str = "softmax",
        spectral: bool = False,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise InputError(f"{heads} heads do not divide a width of {dim}.")
        if gate not in GATES:
            raise InputError(f"An output gate is one of {', '.join(GATES)}, not {gate!r}.")
        if kernel not in KERNELS:
            raise InputError(f"An attention kernel is one of {', '.join(KERNELS)}, not {kernel!r}.")
        made = KERNELS[kernel]
        self.num_heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.kernel: Softmax | Patterned = Softmax() if made is None else made(heads)
        self.proj = nn.Linear(dim, dim)
        self.gate = None if gate == "none" else OutputGate(dim, heads, gate)
        self.query_scale = SpectralScale(dim) if spectral else None
        self.key_scale = SpectralScale(dim) if spectral else None

    def heads(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B H N D]."""
        q, k, v = F.linear(h, self._qkv_weight(), self.qkv.bias).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _qkv_weight(self) -> Tensor:
        if self.query_scale is None or self.key_scale is None:
            return self.qkv.weight
        query, key, value = self.qkv.weight.chunk(3)
        return torch.cat([self.query_scale(query), self.key_scale(key), value])

    def project(self, z: Tensor) -> Tensor:
        """W_O concat(z) + b_O: [B H N D] → [B N C]."""
        update: Tensor = self.proj(z.transpose(1, 2).flatten(2))
        return update

    def forward(self, h: Tensor) -> Tensor:
        z = self.kernel(*self.heads(h))
        return self.project(z if self.gate is None else z * self.gate(h))

    def with_ungated(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """The update, and what it would be without the output gate (the same tensor where there is none)."""
        z = self.kernel(*self.heads(h))
        if self.gate is None:
            return (update := self.project(z)), update
        return self.project(z * self.gate(h)), self.project(z)

    def pattern(self, h: Tensor) -> Tensor:
        """A [B H N N], the weights before any output gate; what a row sums to is the kernel's affair."""
        q, k, _ = self.heads(h)
        return self.kernel.pattern(scaled_logits(q, k))


def scaled_logits(q: Tensor, k: Tensor) -> Tensor:
    """q·k/√D [B H N N]."""
    return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
