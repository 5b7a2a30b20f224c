"""The smallest budgets of the controlled tasks that still show every claim, and how long they take.

    python benchmarks/toy_budget.py [TASK ...] [--seeds 0-2] [--output benchmarks/results/toy_budget.json]

For each task the `laptop` config is trained with more and more steps, several seeds a rung, until every claim of
sinklab.training.toy_claims holds for every seed, and sinklab's own rule and definition call most of the sinks by their
name. Each rung is a training of its own: the learning rate's rise and fall are stretched to its length.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from sinklab.cli_train import seed_numbers
from sinklab.device import device_name
from sinklab.hooks.manager import HookManager
from sinklab.run import Run, library_versions, utc_now
from sinklab.sinks.classify import SinkDefinition
from sinklab.sinks.reader import StatisticsReader
from sinklab.sinks.rule import SinkRule
from sinklab.training.toy import TrainedToy, load_toy, read_evaluation, train_toy
from sinklab.training.toy_claims import best_layer, claims
from sinklab.training.toy_config import make_config

LADDER = {"nop": (50, 100, 200, 400), "broadcast": (100, 200, 400, 800), "pathway": (100, 200, 400, 800)}
# Only NOP queries, half of all, attend to a NOP sink: no rule that asks for nine tenths of the queries can see it.
RULES = {"nop": SinkRule.mass(), "broadcast": SinkRule.relaxed(), "pathway": SinkRule.relaxed()}


def head_rows(held: TrainedToy, sequences: int = 256) -> pd.DataFrame:
    """One row a sequence and layer, as `sinklab diagnose` measures it."""
    x = held.task.batch(0, sequences, purpose="evaluation").x
    probe = HookManager(held.model)
    reader = StatisticsReader(probe.sites)
    with torch.no_grad(), HookManager(held.model, reader) as hooks:
        hooks.run(x)
    layers, table, tokens = reader.take()
    frames = []
    for place, (layer, count) in enumerate(zip(layers, tokens, strict=True)):
        columns = {name: values[:, place, 0].numpy() for name, values in table.items()}
        frames.append(pd.DataFrame({**columns, "layer": layer, "head": 0, "tokens": count, "queries": count}))
    return pd.concat(frames, ignore_index=True)


def called(held: TrainedToy, rule: SinkRule, layer: int) -> dict[str, float]:
    """Of one layer: events a sequence, and the share of each class among them."""
    rows = head_rows(held)
    rows = rows[rows["layer"] == layer]
    events = rows[rule.events(rows)]
    shares = SinkDefinition.causal().classify(events).value_counts(normalize=True)
    return {"events": len(events) / len(rows), **{str(name): float(share) for name, share in shares.items()}}


def rung(kind: str, steps: int, seeds: list[int], folder: Path) -> dict[str, Any]:
    """One length of training, all seeds."""
    config = make_config(kind, "laptop", [f"steps={steps}"])
    run: Run = train_toy(folder, config, seeds)
    found: dict[str, Any] = {"steps": steps, "seeds": {}}
    for seed in seeds:
        arms = {arm: read_evaluation(run, f"seed-{seed}/{arm}") for arm in config.arms()}
        checked = claims(kind, arms)
        first = config.arms()[0]
        held = load_toy(folder / "training" / f"seed-{seed}" / first / "model.safetensors")
        layer = 0 if kind == "nop" else best_layer(arms[first])
        verdict = called(held, RULES[kind], layer)
        right = verdict.get("nop" if kind == "nop" else "broadcast", 0.0)
        timings = [run.config["timings"][f"seed-{seed}/{arm}"] for arm in arms]
        found["seeds"][str(seed)] = {
            "holds": all(claim.holds for claim in checked) and right > 0.5,
            "claims": {claim.name: claim.value for claim in checked},
            "missed": [claim.name for claim in checked if not claim.holds],
            "classified": {"layer": layer, "rule": RULES[kind].sentence(), **verdict},
            "task_mse": {
                arm: next(row["mean"] for row in rows if (row["edit"], row["metric"]) == ("baseline", "task_mse"))
                for arm, rows in arms.items()
            },
            "unreadable": held.task.unreadable,
            **{name: sum(timing[name] for timing in timings) for name in timings[0]},
        }
    found["holds"] = all(seed["holds"] for seed in found["seeds"].values())
    return found


def main() -> None:
    """Climb the ladders and write what was found after every rung."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=[], help="nop, broadcast, pathway; all by default")
    parser.add_argument("--seeds", default="0-2")
    parser.add_argument("--from-steps", type=int, default=0, help="skip shorter rungs")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "toy_budget.json")
    options = parser.parse_args()
    for kind in options.tasks or list(LADDER):
        config = make_config(kind, "laptop")
        fixed = {name: getattr(config, name) for name in ("batch", "lr", "warmup", "decay", "centred")}
        rungs: list[dict[str, Any]] = []
        for steps in (steps for steps in LADDER[kind] if steps >= options.from_steps):
            with tempfile.TemporaryDirectory() as folder:
                rungs.append(rung(kind, steps, seed_numbers(options.seeds), Path(folder) / "run"))
            held = json.loads(options.output.read_text()) if options.output.is_file() else {}
            smallest = steps if rungs[-1]["holds"] else None
            held[kind] = {"smallest": smallest, **fixed, "rungs": rungs, **conditions()}
            options.output.write_text(json.dumps(held, indent=1) + "\n")
            print(kind, steps, "holds" if smallest else [seed["missed"] for seed in rungs[-1]["seeds"].values()])
            if smallest:
                break


def conditions() -> dict[str, Any]:
    """Where and under what load; wall seconds mean little on a shared machine, CPU seconds more."""
    return {
        "device": device_name(torch.device("cpu")),
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "when": utc_now(),
        "versions": library_versions(["sinklab", "torch"]),
    }


if __name__ == "__main__":
    main()
