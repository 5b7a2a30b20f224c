"""The tables of a vision transformer run, from its members' own files: what the report draws, without torch.

| table | one row |
|---|---|
| tables/members.csv | a training: whether it is finished, its probe, common mode, largest inflow, parameters |
| tables/variants.csv | a variant over its finished seeds: mean and standard deviation of each of MEASURES |
| tables/curves.csv | a line of metrics.jsonl: terms of the loss, sink events, mean common mode of blocks from 1 on |
| tables/layers.csv | a block at a scored step: its common-mode share and its largest mean inflow of a head |
| tables/validation.csv | an epoch: the probe, and the mean common mode of blocks from 1 on |

A run may be unfinished: its members are then as far as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError
from sinklab.training.finished import is_number_or_none, reach, read_metrics, read_rows

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "training"
MEASURES = ("probe_accuracy", "probe_loss", "common_mode", "max_inflow")
TERMS = ("total", "sigreg", "invariance", "probe", "penalty")
EVENTS = tuple(f"{rule}_{name}" for rule in ("relaxed", "strict") for name in ("nop", "broadcast", "intermediate"))
PER_LAYER = ("common_mode", "common_mode_ungated", "max_inflow")
"""In metrics.jsonl their names end with the number of the block."""


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


def mean_from_1(shares: Mapping[int, float]) -> float:
    """The mean over blocks 1 and up, as the penalty and `sinklab compare` take it; NaN without any."""
    later = [value for layer, value in shares.items() if layer > 0]
    return sum(later) / len(later) if later else math.nan


def by_layer(line: Mapping[str, Any], name: str) -> dict[int, float]:
    """Block → number, of a line's NAME_0, NAME_1, …"""
    found = {str(key).removeprefix(f"{name}_"): value for key, value in line.items() if str(key).startswith(f"{name}_")}
    return {int(layer): number(value) for layer, value in found.items() if layer.isdigit()}


def curves_table(told: Sequence[Told]) -> pd.DataFrame:
    """[member, seed, config, step, TERMS, probe_accuracy, rate, EVENTS, common_mode]: empty where a line has none."""
    import pandas as pd

    names = (*TERMS, "probe_accuracy", "rate", *EVENTS)
    rows = [
        {
            **_who(one),
            "step": line["step"],
            **{name: number(line.get(name)) for name in names},
            "common_mode": mean_from_1(by_layer(line, "common_mode")),
        }
        for one in told
        for line in one.metrics
    ]
    return pd.DataFrame(rows, columns=["member", "seed", "config", "step", *names, "common_mode"])


def layers_table(told: Sequence[Told]) -> pd.DataFrame:
    """[member, seed, config, step, layer, PER_LAYER]: of the lines that were scored."""
    import pandas as pd

    rows = []
    for one in told:
        for line in one.metrics:
            found = {name: by_layer(line, name) for name in PER_LAYER}
            for layer in sorted({each for numbers in found.values() for each in numbers}):
                rows.append({**_who(one), "step": line["step"], "layer": layer}
                            | {name: found[name].get(layer, math.nan) for name in PER_LAYER})  # fmt: skip
    return pd.DataFrame(rows, columns=["member", "seed", "config", "step", "layer", *PER_LAYER])


def validation_table(told: Sequence[Told]) -> pd.DataFrame:
    """[member, seed, config, epoch, step, images, probe_accuracy, probe_loss, common_mode]."""
    import pandas as pd

    rows = [
        {
            **_who(one),
            "epoch": line["epoch"],
            "step": line["epoch"] * one.steps_per_epoch,
            **{name: number(line.get(name)) for name in ("images", "probe_accuracy", "probe_loss")},
            "common_mode": mean_from_1(dict(enumerate(number(each) for each in line.get("common_mode", ())))),
        }
        for one in told
        for line in one.validation
    ]
    columns = ["epoch", "step", "images", "probe_accuracy", "probe_loss", "common_mode"]
    return pd.DataFrame(rows, columns=["member", "seed", "config", *columns])


def ends_table(told: Sequence[Told]) -> pd.DataFrame:
    """[member, seed, config, layer, common_mode]: each block's share on all validation images, of finished members."""
    import pandas as pd

    rows = [
        {**_who(one), "layer": int(row["layer"]), "common_mode": number(row["value"])}
        for one in told
        for row in one.evaluation
        if row["metric"] == "common_mode"
    ]
    return pd.DataFrame(rows, columns=["member", "seed", "config", "layer", "common_mode"])


def members_table(told: Sequence[Told]) -> pd.DataFrame:
    """[member, seed, config, finished, done, steps, images, MEASURES, max_inflow_layer, parameters].

    `max_inflow` is the largest mean inflow of a head in any block from 1 on, on the images that are scored, at the end.
    MEASURES of an unfinished member are empty.
    """
    import pandas as pd

    rows = []
    for one in told:
        whole = {row["metric"]: number(row["value"]) for row in one.evaluation if row["layer"] is None}
        shares = {int(row["layer"]): number(row["value"]) for row in one.evaluation if row["metric"] == "common_mode"}
        last: dict[str, Any] = (
            next((line for line in reversed(one.metrics) if "max_inflow_1" in line), {}) if one.finished else {}
        )
        inflow = {layer: value for layer, value in by_layer(last, "max_inflow").items() if layer > 0}
        top = max(inflow, key=lambda layer: inflow[layer], default=None)
        rows.append(
            {
                **_who(one),
                "finished": one.finished,
                "done": one.done,
                "steps": one.steps,
                "images": whole.get("images", math.nan),
                "probe_accuracy": whole.get("probe_accuracy", math.nan),
                "probe_loss": whole.get("probe_loss", math.nan),
                "common_mode": mean_from_1(shares),
                "max_inflow": math.nan if top is None else inflow[top],
                "max_inflow_layer": math.nan if top is None else top,
                "parameters": math.nan if one.parameters is None else one.parameters,
            }
        )
    return pd.DataFrame(rows)


def variants_table(members: pd.DataFrame) -> pd.DataFrame:
    """[config, seeds, planned, parameters, and of each of MEASURES NAME_mean, NAME_std], over finished members.

    The standard deviation is that of a sample (NaN for one seed). members: `members_table`.
    """
    import pandas as pd

    rows = []
    for config, mine in members.groupby("config", sort=False):
        done = mine[mine["finished"]]
        row = {"config": config, "seeds": len(done), "planned": len(mine), "parameters": done["parameters"].max()}
        for name in MEASURES:
            row |= {f"{name}_mean": done[name].mean(), f"{name}_std": done[name].std()}
        rows.append(row)
    return pd.DataFrame(rows)


def _who(one: Told) -> dict[str, Any]:
    return {"member": one.name, "seed": one.seed, "config": one.config}
