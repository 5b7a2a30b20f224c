"""What the files of a vision transformer run's members say, finished or not, read without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinklab.errors import InputError, NotFoundError
from sinklab.training.finished import is_number_or_none, reach, read_metrics, read_rows

FOLDER = "training"


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the files of one member say."""

    name: str
    """ "seed-0/baseline-tiny"."""
    seed: int
    config: str
    steps: int
    """Of the whole training."""
    steps_per_epoch: int
    metrics: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    evaluation: list[dict[str, Any]]
    """Rows of metric, layer and value; none while it is trained."""
    parameters: int | None
    """Of the backbone that was saved at the end."""

    @property
    def finished(self) -> bool:
        return bool(self.evaluation)

    @property
    def done(self) -> int:
        """The last step that the metrics tell of."""
        return max((int(line["step"]) for line in self.metrics), default=0)


class UnreadableMember(InputError):
    """A file of a member is missing or damaged; `reason` is a phrase."""

    def __init__(self, member: Path, reason: str) -> None:
        super().__init__(f"{member} is damaged, {reason}: its run's own command with --resume makes it again.")
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What run.json says of one member; the fields are those of `Told`."""

    name: str
    seed: int
    config: str
    steps: int
    steps_per_epoch: int


def planned(config: Mapping[str, Any]) -> list[Planned]:
    """Every member of a run, in the order of its run.json, which is `config`."""
    found = []
    for name in config["members"]:
        seed, variant = str(name).split("/")
        own = config["settings"]["configs"][variant]
        per_epoch = int(config["pictures"][variant]) // int(own["batch"])
        found.append(
            Planned(
                name=str(name),
                seed=int(seed.removeprefix("seed-")),
                config=variant,
                steps=int(own["epochs"]) * per_epoch,
                steps_per_epoch=per_epoch,
            )
        )
    return found


def read_told(member: Planned, path: Path, *, complete: bool) -> Told:
    """What the files in a member's folder say; of a `complete` run every member is finished.

    Raises UnreadableMember for an evaluation that is damaged, or missing in a complete run, for metrics that do not
    reach the end of a finished member, and for what stands in place of a number.
    """
    metrics, validation = read_metrics(path / "metrics.jsonl"), _validation(path / "validation.jsonl")
    ended = complete or (path / "evaluation.json").is_file()
    if ended and not reach(metrics, member.steps):
        raise UnreadableMember(path, f"its metrics.jsonl has no line of step {member.steps}, with which it ended")
    for name, lines in (("metrics.jsonl", metrics), ("validation.jsonl", validation)):
        values = [value for line in lines for key, value in line.items() if key != "common_mode"]
        strange = [value for value in values if not is_number_or_none(value)]
        if strange:
            raise UnreadableMember(path, f"its {name} has {strange[0]!r} in place of a number")
    try:
        rows = read_rows(path / "evaluation.json", ("metric",), ("layer", "value")) if ended else []
    except NotFoundError as error:
        raise UnreadableMember(path, "it has no evaluation.json") from error
    except InputError as error:
        raise UnreadableMember(path, "its evaluation.json is none") from error
    return Told(
        **vars(member),
        metrics=metrics,
        validation=validation,
        evaluation=rows,
        parameters=parameters(path / "model.safetensors") if ended else None,
    )


def _validation(path: Path) -> list[dict[str, Any]]:
    """The lines of validation.jsonl up to one that is none; [] without the file."""
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict) or type(line.get("epoch")) is not int:
            break
        lines.append(line)
    return lines


def parameters(weights: Path) -> int | None:
    """Numbers in the backbone's parameters, by the file's own header; None for a file that is missing or damaged.

    The probe, and σReparam's directions, which are no parameters, are left out.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="numpy") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError):
        return None
    own = [name for name in shapes if not name.startswith("probe.") and not name.endswith("_scale.direction")]
    return sum(math.prod(shapes[name]) for name in own)


def cut_short(told: Sequence[Told]) -> list[str]:
    """Finished members whose validation.jsonl has lost epochs, as sentences."""
    said = []
    for one in told:
        epochs = one.steps // one.steps_per_epoch
        if one.finished and [line["epoch"] for line in one.validation] != list(range(1, epochs + 1)):
            said.append(
                f"{one.name}: validation.jsonl tells of {len(one.validation)} of {epochs} epochs; its curves over "
                "epochs have holes, its evaluation at the end is whole."
            )
    return said


def number(value: Any) -> float:
    """A number of a JSON file, NaN for null. Raises ValueError for anything else."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is no number")
    return float(value)
