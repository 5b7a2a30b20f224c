"""What a loader hands out: the plain module, and what one must know to feed it and to trust it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sinklab.models.tokens import TokenMap

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How the model wants its pixels; every value is read from the model's own configuration."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str
    """"nearest", "bilinear", "bicubic" or "lanczos"."""
    size: tuple[int, int]
    """Height and width of the model's own evaluation input."""
    crop_fraction: float = 1.0
    """The evaluation crop's share of the resized short side (timm's crop_pct)."""
    crop_mode: str = "center"
    """"center": short side to size / crop_fraction, then a centre crop; "squash": both sides straight to `size`."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where the weights came from and what was seen while loading; written into run.json as it stands."""

    name: str
    """What the user asked for, e.g. "timm:vit_small_patch14_dinov2.lvd142m"."""
    family: str
    """"timm", "openclip", "hf", "dinov2", "demo", "attached"."""
    architecture: str
    """The architecture's own name in its library."""
    source: str
    """Package and version, file name, hub repository, or "random weights (seed 0)"."""
    sha256: str | None
    """Of the weights file; None for random weights and models attached from memory."""
    activation: str
    """The MLP's activation as found in the module, e.g. "GELU", "QuickGELU", "SwiGLU"."""
    layer_scale: dict[str, float] | None
    """min, median, max of |γ| over the attention LayerScales; None if the model has none."""
    parameters: int
    versions: dict[str, str]
    """Of torch and the libraries that built the model."""
    notes: tuple[str, ...] = ()
    """Warnings worth keeping beside the numbers (activation mismatch, position table resized, …)."""
    request: dict[str, Any] = field(default_factory=dict)
    """The arguments of `load` that give this model again; empty for a model attached from memory."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A plain module in eval mode with its token map, preprocessing, provenance and way of calling it."""

    module: nn.Module
    tokens: TokenMap
    preprocessing: Preprocessing
    provenance: Provenance
    forward: Callable[[nn.Module, Tensor], Tensor]
    """(module, pixels [B 3 H W]) → the model's final tokens [B N C], after the final norm where the model has one."""
    fixed_size: tuple[int, int] | None = None
    """The one input size that the position table meets; None if the model takes any multiple of a patch."""
    classify: Callable[[nn.Module, Tensor], Tensor] | None = None
    """(module, final tokens [B N C]) → logits [B classes]; None for a model without a classifier."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Family-specific facts that the report shows (e.g. the position table's own grid)."""
