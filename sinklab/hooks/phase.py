"""What is particular to an attention whose values are phases: every token is k angles, and what a key hands over
depends on the angle of the one who reads it.

    a_i = Σ_j A_ij sin(θ_j − θ_i)  = Im(e^{−iθ_i} G_i),  G_i = Σ_j A_ij e^{iθ_j}
    θ_i ← θ_i + bound(v(θ_i) ⊙ a_i)

There is no output projection: a head's z is its own share of G, and the update is not linear in it. So heads are put
together in G, and G is followed through the tangent and the bound to what the block adds (Kuramoto Attention,
arXiv 2606.11585, Secs. 2.1 to 2.3).

Letters: B batch, N tokens, k phases, H heads, m = k/H phases of a head, D = 2m.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

PARTS = ("read", "tangent", "bound", "velocity", "phases", "rotated_values", "projected")
"""What hangs on an attention of phases, beside its number of heads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Phase:
    """The parts of one phase attention that stand between z and what the block adds."""

    attention: Any = field(repr=False)
    heads: int
    phases: int
    """k."""
    projected: bool
    """a = Im(e^{−iθ} G); else Re G + Im G, which knows nothing of the reader's own phase."""

    @property
    def head_dim(self) -> int:
        """D: the cosines of a head's m phases, then their sines."""
        return 2 * self.phases // self.heads

    @property
    def read(self) -> nn.Module:
        """Takes G [B N 2k] of all heads, and gives it back."""
        module: nn.Module = self.attention.read
        return module

    @property
    def dtype(self) -> Any:
        """The weights' own floating point type."""
        return next(self.attention.parameters()).dtype

    def velocity(self, theta: Tensor) -> Tensor:
        """v(θ) [B N k], signed; 1 where the model has none. θ [B N k] may be off by whole turns."""
        linear = self.attention.velocity
        if linear is None:
            return torch.ones_like(theta)
        v: Tensor = linear(torch.cat([theta.cos(), theta.sin()], -1)).to(theta.dtype)
        return v

    def by_head(self, x: Tensor) -> Tensor:
        """[B N k] → [B H N m]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def own(self, call_v: Tensor, queries: int) -> Tensor:
        """The readers' own unit numbers [B H Q D] among the values of a call [B H N D]: the last ones."""
        return call_v[:, :, call_v.shape[2] - queries :]

    def tangent(self, z: Tensor, own: Tensor) -> Tensor:
        """a of some heads [… Q m], from their share of G [… Q D] and the readers' own unit numbers."""
        real, imaginary = z.chunk(2, -1)
        if not self.projected:
            return real + imaginary
        cos, sin = own.chunk(2, -1)
        return imaginary * cos - real * sin

    def increment(self, x: Tensor) -> Tensor:
        """bound(x) [B N k]: what the block adds."""
        added: Tensor = self.attention.bound(x)
        return added

    def saturation(self, x: Tensor) -> Tensor:
        """How near the bound is to its end, 0 to 1, [B N k]: tanh of what it compresses; 0 where there is no bound."""
        kind = getattr(self.attention.bound, "kind", "none")
        if kind == "none":
            return torch.zeros_like(x)
        size = x.abs() if kind == "elementwise" else x.square().mean(-1, keepdim=True).sqrt().expand_as(x)
        return size.tanh()

    def places(self) -> Tensor:
        """Where a head's z lies in G, [H 2k D] of zeros and ones: it stands where others have Γ W_O."""
        size = self.phases // self.heads
        where = torch.arange(self.phases).view(self.heads, size)
        where = torch.cat([where, where + self.phases], -1)  # [H D]
        return torch.nn.functional.one_hot(where, 2 * self.phases).transpose(1, 2).double()


def phase_of(module: Any) -> Phase | None:
    """The phase parts of an attention module; None for any other."""
    heads = getattr(module, "num_heads", None)
    if heads is None or not all(hasattr(module, name) for name in PARTS):
        return None
    return Phase(attention=module, heads=heads, phases=module.phases, projected=bool(module.projected))


def on_circle(gap: Tensor) -> Tensor:
    """A difference of angles, brought to (−π, π]: whole turns are no difference."""
    return torch.atan2(gap.sin(), gap.cos())
