"""`sinklab doctor`: is the attachment faithful, and what does the model's precision cost?

Letters: B batch, R heads of all layers.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sinklab.hooks.manager import HookManager
from sinklab.hooks.proof import Proof, prove
from sinklab.sinks.arguments import require_precision
from sinklab.sinks.reader import StatisticsReader
from sinklab.sinks.scan import as_input

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.handle import Model

MARGIN = 1e-6  # a dominant key that leads by less is decided by rounding


@dataclass(frozen=True, kw_only=True)
class Drift:
    """One statistic, measured in the model's precision and again with the whole model in float64 on the CPU."""

    column: str
    worst: float
    """The largest relative difference of any finite head; NaN if no head is finite."""
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

    def verdict(self) -> str:
        """What to make of it, in one line."""
        silent = [proof for proof in self.proofs if not proof.compared]
        if len(silent) == len(self.proofs):
            return f"Nothing could be compared: no site of {len(self.proofs)} gives a finite number."
        spoken = [proof for proof in self.proofs if proof.compared]
        limit, largest = max(proof.limit for proof in spoken), max(proof.largest for proof in spoken)
        which = f"All {len(spoken)} sites agree" if not silent else f"{len(spoken)} of {len(self.proofs)} sites agree"
        told = [f"{which} (largest error {largest:.0e}, limit {limit:.0e})"]
        if silent:
            told.append(f"{len(silent)} give nothing finite, first {silent[0].name}")
        if self.moved:
            told.append(f"{self.moved} of {self.heads} heads have another sink than in float64")
        if self.not_finite:
            told.append(f"{self.not_finite} of {self.heads} heads are not finite")
        return "; ".join(told) + "."


def examine(model: Model, pixels: Tensor, *, dtype: str = "float32") -> Examination:
    """Prove the attachment on one image and compare every statistic with a float64 copy of the model.

    Args:
        model: a handle; its module is left as it is. pixels [1 3 H W]. dtype "bfloat16" examines autocast.

    Raises InputError, naming the site, where the attachment is not faithful.
    """
    require_precision(model, dtype)
    device = model.device
    with torch.inference_mode():
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            own = as_input(model, pixels)
            proofs = prove(model, own)
            measured = _measure(model, own)
        exact = model.with_module(deepcopy(model.module).to("cpu", torch.float64))
        reference = _measure(exact, as_input(exact, pixels))
    places = measured.pop("place"), reference.pop("place")
    assert torch.equal(*places)
    finite = measured["finite"] & reference["finite"]
    drifts = [_drift(name, measured[name], reference[name], finite, places[0]) for name in measured if name != "finite"]
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
    """name → [R] for one image, one number a head; `place` [R 2] is its layer and head."""
    tables = []
    for heads in sorted({site.heads for site in model.sites}):  # one table holds layers of one number of heads
        sites = [site for site in model.sites if site.heads == heads]
        reader = StatisticsReader(sites, device=pixels.device)
        with HookManager(model, reader, layers=[site.layer for site in sites]) as hooks:
            hooks.run(pixels)
        layers, found, _ = reader.take()
        place = torch.cartesian_prod(torch.tensor(layers), torch.arange(heads))
        tables.append({name: values[0].flatten() for name, values in found.items()} | {"place": place})
    return {name: torch.cat([table[name] for table in tables]) for name in tables[0]}


def _drift(name: str, measured: Tensor, reference: Tensor, finite: Tensor, place: Tensor) -> Drift | None:
    # a margin is a difference of near numbers: it has no relative error
    if not measured.is_floating_point() or name == "inflow_margin":
        return None
    gap = (measured - reference).abs() / reference.abs().clamp_min(1e-12)
    gap = torch.where(finite & torch.isfinite(gap), gap, torch.zeros_like(gap))
    layer, head = place[int(gap.argmax())].tolist()
    worst = float(gap.max()) if bool(finite.any()) else math.nan
    return Drift(column=name, worst=worst, layer=layer, head=head)
