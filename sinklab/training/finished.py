"""What is whole of a training that was begun: a member is finished only if its files are.

A kill, a full disk or a deleted file may leave an evaluation without weights, or weights without what they are of. The
trainings ask here, and --resume makes again what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError
from sinklab.settings import plain

if TYPE_CHECKING:
    from sinklab.run import Run


def begun_status(run: Run) -> str:
    """What run.json says while a run is trained: a complete one stays so, for its tables are there all the while."""
    return "complete" if run.config.get("status") == "complete" else "running"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, up to one that was cut short or is none of metrics; [] without a file."""
    lines: list[dict[str, Any]] = []
    if not path.is_file():
        return lines
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            break
        if not isinstance(told, dict) or type(told.get("step")) is not int:
            break
        lines.append(told)
    return lines


def reach(lines: Sequence[Mapping[str, Any]], step: int) -> bool:
    """Whether metrics have a line with the loss of this step."""
    return any(line["step"] == step and "total" in line for line in reversed(lines))


def steps_done(checkpoint: Path) -> int:
    """Steps in a checkpoint; 0 where there is none, or none that can be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(checkpoint, framework="pt") as file:
            return int(json.loads(file.metadata()["sinklab"])["step"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return 0


def said_of_weights(path: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The .json of weights that were made with these settings; None where there is none, or of others."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or {name: said.get(name) for name in settings} != plain(settings):
        return None
    return said


def whole_weights(path: Path, shapes: Mapping[str, Sequence[int]] | None = None) -> bool:
    """Whether a .safetensors file is there and as long as it says; with `shapes`, whether it holds just these."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            held = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError):
        return False
    return shapes is None or held == {name: list(shape) for name, shape in shapes.items()}


def read_rows(path: Path, texts: Sequence[str], numbers: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of an evaluation.json, each with these texts, and these numbers or null.

    Raises NotFoundError where there is no such file, InputError for another one.
    """
    rows = read_evaluation_file(path)
    fits = isinstance(rows, list) and bool(rows) and all(isinstance(row, dict) for row in rows)
    for row in rows if fits else ():
        fits = fits and all(isinstance(row.get(name), str) for name in texts)
        fits = fits and all(name in row and is_number_or_none(row[name]) for name in numbers)
    if not fits:
        raise damaged(path)
    return list(rows)


def read_evaluation_file(path: Path) -> Any:
    """What an evaluation.json holds. Raises NotFoundError where there is none, InputError where it is no JSON."""
    if not path.is_file():
        raise NotFoundError(f"There is no {path}: that training is not finished. Go on with its run, with --resume.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(path) from error


def is_number_or_none(value: Any) -> bool:
    """Whether JSON holds a number there, or null."""
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def damaged(path: Path) -> InputError:
    """The error for an evaluation that is none."""
    return InputError(f"{path} is damaged, or not an evaluation: the run's own command with --resume makes it again.")
