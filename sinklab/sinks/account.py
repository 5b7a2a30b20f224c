"""What run.json says of a diagnosis: of which model and images, with what, and what it took."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sinklab.device import device_name
from sinklab.settings import library_versions

if TYPE_CHECKING:
    from sinklab.data.input_list import InputList, View
    from sinklab.handle import Model
    from sinklab.run import Run
    from sinklab.sinks.options import ScanOptions
    from sinklab.sinks.ranks import Ranks
    from sinklab.sinks.scan import Timings


def before_scan(
    model: Model,
    images: InputList,
    transform: View,
    options: ScanOptions,
    own: Ranks,
    notes: list[str],
    command: Sequence[str] | None,
) -> dict[str, Any]:
    """What run.json says before the first batch."""
    import torch

    return {
        "status": "running",  # also where a finished run is resumed: its results may be about to change
        "command": list(command) if command is not None else None,
        "model": model.describe(),
        "images": {
            "noun": images.noun,
            "count": len(images),
            "sources": list(images.sources),
            "list_sha256": images.sha256,
            "size": [transform.height, transform.width],
            "transform": transform.sentence(),
            "skipped": [],
            "notes": list(images.notes),
        },
        "options": {
            "size": options.size if model.loaded.sequences is None else None,
            "batch_size": options.batch_size,
            "workers": options.workers,
            "limit": options.limit,
            "layers": None if options.layers is None else list(options.layers),
            "fast": options.fast,
            "strict_images": options.strict_images,
        },
        "rule": options.rule.as_dict(images.noun),
        "definition": options.definition.as_dict() | {"sentence": options.definition.sentence(model.sites[0].axis)},
        "seeds": {"images": options.seed},
        "versions": library_versions(
            ("sinklab", "torch", "torchvision", "timm", "open_clip_torch", "transformers", "numpy", "pandas", "pyarrow")
        )
        | {"python": sys.version.split()[0]},
        "device": device_name(model.device),
        "dtype": options.dtype if options.dtype == "bfloat16" else str(model.dtype).removeprefix("torch."),
        "autocast": options.dtype == "bfloat16",
        "tf32": bool(torch.backends.cuda.matmul.allow_tf32) if model.device.type == "cuda" else False,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "ranks": own.world,
        "notes": [*model.provenance.notes, *options.notes, *notes],
    }


def after_scan(run: Run, timings: Timings, own: Ranks) -> dict[str, Any]:
    """What run.json says when all batches are in."""
    skipped = [{"image": image, "reason": reason} for image, reason in run.skipped()]
    if not timings.images and run.config.get("timings"):  # nothing was left to do: what it took stands
        return {"images": {**run.config["images"], "skipped": skipped}}
    speed = timings.images / timings.seconds if timings.seconds else None
    return {
        "images": {**run.config["images"], "skipped": skipped},
        "timings": {
            "images": timings.images,
            "seconds": round(timings.seconds, 3),
            "model_seconds": round(timings.model_seconds, 3),
            "images_per_second": None if speed is None else round(speed, 2),
            "of": "this session, rank 0" if own.world > 1 or run.resumed else "the whole run",
        },
    }
