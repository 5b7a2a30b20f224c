"""What the figures look at inside a trained controlled model: spectra of Θ, queries beside keys, stable ranks.

Everything is measured on the evaluation's first batch, on the CPU, so that a run's tables do not depend on what trained
it. Letters: B sequences, N tokens, C model dim, P points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinklab.data.toy import BroadcastTask, ToyTask
from sinklab.models.toy import ToyModel
from sinklab.training.toy_edits import LayerRecord, layers_of, run_model
from sinklab.training.toy_measure import interaction

if TYPE_CHECKING:
    import pandas as pd

SEQUENCES = 256
"""Sequences behind principal components and stable ranks."""
SHOWN = 12
"""Sequences whose queries and keys are written down."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """A trained model with the task it was trained on."""

    seed: int
    arm: str
    model: ToyModel
    task: ToyTask


def views(kind: str, trained: Sequence[Seen]) -> dict[str, pd.DataFrame]:
    """Name → table: the spectrum for every task; stable ranks and, for broadcast, queries and keys."""
    import pandas as pd

    made = {"spectrum_training": [row for seen in trained for row in spectrum(seen)]}
    if kind in ("broadcast", "pathway"):
        made["stable_ranks"] = [row for seen in trained for row in stable_ranks(seen)]
    if kind == "broadcast":
        made["qk_pca"] = [row for seen in trained for row in queries_and_keys(seen)]
    return {name: pd.DataFrame(rows) for name, rows in made.items()}


def spectrum(seen: Seen) -> list[dict[str, Any]]:
    """Fig. 2B: the singular values of Θ = W_Q W_Kᵀ of each layer, largest first, and each one's share σ² / Σσ²."""
    rows = []
    for layer in range(len(layers_of(seen.model))):
        sigma = torch.linalg.svdvals(interaction(seen.model, layer))
        share = sigma.square() / sigma.square().sum()
        rows += [
            {"seed": seen.seed, "arm": seen.arm, "layer": layer, "rank": rank + 1, "sigma": one, "share": part}
            for rank, (one, part) in enumerate(zip(sigma.tolist(), share.tolist(), strict=True))
        ]
    return rows


def stable_ranks(seen: Seen) -> list[dict[str, Any]]:
    """Fig. 3D: ‖U‖²_F / σ₁² of attention's update U [N C], one row a sequence and layer."""
    rows = []
    for layer, record in enumerate(_records(seen)):
        update = record.update.double()
        energies = torch.linalg.eigvalsh(update @ update.mT)  # [B N], σ² rising
        ranks = energies.sum(-1) / energies[:, -1].clamp_min(1e-30)
        rows += [
            {"seed": seen.seed, "arm": seen.arm, "layer": layer, "sequence": place, "stable_rank": rank}
            for place, rank in enumerate(ranks.tolist())
        ]
    return rows


def queries_and_keys(seen: Seen) -> list[dict[str, Any]]:
    """Fig. 3C: the queries and keys of SHOWN sequences on the two first principal components of all, per layer.

    One row a sequence, token and role ("query", "key"); `source` is True at j*. Components are those of the queries
    and keys of SEQUENCES sequences together, less their mean; `explained_1` and `explained_2` are the shares of their
    variance that lie along each.
    """
    assert isinstance(seen.task, BroadcastTask)
    source = seen.task.sources(_inputs(seen))  # [B]
    rows = []
    for layer, record in enumerate(_records(seen)):
        head = layers_of(seen.model)[layer].attention
        with torch.no_grad():
            both = torch.stack([head.q_proj(record.h), head.k_proj(record.h)]).double()  # [2 B N C]
        points, explained = components(both.reshape(-1, both.shape[-1]))
        points = points.reshape(*both.shape[:-1], 2)[:, :SHOWN]  # [2 SHOWN N 2]
        shares = {"explained_1": float(explained[0]), "explained_2": float(explained[1])}
        for role, of_role in zip(("query", "key"), points.tolist(), strict=True):
            for sequence, of_sequence in enumerate(of_role):
                for token, (x, y) in enumerate(of_sequence):
                    about = {"seed": seen.seed, "arm": seen.arm, "layer": layer, "sequence": sequence, "token": token}
                    mark = {"role": role, "source": bool(source[sequence] == token)}
                    rows.append({**about, **mark, "pc_1": x, "pc_2": y, **shares})
    return rows


def components(points: Tensor, number: int = 2) -> tuple[Tensor, Tensor]:
    """Points [P C] on their first principal components [P number], and each one's share of the variance [number].

    A component's sign is such that its largest entry is positive.
    """
    centred = points - points.mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)  # rising
    axes = vectors.flip(-1)[:, :number]  # [C number]
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return centred @ (axes * largest.sign()), values.flip(-1)[:number] / values.sum()


def _inputs(seen: Seen) -> Tensor:
    return seen.task.batch(0, SEQUENCES, purpose="evaluation").x


def _records(seen: Seen) -> list[LayerRecord]:
    with torch.no_grad():
        return run_model(seen.model, _inputs(seen))[1]
