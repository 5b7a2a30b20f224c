"""How much a run of the controlled tasks trains, said so that a reader knows what its numbers may be compared with."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sinklab.training.toy_config import VARIANTS, NopBranchConfig, TrainConfig, make_config

RECORDING = ("score_every", "score_batch", "record_every", "checkpoint_every")
"""What changes no model and no evaluation."""
MATTER = (
    *("trained", "penalty", "penalty_layers", "penalty_ratio", "penalty_denominator"),
    *("damping", "threshold", "dedicated", "loss", "frequencies", "dampings", "beside", "centred"),
)
"""What is trained, and not how much of it."""


def budget(config: TrainConfig, sweep: str | None = None) -> dict[str, Any]:
    """The variant whose budget a config differs least from, what differs, and how much is trained.

    Keys: variant, changed (name → value), chosen (the same for what is no budget: arms, penalty, γ, …), steps, batch,
    sequences (a member's), of_paper (sequences over those of the paper's budget), evaluation (batches, sequences in
    each).
    """
    variant = min(VARIANTS[config.kind], key=lambda name: len(_differing(config, name)))
    steps, paper = _steps(config, sweep), make_config(config.kind, "paper")
    return {
        "variant": variant,
        "changed": _differing(config, variant),
        "chosen": _differing(config, variant, MATTER),
        "steps": steps,
        "batch": config.batch,
        "sequences": steps * config.batch,
        "of_paper": steps * config.batch / (_steps(paper, sweep) * paper.batch),
        "evaluation": [config.evaluation_batches, config.evaluation_size],
    }


def _differing(config: TrainConfig, variant: str, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    own, all_names = make_config(config.kind, variant), [entry.name for entry in fields(config)]
    names = tuple(name for name in all_names if (name in names if names else name not in RECORDING + MATTER))
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(own, name)}


def _steps(config: TrainConfig, sweep: str | None) -> int:
    return config.frequency_steps if sweep == "frequency" and isinstance(config, NopBranchConfig) else config.steps
