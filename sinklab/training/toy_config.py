"""What a controlled task's training is: one frozen dataclass a task, with named variants.

`paper` is the full budget of "Attention Sinks", App. A and Sec. 5; `laptop` is the small one that still shows every
claim on two CPU cores in minutes (benchmarks/toy_budget.py says how it was found); `e1` is the pathway's App. E.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any, ClassVar

from sinklab.errors import InputError, NotFoundError
from sinklab.settings import require_numbers, require_seeds
from sinklab.training.changes import changed

ARMS = ("attention", "global", "global+penalty", "global-uniform", "global-uniform+penalty")
SWEEPS = ("frequency", "damping")
UNFLAGGED, NEVER = "nothing-flagged", 10.0
"""The arm of nop-branch in which no token is flagged, and the λ that flags none."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What every controlled task's training needs to know. Raises InputError for values that cannot be."""

    kind: ClassVar[str] = ""
    tokens: int = 32
    """N, the length of a sequence."""
    dim: int = 64
    """C, of tokens, stream and head."""
    centred: bool = False
    """Take the mean over channels, which LayerNorm hides from the model, out of the task's direction."""
    steps: int = 30_000
    """Optimisation steps."""
    batch: int = 1024
    """Sequences a step, all of them fresh."""
    lr: float = 5e-4
    """AdamW's learning rate, default betas."""
    weight_decay: float = 1e-4
    """AdamW's."""
    warmup: float = 0.0
    """Share of the steps in which the learning rate rises from 0; 0 starts at the full rate."""
    decay: float = 0.0
    """Share of the steps, the last ones, in which the learning rate falls linearly to 0; 0 keeps it constant."""
    score_every: int = 100
    """Steps between sink scores."""
    score_batch: int = 64
    """Fresh sequences behind a sink score."""
    record_every: int = 100
    """Steps between lines of the metrics."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; stopping writes one too."""
    evaluation_batches: int = 64
    """Batches of fresh sequences after training; means have a standard error over these."""
    evaluation_size: int = 256
    """Sequences in each of them."""

    def __post_init__(self) -> None:
        require_numbers(self)
        if self.tokens < 3:
            raise InputError(f"A task needs three tokens at least; tokens={self.tokens} was given.")
        if self.dim < 2:
            raise InputError("Tokens have two channels at least, or LayerNorm leaves nothing of them; dim=1 was given.")
        if not self.lr > 0 or not self.weight_decay >= 0:
            raise InputError(f"lr is positive and weight_decay not negative; {self.lr} and {self.weight_decay} came.")
        for name in ("warmup", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is a share of the steps, from 0 to 1; {getattr(self, name)} was given.")

    def rate(self, step: int) -> float:
        """The factor on lr at a step, counted from 0."""
        rising = min(1.0, (step + 1) / (self.warmup * self.steps)) if self.warmup else 1.0
        falling = min(1.0, (self.steps - step) / (self.decay * self.steps)) if self.decay else 1.0
        return rising * falling

    def arms(self) -> tuple[str, ...]:
        """What is trained on the same batches from the same first weights."""
        return (self.kind,)

    def of_arm(self, arm: str) -> TrainConfig:
        """The config of one arm; most arms differ by their model or penalty alone."""
        return self


@dataclass(frozen=True, kw_only=True)
class NopConfig(TrainConfig):
    """Adaptive NOP, block-output form (App. A.3)."""

    kind: ClassVar[str] = "nop"
    lr: float = 3e-3


@dataclass(frozen=True, kw_only=True)
class NopBranchConfig(TrainConfig):
    """Adaptive NOP, branch-supervised form (Eqs. 6, 7; App. A.5)."""

    kind: ClassVar[str] = "nop-branch"
    lr: float = 3e-3
    batch: int = 2048
    score_every: int = 10
    damping: float = 0.0
    """γ: flagged tokens are to be updated by γ x."""
    threshold: float = 0.0
    """λ: tokens with ⟨x, v⟩ > λ are flagged; 10 flags none."""
    dedicated: bool = False
    """Give the head a token 0 without content, as the block-output form does; a sink then forms in few steps."""
    loss: str = "branch"
    """"branch": Eq. 7, on attention's update; "block": on the block's output with the normalised stream as residual."""
    frequencies: tuple[float, ...] = tuple(0.1 + 0.8 * i / 19 for i in range(20))
    """Shares p of flagged tokens that --sweep frequency trains, λ = Φ⁻¹(1 − p)."""
    frequency_steps: int = 20_000
    """Steps of each of them."""
    dampings: tuple[float, ...] = (0.0, 1e-3, 1e-2, 0.1, 0.5, 1.0)
    """The γ that --sweep damping trains."""
    beside: bool = True
    """Without a sweep, also train the arm `nothing-flagged` (λ = 10), which needs no sink (Fig. 2B)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in ("branch", "block"):
            raise InputError(f"loss is branch or block, not {self.loss!r}.")
        if any(not 0 <= value <= 1 for value in (self.damping, *self.dampings)):
            raise InputError(f"The damping lies in [0, 1]; {self.damping} and {self.dampings} were given.")
        if any(not 0 < 1 - value < 1 for value in self.frequencies):  # λ = Φ⁻¹(1 − p)
            raise InputError(f"Frequencies lie strictly between 0 and 1; {self.frequencies} were given.")
        for name in ("frequencies", "dampings"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise InputError(f"{name} are different numbers, a model each; {', '.join(map(str, values))} came.")

    def arms(self) -> tuple[str, ...]:
        return (self.kind, UNFLAGGED) if self.beside and self.threshold < NEVER else (self.kind,)

    def of_arm(self, arm: str) -> TrainConfig:
        return replace(self, threshold=NEVER) if arm == UNFLAGGED else self


@dataclass(frozen=True, kw_only=True)
class BroadcastConfig(TrainConfig):
    """Broadcast, two layers (Eq. 3, App. A.4)."""

    kind: ClassVar[str] = "broadcast"
    hidden: int = 256
    """Width of the MLPs."""
    layers: int = 2
    """Layers of attention and MLP."""


@dataclass(frozen=True, kw_only=True)
class PathwayConfig(BroadcastConfig):
    """The broadcast task with a global pathway, arm against arm (Eqs. 4, 5; Sec. 5)."""

    kind: ClassVar[str] = "pathway"
    trained: tuple[str, ...] = ARMS
    """Arms: attention alone, with the pathway, and with the penalty too; "uniform" has γ ≡ 1."""
    penalty: float = 1.0
    """λ_B."""
    penalty_layers: str = "sum"
    """Over the layers: "sum", as the controlled tasks of the paper have it, or "mean", as Eq. 5 is written."""
    penalty_ratio: str = "batch"
    """"batch": a ratio of means; "example": the mean of each sequence's own ratio (App. E.1)."""
    penalty_denominator: str = "gradient"
    """"gradient", or "stopgrad", which lets the penalty shrink the whole attention branch (Apps. E.1, E.2)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        strange = [arm for arm in self.trained if arm not in ARMS]
        if strange or not self.trained or len(set(self.trained)) < len(self.trained):
            raise InputError(f"trained names different arms out of {', '.join(ARMS)}; {self.trained} was given.")
        for name, fitting in (
            ("penalty_layers", ("sum", "mean")),
            ("penalty_ratio", ("batch", "example")),
            ("penalty_denominator", ("gradient", "stopgrad")),
        ):
            if getattr(self, name) not in fitting:
                raise InputError(f"{name} is {' or '.join(fitting)}, not {getattr(self, name)!r}.")
        if self.penalty < 0:
            raise InputError(f"The penalty's weight is not negative; {self.penalty} was given.")

    def arms(self) -> tuple[str, ...]:
        return self.trained


KINDS: dict[str, type[TrainConfig]] = {
    cls.kind: cls for cls in (NopConfig, NopBranchConfig, BroadcastConfig, PathwayConfig)
}
E1 = ("attention", "global-uniform", "global-uniform+penalty")
SMALL = {
    **{"warmup": 0.05, "decay": 0.5, "evaluation_batches": 16},
    **{"checkpoint_every": 500, "record_every": 10, "score_every": 10},
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "nop": {"paper": {}, "laptop": {"steps": 2000, "batch": 64, "lr": 1e-2, "centred": True, **SMALL}},
    "nop-branch": {
        "paper": {},
        "laptop": {
            "steps": 600,
            "frequency_steps": 600,
            "batch": 64,
            "lr": 1e-2,
            "centred": True,
            "dedicated": True,
            "frequencies": (0.1, 0.3, 0.5, 0.7, 0.9),
            **SMALL,
        },
    },
    "broadcast": {"paper": {}, "laptop": {"steps": 400, "batch": 64, "lr": 2e-3, **SMALL}},
    "pathway": {
        "paper": {},
        "laptop": {"steps": 400, "batch": 64, "lr": 2e-3, "trained": ARMS[:3], **SMALL},
        "e1": {
            "trained": E1,
            "penalty_layers": "mean",
            "penalty_ratio": "example",
            "penalty_denominator": "stopgrad",
        },
    },
}
"""What each variant changes in its task's dataclass."""


def make_config(kind: str, variant: str = "laptop", changes: Sequence[str] = ()) -> TrainConfig:
    """A variant with changes written "key=value"; lists are written with commas.

    Raises NotFoundError for a task, variant or key that does not exist, InputError for a value that does not fit.
    """
    if kind not in KINDS:
        raise NotFoundError(f"There is no controlled task {kind!r}; there are {', '.join(KINDS)}.")
    if variant not in VARIANTS[kind]:
        raise NotFoundError(f"{kind} has no variant {variant!r}; it has {', '.join(VARIANTS[kind])}.")
    config = KINDS[kind](**VARIANTS[kind][variant])
    changed_config: TrainConfig = changed(config, changes, kind)
    return changed_config


def config_from(kind: str, saved: Mapping[str, Any]) -> TrainConfig:
    """The config that was saved as JSON. Raises InputError where fields are missing or unknown."""
    if kind not in KINDS:
        raise InputError(f"A saved config is of one of {', '.join(KINDS)}, not {kind!r}.")
    known = {entry.name for entry in fields(KINDS[kind])}
    if known != saved.keys():
        wrong = sorted(known ^ saved.keys())
        raise InputError(f"The saved config of {kind} differs from this version's in {', '.join(wrong)}.")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()}
    return KINDS[kind](**values)


@dataclass(frozen=True, kw_only=True)
class Member:
    """One training of a run."""

    seed: int
    """Of task, first weights, batches and evaluation, each with a generator of its own."""
    arm: str
    config: TrainConfig

    @property
    def name(self) -> str:
        """Its folder in the run."""
        return f"seed-{self.seed}/{self.arm}"


def members(config: TrainConfig, seeds: Sequence[int], sweep: str | None = None) -> list[Member]:
    """Every training of a run, seeds first. Raises InputError for a sweep or seeds that cannot be."""
    require_seeds(seeds)
    varied: list[tuple[str, TrainConfig]] = [(arm, config.of_arm(arm)) for arm in config.arms()]
    if sweep is not None:
        if not isinstance(config, NopBranchConfig) or sweep not in SWEEPS:
            raise InputError(f"--sweep is {' or '.join(SWEEPS)}, of nop-branch; {sweep!r} of {config.kind} was asked.")
        varied = _swept(config, sweep)
    return [Member(seed=seed, arm=arm, config=changed) for seed in seeds for arm, changed in varied]


def _swept(config: NopBranchConfig, sweep: str) -> list[tuple[str, TrainConfig]]:
    if sweep == "damping":
        written = told_apart(config.dampings, "g", 6)
        return [(f"gamma={text}", replace(config, damping=g)) for g, text in zip(config.dampings, written, strict=True)]
    written = told_apart(config.frequencies, "f", 3)
    return [
        (f"p={text}", replace(config, threshold=threshold_for(p), steps=config.frequency_steps))
        for p, text in zip(config.frequencies, written, strict=True)
    ]


def told_apart(values: Sequence[float], kind: str, digits: int) -> list[str]:
    """Numbers as text, with so many digits (of format `kind`) or as many more as it takes that no two are alike."""
    while len(set(written := [f"{value:.{digits}{kind}}" for value in values])) < len(set(values)):
        digits += 1
    return written


def threshold_for(frequency: float) -> float:
    """λ = Φ⁻¹(1 − p), which flags a share p of the tokens (App. A.5)."""
    return NormalDist().inv_cdf(1 - frequency)
