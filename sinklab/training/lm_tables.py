"""The tables of a language model run, from its evaluations and metrics: what the report draws, without torch.

| table | one row |
|---|---|
| tables/training.csv | an evaluation: seed, config, lr, steps, parameters, bits a byte |
| tables/curves.csv | a line of the metrics: member, seed, config, lr, step, train_bpc, validation_bpc |
| tables/points.csv | a model at one learning rate, over seeds; whether the rate was chosen |
| tables/differences.csv | two models of one seed, each at its chosen rate: how many bits one has more |
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("validation_bpc", "test_bpc")
"""Bits a byte of the best weights, over the whole split: less is better."""
CURVES = ["member", "seed", "config", "lr", "step", "train_bpc", "validation_bpc"]


def chosen_points(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """For each model, the learning rate whose validation bits a byte are lowest, by the median over seeds.

    A rate at which a seed diverged has infinitely many there; a number that is missing is None or NaN.
    """
    held: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        bits = row["validation_bpc"]
        bits = math.inf if bits is None or math.isnan(bits) else bits
        held.setdefault(row["config"], {}).setdefault(row["lr"], []).append(bits)
    return {name: min(points, key=lambda lr: median(points[lr])) for name, points in held.items()}


def at_chosen(training: pd.DataFrame) -> pd.DataFrame:
    """The rows of each model at the learning rate that was chosen for it."""
    chosen = chosen_points(training.to_dict("records"))  # type: ignore[arg-type]
    return training[training["lr"] == training["config"].map(chosen)]


def curve_rows(metrics: Path, member: str, seed: int, config: str, lr: float) -> Iterable[dict[str, Any]]:
    """The lines of a member's metrics.jsonl; none where it diverged before the first. A line cut short ends it."""
    if not metrics.is_file():
        return
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            return
        if not isinstance(told, dict) or type(told.get("step")) is not int:
            return
        yield {
            "member": member, "seed": seed, "config": config, "lr": lr, "step": int(told["step"]),
            "train_bpc": told.get("bpc"), "validation_bpc": told.get("validation"),
        }  # fmt: skip


def points_table(training: pd.DataFrame) -> pd.DataFrame:
    """[config, lr, chosen, steps, parameters, seeds, diverged, and of each measure NAME_mean, _std, _median].

    One row a model and learning rate, in the order of the training. `seeds` are those with a number; `diverged` those
    without. The spread over seeds is that of a sample (NaN for one seed).
    """
    import pandas as pd

    chosen = chosen_points(training.to_dict("records"))  # type: ignore[arg-type]
    rows = []
    for (config, lr), mine in training.groupby(["config", "lr"], sort=False):
        known = mine.dropna(subset=[MEASURES[0]])
        row = {
            "config": config, "lr": lr, "chosen": chosen[str(config)] == lr, "steps": int(mine["steps"].iloc[0]),
            "parameters": known["parameters"].max(), "seeds": len(known), "diverged": len(mine) - len(known),
        }  # fmt: skip
        for name in MEASURES:
            row |= {f"{name}_mean": known[name].mean(), f"{name}_std": known[name].std(),
                    f"{name}_median": known[name].median()}  # fmt: skip
        rows.append(row)
    return pd.DataFrame(rows)


def pairs(configs: Iterable[str]) -> list[tuple[str, str]]:
    """(model, what it is compared with): each phase model with the transformer of its size, ablations with the whole.

    "phase-tiny" with "transformer-tiny", "phase-tiny+no-gates" with "phase-tiny"; where both are there.
    """
    known = list(dict.fromkeys(configs))
    found = [(name, name.replace("phase-", "transformer-")) for name in known if name.startswith("phase-")]
    found += [(name, name.partition("+")[0]) for name in known if "+" in name]
    return [(one, other) for one, other in found if one != other and other in known]


def differences_table(training: pd.DataFrame) -> pd.DataFrame:
    """[config, against, seed, measure, value, other, difference]: value minus other, of one seed and measure.

    Each model at the learning rate chosen for it; a seed that either model lacks, or diverged at, has no row.
    """
    import pandas as pd

    best, rows = at_chosen(training), []
    for config, against in pairs(training["config"]):
        for name in MEASURES:
            own, other = (best[best["config"] == each].set_index("seed")[name].dropna() for each in (config, against))
            for seed in sorted(own.index.intersection(other.index)):
                value, beside = float(own[seed]), float(other[seed])
                rows.append(
                    {
                        "config": config,
                        "against": against,
                        "seed": int(seed),
                        "measure": name,
                        "value": value,
                        "other": beside,
                        "difference": value - beside,
                    }
                )
    return pd.DataFrame(rows, columns=["config", "against", "seed", "measure", "value", "other", "difference"])
