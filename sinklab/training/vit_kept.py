"""What a vision transformer's training keeps epoch by epoch: its validation, the best weights, and what was lost."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.training.finished import is_number_or_none, read_metrics, said_of_weights, steps_done, whole_weights
from sinklab.training.loop import CHECKPOINT, METRICS

if TYPE_CHECKING:
    from sinklab.training.vit_member import Member

VALIDATION = "validation.jsonl"
BEST = "best"


def state_name(name: str) -> str:
    """The file of the whole state (optimizer, step) as it was when the weights of that name were kept: put in the place
    of checkpoint.safetensors, it is what --resume goes on from."""
    return f"checkpoint-{name}.safetensors"


def validation_lines(path: Path, *, before: int) -> list[dict[str, Any]]:
    """The lines of earlier epochs, up to one that is none."""
    kept: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict) or type(line.get("epoch")) is not int or "probe_accuracy" not in line:
            break
        if not is_number_or_none(line["probe_accuracy"]):
            break
        kept += [line] if line["epoch"] < before else []
    return kept


def is_best(member: Member, epoch: int, accuracy: float | None, earlier: Iterable[dict[str, Any]]) -> bool:
    """Whether an epoch's accuracy is above that of all earlier ones: by their lines, and by what the best weights say
    of themselves, for lines may be lost. Without classes no weights are the best."""
    if accuracy is None:
        return False
    known = [line["probe_accuracy"] for line in earlier]
    said = said_of_weights(member.folder / f"{BEST}.json", member.settings()) or {}
    found = said.get("validation")
    if isinstance(found, dict) and type(said.get("epoch")) is int and said["epoch"] < epoch:
        known.append(found.get("probe_accuracy"))
    return all(accuracy > value for value in known if isinstance(value, (int, float)))


def lost(member: Member, *, finished: bool) -> str | None:
    """A sentence on the files that a member's steps have left and that are no longer there, or whole; None for none.

    What a resumed training makes again (weights at the end, evaluation) is not among them.
    """
    steps = member.config.epochs * member.steps_per_epoch
    kept = steps_done(member.folder / CHECKPOINT)
    done = steps if finished else kept
    begun = bool(read_metrics(member.folder / METRICS))
    if not done and begun and not (member.folder / CHECKPOINT).is_file():
        return f"{member.name} had been begun, but there is no {CHECKPOINT} to go on from: it is trained from step 0."
    epochs = done // member.steps_per_epoch
    lines = validation_lines(member.folder / VALIDATION, before=epochs + 1)
    whole = [line["epoch"] for line in lines] == list(range(1, epochs + 1))
    state = dict(_weights(member, epochs, lines if whole else None))
    if finished and kept != steps:
        state[CHECKPOINT] = _state(member.folder / CHECKPOINT)
    told = [
        f"{' and '.join(names) if len(names) < 3 else ', '.join(names)} {'is' if len(names) == 1 else 'are'} {words}"
        for words in ("missing", "damaged")
        if (names := [name for name, found in state.items() if found == words])
    ]
    told += [] if whole else [f"{VALIDATION} tells of {len(lines)} of {epochs} epochs"]
    if not told:
        return None
    return f"{member.name}: {'; '.join(told)}. Nothing but training anew would make that again."


def _weights(member: Member, epochs: int, lines: list[dict[str, Any]] | None) -> Iterable[tuple[str, str]]:
    """Those of the kept weights' files that are not whole, each with "missing" or "damaged"; lines: of validation,
    if they are whole."""
    if lines is None:
        scored = range(min(member.config.validation_images, len(member.validation)))
        best = epochs > 0 and bool(member.images.classes) and any(member.validation.label(at) >= 0 for at in scored)
    else:
        best = any(line["probe_accuracy"] is not None for line in lines)
    every = member.config.save_every
    stems = [BEST] if best else []
    stems += [f"epoch-{epoch:04d}" for epoch in range(every, epochs + 1, every)] if every else []
    for stem in stems:
        weights, about = (member.folder / f"{stem}.{ending}" for ending in ("safetensors", "json"))
        if not whole_weights(weights):
            yield weights.name, _state(weights)
        if said_of_weights(about, member.settings()) is None:
            yield about.name, _state(about)


def _state(path: Path) -> str:
    return "damaged" if path.is_file() else "missing"
