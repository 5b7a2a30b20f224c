"""On a CUDA device: do the numbers hold, and what does reading cost? python benchmarks/gpu_diagnose.py [--batch 32]

First every statistic of one image in fp32 on the device against a float64 copy of the model on the CPU. Then ViT-L in
bf16 at 224 and 518 px: reading over the plain forward and over the compiled plain forward, interleaved, by CUDA events,
and peak memory. Random weights. Without a CUDA device it says so and exits with 2. Writes results/gpu_diagnose.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diagnose import build, conditions

from sinklab.handle import Model
from sinklab.hooks.manager import HookManager
from sinklab.sinks.doctor import examine
from sinklab.sinks.reader import StatisticsReader

RESULT = Path(__file__).parent / "results" / "gpu_diagnose.json"
WARM_UP = 4  # rounds whose times are dropped: compiling and choosing kernels


def correctness(name: str, size: int, device: str) -> dict[str, Any]:
    """The worst relative difference of every column, fp32 on the device against float64 on the CPU."""
    model = build(name, torch.float32)
    model.module.to(device)
    found = examine(model, torch.randn(1, 3, size, size))
    return {
        "model": name,
        "size": size,
        "heads": found.heads,
        "not_finite": found.not_finite,
        "dominant_keys_that_moved": found.moved,
        "worst_relative_difference": {drift.column: drift.worst for drift in found.drifts},
        "facts": found.facts,
    }


def milliseconds(once: Callable[[], Any]) -> float:
    """One run on the device, by events; what it copies to the CPU included."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    once()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def peak_bytes(once: Callable[[], Any]) -> int:
    """The most device memory allocated during one run, weights included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    once()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def reading(model: Model, reader: StatisticsReader, pixels: torch.Tensor, measured: Callable[..., Any]) -> Any:
    """Apply `measured` to one forward with its statistics; attaching is not counted, a scan attaches once."""

    def once() -> None:
        hooks.run(pixels)
        reader.take()

    with HookManager(model, reader) as hooks:
        return measured(once)


def cost(name: str, size: int, batch: int, rounds: int, device: str) -> dict[str, Any]:
    """Medians and ratios of one size."""
    model = build(name, torch.bfloat16)
    model.module.to(device)
    forward: Any = model.module.forward_features
    compiled = torch.compile(forward, dynamic=False)
    pixels = torch.randn(batch, 3, size, size, device=device, dtype=torch.bfloat16)
    reader = StatisticsReader(model.sites, device=device)
    times: dict[str, list[float]] = {"plain": [], "compiled": [], "reading": []}
    for turn in range(-WARM_UP, rounds):
        taken = {
            "plain": milliseconds(lambda: model(pixels)),
            "compiled": milliseconds(lambda: compiled(pixels)),
            "reading": reading(model, reader, pixels, milliseconds),
        }
        if turn >= 0:
            for way, value in taken.items():
                times[way].append(value)
    median = {way: statistics.median(values) for way, values in times.items()}
    base = peak_bytes(lambda: model(pixels))
    return {
        "model": name,
        "size": size,
        "batch": batch,
        "dtype": "bfloat16",
        "rounds": rounds,
        **{f"{way}_ms": round(value, 3) for way, value in median.items()},
        "reading_over_plain": round(median["reading"] / median["plain"], 3),
        "reading_over_compiled": round(median["reading"] / median["compiled"], 3),
        "plain_peak_mb": round(base / 1e6, 1),
        "reading_extra_mb": round((reading(model, reader, pixels, peak_bytes) - base) / 1e6, 1),
    }


def main() -> None:
    """Check, measure, and write after every step, so that a lost machine loses only the step it was in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="L", choices=["S", "B", "L"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 518])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device, and torch sees none here.", file=sys.stderr)
        sys.exit(2)
    device = "cuda"
    about = conditions() | {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    result: dict[str, Any] = {"conditions": about, "rows": []}

    def save() -> None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(result, indent=1) + "\n")

    result["correctness"] = correctness("B", 224, device)
    save()
    print(result["correctness"], flush=True)
    with torch.inference_mode():
        for size in given.sizes:
            result["rows"].append(cost(given.model, size, given.batch, given.rounds, device))
            save()
            print(result["rows"][-1], flush=True)


if __name__ == "__main__":
    main()
