"""What a vision transformer's training is: one frozen dataclass, and the paper's variants by name.

A name is VARIANT-SIZE, such as `gated-elementwise-registers-L`. Sizes are S, B, L, G, and `tiny`, which learns
something from 64-pixel images on one CPU core in minutes.

| variant | gate | pathway | penalty |
|---|---|---|---|
| `baseline` | none | none | 0 |
| `gated-elementwise` | elementwise | none | 0 |
| `gated-headwise` | headwise | none | 0 |
| `global-penalty` | none | learned | 0.1 |
| `gated-global-penalty` | elementwise | learned | 0.1 |

Each with `-registers` behind it has four of them (`registers` is the baseline's). "Attention Sinks", App. E.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sinklab.errors import InputError, NotFoundError
from sinklab.settings import require_numbers
from sinklab.training.changes import changed

SIZES = ("S", "B", "L", "G", "tiny")
PENALISED = {"pathway": "learned", "penalty": 0.1, "layer_scale": 1.0}
PLAIN: dict[str, dict[str, Any]] = {
    "baseline": {},
    "gated-elementwise": {"gate": "elementwise"},
    "gated-headwise": {"gate": "headwise"},
    "global-penalty": PENALISED,
    "gated-global-penalty": {"gate": "elementwise", **PENALISED},
}
VARIANTS: dict[str, dict[str, Any]] = {
    **PLAIN,
    "registers": {"registers": 4},
    **{f"{name}-registers": {**changes, "registers": 4} for name, changes in PLAIN.items() if name != "baseline"},
}
TINY: dict[str, Any] = {
    "layer_scale": 1.0,
    "drop_path": 0.0,
    "init_std": 0.08,  # at a width of 64, 0.02 would make every branch, and every difference between logits, tiny
    "sigreg": 0.05,
    "jitter": 0.5,
    "procedural": 1024,
    "crop": 0.3,
    "blur_kernel": 3,
    "blur_sigma": 0.6,
    "projector_hidden": 256,
    "projector_dim": 32,
    "batch": 16,
    "epochs": 8,
    "warmup_epochs": 1.0,
    "lr": 2e-3,
    "probe_lr": 5e-3,
    "precision": "fp32",
    "record_every": 5,
    "score_every": 40,
    "checkpoint_every": 64,
    "save_every": 0,
    "validation_images": 384,
}
"""What `tiny` changes whatever the variant, LayerScale among it, so that its variants are trained alike."""


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The paper's recipe; the defaults are its ViT-L. Raises InputError for values that cannot be."""

    variant: str = "baseline"
    """By name; it sets what its row above tells."""
    size: str = "L"
    """By name; it sets dim, depth and heads, and for `tiny` the rest of the last column."""
    image: int = 224
    """Side of a view, pixels."""
    patch: int = 16
    """Side of a patch, pixels; it divides `image`."""
    dim: int = 1024
    """Width C of the residual stream."""
    depth: int = 24
    """Blocks."""
    heads: int = 16
    """Heads a block; they divide `dim`."""
    registers: int = 0
    """Register tokens, after [CLS] and before the patches."""
    gate: str = "none"
    """Output gate: none, elementwise or headwise."""
    pathway: str = "none"
    """Gate of the global pathway: none (no pathway), learned, hier (row 4 of Table 1) or uniform."""
    layer_scale: float = 1e-4
    """Where ls1 and ls2 begin; 0 leaves them out."""
    pathway_scale: float = 0.0
    """Where ls3 begins; 0 leaves it out."""
    drop_path: float = 0.1
    """Chance that the last block leaves both branches of an image out; it rises linearly from 0 over the blocks."""
    init_std: float = 0.02
    """Of the first weights of all matrices."""
    kernel: str = "softmax"
    """Of attention: softmax, or clipped, relu, sigmoid, polynomial, sink-logit."""
    spectral: bool = False
    """σReparam on the weights of queries and keys."""
    views: int = 4
    """Views of an image a step."""
    crop: float = 0.08
    """Smallest share of an image that a view may show."""
    jitter: float = 1.0
    """Strength of the change of colours; 1 is the paper's."""
    blur_kernel: int = 7
    """Side of the Gaussian blur, pixels, odd."""
    blur_sigma: float = 2.0
    """Largest σ of the blur, pixels."""
    solarize: float = 0.2
    """Chance that a view is solarised; 0.1 is what the authors' nesting makes of it."""
    projector_hidden: int = 2048
    """Width of the projector's two hidden layers."""
    projector_dim: int = 128
    """Width of its output, on which invariance and SIGReg are taken."""
    slices: int = 256
    """Random directions of SIGReg a step."""
    sigreg: float = 0.02
    """λ, the weight of SIGReg; invariance has 1 − λ."""
    penalty: float = 0.0
    """λ_B, the weight of attention's common-mode share."""
    penalty_ratio: str = "global"
    """"global": ratios of means over all ranks; "rank": each rank's own, as in the paper's scripts."""
    penalty_update: str = "gated"
    """"gated": attention's update as it is added; "ungated": without the output gate."""
    penalty_first: int = 1
    """The first block that is penalised."""
    epochs: int = 100
    """Passes over the training images."""
    warmup_epochs: float = 10.0
    """Epochs in which the rates rise from 0; 0 starts at the full ones."""
    batch: int = 256
    """Images a step, over all ranks and accumulated batches."""
    accumulate: int = 1
    """Parts that a batch is computed in; SIGReg, batch norm and penalty are then of each part."""
    lr: float = 5e-4
    """AdamW's largest learning rate, for all but the probe."""
    last_rate: float = 1e-3
    """The rate at the end, as a share of lr."""
    weight_decay: float = 0.05
    """AdamW's, for all but the probe."""
    decay_all: bool = True
    """Decay every parameter, as the paper's scripts do; false spares biases, norms, scales, tokens and positions."""
    probe_lr: float = 1e-3
    """The online probe's largest learning rate."""
    probe_weight_decay: float = 1e-7
    """The online probe's."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    precision: str = "bf16"
    """bf16 (autocast) or fp32."""
    checkpointing: bool = False
    """Compute activations again in backward instead of keeping them."""
    procedural: int = 20_000
    """Training images of the built-in set, where no others are given."""
    validation_images: int = 50_000
    """At most so many are scored; the built-in set draws them."""
    record_every: int = 50
    """Steps between lines of metrics.jsonl."""
    score_every: int = 500
    """Steps between scores: common mode, sink events, largest inflow."""
    score_images: int = 32
    """Validation images behind a score."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; stopping writes one too."""
    save_every: int = 10
    """Epochs between weights that are kept for good; 0 keeps the best and the last only."""

    def __post_init__(self) -> None:
        require_numbers(self, may_be_zero=("registers", "penalty_first", "save_every"))
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, float) and value < 0:
                raise InputError(f"{entry.name} is a number from 0 on, not {value}.")
        if self.last_rate > 1:
            raise InputError(f"last_rate is a share of lr, from 0 to 1; {self.last_rate:g} was given.")
        if self.precision not in ("bf16", "fp32"):
            raise InputError(f"precision is bf16 or fp32, not {self.precision!r}.")
        if self.batch % self.accumulate:
            raise InputError(
                f"A batch of {self.batch} images does not divide evenly into {self.accumulate} accumulated parts: give "
                f"a --set batch=… that is a multiple of {self.accumulate}, or another --set accumulate=…."
            )
        if self.warmup_epochs >= self.epochs:
            raise InputError(
                f"A warm-up of {_epochs(self.warmup_epochs)} leaves nothing of a training of {_epochs(self.epochs)}: "
                "shorten it (--set warmup_epochs=0 leaves it out) or give more epochs."
            )
        if self.checkpointing and self.spectral:
            raise InputError(
                "σReparam keeps a state that a second computation in backward would move: no checkpointing."
            )

    @property
    def name(self) -> str:
        """VARIANT-SIZE."""
        return f"{self.variant}-{self.size}"

    def rate(self, step: int, steps_per_epoch: int) -> float:
        """The factor on every learning rate at a step, counted from 0: linear from 0, then a cosine to `last_rate`.

        It follows from the step alone, so that a resumed training goes on with the rate that it would have had.
        """
        warm, steps = self.warmup_epochs * steps_per_epoch, self.epochs * steps_per_epoch
        if step < warm:
            return min(1.0, (step + 1) / warm)
        done = (step - warm) / (steps - warm)
        return self.last_rate + (1 - self.last_rate) * 0.5 * (1 + math.cos(math.pi * done))


def _epochs(number: float) -> str:
    return f"{number:g} epoch{'' if number == 1 else 's'}"


def config_names() -> list[str]:
    """Every VARIANT-SIZE there is."""
    return [f"{variant}-{size}" for size in SIZES for variant in VARIANTS]


def make_config(name: str, changes: Sequence[str] = ()) -> ViTConfig:
    """A named config, with changes written "key=value".

    Raises NotFoundError for a name or key that does not exist, InputError for a value that does not fit.
    """
    variant, _, size = name.rpartition("-")
    if variant not in VARIANTS or size not in SIZES:
        from difflib import get_close_matches

        close = get_close_matches(name, config_names(), n=3)
        raise NotFoundError(
            f"There is no vision transformer {name!r}{': perhaps ' + ', '.join(close) if close else ''}. A name is "
            f"VARIANT-SIZE: {', '.join(VARIANTS)}; {', '.join(SIZES)}."
        )
    from sinklab.models.vit_sizes import SIZES as NUMBERS

    own = TINY if size == "tiny" else {}
    config = ViTConfig(**{"variant": variant, "size": size, **NUMBERS[size], **VARIANTS[variant], **own})
    made: ViTConfig = changed(config, changes, "A vision transformer's training")
    if made.name != name:
        raise InputError(f"Variant and size are in the name: ask for {made.name} instead of setting them.")
    return made


def config_from(saved: Mapping[str, Any]) -> ViTConfig:
    """The config that was saved as JSON. Raises InputError where fields are missing or unknown."""
    known = {entry.name for entry in fields(ViTConfig)}
    if known != saved.keys():
        raise InputError(f"The saved config differs from this version's in {', '.join(sorted(known ^ saved.keys()))}.")
    return ViTConfig(**saved)
