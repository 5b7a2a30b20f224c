"""The controlled tasks: random tokens whose targets say what an attention head has to do (App. A.1).

Everything drawn has a generator of its own, seeded by what it is for: a batch depends on the task's seed and the step
alone, never on what was drawn before it; evaluation never sees a training batch. The tasks' own vectors are drawn on
the CPU; batches on the device that trains (CUDA and CPU give different ones).

Letters: B batch, N tokens, C model dim.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sinklab.errors import InputError

PURPOSES = ("task", "initialisation", "batches", "evaluation", "donors", "scores", "sample")


def generator_for(purpose: str, seed: int, step: int = 0, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator that nothing else shares: its seed is a hash of purpose, seed and step."""
    if purpose not in PURPOSES:
        raise InputError(f"Random numbers are drawn for one of {', '.join(PURPOSES)}, not for {purpose!r}.")
    digest = hashlib.sha256(f"sinklab/{purpose}/{seed}/{step}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _hash(*parts: Any) -> str:
    """SHA-256 of numbers, text and tensors' bytes, in order."""
    digest = hashlib.sha256()
    for part in parts:
        held = part.cpu().contiguous().numpy().tobytes() if isinstance(part, Tensor) else str(part).encode()
        digest.update(len(held).to_bytes(8, "little") + held)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Inputs x and targets [B N C], and what only the task knows about them."""

    x: Tensor
    target: Tensor
    flags: Tensor
    """[B N] bool: NOP tasks, the queries whose update should vanish; broadcast, the source j*."""
    weight: Tensor
    """[N], 1 for tokens that count in loss and metrics and 0 for those that do not."""


@dataclass(frozen=True, kw_only=True)
class ToyTask:
    """What the tasks share. A task is its seed and its numbers; everything else follows from them."""

    seed: int
    tokens: int = 32
    dim: int = 64
    centred: bool = False
    """Take the mean over channels out of the task's direction; see `unreadable`."""

    @property
    def vector(self) -> Tensor:
        """The direction [C] that tokens are compared with."""
        raise NotImplementedError

    @property
    def unreadable(self) -> float:
        """The cosine between the task's direction and (1, …, 1), in [-1, 1].

        LayerNorm takes each token's mean over channels away, so no model that reads through one can see this part of
        ⟨x, v⟩: it takes the wrong side for asin|cosine|/π of the tokens whatever it learns. This is most of why the
        attainable error differs between seeds; a centred direction has none of it.
        """
        return float(self.vector.mean() * self.dim**0.5)

    def batch(self, step: int, size: int, *, purpose: str = "batches", device: str | torch.device = "cpu") -> Batch:
        """Fresh sequences; the same for the same (seed, purpose, step, size, kind of device)."""
        generator = generator_for(purpose, self.seed, step, device)
        return self.of(torch.randn(size, self.tokens, self.dim, generator=generator, device=device))

    def of(self, x: Tensor) -> Batch:
        """Targets for tokens x [B N C]."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """SHA-256 of all that fixes the task and its first batch: equal for arms that may be compared.

        Bits count, and random numbers differ in their last ones between kinds of processor: see `signature`.
        """
        first = self.batch(0, 1)
        numbers = [getattr(self, entry.name) for entry in fields(self)]
        return _hash(type(self).__name__, *numbers, self.vector, first.x, first.target)

    def signature(self) -> list[float]:
        """A few of the task's numbers, for telling on another machine whether it is drawn alike there, to 1e-3."""
        first = self.batch(0, 1)
        return [
            round(float(value), 5) for part in (self.vector, first.x[0, 1], first.target[0, 1]) for value in part[:8]
        ]

    def _unit(self) -> Tensor:
        """One draw from N(0, I), of length 1 [C]."""
        vector = torch.randn(self.dim, generator=generator_for("task", self.seed))
        if self.centred:
            vector = vector - vector.mean()
        return vector / vector.norm()


@dataclass(frozen=True, kw_only=True)
class NopTask(ToyTask):
    """Block-output form (App. A.3): reproduce x_i where ⟨x_i, v⟩ ≤ 0, and give 0 elsewhere.

    Token 0 is the dedicated sink: its input is always 0, and it does not count. `flags` are the NOP queries.
    """

    @cached_property
    def vector(self) -> Tensor:
        """v [C], of length 1."""
        return self._unit()

    def of(self, x: Tensor) -> Batch:
        weight = torch.ones(self.tokens, device=x.device)
        weight[0] = 0
        x = x * weight[:, None]
        active = x @ self.vector.to(x) > 0
        return Batch(x=x, target=x * ~active[..., None], flags=~active, weight=weight)


@dataclass(frozen=True, kw_only=True)
class NopBranchTask(ToyTask):
    """Branch-supervised form (Eqs. 6, 7): the attention's own update is to be x_i, or γ x_i where ⟨x_i, v⟩ > λ.

    Every token is random and counts, unless there is a dedicated sink. `flags` are the damped tokens.
    """

    damping: float = 0.0
    """γ."""
    threshold: float = 0.0
    """λ."""
    dedicated: bool = False
    """Token 0's input is always 0 and it does not count, as in the block-output form: a sink then forms early, where it
    otherwise has first to win a position over."""

    def __post_init__(self) -> None:
        if not 0 <= self.damping <= 1:
            raise InputError(f"The damping γ lies in [0, 1]; {self.damping} was given.")

    @cached_property
    def vector(self) -> Tensor:
        """v [C], of length 1."""
        return self._unit()

    def of(self, x: Tensor) -> Batch:
        weight = torch.ones(self.tokens, device=x.device)
        if self.dedicated:
            weight[0] = 0
            x = x * weight[:, None]
        flagged = (x @ self.vector.to(x) > self.threshold) & (weight > 0)
        factor = torch.where(flagged, self.damping, 1.0)[..., None]
        return Batch(x=x, target=factor * x, flags=flagged, weight=weight)


@dataclass(frozen=True, kw_only=True)
class BroadcastTask(ToyTask):
    """Broadcast (Eq. 3): add p = x_{j*} R to every token, with j* = argmax_j ⟨x_j, u⟩. `flags` mark j*."""

    @cached_property
    def vector(self) -> Tensor:
        """u [C], of length 1."""
        return self._unit()

    @cached_property
    def rotation(self) -> Tensor:
        """R [C C], orthogonal: the Q factor of a matrix of N(0, 1) draws."""
        drawn = torch.randn(self.dim, self.dim, generator=generator_for("task", self.seed, step=1))
        return torch.linalg.qr(drawn.double()).Q.float()

    def sources(self, x: Tensor) -> Tensor:
        """j* [B]."""
        return (x @ self.vector.to(x)).argmax(-1)

    def payload(self, x: Tensor) -> Tensor:
        """p [B C]."""
        return x[torch.arange(len(x), device=x.device), self.sources(x)] @ self.rotation.to(x)

    def of(self, x: Tensor) -> Batch:
        flags = torch.nn.functional.one_hot(self.sources(x), self.tokens).bool()
        weight = torch.ones(self.tokens, device=x.device)
        return Batch(x=x, target=x + self.payload(x)[:, None], flags=flags, weight=weight)


def task_loss(produced: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Mean squared error [B N C] over the tokens that count, batch and channels."""
    return ((produced - target).square().mean(-1) * weight).sum() / (len(produced) * weight.sum())
