"""What an experiment is asked to do: one frozen dataclass, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sinklab.errors import InputError
from sinklab.interventions.design import EDITS
from sinklab.interventions.edit import ANYWHERE, Edit

METRICS = ("patch", "cls", "logits")


@dataclass(frozen=True, kw_only=True)
class PatchOptions:
    """Options of `patch`; everything that the effects depend on is saved in run.json and checked by --resume."""

    heads: tuple[tuple[int, int], ...] | None = None
    """(layer, head) pairs; None chooses those with the most events ("auto")."""
    edits: tuple[str, ...] = EDITS
    classes: tuple[str, ...] = ("nop", "broadcast")
    per_class: int = 16
    """Heads a class in layers ≥ 1."""
    block0: int = 4
    """Heads a class in block 0."""
    min_events: int = 50
    """Events that a head needs to be chosen."""
    min_events_analysis: int = 20
    """Edited images that a head needs for a verdict, and to count in a class's mean."""
    held_out: float = 0.25
    """Share of the images that are not edited and give the mean values."""
    joint: bool = False
    """Edit the heads of a class together as well, the first, the first two, … and all."""
    metrics: tuple[str, ...] = METRICS
    bootstrap: int = 2000
    seed: int = 0
    rows: int = 32
    """Edits that run at once."""
    plan: tuple[Edit, ...] | None = None
    """Edits of one's own, made together in every image, in place of the battery."""
    labels: Mapping[str, int] = field(default_factory=dict)
    """Image → class number, for the change of cross-entropy."""

    def __post_init__(self) -> None:
        for name, given, known in (
            ("--edits", self.edits, EDITS),
            ("--class", self.classes, ("nop", "broadcast", "intermediate")),
            ("--metric", self.metrics, METRICS),
        ):
            unknown = [one for one in given if one not in known]
            if unknown or not given:
                raise InputError(f"{name} is one or more of {', '.join(known)}, not {', '.join(unknown) or 'none'}.")
            if len(set(given)) < len(given):
                raise InputError(f"{name} names {next(one for one in given if given.count(one) > 1)} twice.")
        for name, number, least in (
            ("--per-class", self.per_class, 0),
            ("--block0", self.block0, 0),
            ("--min-events", self.min_events, 1),
            ("--min-events-analysis", self.min_events_analysis, 1),
            ("--bootstrap", self.bootstrap, 1),
            ("--rows", self.rows, 1),
        ):
            if number < least:
                raise InputError(f"{name} is a number from {least} on, not {number}.")
        for edit in self.plan or ():
            if edit.kind not in ANYWHERE:
                raise InputError(f"A plan is made of {', '.join(ANYWHERE)}; {edit.kind} is one of --edits.")
            edit.as_dict()  # raises for a place that is a function
        if self.plan == ():
            raise InputError("The plan has no edit.")
        if not 0 < self.held_out < 1:
            raise InputError(f"--heldout is a share of the images between 0 and 1, or a folder, not {self.held_out}.")

    def settings(self) -> dict[str, Any]:
        """What the rows of the effects table depend on."""
        return {
            "heads": None if self.heads is None else [list(pair) for pair in self.heads],
            "edits": list(self.edits),
            "classes": list(self.classes),
            "per_class": self.per_class,
            "block0": self.block0,
            "min_events": self.min_events,
            "held_out": self.held_out,
            "joint": self.joint,
            "metrics": sorted(self.metrics),
            "seed": self.seed,
            "rows": self.rows,
            "plan": None if self.plan is None else [edit.as_dict() for edit in self.plan],
            "labels": dict(sorted(self.labels.items())),
        }
