"""The classifier against the truth: freshly trained controlled models, diagnosed and patched.

    python benchmarks/toy_truth.py [--output benchmarks/results/toy_truth.json]

For every seed of the laptop budget: what share of the sink events each definition names as the task was trained, and
what the interventions say of the head with the most events.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from toy_budget import conditions, write

import sinklab
from sinklab.training.toy import train_toy
from sinklab.training.toy_config import make_config

SEEDS = (0, 1, 2)
SEQUENCES = 2048
TASKS = ("nop", "broadcast")


def found_in(member: Path, output: Path, task: str) -> dict[str, Any]:
    """Of one trained model."""
    run = sinklab.diagnose(str(member), output=output, limit=SEQUENCES, report=False)
    sinklab.patch(run, report=False)
    sinks, verdicts = run.sinks, run.table("causal_verdicts")
    heads = verdicts[verdicts["level"] == "head"].sort_values("images", ascending=False)
    return {
        "sequences": SEQUENCES,
        "events": len(sinks),
        "named": {name: float((sinks[f"class_{name}"] == task).mean()) for name in ("causal", "counts")},
        "heads": heads[["layer", "head", "class", "images", "verdict", "reason"]].to_dict("records"),
        "seconds": run.config["patch"]["timings"]["seconds"],
    }


def main() -> None:
    """Train, diagnose, patch; write after each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "toy_truth.json")
    options = parser.parse_args()
    for task in TASKS:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            train_toy(place / "run", make_config(task, "laptop"), SEEDS)
            members = {seed: place / f"run/training/seed-{seed}/{task}" for seed in SEEDS}
            seeds = {str(seed): found_in(path, place / f"seed-{seed}", task) for seed, path in members.items()}
        write(options.output, task, {"seeds": seeds, **conditions()})
        print(task, {seed: (one["named"], [h["verdict"] for h in one["heads"]]) for seed, one in seeds.items()})


if __name__ == "__main__":
    main()
