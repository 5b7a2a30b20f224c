"""What a vision transformer has learned: the online probe on images it has not seen, and what its layers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.models.vit import ViT, shares
from sinklab.training.distributed import Ranks
from sinklab.training.lejepa import LeJEPA
from sinklab.training.vit_feed import Pictures, measured

Score = Callable[[ViT, Tensor], Mapping[str, float]]
"""(the network in evaluation mode, pixels [B 3 S S]) → numbers to record, such as sink counts."""


@torch.no_grad()
def evaluate(
    model: LeJEPA,
    images: Pictures,
    *,
    size: int,
    limit: int,
    batch: int = 64,
    device: str = "cpu",
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Probe accuracy and loss on centre crops (None without classes), and each layer's common-mode share.

    The first `limit` pictures count. Every rank computes every world-th batch, and the result is of all of them.
    """
    ranks = ranks or Ranks()
    count = min(limit, len(images))
    batches = -(-count // batch)
    numbers, rounds = range(ranks.rank, batches, ranks.world), -(-batches // ranks.world)
    depth, classes = model.vit.shape.depth, model.probe is not None
    sums = torch.zeros(3 + 2 * depth, dtype=torch.float64)  # images, right, loss; moments
    was, _ = model.training, model.eval()
    for round_number in range(rounds):  # a sharded model needs all ranks at each forward
        number = numbers[round_number] if round_number < len(numbers) else 0
        counts = round_number < len(numbers)
        positions = list(range(number * batch, min(count, (number + 1) * batch)))
        pixels, asked = (part.to(device) for part in measured(images, positions, size))
        with model.autocast(pixels.device):
            tokens, found = model.vit(pixels, measure="gated")
            answers = model.probe(tokens[:, 0]).float() if model.probe is not None else None
        if not counts:
            continue
        sums[0] += len(positions)
        sums[3:] += len(positions) * found.double().flatten().cpu()
        if answers is not None:
            sums[1] += float((answers.argmax(-1) == asked).sum())
            sums[2] += float(F.cross_entropy(answers, asked, ignore_index=-1, reduction="sum"))
    model.train(was)
    sums = torch.tensor(ranks.total(sums.tolist()), dtype=torch.float64)
    total = float(sums[0])
    return {
        "images": round(total),
        "probe_accuracy": float(sums[1]) / total if classes else None,
        "probe_loss": float(sums[2]) / total if classes else None,
        "common_mode": shares((sums[3:] / total).reshape(depth, 2)).tolist(),
    }


@torch.no_grad()
def layer_scores(model: LeJEPA, pixels: Tensor, score: Score | None = None) -> dict[str, float]:
    """The numbers that are recorded as training goes on: each layer's common-mode share, with and without the output
    gate where there is one, and whatever `score` adds."""
    was, _ = model.training, model.eval()
    try:
        found: dict[str, float] = {}
        kinds = ("gated",) if model.vit.shape.gate == "none" else ("gated", "ungated")
        for kind in kinds:
            with model.autocast(pixels.device):
                _, moments = model.vit(pixels, measure=kind)
            name = "common_mode" if kind == "gated" else "common_mode_ungated"
            found |= {f"{name}_{layer}": value for layer, value in enumerate(shares(moments).tolist())}
        return found | dict(score(model.vit, pixels) if score is not None else {})
    finally:
        model.train(was)
