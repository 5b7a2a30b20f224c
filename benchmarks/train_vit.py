"""On a CUDA device: what does a step of ViT-L cost? python benchmarks/train_vit.py [--batch 64] [--size L]

The four variants of Table 1 ("Attention Sinks") under LeJEPA with bf16 and torch.compile, on random pixels that lie on
the device: seconds a step, images a second (an image is shown in four views), peak memory, and what an epoch of
ImageNet-1k would take on four such devices, beside the paper's minutes on four H100. Reading images is not part of it.
Without a CUDA device it says so and exits with 2. Writes results/train_vit.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sinklab.settings import library_versions, utc_now
from sinklab.training.lejepa import directions
from sinklab.training.vit_config import ViTConfig, make_config
from sinklab.training.vit_member import build_model, build_optimizer

RESULT = Path(__file__).parent / "results" / "train_vit.json"
VARIANTS = {"baseline": 33, "gated-elementwise": 37, "global-penalty": 43, "gated-global-penalty": 51}
"""Of Table 1, with the paper's minutes an epoch."""
IMAGENET = 1_281_167
DEVICES = 4
WARM_UP = 5  # steps whose times are dropped: compiling, and choosing kernels


def measure(config: ViTConfig, *, images: int, steps: int, compile: bool) -> dict[str, Any]:
    """Steps of one variant on one device."""
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats()
    model = build_model(config, 0, 1000).to(device)
    if compile:
        model.vit.compile()
    optimizer = build_optimizer(model, config)
    views = torch.randn(images, config.views, 3, config.image, config.image, device=device)
    labels = torch.randint(0, 1000, (images,), device=device)
    drawing, seconds, loss = torch.Generator().manual_seed(0), [], float("nan")
    for _ in range(WARM_UP + steps):
        torch.cuda.synchronize()
        began = time.monotonic()
        optimizer.zero_grad(set_to_none=True)
        total = model(views, labels, directions(config.projector_dim, config.slices, drawing, device))["total"]
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        loss = float(total.detach())
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    step = statistics.median(seconds[WARM_UP:])
    return {
        "step_seconds": step,
        "step_seconds_spread": [min(seconds[WARM_UP:]), max(seconds[WARM_UP:])],
        "first_step_seconds": seconds[0],
        "images_per_second": images / step,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": loss,
        "epoch_minutes_on_four": IMAGENET / DEVICES / images * step / 60,
        "paper_minutes_on_four_h100": VARIANTS[config.variant] if config.size == "L" else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="images a step and device; the paper's 64")
    parser.add_argument("--size", default="L", choices=("S", "B", "L", "G"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again in backward")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device, and torch sees none.", file=sys.stderr)
        raise SystemExit(2)
    torch.set_float32_matmul_precision("high")
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        config = replace(make_config(f"{variant}-{chosen.size}"), checkpointing=chosen.checkpointing)
        found[config.name] = measure(config, images=chosen.batch, steps=chosen.steps, compile=not chosen.no_compile)
        print(config.name, json.dumps(found[config.name]), flush=True)
        torch.compiler.reset()
        torch.cuda.empty_cache()
    result = {
        "measured": utc_now(),
        "device": torch.cuda.get_device_name(),
        "versions": library_versions(["sinklab", "torch"]),
        "options": vars(chosen),
        "precision": "bf16 autocast, fp32 weights",
        "variants": found,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
