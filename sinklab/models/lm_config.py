"""What a language model is: one frozen dataclass a family, their sizes and the ablations, each by its name.

| name | width | layers | hidden | parameters, 205 symbols |
|---|---|---|---|---|
| `phase-tiny` | 48 | 4 | 104 | 98,466 |
| `transformer-tiny` | 48 | 4 | 88 | 97,824 |
| `phase-1m` | 128 | 5 | 384 | 995,923 |
| `transformer-1m` | 128 | 5 | 344 | 1,015,808 |
| `phase-5m` | 256 | 6 | 800 | 4,794,324 |
| `transformer-5m` | 256 | 6 | 688 | 4,798,976 |

The pairs have as many parameters to 1 %, but for the 1m pair, where it is 2 %: a phase-1m of hidden=392 has 1,011,283.

Kuramoto Attention (J. Nunley, arXiv 2606.11585): "stated" is in the paper, "ours" a choice where it is silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from sinklab.errors import InputError, NotFoundError
from sinklab.settings import require_numbers


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """What both families need to know. Raises InputError for values that cannot be."""

    family: ClassVar[str] = ""
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    layers: int = 5
    hidden: int = 384
    """Width of the SwiGLU."""
    heads: int = 1
    rope_base: float = 10_000.0
    """The slowest rate turns by about 1/base a token."""

    def __post_init__(self) -> None:
        require_numbers(self)
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in self.choices and value not in self.choices[entry.name]:
                raise InputError(f"{entry.name} is {' or '.join(self.choices[entry.name])}, not {value!r}.")
        if self.rope_base <= 1:
            raise InputError(f"rope_base is greater than 1; {self.rope_base} was given.")


@dataclass(frozen=True, kw_only=True)
class KuramotoConfig(LanguageModelConfig):
    """The phase-state language model: every token is `phases` angles."""

    family: ClassVar[str] = "phase"
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "gates": ("shared", "layer", "none"),
        "frequencies": ("learned", "fixed", "none"),
        "values": ("raw", "rotated"),
        "tangent": ("projected", "none"),
        "velocity": ("linear", "one"),
        "bound": ("radial", "elementwise", "none"),
        "ffn": ("angle", "lift", "none"),
        "phase_init": ("normal", "uniform"),
    }
    phases: int = 128
    """k, the angles of a token."""
    gates: str = "shared"
    """g^q and g^k: "shared" by all layers (stated for the metric, ours for the weights), of each "layer", or "none",
    g ≡ 1."""
    frequencies: str = "learned"
    """ω, one rate a coordinate and layer, from rope_base^(−j/k): "learned" (stated), "fixed", or "none", ω ≡ 0."""
    values: str = "raw"
    """"raw" phases (stated), or "rotated" by ω as the keys are."""
    tangent: str = "projected"
    """"projected": Im(e^{−iθ} G) (stated); "none": Re G + Im G, which knows nothing of the token's own phase."""
    velocity: str = "linear"
    """v: "linear" in ψ(θ) (stated), or "one", v ≡ 1."""
    bound: str = "radial"
    """"radial": r x tanh(m)/m with m = RMS(x); "elementwise": r tanh(x); "none": x. Slope r at 0 is stated."""
    ffn: str = "angle"
    """What the SwiGLU reads: the raw "angle" (stated), or its "lift" ψ(θ), which makes the model 2π-periodic; "none":
    there is no SwiGLU."""
    biases: bool = True
    """Of gates and v (ours)."""
    temperature: float = 1.0
    """τ at first; learned, one a layer and head (ours)."""
    radius: float = 1.0
    """r at first; learned, one a coordinate, its own for each of the two updates (ours)."""
    phase_init: str = "normal"
    """Phases of a symbol at first: "normal", N(0, phase_std²), or "uniform" on the circle, which trains far worse."""
    phase_std: float = 0.5
    readout_scale: float = 1.0
    """σ at first; learned (ours: 8 starts at 75 bits a byte)."""
    tied: bool = True
    """Read out against the embedding's own phases (ours)."""
    wrap: bool = False
    """Bring phases back to (−π, π] before every layer (ours: not)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.phases % self.heads:
            raise InputError(f"The heads share the phases evenly: {self.phases} phases do not go into {self.heads}.")
        for name in ("radius", "phase_std"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} is positive; {getattr(self, name)} was given.")

    @property
    def width(self) -> int:
        """Of the stream: one angle a coordinate."""
        return self.phases


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(LanguageModelConfig):
    """The matched transformer: pre-RMSNorm, RoPE, SwiGLU, tied embedding, no biases, no dropout."""

    family: ClassVar[str] = "transformer"
    dim: int = 128
    heads: int = 4
    hidden: int = 344
    init: float = 0.55
    """Matrices are drawn from N(0, init²/dim), those that add to the stream smaller by √(2 layers) (ours: 0.02 at 768
    channels, as is usual there; 0.02 at 48 channels costs nearly half a bit after 300 steps)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % (2 * self.heads):
            raise InputError(
                f"RoPE turns pairs of channels in every head: {self.dim} channels do not make pairs in {self.heads}."
            )
        if self.init <= 0:
            raise InputError(f"init is positive; {self.init} was given.")

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.dim


Config = KuramotoConfig | TransformerConfig
FAMILIES: dict[str, type[KuramotoConfig] | type[TransformerConfig]] = {
    "phase": KuramotoConfig,
    "transformer": TransformerConfig,
}
SIZES: dict[str, Config] = {
    "phase-tiny": KuramotoConfig(phases=48, layers=4, hidden=104),
    "transformer-tiny": TransformerConfig(dim=48, layers=4, heads=2, hidden=88),
    "phase-1m": KuramotoConfig(phases=128, layers=5, hidden=384),
    "transformer-1m": TransformerConfig(dim=128, layers=5, hidden=344),
    "phase-5m": KuramotoConfig(phases=256, layers=6, hidden=800),
    "transformer-5m": TransformerConfig(dim=256, layers=6, hidden=688),
}
ABLATIONS: dict[str, dict[str, Any]] = {
    "no-gates": {"gates": "none"},
    "no-omega": {"frequencies": "none"},
    "no-bound": {"bound": "none"},
    "unit-velocity": {"velocity": "one"},
    "rotated-values": {"values": "rotated"},
    "no-tangent": {"tangent": "none"},
    "layer-gates": {"gates": "layer"},
    "lifted-ffn": {"ffn": "lift"},
    "no-ffn": {"ffn": "none"},
}
"""What each named ablation changes in a phase model; the paper's Sec. 4.3 has such rows, the names are ours."""


def named(name: str) -> Config:
    """A size, and an ablation of it after a plus sign: "phase-1m", "phase-tiny+no-gates". Raises NotFoundError."""
    size, *ablations = name.split("+")
    if size not in SIZES:
        raise NotFoundError(f"There is no language model {size!r}; there are {', '.join(SIZES)}.")
    config: Config = SIZES[size]
    for ablation in ablations:
        if ablation not in ABLATIONS or not isinstance(config, KuramotoConfig):
            raise NotFoundError(
                f"{size} has no ablation {ablation!r}; phase models have {', '.join(ABLATIONS)}, transformers none."
            )
        config = replace(config, **ABLATIONS[ablation])
    return config


def config_from(family: str, saved: Mapping[str, Any]) -> Config:
    """The config that was saved as JSON. Raises InputError where fields are missing or unknown."""
    if family not in FAMILIES:
        raise InputError(f"A language model is of the family {' or '.join(FAMILIES)}, not {family!r}.")
    known = {entry.name for entry in fields(FAMILIES[family])}
    if known != saved.keys():
        wrong = ", ".join(sorted(known ^ saved.keys()))
        raise InputError(f"The saved config of a {family} model differs from this version's in {wrong}.")
    return FAMILIES[family](**saved)
