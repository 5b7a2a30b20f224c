"""What a locator says of one attention module, for `sinklab.hooks.site` to make a `Site` of.

Letters: C model dim, H query heads, K key/value heads, D head dim (of values).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sinklab.hooks.eager import EagerParts
    from sinklab.hooks.phase import Phase


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionParts:
    """What a locator says of one attention module. `register` takes a function that returns one."""

    heads: int
    """H, the number of query heads."""
    projection: nn.Module
    """The output projection W_O: a Linear of shape [C, H·D]."""
    kv_heads: int | None = None
    """K, the number of key/value heads; H when not given."""
    query_weight: Callable[[], Tensor] | None = None
    """() → [H·D, C], the rows of W_Q; None hides the spectrum of Θ."""
    key_weight: Callable[[], Tensor] | None = None
    """() → [K·D, C]."""
    head_scale: Callable[[], Tensor] | None = None
    """() → [H], a factor a head between the attention and W_O (OpenCLIP's scale_heads)."""
    after: str | None = None
    """What stands between the attention and W_O and is not linear: "gate", "norm"; None for nothing."""
    gate: nn.Module | None = None
    """A module whose output, [B H Q D] or [B H Q 1], multiplies z before W_O; None without one, or where a gate's
    output is of another shape."""
    stand_in: bool = False
    """True for `nn.MultiheadAttention`, which never calls SDPA visibly."""
    output: Callable[[], Tensor] | None = None
    """() → W_O as [C, H·D], where the projection does not hold it so (Conv1D)."""
    caller: str | None = None
    """The part of the module that makes the call, where W_O is outside of that; None for the module itself."""
    second_norm: nn.Module | None = None
    """Where the residual stream with the update passes, if it is none of the block's norms."""
    eager: EagerParts | None = None
    """For an attention that makes no call: where its steps can be seen."""
    phase: Phase | None = None
    """Of an attention whose values are phases; its projection is then what takes G and gives it back."""
