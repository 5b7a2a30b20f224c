"""What reading costs: python benchmarks/diagnose.py [--models S B] [--sizes 224] [--batches 1 8] [--dtype float32]

In one process and interleaved, medians of several rounds: (a) the plain fused forward, (b) sinklab reading, (b')
sinklab --fast, (c) materialising everything. One thread's CPU clock; with --threads 2, wall clock. Peak memory beyond
the plain forward comes from processes of their own. Only the ratios carry over to another machine. Rows are kept in
results/diagnose.json by case, so that cases can be measured one by one; the table in the README is made from it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import timm
import torch
from materialise import Materialiser

from sinklab.handle import Model, attach
from sinklab.hooks.manager import HookManager
from sinklab.sinks.reader import StatisticsReader

RESULT = Path(__file__).parent / "results" / "diagnose.json"
NAMES = {"S": "small", "B": "base", "L": "large"}
VARIANTS = ("plain", "reading", "fast")


def build(size_name: str, dtype: torch.dtype) -> Model:
    """A timm DINOv2 with random weights (seed 0)."""
    torch.manual_seed(0)
    module = timm.create_model(f"vit_{NAMES[size_name]}_patch14_dinov2.lvd142m", dynamic_img_size=True)
    return attach(module.eval().to(dtype))


def one_forward(model: Model, pixels: torch.Tensor, variant: str, reader: Any, clock: Any) -> float:
    """Seconds of one forward of a variant, attaching not counted (a scan attaches once)."""
    if variant == "plain":
        start = clock()
        model(pixels)
        return clock() - start
    with HookManager(model, reader, attend=reader.attend if variant == "fast" else None) as hooks:
        start = clock()
        hooks.run(pixels)
        if variant != "materialise":
            reader.take()
        return clock() - start


def measure(case: dict[str, Any], rounds: int, budget: float) -> dict[str, Any]:
    """Ratios of one case; `budget` seconds at most for materialising, else one layer of it is measured and scaled."""
    torch.set_num_threads(case["threads"])
    clock = time.thread_time if case["threads"] == 1 else time.perf_counter
    model = build(case["model"], getattr(torch, case["dtype"]))
    pixels = torch.randn(case["batch"], 3, case["size"], case["size"], dtype=model.dtype)
    readers = {"reading": StatisticsReader(model.sites), "fast": StatisticsReader(model.sites, fast=True)}
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with torch.inference_mode():
        for number in range(rounds + 1):
            for variant in VARIANTS:
                spent = one_forward(model, pixels, variant, readers.get(variant), clock)
                if number:  # the first round warms up
                    seconds[variant].append(spent)
        median = {variant: sorted(spent)[len(spent) // 2] for variant, spent in seconds.items()}
        row = {**case, "rounds": rounds, "plain_seconds": round(median["plain"], 4)}
        row |= {variant: round(median[variant] / median["plain"], 3) for variant in VARIANTS[1:]}
        if case["batch"] == 1 and budget > 0:
            layer = one_forward(model, pixels, "materialise", Materialiser({0}), clock) - median["plain"]
            whole = layer * len(model.sites) + median["plain"]
            row["materialise_is"] = f"one layer x {len(model.sites)}"
            if whole < budget:
                whole, row["materialise_is"] = (
                    one_forward(model, pixels, "materialise", Materialiser(), clock),
                    "measured, one round",
                )
            row["materialise"] = round(whole / median["plain"], 2)
            row["materialise_over_reading"] = round(whole / median["reading"], 1)
    return row


def peak_memory(case: dict[str, Any], variant: str) -> int:
    """Peak resident bytes of a process that runs one variant twice."""
    command = [sys.executable, __file__, "--peak", variant, "--case", json.dumps(case)]
    # every tensor in pages of its own, given back when it is freed: else the peak is that of malloc's moods
    quiet = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=quiet).stdout.split()[-1])


def add_memory(row: dict[str, Any]) -> None:
    """Peak memory of each variant beyond the plain forward, in MB, into the row."""
    case = {name: row[name] for name in ("model", "size", "batch", "dtype", "threads")}
    base = peak_memory(case, "plain")
    for variant in ("reading", "fast", *(["materialise"] if "materialise" in row else [])):
        row[f"{variant}_mb"] = round((peak_memory(case, variant) - base) / 1e6, 1)


def print_peak(case: dict[str, Any], variant: str) -> None:
    """In a process of its own: the peak while one variant runs twice, after a plain forward has warmed up (Linux)."""
    torch.set_num_threads(1)
    model = build(case["model"], getattr(torch, case["dtype"]))
    pixels = torch.randn(case["batch"], 3, case["size"], case["size"], dtype=model.dtype)
    reader: Any = Materialiser() if variant == "materialise" else StatisticsReader(model.sites, fast=variant == "fast")
    with torch.inference_mode():
        one_forward(model, pixels, "plain", None, time.perf_counter)
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is that of loading: start again from here
        for _ in range(1 if variant == "materialise" else 2):
            one_forward(model, pixels, variant, reader, time.perf_counter)
    status = Path("/proc/self/status").read_text()
    print(int(status.partition("VmHWM:")[2].split()[0]) * 1024)


def conditions() -> dict[str, Any]:
    """The machine and the libraries."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
    return {
        "cpu": names[0] if names else "unknown",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "weights": "random",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a case."""
    return tuple(row[name] for name in ("dtype", "threads", "size", "model", "batch"))


def markdown(result: dict[str, Any]) -> str:
    """The table of the README."""
    given = result["conditions"]
    lines = [
        f"Ratios to the plain fused forward of the same model in the same process ({given['cpu']}, {given['cores']} "
        f"cores, torch {given['torch']}, random weights, medians of interleaved rounds; one thread's CPU clock, "
        "or wall clock where two threads are named). *Everything* is the way that builds A, the projected values, "
        "the updates and their N×N Gram matrix whole. MB are peak memory beyond the plain forward, whatever the "
        "number of images.",
        "",
        "| ViT | px | batch | dtype | threads | rounds | reading | `--fast` | everything "
        "| reading, MB | everything, MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(result["rows"], key=lambda r: (r["dtype"] != "float32", r["threads"], r["size"], -r["batch"])):
        whole = "" if "materialise" not in row else f"{row['materialise']:.1f}"
        whole += "*" if row.get("materialise_is", "").startswith("one layer") else ""
        memory = [row.get(f"{variant}_mb") for variant in ("reading", "materialise")]
        shown = ["" if value is None else f"{value:.0f}" for value in memory]
        lines.append(
            f"| {row['model']} | {row['size']} | {row['batch']} | {row['dtype']} | {row['threads']} | "
            f"{row['rounds']} | {row['reading']:.2f} | {row['fast']:.2f} | {whole} | {shown[0]} | {shown[1]} |"
        )
    if any(row.get("materialise_is", "").startswith("one layer") for row in result["rows"]):
        lines += ["", "\\* one layer measured, times the number of layers."]
    lines += [
        "",
        "The fewer the rounds, the rougher the median; *everything* was measured in one round. Short sequences of "
        "narrow models (S) pay most for reading, because there the statistics are large beside the model; where the "
        "sequence is long, building everything costs many times more than reading.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the cases asked for, merge them into the result, and render the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["S", "B", "L"], choices=list(NAMES))
    parser.add_argument("--sizes", nargs="+", type=int, default=[224], help="pixels, a multiple of 14")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=120, help="seconds for one forward that materialises; 0: none")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--only-memory", action="store_true", help="measure the memory of the saved rows again")
    parser.add_argument("--render", action="store_true", help="only make the table again")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        print_peak(json.loads(given.case), given.peak)
        return
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": []}
    result["conditions"] = conditions() if not given.render else result["conditions"]
    if given.only_memory:
        for row in result["rows"]:
            if "reading_mb" in row:
                add_memory(row)
                print(row, flush=True)
    for size in [] if given.render or given.only_memory else given.sizes:
        for batch in given.batches:
            for name in given.models:
                case = {
                    "model": name,
                    "size": size,
                    "batch": batch,
                    "dtype": given.dtype,
                    "threads": given.threads,
                }
                row = measure(case, given.rounds, given.budget)
                if not given.no_memory:
                    add_memory(row)
                print(row, flush=True)
                result["rows"] = [old for old in result["rows"] if key(old) != key(row)] + [row]
                RESULT.write_text(json.dumps(result, indent=1) + "\n")
    result["markdown"] = markdown(result)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(result["markdown"])


if __name__ == "__main__":
    main()
