"""Diagnosed runs side by side: the paper's Tables 14 and 15 over variants, each cell a mean over seeds.

A training run stands for all its diagnosed models (RUN/diagnosed/MEMBER), any other run for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sinklab.errors import InputError
from sinklab.reports.variants import Compared, arm_and_seed, rules_of, sink_counts, table_14, table_15
from sinklab.trained import DIAGNOSED

__all__ = ["Compared", "diagnosed", "is_training", "sink_counts", "table_14", "table_15"]


def is_training(path: str | Path) -> bool:
    """Whether a folder is a training run. Raises NotFoundError where there is no run."""
    from sinklab.run import Run

    return Run.open(path).config.get("purpose") == "training"


def diagnosed(paths: Sequence[str | Path]) -> list[Compared]:
    """The diagnosed runs that the folders stand for; those of a training run may be none.

    Raises InputError for an unfinished run, a folder named twice, and runs made under different rules.
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
        for record in sorted((folder / DIAGNOSED).glob("**/run.json")):
            name = record.parent.relative_to(folder / DIAGNOSED).as_posix()
            arm, seed = arm_and_seed(name)
            found.append(Compared(run=open_run(record.parent), source=folder.as_posix(), arm=arm, seed=seed))
    rules = rules_of(found)
    if len(rules) > 1:
        raise InputError(f"Sinks are counted under one rule, but these runs have {len(rules)}: {'; '.join(rules)}.")
    return found
