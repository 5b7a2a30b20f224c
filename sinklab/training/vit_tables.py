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

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sinklab.training.vit_files import Told, number

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("probe_accuracy", "probe_loss", "common_mode", "max_inflow")
TERMS = ("total", "sigreg", "invariance", "probe", "penalty")
EVENTS = tuple(f"{rule}_{name}" for rule in ("relaxed", "strict") for name in ("nop", "broadcast", "intermediate"))
PER_LAYER = ("common_mode", "common_mode_ungated", "max_inflow")
"""In metrics.jsonl their names end with the number of the block."""


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
