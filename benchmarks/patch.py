"""What patching costs: the demo's battery by `sinklab patch`, against whole forwards, in one run.

Three ways to the same effects: sinklab's (events only, the prefix of each image once, edits of a layer together), a
whole forward for each of the same edits, and a whole forward for each edit on every image, as scripts usually do it
(all images in one batch). One thread, CPU time of that thread. Two runs: the demo's own, whose sinks lie mostly in
block 0, and the same photographs under a lax rule, whose events lie in all layers.

python benchmarks/patch.py [--rounds 3]; writes benchmarks/results/patch.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from diagnose import conditions

import sinklab
from sinklab.data.images import find_images, open_image
from sinklab.sinks.options import ScanOptions

RESULT = Path(__file__).parent / "results" / "patch.json"
CASES = {"demo": sinklab.SinkRule.relaxed(), "lax": sinklab.SinkRule.mass(0.2)}
BATTERY: dict[str, dict[str, Any]] = {"demo": {}, "lax": {"per_class": 4, "block0": 1}}


def edit_of(name: str, layer: int, head: int, keys: Sequence[int], dim: int) -> sinklab.Edit:
    """An edit that costs what the named one costs: a value replaced, or a key hidden."""
    at = torch.tensor(keys)
    if name == "route":
        return sinklab.Edit.route(head=(layer, head), at=lambda call: at)
    return sinklab.Edit.set_value([0.1] * dim, head=(layer, head), at=lambda call: at)


def whole_forwards(model: sinklab.Model, pixels: torch.Tensor, edits: Sequence[sinklab.Edit]) -> None:
    """One whole forward of these images for every edit, and one without."""
    with torch.inference_mode(), sinklab.HookManager(model) as hooks:
        hooks.run(pixels)
        for edit in edits:
            with hooks.edit([edit]):
                hooks.run(pixels)


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def case(name: str, model: sinklab.Model, folder: Path, rounds: int) -> dict[str, Any]:
    """Times of the three ways, interleaved, and what the battery found."""
    run = sinklab.diagnose(model, "demo", folder / name, rule=CASES[name], report=False)
    run = sinklab.patch(run, model, report=False, **BATTERY[name])
    effects, chosen = run.effects, run.config["patch"]["heads"]
    sinks = run.heads.set_index(["image", "layer", "head"])["sink_index"]
    transform = ScanOptions().transform(model)
    pixels = {ref.id: transform(open_image(ref), ref.id)[None] for ref in find_images("demo")}
    everyone, dim = torch.cat(list(pixels.values())), model.sites[0].head_dim
    names = run.config["patch"]["edits"]
    every = [
        edit_of(edit, h["layer"], h["head"], [int(sinks[image, h["layer"], h["head"]]) for image in pixels], dim)
        for h in chosen
        for edit in names
    ]
    same = {
        image: [edit_of(r.edit, r.layer, r.head, [r.edited_index], dim) for r in own.itertuples()]
        for image, own in effects.groupby("image")
    }
    ways: dict[str, Callable[[], Any]] = {
        "sinklab": lambda: sinklab.patch(run, model, report=False, overwrite=True, **BATTERY[name]),
        "whole forwards, the same edits": lambda: [
            whole_forwards(model, pixels[i], edits) for i, edits in same.items()
        ],
        "whole forwards, every image": lambda: whole_forwards(model, everyone, every),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, work in ways.items():
            seconds[way].append(cpu_seconds(work))
    ratios = {
        way: statistics.median(a / b for a, b in zip(seconds[way], seconds["sinklab"], strict=True)) for way in ways
    }
    table = run.table("effects").query("level == 'class' and blocks == 'all' and joint == 0 and kind == 'edit'")
    means = table[table["measure"] == "patch_change"]  # as the report has them
    about = run.config["patch"]
    return {
        "rule": run.config["rule"]["sentence"],
        "images": run.summary["images"],
        "edited_images": about["images"]["edited"],
        "held_out_images": about["images"]["heldout"],
        "heads": len(chosen),
        "rows": len(effects),
        "rounds": rounds,
        "seconds": round(statistics.median(seconds["sinklab"]), 2),
        "times_as_long": {way: round(ratio, 2) for way, ratio in ratios.items() if way != "sinklab"},
        "blocks_run": about["timings"]["blocks_run"],
        "blocks_whole": about["timings"]["blocks_whole"],
        "class_means": {
            kind: {edit: float(f"{mean:.3g}") for edit, mean in zip(own["name"], own["mean"], strict=True)}
            for kind, own in means.groupby("class")
        },
        "class_heads": {kind: int(own["heads"].max()) for kind, own in means.groupby("class")},
        "heads_edited": {kind: sum(h["class"] == kind for h in chosen) for kind in about["classes"]},
        "checks": about["checks"],
    }


def main() -> None:
    """Measure both cases and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = sinklab.load("demo")
    with TemporaryDirectory() as folder:
        found = {name: case(name, model, Path(folder), given.rounds) for name in given.cases}
    before = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    whole = before | {"conditions": conditions() | {"weights": "the demo's"}, **found}
    RESULT.write_text(json.dumps(whole, indent=2) + "\n")
    print(RESULT)


if __name__ == "__main__":
    main()
