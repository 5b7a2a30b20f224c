"""Training vision transformers under LeJEPA, one process or many, into a run folder.

A run folder holds, for each seed and config, `training/seed-S/VARIANT-SIZE/` with metrics.jsonl, validation.jsonl,
checkpoint.safetensors (the whole state), model.safetensors with model.json (the last weights and what made them),
best.safetensors and epoch-EEEE.safetensors alike, and evaluation.json; tables/training.csv has all evaluations.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sinklab.data.procedural import ProceduralImages
from sinklab.data.validated import where_found
from sinklab.errors import InputError, NotFoundError
from sinklab.run import Run, library_versions
from sinklab.settings import require_seeds
from sinklab.training.checkpoint import save_model
from sinklab.training.distributed import Ranks, together
from sinklab.training.finished import (
    begun_status,
    reach,
    read_rows,
    said_of_weights,
    steps_done,
    whole_weights,
)
from sinklab.training.joined import first
from sinklab.training.loop import CHECKPOINT, METRICS, Progress, read_metrics, train
from sinklab.training.vit_config import ViTConfig
from sinklab.training.vit_evaluate import Score
from sinklab.training.vit_feed import Pictures, readable
from sinklab.training.vit_kept import lost
from sinklab.training.vit_member import Member, build_feed, build_model, build_recipe, evaluated

FOLDER = "training"


def train_vit(
    path: str | Path,
    configs: Sequence[ViTConfig],
    images: Pictures | None = None,
    *,
    validation: Pictures | None = None,
    seeds: Sequence[int] = (0,),
    device: str = "cpu",
    workers: int = 0,
    compile: bool = False,
    shard: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] = (),
    score: Score | None = None,
    progress: Callable[[str, Progress], None] | None = None,
) -> Run | None:
    """Train every config with every seed into the run folder `path`; the run, or None on ranks that do not write.

    Without `images` the built-in set is used, for training and validation; without `validation` the training images
    are scored. `resume` skips what is finished and goes on within what is not. `score` is called every `score_every`
    steps with the network and a fixed batch, but not for kernels that make no softmax call, which a note says. Raises
    InputError for what cannot be, WriteError where the folder cannot be written, and Stopped after SIGTERM or Ctrl-C.
    """
    _require_different(configs, seeds)
    with together(device) as (ranks, own_device):
        if shard and ranks.world == 1:
            raise InputError(
                "--fsdp shares the weights out over several processes, and this is one: start it with torchrun "
                "--nproc-per-node 2 -m sinklab train vit …, or leave --fsdp out."
            )
        members = []
        for seed in seeds:
            for config in configs:
                shown, scored = _pictures(config, images, validation)
                members.append(
                    Member(
                        config=config,
                        seed=seed,
                        images=shown,
                        validation=scored,
                        folder=Path(path) / FOLDER / f"seed-{seed}" / config.name,
                        device=own_device,
                        ranks=ranks,
                        workers=workers,
                        compile=compile,
                        shard=shard,
                        score=score if _is_seen(config) else None,
                    )
                )
        for member in members:  # what cannot be is said before anything is written, or overwritten
            build_feed(member)
            readable(member.validation, 0)
            with torch.device("meta"):
                build_model(member.config, member.seed, len(member.images.classes))
        settings = {
            "kind": "vit",
            "configs": {config.name: asdict(config) for config in configs},
            "seeds": list(seeds),
            "images": {member.config.name: [member.images.sha256, member.validation.sha256] for member in members},
        }
        run = first(ranks, lambda: Run.create(path, settings=settings, overwrite=overwrite, resume=resume))
        try:
            if run is not None:
                _begin(run, members, ranks, command, [] if score is None else _unseen(configs))
                for sentence in [lost(member, finished=_is_finished(member)) for member in members if run.resumed]:
                    if sentence is not None:
                        warnings.warn(sentence, stacklevel=2)
            for member in members:
                if not ranks.any(ranks.first and _is_finished(member)):
                    _train_member(run, member, resume, progress)
            if run is not None:
                _write_table(run, members)
                run.update(status="complete")
            ranks.wait()
        finally:
            if run is not None:
                run.close()
    return run


def _require_different(configs: Sequence[ViTConfig], seeds: Sequence[int]) -> None:
    names = [config.name for config in configs]
    if not names or len(set(names)) < len(names):
        raise InputError(f"A run trains different configs, one at least; {', '.join(names) or 'none'} came.")
    require_seeds(seeds)


def _pictures(config: ViTConfig, images: Pictures | None, validation: Pictures | None) -> tuple[Pictures, Pictures]:
    if images is not None:
        return images, validation or images
    drawn = min(config.validation_images, config.procedural)
    return (
        ProceduralImages(count=config.procedural, size=config.image),
        validation or ProceduralImages(count=drawn, size=config.image, split="validation"),
    )


def _is_seen(config: ViTConfig) -> bool:
    """Whether whoever counts sinks can look on: only softmax is one call that hooks see."""
    return config.kernel == "softmax"


def _unseen(configs: Sequence[ViTConfig]) -> list[str]:
    """A sentence for every config whose sinks are not counted."""
    return [
        f"As {config.name} is trained, no sinks are counted: its kernel, {config.kernel}, makes no softmax call, which "
        "is where they are read. Loss, common mode, the probe, and what rows sum to are recorded."
        for config in configs
        if not _is_seen(config)
    ]


def _begin(run: Run, members: Sequence[Member], ranks: Ranks, command: Sequence[str], remarks: Sequence[str]) -> None:
    """run.json as the training begins; each of the remarks is kept there and said."""
    before, notes = run.config.get("world"), list(run.config.get("notes", []))
    for remark in remarks:
        warnings.warn(remark, stacklevel=3)
    notes += [remark for remark in remarks if remark not in notes]
    if before not in (None, ranks.world):
        changed = (
            f"Begun by {before} processes and gone on with by {ranks.world}: the batches, views and directions are the "
            "same; what drop path leaves out is drawn anew, and sums are taken in another order."
        )
        warnings.warn(changed, stacklevel=3)
        notes.append(changed)
    run.update(
        status=begun_status(run),
        command=list(command),
        purpose="training",
        versions=library_versions(["sinklab", "torch", "torchvision"]),
        members=[member.name for member in members],
        world=ranks.world,
        notes=notes,
        pictures={member.config.name: len(member.images) for member in members},
        sources={member.config.name: _sources(member) for member in members},
    )


def _sources(member: Member) -> dict[str, Any]:
    """Where the pictures of a training and of its validation lie, or how they are drawn."""
    held_out = member.about()["pictures"]
    if member.validation is member.images:
        return {"training": held_out, "validation": held_out}
    return {"training": where_found(member.images, count=len(member.images)), "validation": held_out}


def _train_member(
    run: Run | None, member: Member, resume: bool, progress: Callable[[str, Progress], None] | None
) -> None:
    recipe, model, feed = build_recipe(member)
    if run is not None:
        (member.folder).mkdir(parents=True, exist_ok=True)
    began, done = time.monotonic(), steps_done(member.folder / CHECKPOINT) if resume else 0
    told = None if progress is None or run is None else lambda state: progress(member.name, state)
    with closing(feed):
        last = train(recipe, member.folder, resume=resume, progress=told)
    seconds = time.monotonic() - began
    found = evaluated(member, model)
    described = {**member.about(), "step": recipe.steps, "validation": found}
    path, beside = member.folder / "model.safetensors", {"probe": model.probe}
    save_model(path, model.vit, described, writes=run is not None, beside=beside)
    missed = feed.remembered()
    if run is None:
        return
    shown = (recipe.steps - done) * member.config.batch
    timings = {"train_seconds": seconds, "images_per_second": shown / seconds if shown else None}
    unreadable = run.config.get("unreadable", {})
    missed = sorted({*missed, *unreadable.get(member.name, [])})
    run.update(
        timings={**run.config.get("timings", {}), member.name: timings},  # of the last session
        final={**run.config.get("final", {}), member.name: last},
        unreadable={**unreadable, member.name: missed},
    )
    _say_unreadable(member, missed, found)
    run.write_json(f"{FOLDER}/{member.name}/evaluation.json", _rows(found))  # last: with it the member is finished


def _say_unreadable(member: Member, missed: Sequence[str], found: dict[str, Any]) -> None:
    """A warning for pictures that the training, or the evaluation at its end, had to do without."""
    if missed:
        some = f"{', '.join(missed[:3])}{' …' if len(missed) > 3 else ''}"
        warnings.warn(
            f"{member.name}: {len(missed)} of {len(member.images)} training images could not be read, and others stood "
            f"in for them: {some}. All are named in run.json.",
            stacklevel=3,
        )
    if found["unreadable"]:
        asked = found["images"] + found["unreadable"]
        warnings.warn(
            f"{member.name}: {found['unreadable']} of {asked} validation images could not be read and were left out.",
            stacklevel=3,
        )


def _is_finished(member: Member) -> bool:
    """Whether its evaluation, its metrics and its weights are there and whole, and are this member's."""
    try:
        _read_rows(member)
    except (InputError, NotFoundError):
        return False
    described = said_of_weights(member.folder / "model.json", member.settings()) is not None
    done = reach(read_metrics(member.folder / METRICS), member.config.epochs * member.steps_per_epoch)
    return described and done and whole_weights(member.folder / "model.safetensors")


def _read_rows(member: Member) -> list[dict[str, Any]]:
    return read_rows(member.folder / "evaluation.json", ("metric",), ("layer", "value"))


def _rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a number: metric, layer (empty for the whole network), value."""
    rows = [
        {"metric": name, "layer": None, "value": found[name]}
        for name in ("images", "unreadable", "probe_accuracy", "probe_loss")
        if found[name] is not None
    ]
    return rows + [
        {"metric": "common_mode", "layer": layer, "value": value} for layer, value in enumerate(found["common_mode"])
    ]


def _write_table(run: Run, members: Sequence[Member]) -> None:
    import pandas as pd

    rows = []
    for member in members:
        rows += [{"seed": member.seed, "arm": member.config.name, **row} for row in _read_rows(member)]
    table = pd.DataFrame(rows)
    run.write_table("tables/training.csv", table.assign(layer=table["layer"].astype("Int64")))
