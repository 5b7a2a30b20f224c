"""What an experiment is asked to do: one frozen dataclass, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.interventions.design import EDITS, PHASE_EDITS
from sinklab.interventions.edit import ANYWHERE, Edit

if TYPE_CHECKING:
    from sinklab.handle import Model

METRICS = ("patch", "cls", "logits")


@dataclass(frozen=True, kw_only=True)
class PatchOptions:
    """Options of `patch`; everything that the effects depend on is saved in run.json and checked by --resume."""

    heads: tuple[tuple[int, int], ...] | None = None
    """(layer, head) pairs; None chooses those with the most events ("auto")."""
    edits: tuple[str, ...] = EDITS
    """As they stand, the battery: for a model of phases, `null` is then one of them."""
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
        self._require_kinds()
        for name, given, known in (
            ("--edits", self.edits, PHASE_EDITS),
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
        if self.plan is not None and (self.heads is not None or self.joint or self.edits != EDITS):
            raise InputError("A plan takes the place of the battery: give it without --heads, --edits and --joint.")
        if self.plan == ():
            raise InputError("The plan has no edit.")
        if not 0 < self.held_out < 1:
            raise InputError(
                f"--heldout is a share of the inputs between 0 and 1, or a folder of images, not {self.held_out}."
            )

    def _require_kinds(self) -> None:
        """Raise InputError for a value of the wrong kind, naming it."""
        for name in ("per_class", "block0", "min_events", "min_events_analysis", "bootstrap", "seed", "rows"):
            number = getattr(self, name)
            if not isinstance(number, Integral) or isinstance(number, bool):
                raise InputError(f"{name} is a whole number, not {number!r}.")
            object.__setattr__(self, name, int(number))
        for name in ("edits", "classes", "metrics"):
            words = getattr(self, name)
            if isinstance(words, str) or not all(isinstance(word, str) for word in words):
                raise InputError(f"{name} is a list of names, not {words!r}.")
        if not isinstance(self.joint, bool):
            raise InputError(f"joint is True or False, not {self.joint!r}.")
        if not isinstance(self.labels, Mapping):
            raise InputError(f"labels is a dictionary, image → class number, not {self.labels!r}.")
        if isinstance(self.held_out, bool) or not isinstance(self.held_out, (int, float)):
            raise InputError(f"held_out is a share between 0 and 1, or a folder, not {self.held_out!r}.")
        if self.heads is not None:
            object.__setattr__(self, "heads", _pairs(self.heads))
        for edit in self.plan or ():
            if not isinstance(edit, Edit):
                raise InputError(f"A plan is a list of sinklab.Edit, not of {edit!r}.")

    def fitting(self, model: Model) -> PatchOptions:
        """With the battery that fits the model, where no other edits were chosen.

        InputError for edits that do not fit, and for metrics that were chosen and are not to be had.
        """
        self._require_measured(model)
        phases = all(site.parts.phase is not None for site in model.sites)
        if "null" in self.edits and not phases:
            raise InputError(
                "The edit null gives every query its own phases in place of the sink's; the values of this model are "
                "no phases. Its nearest here is zero."
            )
        return replace(self, edits=PHASE_EDITS) if phases and self.edits == EDITS and self.plan is None else self

    def _require_measured(self, model: Model) -> None:
        """Raise InputError for a metric that the model has not; of the default ones those that it has are measured."""
        if set(self.metrics) == set(METRICS):
            return
        own = model.loaded.sequences
        if "logits" in self.metrics and (model.loaded.classify is None or (own is not None and not own.predicts_next)):
            raise InputError(
                f"--metric logits needs a classifier or a prediction of the next token, and {model.name} has neither."
            )
        if "cls" in self.metrics and "cls" not in model.tokens.prefix:
            raise InputError(f"--metric cls is the change of the class token, and {model.name} has none.")

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


def _pairs(heads: Any) -> tuple[tuple[int, int], ...]:
    """(layer, head) pairs as whole numbers."""
    try:
        return tuple((int(index(layer)), int(index(head))) for layer, head in heads)
    except (TypeError, ValueError) as error:
        raise InputError(f"heads is a list of (layer, head) pairs like [(5, 3), (0, 2)], not {heads!r}.") from error


def options_from(chosen: Mapping[str, Any]) -> PatchOptions:
    """Options from fields by name; lists become tuples. Raises InputError for a name that is no field."""
    known = [entry.name for entry in fields(PatchOptions)]
    unknown = sorted(chosen.keys() - set(known))
    if unknown:
        raise InputError(f"patch has no option {unknown[0]!r}; it has {', '.join(known)}.")
    listed: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()
    }
    return PatchOptions(**listed)
