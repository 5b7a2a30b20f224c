"""The smallest budgets of the controlled tasks that still show every claim, and how long they take.

    python benchmarks/toy_budget.py [TASK ...] [--seeds 0-2] [--output benchmarks/results/toy_budget.json]
    python benchmarks/toy_budget.py --add RUN ...        a finished `sinklab train` run, recorded beside them

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

from sinklab.device import device_name
from sinklab.hooks.manager import HookManager
from sinklab.run import Run, library_versions, utc_now
from sinklab.settings import seed_numbers
from sinklab.sinks.classify import SinkDefinition
from sinklab.sinks.reader import StatisticsReader
from sinklab.sinks.rule import SinkRule
from sinklab.training.toy import TrainedToy, load_toy, read_evaluation, train_toy
from sinklab.training.toy_claims import best_layer, claims
from sinklab.training.toy_config import config_from, make_config

LADDER = {
    "nop": (50, 100, 200, 400, 1000, 2000, 4000, 8000),
    "broadcast": (100, 200, 400, 800),
    "pathway": (100, 200, 400, 800),
}
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


def summary(run: Run) -> dict[str, Any]:
    """What a finished run shows, seed by seed."""
    kind, settings = run.config["settings"]["kind"], run.config["settings"]
    config = config_from(kind, settings["config"])
    found: dict[str, Any] = {
        "steps": config.steps,
        "evaluation": [config.evaluation_batches, config.evaluation_size],
        "seeds": {},
    }
    for seed in settings["seeds"]:
        arms = {arm: read_evaluation(run, f"seed-{seed}/{arm}") for arm in config.arms()}
        checked = claims(kind, arms)
        first = config.arms()[0]
        held = load_toy(run.path / "training" / f"seed-{seed}" / first / "model.safetensors")
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
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="finished runs to record beside the ladders")
    options = parser.parse_args()
    for path in options.add:
        run = Run.open(path)
        write(
            options.output,
            f"{run.config['settings']['kind']}, {run.config['settings']['config']['steps']} steps",
            {"settings": run.config["settings"], **summary(run)},
        )
    if options.add:
        return
    for kind in options.tasks or list(LADDER):
        config = make_config(kind, "laptop")
        fixed = {name: getattr(config, name) for name in ("batch", "lr", "warmup", "decay", "centred")}
        rungs: list[dict[str, Any]] = []
        for steps in (steps for steps in LADDER[kind] if steps >= options.from_steps):
            with tempfile.TemporaryDirectory() as folder:
                trained = make_config(kind, "laptop", [f"steps={steps}"])
                rungs.append(summary(train_toy(Path(folder) / "run", trained, seed_numbers(options.seeds))))
            smallest = steps if rungs[-1]["holds"] else None
            write(options.output, kind, {"smallest": smallest, **fixed, "rungs": rungs, **conditions()})
            print(kind, steps, "holds" if smallest else [seed["missed"] for seed in rungs[-1]["seeds"].values()])
            if smallest:
                break


def write(path: Path, key: str, found: dict[str, Any]) -> None:
    """Put one entry into the result file."""
    held = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**held, key: found}, indent=1, ensure_ascii=False) + "\n")


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
