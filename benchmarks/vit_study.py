"""Do the variants' sinks differ already at a laptop's scale? Trains five `-tiny` variants alike and diagnoses them.

    python benchmarks/vit_study.py [--epochs 16] [--seeds 0-2] [--work FOLDER] [--images 384] [--set KEY=VALUE ...]

Every variant is trained with every seed on the same drawn pictures, and diagnosed on held-out ones. The result,
results/vit_study.json, is written again after each training that is done, so that a study which was stopped has what
it came to; the same command goes on. `compared` repeats the paper's claims of order, and whether they show.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from sinklab.atomic import atomically
from sinklab.settings import library_versions, plain, seed_numbers

HERE = Path(__file__).parent
VARIANTS = ("baseline", "gated-elementwise", "global-penalty", "gated-global-penalty", "registers")
MASS = 0.3
"""The lowest mean inflow of a sink in the literature on language models; the paper's own rules ask for more."""


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--epochs", type=int, default=16)
    asked.add_argument("--seeds", default="0-2")
    asked.add_argument("--images", type=int, default=384, help="held-out pictures that are diagnosed")
    asked.add_argument("--work", type=Path, default=Path("runs/vit-study"), help="where the runs lie")
    asked.add_argument("--output", type=Path, default=HERE / "results" / "vit_study.json")
    asked.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    given = asked.parse_args()
    study(given.work, given.output, given.epochs, seed_numbers(given.seeds), given.images, given.changes)


def study(work: Path, output: Path, epochs: int, seeds: list[int], images: int, changes: list[str]) -> None:
    """Train, diagnose, and write what was found so far."""
    from sinklab.training.vit import train_vit
    from sinklab.training.vit_config import make_config
    from sinklab.watching import sink_scores

    configs = [make_config(f"{variant}-tiny", [f"epochs={epochs}", *changes]) for variant in VARIANTS]
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        for config in configs:
            path = work / f"seed-{seed}" / config.name
            train_vit(path, [config], seeds=[seed], resume=True, score=sink_scores, command=["vit_study.py"])
            rows.append(measured(path, config.variant, config.name, seed, images))
            print(f"{config.name}, seed {seed}: {rows[-1]['probe_accuracy']:.3f}", flush=True)
            write(output, rows, configs[0], seeds, images, changes)


def measured(path: Path, variant: str, name: str, seed: int, images: int) -> dict[str, Any]:
    """One training's numbers."""
    from sinklab.diagnosis import diagnose

    member = path / "training" / f"seed-{seed}" / name
    saved = json.loads((member / "evaluation.json").read_text())
    began = time.perf_counter()
    run = diagnose(str(member), output=path / "diagnosed", limit=images, device="cpu", report=False, resume=True)
    heads = run.heads
    inflow = heads[heads["layer"] > 0].groupby(["layer", "head"])["inflow"].mean()
    training = json.loads((path / "run.json").read_text())["timings"][f"seed-{seed}/{name}"]
    return {
        "variant": variant,
        "seed": seed,
        "probe_accuracy": next(row["value"] for row in saved if row["metric"] == "probe_accuracy"),
        "probe_loss": next(row["value"] for row in saved if row["metric"] == "probe_loss"),
        "common_mode": [row["value"] for row in saved if row["metric"] == "common_mode"],
        "largest_mean_inflow": float(inflow.max()),
        "largest_inflow": float(heads[heads["layer"] > 0]["inflow"].max()),
        "sinks_per_image": counts(heads),
        "train_seconds": training["train_seconds"],
        "diagnose_seconds": time.perf_counter() - began,
    }


def counts(heads: Any) -> dict[str, dict[str, dict[str, float]]]:
    """rule → definition → class → events an image, in blocks 1 and up."""
    from sinklab.sinks.classify import both_definitions
    from sinklab.sinks.counts import counts_per_image
    from sinklab.sinks.rule import SinkRule

    rules = {"relaxed": SinkRule.relaxed(), "strict": SinkRule.strict(), f"mass {MASS}": SinkRule.mass(MASS)}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, rule in rules.items():
        table = counts_per_image(heads, [rule], both_definitions())
        own = table[(table["blocks"] == "1+") & (table["kind"] == "all")]
        for definition, part in own.groupby("definition", sort=False):
            numbers = {str(row["class"]): float(row["per_image"]) for _, row in part.iterrows()}
            found.setdefault(name, {})[str(definition)] = numbers
    return found


def write(
    output: Path, rows: list[dict[str, Any]], config: Any, seeds: list[int], images: int, changes: list[str]
) -> None:
    """The result file, whole at any time."""
    from dataclasses import asdict

    steps = config.epochs * (config.procedural // config.batch)
    result = {
        "complete": len(rows) == len(VARIANTS) * len(seeds),
        "conditions": {
            "steps": steps,
            "changes": changes,
            "images_seen": steps * config.batch,
            "config": {key: value for key, value in asdict(config).items() if key not in ("variant", "penalty")},
            "diagnosed_images": images,
            "seeds": seeds,
            "processor": platform.machine(),
            "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
            "shared_machine": "others ran beside it, so that seconds are of the wall and not of the work",
            "versions": library_versions(["sinklab", "torch"]),
        },
        "over_seeds": over_seeds(rows),
        "compared": compared(rows),
        "rows": rows,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomically(output) as stream:
        stream.write((json.dumps(plain(result), indent=1) + "\n").encode())


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of one training that are averaged over seeds."""
    shares = row["common_mode"][1:]
    found = {name: row[name] for name in ("probe_accuracy", "largest_mean_inflow", "largest_inflow")}
    found |= {"common_mode": statistics.fmean(shares), "largest_common_mode": max(shares)}
    for rule, definitions in row["sinks_per_image"].items():
        for definition, classes in definitions.items():
            found |= {f"{rule} | {definition} | {label}": value for label, value in classes.items()}
    return found


def over_seeds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """variant → number → its mean over seeds and the seeds' own, in the order of the variants."""
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        own = [numbers_of(row) for row in rows if row["variant"] == variant]
        if own:
            found[variant] = {
                name: {"mean": statistics.fmean(one[name] for one in own), "seeds": [one[name] for one in own]}
                for name in own[0]
            }
    return found


CLAIMS = (
    ("gating has fewer NOP sinks than the baseline", "gated-elementwise", "baseline", "nop", -1),
    ("gating has more broadcast sinks than the baseline", "gated-elementwise", "baseline", "broadcast", 1),
    (
        "the penalised pathway has fewer broadcast sinks than the baseline",
        "global-penalty",
        "baseline",
        "broadcast",
        -1,
    ),
    (
        "with both, there are fewer broadcast sinks than with gating alone",
        "gated-global-penalty",
        "gated-elementwise",
        "broadcast",
        -1,
    ),
)


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The paper's order of sink counts (definition `counts`), claim by claim and rule by rule, paired by seed; and
    whether the penalised pathway's attention has the smaller common-mode share."""
    found = []
    by = {(row["variant"], row["seed"]): numbers_of(row) for row in rows}
    claims = [
        (f"{claim} ({rule})", one, other, f"{rule} | counts | {label}", sign)
        for claim, one, other, label, sign in CLAIMS
        for rule in ("relaxed", f"mass {MASS}")
    ]
    claims.append(("the penalty lowers attention's common-mode share", "global-penalty", "baseline", "common_mode", -1))
    for claim, one, other, number, sign in claims:
        seeds = [seed for variant, seed in by if variant == one and (other, seed) in by]
        gaps = [by[one, seed][number] - by[other, seed][number] for seed in seeds]
        holds = sum(gap * sign > 0 for gap in gaps)
        found.append({"claim": claim, "number": number, "differences": gaps, "seeds_that_show_it": holds})
    return found


if __name__ == "__main__":
    main()
