"""What a loader hands out: the plain module, and what one must know to feed it and to trust it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.models.tokens import TokenMap

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sinklab.models.tokenizer import TextTokenizer


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

    def __post_init__(self) -> None:
        three = "three numbers, one a colour channel"
        _require("mean", self.mean, _numbers(self.mean, 3), three)
        _require("std", self.std, _numbers(self.std, 3) and min(self.std) > 0, f"{three}, above 0")
        _require("interpolation", self.interpolation, isinstance(self.interpolation, str), "a word like 'bicubic'")
        sides = _numbers(self.size, 2) and all(side == int(side) and side >= 1 for side in self.size)
        _require("size", self.size, sides, "(height, width) in whole pixels")
        positive = _numbers((self.crop_fraction,), 1) and self.crop_fraction > 0
        _require("crop_fraction", self.crop_fraction, positive, "a number above 0")
        _require("crop_mode", self.crop_mode, isinstance(self.crop_mode, str), "'center' or 'squash'")


def _numbers(values: Any, count: int) -> bool:
    """Is it a tuple or list of so many finite numbers?"""
    return (
        isinstance(values, tuple | list)
        and len(values) == count
        and all(isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) for value in values)
    )


def _require(field_name: str, given: Any, fits: bool, wanted: str) -> None:
    if not fits:
        raise InputError(f"{field_name} of a model's preprocessing is {wanted}, not {given!r}.")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where the weights came from and what was seen while loading; written into run.json as it stands."""

    name: str
    """What the user asked for, e.g. "timm:vit_small_patch14_dinov2.lvd142m"."""
    family: str
    """"timm", "openclip", "hf", "dinov2", "demo", "vit", "attached"."""
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
class SequenceInput:
    """What a model of sequences takes, where a vision model has its `Preprocessing`."""

    tokens: int
    """N; for text the longest context."""
    exact: bool = False
    """Whether it takes N tokens and no fewer, for it has a position for each; else up to N."""
    channels: int | None = None
    """C of tokens that are vectors [N C]; None for token ids [N]."""
    ids: int | None = None
    """How many token ids there are, 0 to ids − 1; None for vectors, or where it is not known."""
    vocabulary: tuple[int, ...] | None = None
    """The bytes that have an id, in their order; None where ids come from a tokenizer, or for vectors."""
    tokenizer: TextTokenizer | None = None
    """Of a language model whose ids are a tokenizer's; None where there is none, and ids have to be given."""
    predicts_next: bool = True
    """Whether a token's logits are of the next one; False for models that fill in masked tokens."""
    task: dict[str, Any] | None = None
    """Of a controlled model: the kind, seed and config of its task, from which its sequences are drawn, and the task's
    signature, which tells whether they are the ones of the training."""
    text: str | None = None
    """Of a language model: the name of the text that it was trained on."""
    text_sha256: str | None = None
    """The hash of that text, which may have been renamed."""
    rule: str = "relaxed"
    """The sink rule that fits unless another is asked for."""
    rule_note: str = ""
    """Why, where that is not the usual rule; kept in a run whose rule was left open."""
    batch_size: int = 16
    """Sequences at once, unless another number is asked for."""
    together: int = 1
    """Sequences whose edits run together: more where they are short and the model small."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A plain module in eval mode with its token map, preprocessing, provenance and way of calling it."""

    module: nn.Module
    tokens: TokenMap
    preprocessing: Preprocessing | None
    """None for a model of sequences."""
    provenance: Provenance
    forward: Callable[[nn.Module, Tensor], Tensor]
    """(module, pixels [B 3 H W], or sequences) → the model's final tokens [B N C], after the final norm where the model
    has one."""
    sequences: SequenceInput | None = None
    """None for a vision model."""
    fixed_size: tuple[int, int] | None = None
    """The one input size that the position table meets; None if the model takes any multiple of a patch."""
    usual_size: int | None = None
    """Side in pixels at which it is looked at unless another is asked for; None for the paper's 224."""
    pictures: dict[str, Any] | None = None
    """Of a model that sinklab trained on pictures: where those of its validation lie, or how they are drawn, as
    `data.validated.where_found` says it; it is diagnosed on them unless others are given."""
    classify: Callable[[nn.Module, Tensor], Tensor] | None = None
    """(module, final tokens [B N C]) → logits [B classes]; None for a model without a classifier."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Family-specific facts that the report shows (e.g. the position table's own grid)."""
