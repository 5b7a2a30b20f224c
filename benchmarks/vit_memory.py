"""What a GPU must hold to train ViT-L or G: python benchmarks/vit_memory.py. Computed on a CPU, without the GPU.

Weights, gradients and AdamW's two moments are 16 bytes a parameter. What a forward keeps for backward is counted
tensor by tensor under bfloat16 autocast, for one image and for two (each in four views), in networks of two and three
blocks: a block more keeps as much as another, and so does an image, so the whole network's follows. Under torch.compile
less is kept; the allocator's slack, and what a kernel needs while it runs, are not in it. Writes
results/vit_memory.json.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sinklab.settings import library_versions
from sinklab.training.vit_config import make_config
from sinklab.training.vit_dry_run import dry_run

RESULT = Path(__file__).parent / "results" / "vit_memory.json"
NAMES = ("baseline-L", "gated-elementwise-L", "global-penalty-L", "gated-global-penalty-L", "baseline-G")
GPUS, IMAGES = 4, 64
"""The paper's: four GPUs, 64 images each."""


def memory(name: str) -> dict[str, Any]:
    """In GiB: state, the copies of weights that autocast keeps, and what is kept an image; with checkpointing of blocks
    that is the blocks' inputs and one block."""
    config = make_config(name)
    whole = dry_run(config, steps=1, device="meta")
    kept = {
        (depth, images): dry_run(replace(config, depth=depth), steps=1, images=images)["saved_gib"]
        for depth in (2, 3)
        for images in (1, 2)
    }
    image = {depth: kept[depth, 2] - kept[depth, 1] for depth in (2, 3)}
    block = image[3] - image[2]
    once = {depth: kept[depth, 1] - image[depth] for depth in (2, 3)}  # autocast's copies of the weights
    tokens = 1 + config.registers + (config.image // config.patch) ** 2
    inputs = config.depth * config.views * tokens * config.dim * 4 / 2**30  # the stream is in float32
    outside = max(image[2] - 2 * block, 0.0)
    return {
        "parameters": sum(whole["parameters"].values()),
        "state_gib": whole["state_gib"],
        "copies_gib": once[2] + (config.depth - 2) * (once[3] - once[2]),
        "image_gib": image[2] + (config.depth - 2) * block,
        "image_checkpointed_gib": inputs + block + outside,
    }


def main() -> None:
    found = {name: memory(name) for name in NAMES}
    result = {
        "precision": "bf16 autocast, fp32 weights",
        "gpus": GPUS,
        "images_per_gpu": IMAGES,
        "versions": library_versions(["sinklab", "torch"]),
        "variants": found,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
