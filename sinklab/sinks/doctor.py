"""`sinklab doctor`: is the attachment faithful, and what does the model's precision cost?

Letters: B batch, L layers, H heads.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sinklab.hooks.manager import HookManager
from sinklab.hooks.proof import Proof, prove
from sinklab.sinks.reader import StatisticsReader

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.handle import Model

MARGIN = 1e-6  # a dominant key that leads by less is decided by rounding


@dataclass(frozen=True, kw_only=True)
class Drift:
    """One statistic, measured in the model's precision and again with the whole model in float64 on the CPU."""

    column: str
    worst: float
    """The largest relative difference of any finite head."""
    layer: int
    head: int


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What `examine` found."""

    proofs: list[Proof]
    drifts: list[Drift]
    moved: int
    """Heads whose dominant key differs from float64's although it leads by more than rounding."""
    heads: int
    not_finite: int
    facts: dict[str, str]


def examine(model: Model, pixels: Tensor, *, dtype: str = "float32") -> Examination:
    """Prove the attachment on one image and compare every statistic with a float64 copy of the model.

    Args:
        model: a handle; its module is left as it is. pixels [1 3 H W]. dtype "bfloat16" examines autocast.

    Raises InputError, naming the site, where the attachment is not faithful.
    """
    device = model.device
    with torch.inference_mode():
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            own = pixels.to(device, model.dtype)
            proofs = prove(model, own)
            measured = _measure(model, own)
        exact = model.with_module(deepcopy(model.module).to("cpu", torch.float64))
        reference = _measure(exact, pixels.to("cpu", torch.float64))
    finite = measured["finite"] & reference["finite"]
    drifts = [_drift(name, measured[name], reference[name], finite) for name in measured if name != "finite"]
    sure = finite & (reference["inflow_margin"] > MARGIN)
    return Examination(
        proofs=proofs,
        drifts=[drift for drift in drifts if drift is not None],
        moved=int((sure & (measured["sink_index"] != reference["sink_index"])).sum()),
        heads=finite.numel(),
        not_finite=int((~measured["finite"]).sum()),
        facts={
            "device": str(device),
            "model dtype": str(model.dtype).removeprefix("torch."),
            "run as": dtype,
            "TF32": "on" if device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32 else "off",
            "matmul precision": torch.get_float32_matmul_precision(),
        },
    )


def _measure(model: Model, pixels: Tensor) -> dict[str, Tensor]:
    """name → [L H] for one image."""
    reader = StatisticsReader(model.sites, device=pixels.device)
    with HookManager(model, reader) as hooks:
        hooks.run(pixels)
    _, found, _ = reader.take()
    return {name: values[0] for name, values in found.items()}


def _drift(name: str, measured: Tensor, reference: Tensor, finite: Tensor) -> Drift | None:
    # a margin is a difference of near numbers: it has no relative error
    if not measured.is_floating_point() or name == "inflow_margin":
        return None
    gap = (measured - reference).abs() / reference.abs().clamp_min(1e-12)
    gap = torch.where(finite & torch.isfinite(gap), gap, torch.zeros_like(gap))
    place: Any = divmod(int(gap.argmax()), gap.shape[-1])
    return Drift(column=name, worst=float(gap.max()), layer=int(place[0]), head=int(place[1]))
