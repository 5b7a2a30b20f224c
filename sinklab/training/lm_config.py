"""What a language model's training is: one frozen dataclass, a variant for each model size and ablation.

| size | context | sequences a step | steps | for |
|---|---|---|---|---|
| tiny | 128 | 16 | 1,500 | minutes on one core |
| 1m | 256 | 64 | 165,000 | about 30 times through enwik8's 90 million bytes |
| 5m | 512 | 64 | 82,500 | the same |

Both families have the same order of data, steps and sweep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from sinklab.errors import InputError
from sinklab.models.lm_config import SIZES, Config, config_from, named
from sinklab.settings import require_numbers, require_seeds
from sinklab.training.changes import changed

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
"""Peak learning rates of --sweep lr."""


@dataclass(frozen=True, kw_only=True)
class LMConfig:
    """All that a language model's training needs to know but the text. Raises InputError for values that cannot be."""

    name: str
    """The model's: a size, and ablations of it after plus signs."""
    model: Config = field(default_factory=lambda: SIZES["phase-tiny"])
    context: int = 256
    """N, the tokens of a sequence."""
    batch: int = 64
    """Sequences a step, over all processes."""
    steps: int = 165_000
    """Optimisation steps."""
    lr: float = 3e-3
    """AdamW's peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    weight_decay: float = 0.1
    """On matrices; never on rates, temperatures, radii, norms and biases."""
    decay_embedding: bool = True
    """Whether the embedding is one of the matrices."""
    warmup: float = 0.02
    """Share of the steps in which the learning rate rises from 0."""
    floor: float = 0.1
    """Share of the peak that a cosine then falls to."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    bf16: bool = False
    """Matrix products and attention in bfloat16 while training; phases, losses and evaluation stay in float32."""
    validate_every: int = 1000
    """Steps between looks at the validation split; the best weights by these are kept."""
    validation_windows: int = 512
    """Windows of `context` behind such a look, spread over the split."""
    stride: int = 128
    """Bytes that the window moves on by in the evaluation at the end, every split from beginning to end."""
    evaluation_batch: int = 64
    """Windows at once; the numbers do not depend on it."""
    sample: int = 400
    """Bytes of text written at the end."""
    record_every: int = 50
    """Steps between lines of the metrics."""
    checkpoint_every: int = 2000
    """Steps between checkpoints; stopping writes one too."""

    def __post_init__(self) -> None:
        require_numbers(self)
        if not self.lr > 0 or not self.weight_decay >= 0 or not self.clip > 0:
            raise InputError(
                "lr and clip are positive and weight_decay not negative; "
                f"{self.lr}, {self.clip} and {self.weight_decay} came."
            )
        for name in ("warmup", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is a share, from 0 to 1; {getattr(self, name)} was given.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas are two numbers from 0 to below 1; {self.betas} was given.")
        if self.stride > self.context:
            raise InputError(
                f"The evaluation's stride is at most the context, or bytes would be left out; {self.stride} and "
                f"{self.context} were given."
            )

    def rate(self, step: int) -> float:
        """The factor on lr at a step, counted from 0."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return (step + 1) / rising
        gone = (step - rising) / max(1, self.steps - rising)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * gone))


BUDGETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "context": 128,
        "batch": 16,
        "steps": 1500,
        "lr": 1e-2,
        "warmup": 0.05,
        "validate_every": 250,
        "validation_windows": 128,
        "stride": 64,
        "checkpoint_every": 500,
    },
    "1m": {"context": 256, "steps": 165_000},
    "5m": {"context": 512, "steps": 82_500, "stride": 256},
}
"""What each size's training changes in the dataclass."""


def make_lm_config(name: str, changes: Sequence[str] = ()) -> LMConfig:
    """The training of a model, with changes written "key=value", and "model.key=value" for the model's own.

    Raises NotFoundError for a model or key that does not exist, InputError for a value that does not fit.
    """
    model = named(name)
    size = name.partition("+")[0].rpartition("-")[2]
    config: LMConfig = changed(LMConfig(name=name, model=model, **BUDGETS[size]), changes, name)
    if config.name != name:  # it names folders, and what is reported
        raise InputError(f"The name of a model is not a value to set: choose among {', '.join(SIZES)}.")
    return config


def lm_config_from(family: str, saved: Mapping[str, Any]) -> LMConfig:
    """The config that was saved as JSON. Raises InputError where fields are missing or unknown."""
    known = {entry.name for entry in fields(LMConfig)}
    if known != saved.keys():
        wrong = ", ".join(sorted(known ^ saved.keys()))
        raise InputError(f"The saved config of a language model differs from this version's in {wrong}.")
    values = {**saved, "model": config_from(family, saved["model"]), "betas": tuple(saved["betas"])}
    return LMConfig(**values)


@dataclass(frozen=True, kw_only=True)
class LMMember:
    """One training of a run."""

    seed: int
    """Of first weights and batches; all configs of one seed see the same batches."""
    config: LMConfig
    point: str = ""
    """Of a sweep, such as "lr=0.001"."""

    @property
    def arm(self) -> str:
        """What it is called among the others of its seed."""
        return f"{self.config.name}/{self.point}" if self.point else self.config.name

    @property
    def name(self) -> str:
        """Its folder in the run."""
        return f"seed-{self.seed}/{self.arm}"

    def settings(self) -> dict[str, Any]:
        """What fixes it but for the text."""
        return {
            "kind": "lm",
            "arm": self.arm,
            "seed": self.seed,
            "family": self.config.model.family,
            "model": asdict(self.config.model),
            "config": asdict(self.config),
        }


def lm_members(configs: Sequence[LMConfig], seeds: Sequence[int], sweep: str | None = None) -> list[LMMember]:
    """Every training of a run, seeds first. Raises InputError for a sweep, seeds or configs that cannot be."""
    require_seeds(seeds)
    names = [config.name for config in configs]
    if not names or len(set(names)) < len(names):
        raise InputError(f"A run trains one or more different models; {', '.join(names) or 'none'} was asked for.")
    if sweep not in (None, "lr"):
        raise InputError(f"A language model's --sweep is lr; {sweep!r} was asked for.")
    points: list[tuple[LMConfig, str]] = [(config, "") for config in configs]
    if sweep == "lr":
        points = [(replace(config, lr=rate), f"lr={rate:g}") for config in configs for rate in RATES]
    return [LMMember(seed=seed, config=config, point=point) for seed in seeds for config, point in points]
