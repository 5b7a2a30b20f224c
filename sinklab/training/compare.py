"""Finished training runs side by side: each measure over seeds, and differences paired by seed.

A kind of run takes part by having a reader in `READERS`: run → one row a seed, arm and measure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.run import Run

if TYPE_CHECKING:
    import pandas as pd

LM_MEASURES = ("validation_bpc", "test_bpc")
"""Bits a byte: less is better."""


COLUMNS = {
    "lm": (("config",), ("seed", "lr", *LM_MEASURES)),
    "toy": (("arm", "edit", "metric"), ("seed", "layer", "mean")),
}
"""Columns of tables/training.csv, by kind of training: of text, and of numbers."""


class ForeignTable(InputError):
    """A table is not the one that a training writes; `reason` is a phrase."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} is not the table of a training, {reason}: the command that made the run, with --resume, writes it "
            "again."
        )
        self.reason = reason


def training_table(run: Run) -> pd.DataFrame:
    """tables/training.csv of a run. Raises NotFoundError where it is missing, InputError where it is another table."""
    from pandas.api.types import is_numeric_dtype

    settings = run.config.get("settings", {})
    texts, numbers = COLUMNS["lm" if settings.get("kind") == "lm" else "toy"]
    table = run.table("training")
    missing = [name for name in (*texts, *numbers) if name not in table]
    wrong = [name for name in numbers if name in table and not is_numeric_dtype(table[name])]
    if missing or wrong or not len(table):
        said = f"it has no {missing[0]}" if missing else "it has no rows"
        raise ForeignTable(run.path / "tables/training.csv", f"its {wrong[0]} is not a number" if wrong else said)
    return table


def read_lm_results(run: Run) -> pd.DataFrame:
    """A language model run's rows; of a sweep those of the learning rate that was chosen."""
    table = training_table(run)
    chosen = table["config"].map(run.config.get("chosen", {})).astype(float)
    table = table[(table["lr"] == chosen) | chosen.isna()]
    rows = table.melt(["config", "seed"], list(LM_MEASURES), "measure", "value")
    return rows.rename(columns={"config": "arm"})[["arm", "seed", "measure", "value"]]


def read_toy_results(run: Run) -> pd.DataFrame:
    """A controlled task's rows: the whole model's own errors, without any edit."""
    table = training_table(run)
    table = table[(table["edit"] == "baseline") & table["metric"].str.endswith("_mse")]
    rows = table.sort_values("layer").drop_duplicates(["arm", "seed", "metric"])
    return rows.rename(columns={"metric": "measure", "mean": "value"})[["arm", "seed", "measure", "value"]]


VIT_MEASURES = ("probe_accuracy", "probe_loss")
MEANINGS = {
    "common_mode": "mean share over blocks from 1 on, of attention's update as it is added, any output gate included"
}
"""What a measure's name does not say by itself."""


def read_vit_results(run: Run) -> pd.DataFrame:
    """A vision transformer run's rows: the online probe's, where there is one, and attention's common-mode share,
    averaged over blocks 1 and up."""
    import pandas as pd

    table = run.table("training")
    probe = table[table["metric"].isin(VIT_MEASURES)].rename(columns={"metric": "measure"})
    shares = table[(table["metric"] == "common_mode") & (table["layer"] > 0)]
    mean = shares.groupby(["arm", "seed"], sort=False)["value"].mean().reset_index().assign(measure="common_mode")
    return pd.concat([probe, mean], ignore_index=True)[["arm", "seed", "measure", "value"]]


READERS: dict[str, Callable[[Run], pd.DataFrame]] = {
    "lm": read_lm_results,
    "vit": read_vit_results,
    **dict.fromkeys(("nop", "nop-branch", "broadcast", "pathway"), read_toy_results),
}


def read_results(paths: Sequence[str | Path]) -> pd.DataFrame:
    """[run, arm, seed, measure, value] of runs of one kind, in the order given.

    Raises InputError for runs that are not finished trainings, or not of one kind.
    """
    import pandas as pd

    runs = [Run.open(path) for path in paths]
    for run in runs:
        if run.config.get("purpose") != "training":
            raise InputError(f"{run.path} is not a training run (`sinklab train`): it cannot be compared.")
        if run.config.get("status") != "complete":
            raise InputError(f"The run {run.path} is not finished: go on with it, by its own command and --resume.")
    kinds = [run.config.get("settings", {}).get("kind") for run in runs]
    if len(set(kinds)) > 1 or kinds[0] not in READERS:
        raise InputError(f"Runs of one kind, out of {', '.join(READERS)}, can be compared; {kinds} was given.")
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise InputError("A run is compared with others: the same folder was given twice.")
    frames = [READERS[kinds[0]](run).assign(run=run.path.as_posix()) for run in runs]
    return pd.concat(frames, ignore_index=True)[["run", "arm", "seed", "measure", "value"]]


def left_out(paths: Sequence[str | Path], results: pd.DataFrame) -> list[str]:
    """Models that a run names and `results` has no number of: "RUN/seed-0/phase-tiny"."""
    known = results.dropna(subset=["value"])
    rows = zip(known["run"], known["arm"], known["seed"], strict=True)
    seen = {f"{run}/seed-{seed}/{arm}" for run, arm, seed in rows}
    planned = []
    for run in map(Run.open, paths):
        names = [str(name).split("/lr=")[0] for name in run.config.get("members", [])]
        planned += [f"{run.path.as_posix()}/{name}" for name in names]
    return [name for name in dict.fromkeys(planned) if name not in seen]


def differing_texts(paths: Sequence[str | Path]) -> list[str]:
    """The names of the texts, if language models were trained on different ones, or on other splits of one: their
    numbers do not compare."""
    texts = [Run.open(path).config.get("settings", {}).get("text", {}) for path in paths]
    names = [str(text.get("name")) for text in texts]
    kinds = {json.dumps([text.get("sha256"), text.get("splits")]) for text in texts}
    return names if len(kinds) > 1 else []


ARCHITECTURE = ("variant", "gate", "pathway", "registers", "penalty", "layer_scale")
"""What variants of a vision transformer differ in by their names."""


def differing_budgets(paths: Sequence[str | Path]) -> list[str]:
    """The settings, variants' own left out, in which runs of vision transformers differ: "epochs 2, 8"."""
    found: dict[str, list[str]] = {}
    for path in paths:
        configs = Run.open(path).config.get("settings", {}).get("configs")
        for own in configs.values() if isinstance(configs, dict) else ():
            for name, value in own.items():
                if name not in ARCHITECTURE and str(value) not in found.setdefault(name, []):
                    found[name].append(str(value))
    return [f"{name} {', '.join(values)}" for name, values in found.items() if len(values) > 1]


def over_seeds(results: pd.DataFrame) -> pd.DataFrame:
    """[run, arm, measure, seeds, median, mean, std, least, most]; std has n − 1, and is NaN for one seed."""
    groups = results.groupby(["run", "arm", "measure"], sort=False)["value"]
    return groups.agg(seeds="count", median="median", mean="mean", std="std", least="min", most="max").reset_index()


def paired(results: pd.DataFrame) -> pd.DataFrame:
    """Differences from the first run and arm, over the seeds that both have.

    [measure, run, arm, seeds, median, mean, std, less]: of the difference (this minus the first); `less` counts the
    seeds in which this one has less. Arms that share no seed with the first have 0 seeds.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    order = list(dict.fromkeys(zip(results["run"], results["arm"], strict=True)))
    for measure in dict.fromkeys(results["measure"]):
        own = results[results["measure"] == measure].set_index(["run", "arm", "seed"])["value"].sort_index()
        first = own.get(order[0])
        for run, arm in order[1:]:
            other = own.get((run, arm))
            gap = pd.Series(dtype=float) if first is None or other is None else (other - first).dropna()
            rows.append(
                {
                    "measure": measure,
                    "run": run,
                    "arm": arm,
                    "seeds": len(gap),
                    "median": gap.median() if len(gap) else math.nan,
                    "mean": gap.mean() if len(gap) else math.nan,
                    "std": gap.std() if len(gap) > 1 else math.nan,
                    "less": int((gap < 0).sum()),
                }
            )
    return pd.DataFrame(rows, columns=["measure", "run", "arm", "seeds", "median", "mean", "std", "less"])
