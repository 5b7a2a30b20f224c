"""A few steps of a config on random pixels: does its graph, its penalty and its optimizer's step hold together?

On the device "meta" nothing is computed and no memory is needed: shapes and gradients are checked, and the memory that
training holds for good (weights, gradients, AdamW's two moments) is told. Elsewhere the loss has to be finite.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from sinklab.device import pick_device
from sinklab.errors import InputError
from sinklab.training.lejepa import directions
from sinklab.training.vit_config import ViTConfig
from sinklab.training.vit_member import build_model, build_optimizer

CLASSES = 1000


def dry_run(config: ViTConfig, *, steps: int = 2, device: str = "cpu", images: int = 1) -> dict[str, Any]:
    """Train `steps` steps of `images` images (each in all of its views) and say what was seen.

    Returns name, device, steps, images, parameters (of backbone, projector and probe), state_gib, saved_gib (what
    forward keeps for backward, of these images, in this precision), seconds a step, and the terms of the last loss
    (null on meta). Raises InputError for a device that is not there, a loss that is not finite or a parameter without a
    gradient.
    """
    where = torch.device(device if device == "meta" else pick_device(device))
    if where.type == "meta":
        config = replace(config, precision="fp32")  # autocast knows no meta device
    with where if where.type == "meta" else nullcontext():
        model = build_model(config, 0, CLASSES).to(where)
    optimizer = build_optimizer(model, config)
    drawing = torch.Generator().manual_seed(0)
    views = torch.randn(images, config.views, 3, config.image, config.image, generator=drawing).to(where)
    labels = torch.zeros(images, dtype=torch.long, device=where)
    terms: dict[str, torch.Tensor] = {}
    began = time.monotonic()
    kept = Kept(model)
    for _ in range(steps):
        optimizer.zero_grad()
        with kept:
            terms = model(views, labels, directions(config.projector_dim, config.slices, drawing, where))
        terms["total"].backward()  # type: ignore[no-untyped-call]
        if config.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
    silent = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    if silent:
        raise InputError(f"{len(silent)} parameters of {config.name} were given no gradient; the first is {silent[0]}.")
    values = None if where.type == "meta" else {name: float(value.detach()) for name, value in terms.items()}
    if values is not None and not all(map(math.isfinite, values.values())):
        raise InputError(f"The loss of {config.name} is not finite: {values}.")
    parts = {"backbone": model.vit, "projector": model.projector, "probe": model.probe}
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items() if part is not None}
    return {
        "name": config.name,
        "device": str(where),
        "steps": steps,
        "images": images,
        "parameters": counts,
        "state_gib": round(16 * sum(counts.values()) / 2**30, 2),  # 4 bytes each: weight, gradient, two moments
        "saved_gib": round(kept.bytes / 2**30, 4),
        "seconds_per_step": None if values is None else round((time.monotonic() - began) / steps, 3),
        "terms": values,
    }


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Within, counts the bytes that a forward keeps for backward: each storage once, weights left out."""

    def __init__(self, model: torch.nn.Module) -> None:
        own = {id(parameter) for parameter in model.parameters()}
        self.bytes = 0
        self._seen: dict[int, Any] = {}

        def keep(saved: torch.Tensor) -> torch.Tensor:
            whole = saved if saved._base is None else saved._base  # views of one tensor are kept once
            if id(whole) not in own and id(whole) not in self._seen:
                self._seen[id(whole)] = whole  # held, so that no other tensor is given its number
                self.bytes += whole.numel() * whole.element_size()
            return saved

        super().__init__(keep, lambda saved: saved)

    def __enter__(self) -> Kept:  # type: ignore[override]
        self.bytes, self._seen = 0, {}
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._seen = {}
