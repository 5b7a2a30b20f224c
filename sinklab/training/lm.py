"""Runs that train language models.

A run folder holds, for each seed and model (and each point of a sweep), `training/seed-S/MODEL/` with metrics.jsonl,
checkpoint.safetensors, the best weights by the validation split as model.safetensors and the last as last.safetensors,
each with a .json of what made them, sample.txt and evaluation.json; `lm_tables` says what tables/ holds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sinklab.data.text import Text, open_text
from sinklab.data.toy import generator_for
from sinklab.errors import InputError, NotFoundError
from sinklab.models.generation import generate
from sinklab.models.lm_file import read_lm
from sinklab.run import Run, library_versions, plain
from sinklab.training.checkpoint import save_model
from sinklab.training.distributed import Ranks, together
from sinklab.training.finished import (
    begun_status,
    damaged,
    is_number_or_none,
    reach,
    read_evaluation_file,
    whole_weights,
)
from sinklab.training.lm_config import LMConfig, LMMember, lm_members
from sinklab.training.lm_measure import bits_per_byte
from sinklab.training.lm_recipe import Keeper, Kept, build_recipe, saved_settings
from sinklab.training.lm_tables import CURVES, chosen_points, curve_rows, differences_table, points_table
from sinklab.training.loop import CHECKPOINT, METRICS, Diverged, Progress, read_metrics, train

FOLDER = "training"
PROMPT = 16
"""Bytes of the validation split that a sample goes on from."""
TEMPERATURE = 0.8
NUMBERS = ("parameters", "train_bpc", "validation_bpc", "test_bpc")
"""What every evaluation has."""


def train_lm(
    path: str | Path,
    configs: Sequence[LMConfig],
    seeds: Sequence[int] = (0,),
    *,
    text: str | Path | Text = "stdlib",
    sweep: str | None = None,
    device: str = "cpu",
    compile: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] = (),
    progress: Callable[[LMMember, Progress], None] | None = None,
) -> Run:
    """Train and evaluate every model of every seed (and every point of a sweep) into the run folder `path`.

    Under torchrun the processes share every batch. `resume` skips what is finished and goes on within what is not; the
    results are those of a run never interrupted. Raises InputError or NotFoundError for what cannot be, WriteError
    where the folder cannot be written, and Stopped after SIGTERM or Ctrl-C.
    """
    trained = lm_members(configs, seeds, sweep)
    read = text if isinstance(text, Text) else open_text(text)
    for config in configs:
        read.require(config.context)
    settings = {
        "kind": "lm",
        "configs": {config.name: asdict(config) for config in configs},
        "seeds": list(seeds),
        "sweep": sweep,
        "text": read.settings(),
        "device": torch.device(device).type,
        "compile": compile,
    }
    with together(device) as (ranks, here), _joined(path, settings, ranks, resume, overwrite) as run:
        if ranks.first:
            run.update(
                status=begun_status(run),
                command=list(command),
                purpose="training",
                versions=library_versions(["sinklab", "torch"]),
                threads=torch.get_num_threads(),
                processes=ranks.world,
                members=[member.name for member in trained],
                notes=list(dict.fromkeys([*read.notes, *run.config.get("notes", [])])),
            )
        small = min(config.batch for config in configs)
        if small < ranks.world:  # a process without rows has a loss of nothing, which is no number
            raise InputError(f"{ranks.world} processes share every batch: it needs as many sequences, not {small}.")
        for member in trained:
            # asked before the first process may write it: all processes must answer alike
            finished = ranks.any(ranks.first and _is_finished(run, member, read, may_diverge=sweep is not None))
            if not finished:
                try:
                    _train_member(run, member, read, here, ranks, compile, resume, progress)
                except Diverged as error:  # a point of a sweep may be too large a rate: that is an answer, too
                    if sweep is None:
                        raise Diverged(f"{member.name}: {error}") from error
                    _record_divergence(run, member, str(error), ranks)
            ranks.wait()
        if ranks.first:
            run.update(status="complete", chosen=_write_tables(run, trained))
        ranks.wait()
    return run


def _joined(path: str | Path, settings: dict[str, Any], ranks: Ranks, resume: bool, overwrite: bool) -> Run:
    """The run, created by the first process and joined by the others; if it cannot be, all of them say why."""
    run, problem = None, None
    if ranks.first:
        try:
            run = Run.create(path, settings=settings, overwrite=overwrite, resume=resume)
        except Exception as error:
            problem = error
    problem = ranks.gathered(problem)[0]
    if problem is not None:
        raise problem
    return run if run is not None else Run.join(path, settings=settings, rank=ranks.rank)


def _train_member(
    run: Run,
    member: LMMember,
    text: Text,
    device: str,
    ranks: Ranks,
    compile: bool,
    resume: bool,
    progress: Callable[[LMMember, Progress], None] | None,
) -> None:
    folder, config = run.path / FOLDER / member.name, member.config
    recipe = build_recipe(member, text, folder, device, compile=compile, ranks=ranks)
    assert isinstance(recipe.score, Keeper)
    if ranks.first and resume and (folder / CHECKPOINT).is_file():
        recipe.score.mend(recipe, member.name)
    elif ranks.first:
        recipe.score.forget()
    ranks.wait()  # until it is decided whether there is a checkpoint to go on from
    started = time.monotonic()
    begun: list[tuple[int, float]] = []

    def told(state: Progress) -> None:
        if not begun:
            begun.append((state.step, time.monotonic()))
        if progress is not None:
            progress(member, state)

    last = train(recipe, folder, resume=resume, progress=told)
    ended = time.monotonic()
    found: dict[str, Any] = {
        "parameters": sum(weight.numel() for weight in recipe.model.parameters()),
        "train_bpc": last["bpc"],
        "last_validation": last["validation"],
    }
    if ranks.first:
        save_model(folder / "last.safetensors", recipe.model, {**recipe.score.about, "step": config.steps})
    ranks.wait()
    kept = recipe.score.kept()
    if kept is None:
        raise Diverged(f"{member.name} never had a finite number of bits on the validation split: it has diverged.")
    found |= _evaluate(recipe.model, text, kept, config, ranks)
    if not ranks.first:
        return
    step, since = begun[0] if begun else (config.steps, ended)
    pace = (config.steps - step) * config.batch * config.context / (ended - since) if step < config.steps else None
    timings = {"train_seconds": ended - started, "tokens_per_second": pace}
    run.update(timings={**run.config.get("timings", {}), member.name: timings})
    run.write_bytes(f"{FOLDER}/{member.name}/sample.txt", sample(recipe.model, text, member))
    os.replace(kept.weights, folder / "model.safetensors")
    os.replace(kept.about, folder / "model.json")
    run.write_json(f"{FOLDER}/{member.name}/evaluation.json", found)  # last: with it the member is finished


def _record_divergence(run: Run, member: LMMember, words: str, ranks: Ranks) -> None:
    if ranks.first:
        run.update(notes=list(dict.fromkeys([*run.config.get("notes", []), f"{member.name}: {words}"])))
        nothing = dict.fromkeys(NUMBERS)
        run.write_json(f"{FOLDER}/{member.name}/evaluation.json", nothing)


def _is_finished(run: Run, member: LMMember, text: Text, *, may_diverge: bool) -> bool:
    """Whether all that it leaves is there and whole, and is this member's; of one that diverged, that it did."""
    folder = run.path / FOLDER / member.name
    try:
        if read_lm_evaluation(run, member.name)["validation_bpc"] is None:
            return may_diverge
        saved = read_lm(folder / "model.safetensors").saved
    except (InputError, NotFoundError):
        return False
    settings = plain(saved_settings(member, text))
    return (
        {name: saved.get(name) for name in settings} == settings
        and reach(read_metrics(folder / METRICS), member.config.steps)
        and whole_weights(folder / "last.safetensors")
        and (folder / "last.json").is_file()
        and (folder / "sample.txt").is_file()
    )


def _evaluate(model: Any, text: Text, kept: Kept, config: LMConfig, ranks: Ranks) -> dict[str, Any]:
    """The best weights' bits a byte on validation and test; the model has these weights afterwards."""
    from safetensors.torch import load_file

    model.load_state_dict(load_file(kept.weights))
    model.eval()
    found: dict[str, Any] = {"best_step": kept.said["step"]}
    for split in ("validation", "test"):
        bits = bits_per_byte(
            model,
            text,
            split,
            context=config.context,
            stride=config.stride,
            batch=config.evaluation_batch,
            ranks=ranks,
        )
        found |= {f"{split}_bpc": bits.bpc, f"{split}_bytes": bits.predicted}
    ranks.wait()
    return found | {"context": config.context, "stride": config.stride}


def sample(model: Any, text: Text, member: LMMember) -> bytes:
    """Text that goes on from the beginning of the validation split, drawn with the seed's own generator."""
    device = next(model.parameters()).device
    prompt = text.tokens(text.splits["validation"][0], min(PROMPT, member.config.context))
    drawn = generate(
        model,
        prompt[None].to(device),
        member.config.sample,
        temperature=TEMPERATURE,
        generator=generator_for("sample", member.seed, device=device),
        longest=member.config.context,
    )
    return text.decode(drawn[0].cpu())


def read_lm_evaluation(run: Run, member: str) -> dict[str, Any]:
    """What `evaluation.json` of a finished member holds; of one that diverged, None for every number.

    Raises NotFoundError before it is done, InputError where the file is damaged.
    """
    path = run.path / FOLDER / member / "evaluation.json"
    found = read_evaluation_file(path)
    if not isinstance(found, dict) or not all(name in found and is_number_or_none(found[name]) for name in NUMBERS):
        raise damaged(path)
    return found


def _write_tables(run: Run, trained: Sequence[LMMember]) -> dict[str, float]:
    """tables/training.csv and those that are made of it and the metrics; returns the chosen learning rates."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []
    for member in trained:
        told: dict[str, Any] = {"seed": member.seed, "config": member.config.name, "lr": member.config.lr}
        rows.append({**told, "steps": member.config.steps, **read_lm_evaluation(run, member.name)})
        curves += curve_rows(run.path / FOLDER / member.name / METRICS, member=member.name, **told)
    training = pd.DataFrame(rows)
    run.write_table("tables/training.csv", training)
    run.write_table("tables/curves.csv", pd.DataFrame(curves, columns=CURVES))
    run.write_table("tables/points.csv", points_table(training))
    run.write_table("tables/differences.csv", differences_table(training))
    return chosen_points(rows)
