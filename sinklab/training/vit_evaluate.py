"""What a vision transformer has learned: the online probe on images it has not seen, and what its layers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.errors import InputError
from sinklab.models.attention import Attention
from sinklab.models.vit import ViT, shares
from sinklab.training.checkpoint import whole
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
    """Probe accuracy and loss on centre crops, and each layer's common-mode share.

    The first `limit` pictures count, those that cannot be read left out (`unreadable` says how many). Accuracy and loss
    are of the pictures that have a label, None where there is none. Every rank computes every world-th batch, and the
    result is of all of them. Raises InputError where no picture can be read.
    """
    ranks = ranks or Ranks()
    count = min(limit, len(images))
    batches = -(-count // batch)
    numbers, rounds = range(ranks.rank, batches, ranks.world), -(-batches // ranks.world)
    depth = model.vit.shape.depth
    sums = torch.zeros(5 + 2 * depth, dtype=torch.float64)  # images, unreadable, labelled, right, loss; moments
    was, _ = model.training, model.eval()
    for round_number in range(rounds):  # a sharded model needs all ranks at each forward
        number = numbers[round_number] if round_number < len(numbers) else 0
        counts = round_number < len(numbers)
        positions = list(range(number * batch, min(count, (number + 1) * batch)))
        pixels, asked, missed = measured(images, positions, size)
        if not len(pixels):  # the forward is still owed to the other ranks
            pixels, sums[1], counts = torch.zeros(1, 3, size, size), sums[1] + counts * len(missed), False
        pixels, asked = pixels.to(device), asked.to(device)
        with model.autocast(pixels.device):
            tokens, found = model.vit(pixels, measure="gated")
            answers = model.probe(tokens[:, 0]).float() if model.probe is not None else None
        if not counts:
            continue
        sums[0] += len(asked)
        sums[1] += len(missed)
        sums[5:] += len(asked) * found.double().flatten().cpu()
        if answers is not None:
            sums[2] += int((asked >= 0).sum())
            sums[3] += float((answers.argmax(-1) == asked).sum())
            sums[4] += float(F.cross_entropy(answers, asked, ignore_index=-1, reduction="sum"))
    model.train(was)
    sums = torch.tensor(ranks.total(sums.tolist()), dtype=torch.float64)
    total, unreadable, labelled, right, loss = sums[:5].tolist()
    if not total:
        raise InputError(f"None of the {count} images for validation can be read.")
    return {
        "images": round(total),
        "unreadable": round(unreadable),
        "probe_accuracy": right / labelled if labelled else None,
        "probe_loss": loss / labelled if labelled else None,
        "common_mode": shares((sums[5:] / total).reshape(depth, 2)).tolist(),
    }


@torch.no_grad()
def layer_scores(model: LeJEPA, pixels: Tensor, score: Score | None = None) -> dict[str, float]:
    """The numbers that are recorded as training goes on: each layer's common-mode share, with and without the output
    gate where there is one, and whatever `score` adds. All ranks have to call it: of a sharded model `score` is given a
    gathered copy, for it looks at weights as well as it calls them."""
    was, _ = model.training, model.eval()
    try:
        found: dict[str, float] = {}
        kinds = ("gated",) if model.vit.shape.gate == "none" else ("gated", "ungated")
        for kind in kinds:
            with model.autocast(pixels.device):
                _, moments = model.vit(pixels, measure=kind)
            name = "common_mode" if kind == "gated" else "common_mode_ungated"
            found |= {f"{name}_{layer}": value for layer, value in enumerate(shares(moments).tolist())}
        if score is None and model.vit.shape.kernel == "softmax":
            return found
        network = gathered(model.vit)
        return found | row_sums(network, pixels) | dict(score(network, pixels) if score is not None else {})
    finally:
        model.train(was)


def row_sums(vit: ViT, pixels: Tensor) -> dict[str, float]:
    """row_sum_LAYER, the mean over images, heads and queries of Σ_j A_ij, for kernels whose rows need not sum to 1; of
    a sink logit 1 − row_sum is the mass that escaped. Nothing for softmax."""
    if vit.shape.kernel == "softmax":
        return {}
    sums: dict[str, float] = {}

    def hook(layer: int, attention: Attention) -> Callable[..., None]:
        def look(module: Any, args: Any, h: Tensor) -> None:
            sums[f"row_sum_{layer}"] = float(attention.pattern(h).sum(-1).mean())

        return look

    handles = [
        block.norm1.register_forward_hook(hook(layer, block.attn)) for layer, block in enumerate(cast(Any, vit.blocks))
    ]
    try:
        vit(pixels)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def gathered(vit: ViT) -> ViT:
    """The network itself, or, of one that is sharded over ranks, a copy with whole weights in the same mode."""
    if not any(hasattr(parameter, "full_tensor") for parameter in vit.parameters()):
        return vit
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        copy = ViT(vit.shape)
    copy.load_state_dict({name: whole(value) for name, value in vit.state_dict().items()}, assign=True)
    return copy.train(vit.training)
