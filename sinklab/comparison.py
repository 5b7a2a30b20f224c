"""Diagnosed runs side by side: the paper's Tables 14 and 15 over variants, each cell a mean over seeds.

A training run stands for all its diagnosed models (RUN/diagnosed/MEMBER), any other run for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinklab.errors import InputError
from sinklab.reports.variants import (
    Compared,
    arm_and_seed,
    differing_images,
    not_finite_sentences,
    rules_of,
    sink_counts,
    table_14,
    table_15,
    who_by_rule,
)
from sinklab.trained import DIAGNOSED

__all__ = [
    "Compared",
    "diagnosed",
    "is_training",
    "not_diagnosed",
    "not_finite_sentences",
    "sink_counts",
    "table_14",
    "table_15",
]


def is_training(path: str | Path) -> bool:
    """Whether a folder is a training run. Raises NotFoundError where there is no run."""
    return _config(path).get("purpose") == "training"


def diagnosed(paths: Sequence[str | Path]) -> list[Compared]:
    """The diagnosed runs that the folders stand for, in the order of the trainings' own members; there may be none.

    Raises InputError for an unfinished run, a folder named twice, and runs that were made under different rules, or of
    different images: such counts have no mean, and no difference.
    """
    from sinklab.diagnosis import open_run

    found: list[Compared] = []
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise InputError("A run is compared with others: the same folder was given twice.")
    for path in paths:
        folder = Path(path)
        if not is_training(folder):
            run = open_run(folder)
            arm, seed = arm_and_seed(str(run.config["model"]["name"]))
            found.append(Compared(run=run, source=folder.as_posix(), arm=arm, seed=seed))
            continue
        for name in _looked_at(folder):
            arm, seed = arm_and_seed(name)
            run = open_run(folder / DIAGNOSED / name)
            found.append(Compared(run=run, source=folder.as_posix(), arm=arm, seed=seed, member=name))
    if len(rules_of(found)) > 1:
        raise InputError(
            f"Sinks are counted under one rule, but these runs have {len(rules_of(found))}: {who_by_rule(found)}. "
            "Diagnose them under one, with --overwrite."
        )
    if said := differing_images(found):
        raise InputError(
            f"Sinks are counted on the same images, but these models were diagnosed on different ones: {said}. "
            "Diagnose them on the same, with --overwrite."
        )
    return found


def not_diagnosed(paths: Sequence[str | Path], found: Sequence[Compared]) -> list[str]:
    """The trained models that are missing from the diagnosed ones, by name; none where nothing was diagnosed at all."""
    seen = {one.name for one in found}
    planned = [
        f"{Path(path).as_posix()}/{name}" for path in paths if is_training(path) for name in _config(path)["members"]
    ]
    return [name for name in planned if name not in seen] if found else []


def _looked_at(folder: Path) -> list[str]:
    """Names of the models of a training run that were diagnosed, in the order of its run.json, others after them."""
    within = folder / DIAGNOSED
    present = sorted(record.parent.relative_to(within).as_posix() for record in within.glob("**/run.json"))
    order = [str(name) for name in _config(folder).get("members", [])]
    return [name for name in order if name in present] + [name for name in present if name not in order]


def _config(path: str | Path) -> dict[str, Any]:
    from sinklab.run import Run

    return Run.open(path).config
