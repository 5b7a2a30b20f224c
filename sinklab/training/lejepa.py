"""The LeJEPA objective (Balestriero & LeCun 2025) with an online probe and the broadcast penalty, exact over ranks.

    L = λ · SIGReg + (1 − λ) · invariance + CE(probe) + λ_B · penalty,  λ = 0.02
    invariance = mean((mean_v p − p)²)                        p: the projected CLS of each view
    SIGReg = mean over directions of N Σ_k w_k [(mean cos(t_k y) − e^{−t_k²/2})² + (mean sin(t_k y))²]
    w_k = e^{−t_k²/2} times the trapezoid rule on [0, 3], doubled for the half line

Means of cos and sin, the projector's batch norm and the penalty's moments are taken over all ranks, so that N processes
compute what one would with the joined batch. Letters: B images, V views, R = V·B projected rows, K their dim,
M directions, T knots, C model dim, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sinklab.errors import InputError
from sinklab.models.vit import ViT, shares
from sinklab.training.joined import JoinedBatchNorm, mean_over_ranks, world_size

KNOTS = 17
LAST_KNOT = 3.0
RATIOS = ("global", "rank")


def knots(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """t [T], the weights w [T] and the Gaussian's characteristic function e^{−t²/2} [T]."""
    t = torch.linspace(0, LAST_KNOT, KNOTS, device=device, dtype=dtype)
    window = torch.exp(-t.square() / 2)
    weights = torch.full_like(t, 2 * LAST_KNOT / (KNOTS - 1))
    weights[0] = weights[-1] = LAST_KNOT / (KNOTS - 1)
    return t, weights * window, window


def directions(dim: int, count: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Tensor:
    """Random unit directions [K M], drawn on the CPU so that they are the same on every rank and device."""
    return F.normalize(torch.randn(dim, count, generator=generator), dim=0).to(device)


def sigreg(projected: Tensor, along: Tensor) -> Tensor:
    """How far rows [R K] are from a standard normal along the directions [K M]; 0 for a perfect fit.

    Of R rows drawn from N(0, I) it is Σ_k w_k (1 − e^{−t_k²}) on average, whatever R is; N counts all ranks' rows.
    """
    rows = len(projected) * world_size()
    y = (projected.to(along.dtype) @ along).unsqueeze(-1)  # [R M 1]
    t, weights, normal = knots(projected.device, along.dtype)
    angles = y * t  # [R M T]
    real, imaginary = mean_over_ranks(torch.stack([angles.cos().mean(0), angles.sin().mean(0)]))  # [M T] each
    errors = (real - normal).square() + imaginary.square()
    return rows * (errors @ weights).mean()


def invariance(projected: Tensor) -> Tensor:
    """Mean squared distance of views [V B K] from their images' mean."""
    return (projected.mean(0) - projected).square().mean()


class Projector(nn.Sequential):
    """[R C] → [R K]: Linear, BN, ReLU, twice, and a Linear."""

    def __init__(self, dim: int, hidden: int = 2048, output: int = 128) -> None:
        super().__init__(
            nn.Linear(dim, hidden),
            JoinedBatchNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            JoinedBatchNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, output),
        )


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What each term counts."""

    sigreg: float = 0.02
    """λ; the invariance counts 1 − λ."""
    penalty: float = 0.0
    """λ_B; 0 leaves the penalty out."""
    ratio: str = "global"
    """The penalty's ratio of means is over all ranks ("global"), or each rank's own, averaged ("rank", as in the
    paper's scripts)."""
    update: str = "gated"
    """What is penalised: attention's update as it is added, or "ungated", without the output gate."""
    first_block: int = 1
    """The penalty's first block; block 0 is left out in the paper."""

    def __post_init__(self) -> None:
        if not 0 <= self.sigreg <= 1 or self.penalty < 0 or self.first_block < 0:
            raise InputError("SIGReg's weight lies in [0, 1]; the penalty's, and its first block, are not negative.")
        if self.ratio not in RATIOS or self.update not in ("gated", "ungated"):
            raise InputError("The penalty's ratio is global or rank and its update gated or ungated.")


class LeJEPA(nn.Module):
    """The backbone with what trains it: projector and, with classes, the online probe."""

    def __init__(
        self,
        vit: ViT,
        *,
        weights: Weights,
        classes: int = 0,
        hidden: int = 2048,
        output: int = 128,
        slices: int = 256,
        low_precision: bool = False,
    ) -> None:
        """`slices` is M; `low_precision` runs the networks, never the objective, in bfloat16 where autocast does.

        Raises InputError if the penalty would be over no block.
        """
        super().__init__()
        if weights.penalty and weights.first_block >= vit.shape.depth:
            raise InputError(
                f"The penalty begins with block {weights.first_block} of a network that has {vit.shape.depth}."
            )
        dim = vit.shape.dim
        self.weights, self.slices, self.output, self.low_precision = weights, slices, output, low_precision
        self.vit = vit
        self.projector = Projector(dim, hidden, output)
        self.probe = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes)) if classes else None
        for part in (self.projector, self.probe):
            for module in part.modules() if part is not None else ():
                if isinstance(module, nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=0.02)
                    nn.init.zeros_(module.bias)

    def forward(self, views: Tensor, labels: Tensor, along: Tensor) -> dict[str, Tensor]:
        """Views [B V 3 H W], labels [B] (−1 where there is none), directions [K M] → the terms and their "total"."""
        images, count = views.shape[:2]
        pixels = views.transpose(0, 1).flatten(0, 1)  # [V·B 3 H W]
        with self.autocast(pixels.device):
            tokens, measured = (
                self.vit(pixels, measure=self.weights.update) if self.weights.penalty else (self.vit(pixels), None)
            )
            cls = tokens[:, 0]
            projected = self.projector(cls)
            answers = None if self.probe is None else self.probe(cls.detach())
        projected = projected if projected.dtype == torch.float64 else projected.float()
        terms = {
            "sigreg": sigreg(projected, along),
            "invariance": invariance(projected.unflatten(0, (count, images))),
        }
        total = self.weights.sigreg * terms["sigreg"] + (1 - self.weights.sigreg) * terms["invariance"]
        if answers is not None:
            answers = answers.float()
            asked = labels.repeat(count)
            labelled = (asked >= 0).sum().clamp_min(1)
            terms["probe"] = F.cross_entropy(answers, asked, ignore_index=-1, reduction="sum") / labelled
            terms["probe_accuracy"] = (answers.argmax(-1) == asked).sum().detach() / labelled
            total = total + terms["probe"]
        if measured is not None:
            terms["penalty"] = self.penalty(measured)
            total = total + self.weights.penalty * terms["penalty"]
        return {"total": total, **terms}

    def autocast(self, device: torch.device) -> torch.autocast:
        """Within, matrix products are in bfloat16 if this was asked for."""
        return torch.autocast(
            "cpu" if device.type == "meta" else device.type, torch.bfloat16, enabled=self.low_precision
        )

    def penalty(self, measured: Tensor) -> Tensor:
        """Eq. 5 without λ_B, from the layers' moments [L 2]."""
        counted = measured[self.weights.first_block :]
        return shares(mean_over_ranks(counted) if self.weights.ratio == "global" else counted).mean()


def first_not_finite(terms: Mapping[str, Any]) -> str | None:
    """The name of the first term that is no longer a number; "total" only if no other is to blame."""
    import math

    names = [name for name in terms if name != "total"] + ["total"]
    return next((name for name in names if name in terms and not math.isfinite(float(terms[name]))), None)
