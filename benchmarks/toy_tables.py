"""Tables 2 and 3, the pathway table and App. E.1 at a laptop's budget: what stands beside the paper's numbers in docs/.

`nop-long` is Table 2 again with the paper's recipe and all of its steps, of 64 sequences in place of 1,024;
`nop-uncentred` the same with directions v that LayerNorm hides a part of, as the paper draws them. The sweeps of
nop-branch (Fig. 11) keep each point's last sink score, the step with half of it, and what its head looks like.

    python benchmarks/toy_tables.py [NAME ...] [--output benchmarks/results/toy_tables.json]

Each entry is one `sinklab train` run, trained from nothing into a temporary folder: its budget, the rows over seeds of
the table that the run saves, the claims it confirms, and the seconds of every training.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from toy_budget import conditions, write

from sinklab.reports.training_figures import sweep_ends, sweep_points
from sinklab.run import Run, plain
from sinklab.training.toy import read_evaluation, train_toy
from sinklab.training.toy_config import make_config
from sinklab.training.toy_measure import look_up

E1_BUDGET = ("steps=400", "batch=64", "lr=2e-3", "warmup=0.05", "decay=0.5", "evaluation_batches=16")
RUNS: dict[str, tuple[str, str, tuple[str, ...], tuple[int, ...]]] = {
    "nop": ("nop", "laptop", (), (0, 1, 2)),
    "nop-long": ("nop", "paper", ("batch=64", "centred=true"), (0, 1, 2)),
    "nop-uncentred": ("nop", "paper", ("batch=64",), (0, 1, 2)),
    "broadcast": ("broadcast", "laptop", (), (0, 1, 2)),
    "pathway": ("pathway", "laptop", (), (0, 1, 2, 3, 4)),
    "e1": ("pathway", "e1", E1_BUDGET, (0, 1, 2)),
}
"""Entry → task, variant, changes, seeds."""
SWEEPS = {"sweep-frequency": "frequency", "sweep-damping": "damping"}
"""Entry → sweep of nop-branch, laptop budget, three seeds (Fig. 11)."""
TABLE = {"nop": "table2", "broadcast": "table3", "pathway": "pathway"}


def trained(name: str, folder: Path) -> dict[str, Any]:
    """Train one entry and keep what the docs say of it."""
    kind, variant, changes, seeds = RUNS[name]
    run = train_toy(folder, make_config(kind, variant, changes), seeds)
    rows, checked, timings = run.table(TABLE[kind]), run.table("claims"), run.config["timings"]
    return {
        "command": command(name),
        "budget": run.config["budget"],
        "seeds": list(seeds),
        "mean": rows[rows["level"] == "mean"].drop(columns=["level", "seed"]).to_dict("records"),
        "by_seed": rows[rows["level"] == "seed"]
        .drop(columns=["level", "seeds"])
        .astype({"seed": int})
        .to_dict("records"),
        "claims": {"checked": len(checked), "held": int(checked["holds"].sum())},
        "missed": checked[~checked["holds"].astype(bool)].drop(columns=["holds"]).to_dict("records"),
        "update_rms": update_rms(run) if kind == "pathway" else None,
        "seconds": timings,
        "cpu_seconds_a_training": sum(one["train_cpu_seconds"] for one in timings.values()) / len(timings),
        "threads": torch.get_num_threads(),
        **conditions(),
    }


def swept(name: str, folder: Path) -> dict[str, Any]:
    """Train one sweep and keep what each point and seed ended with."""
    config, seeds = make_config("nop-branch", "laptop"), (0, 1, 2)
    run = train_toy(folder, config, seeds, sweep=SWEEPS[name])
    ends = sweep_ends(run.table("curves"), config.tokens)
    points = sweep_points(run.table("curves"))
    rows = []
    for row in ends.to_dict("records"):
        found = read_evaluation(run, f"seed-{row['seed']}/{row['arm']}")
        rest = {key: look_up(found, 0, "baseline", key) for key in ("value_ratio", "sigma1_share", "branch_mse")}
        rows.append({**row, "point": points[row["arm"]], **rest})
    return {
        "command": f"sinklab train nop-branch --sweep {SWEEPS[name]} --seeds 0-2 --device cpu",
        "budget": run.config["budget"],
        "seeds": list(seeds),
        "by_seed": rows,
        "seconds": run.config["timings"],
        **conditions(),
    }


def update_rms(run: Run) -> dict[str, float]:
    """Of each arm, the root mean square of the last layer's attention update, over seeds."""
    settings = run.config["settings"]
    last, arms = settings["config"]["layers"] - 1, settings["config"]["trained"]
    found: dict[str, float] = {}
    for arm in arms:
        values = [
            look_up(read_evaluation(run, f"seed-{seed}/{arm}"), last, "baseline", "update_rms")
            for seed in settings["seeds"]
        ]
        found[arm] = sum(values) / len(values)
    return found


def command(name: str) -> str:
    """The same run, as it is typed."""
    kind, variant, changes, seeds = RUNS[name]
    sets = "".join(f" --set {change}" for change in changes)
    return f"sinklab train {kind} --config {variant}{sets} --seeds {seeds[0]}-{seeds[-1]} --device cpu"


def main() -> None:
    """Train, and write after each entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[], help=f"{', '.join([*RUNS, *SWEEPS])}; all by default")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "toy_tables.json")
    options = parser.parse_args()
    for name in options.names or [*RUNS, *SWEEPS]:
        with tempfile.TemporaryDirectory() as folder:
            found = (swept if name in SWEEPS else trained)(name, Path(folder) / "run")
        write(options.output, name, json.loads(json.dumps(plain(found))))
        print(name, found.get("claims", ""), flush=True)


if __name__ == "__main__":
    main()
