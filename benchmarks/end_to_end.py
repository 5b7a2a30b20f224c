"""Decode, forward, statistics and Parquet against the forward alone: python benchmarks/end_to_end.py [--images 500].

Photographs are seeded crops of the demo's; wall clock, the demo model, one run of each after a warm-up. Writes
results/end_to_end.json.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from diagnose import conditions

import sinklab
from sinklab.data.images import ImageList, demo_photographs, find_images, open_image
from sinklab.sinks.options import ScanOptions

RESULT = Path(__file__).parent / "results" / "end_to_end.json"


def photographs(folder: Path, number: int) -> ImageList:
    """JPEGs of about 500 px a side, cropped from the demo photographs at places drawn from seed 0."""
    draw, sources = random.Random(0), [open_image(ref) for ref in demo_photographs()]
    for index in range(number):
        source = sources[index % len(sources)]
        side = int(min(source.size) * draw.uniform(0.6, 1.0))
        left, top = draw.randint(0, source.width - side), draw.randint(0, source.height - side)
        crop = source.crop((left, top, left + side, top + side)).resize((500, 500))
        crop.save(folder / f"{index:04d}.jpg", quality=92)
    return find_images(folder)


def main() -> None:
    """Measure both ways and save the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=16)
    given = parser.parse_args()
    model = sinklab.load("demo")
    transform = ScanOptions().transform(model)
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "photographs").mkdir()
        images = photographs(folder / "photographs", given.images)
        pixels = [transform(open_image(ref), ref.id) for ref in images]
        with torch.inference_mode():
            model(torch.stack(pixels[: given.batch_size]))
            start = time.perf_counter()
            for first in range(0, len(pixels), given.batch_size):
                model(torch.stack(pixels[first : first + given.batch_size]))
            forward = time.perf_counter() - start
        run = sinklab.diagnose(model, images, folder / "run", batch_size=given.batch_size, report=False)
    whole = run.config["timings"]["seconds"]
    result = {
        "conditions": conditions() | {"weights": "the demo's", "threads": torch.get_num_threads()},
        "images": given.images,
        "batch_size": given.batch_size,
        "forward_seconds": round(forward, 2),
        "end_to_end_seconds": whole,
        "ratio": round(whole / forward, 3),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(result)


if __name__ == "__main__":
    main()
