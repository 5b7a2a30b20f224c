"""On a CUDA device: are edits exact there too, and how fast? python benchmarks/gpu_patch.py [--images 64]

ViT-B with random weights on random pictures, under a lax rule so that many heads are events. First the same patching
on the device and on the CPU: heads, rows and effects must agree. Then its time against one whole forward an edit, by
the wall clock. Without a CUDA device it says so and exits with 2. Writes results/gpu_patch.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from diagnose import build, conditions
from PIL import Image

import sinklab

RESULT = Path(__file__).parent / "results" / "gpu_patch.json"
KEYS = ["image", "layer", "head", "class", "joint", "edit"]


def pictures(folder: Path, count: int) -> Path:
    """Smooth noise, each its own."""
    folder.mkdir()
    for index in range(count):
        noise = np.random.default_rng(index).integers(0, 256, (9, 9, 3), dtype="uint8")
        Image.fromarray(noise).resize((256, 256), Image.Resampling.BICUBIC).save(folder / f"{index:03d}.png")
    return folder


def patched(photos: Path, run: Path, device: str) -> tuple[sinklab.Diagnosis, float]:
    """A patched run on the device, and the seconds of the patching."""
    model = build("B", torch.float32)
    rule = sinklab.SinkRule.mass(0.004)
    found = sinklab.diagnose(model, photos, run, rule=rule, device=device, report=False)
    start = time.perf_counter()
    options: dict[str, Any] = {"classes": ("nop", "broadcast", "intermediate"), "per_class": 4, "block0": 1}
    return sinklab.patch(found, model, report=False, **options), time.perf_counter() - start


def main() -> None:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("This check needs a CUDA device, and torch sees none here.", file=sys.stderr)
        sys.exit(2)
    about = conditions() | ({"gpu": torch.cuda.get_device_name()} if given.device == "cuda" else {})
    with TemporaryDirectory() as folder:
        few, many = pictures(Path(folder) / "few", 6), pictures(Path(folder) / "many", given.images)
        here, _ = patched(few, Path(folder) / "device", given.device)
        there, _ = patched(few, Path(folder) / "cpu", "cpu")
        both = here.effects.merge(there.effects, on=KEYS, suffixes=("", "_cpu"))
        same = both[both["edited_index"] == both["edited_index_cpu"]]
        gap = (same["patch_change"] - same["patch_change_cpu"]).abs() / same["patch_change_cpu"].clip(lower=1e-3)
        run, seconds = patched(many, Path(folder) / "timed", given.device)
        result = {
            "conditions": about,
            "agreement": {
                "rows": [len(here.effects), len(there.effects), len(both), len(same)],
                "worst_relative_difference": float(gap.max()),
                "checks": here.config["patch"]["checks"],
            },
            "speed": {"images": given.images, "seconds": round(seconds, 2), **run.config["patch"]["images"]}
            | {"rows_per_second": round(len(run.effects) / seconds, 1), **run.config["patch"]["timings"]},
        }
    if given.device == "cuda":
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
