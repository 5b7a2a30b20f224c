"""The controlled tasks' recipes, and the runs that train them.

A run folder holds, for each seed and arm, `training/seed-S/ARM/` with metrics.jsonl, checkpoint.safetensors, the final
weights as model.safetensors with the config that made them as model.json, and evaluation.json; tables/ has what the
report draws (`toy_tables`, `toy_views`). `load_toy` reads a model back.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinklab.data.toy import Batch, BroadcastTask, ToyTask, generator_for, task_from, task_loss
from sinklab.errors import InputError, NotFoundError
from sinklab.models.pathway import broadcast_penalty
from sinklab.models.toy import ToyModel, build_toy
from sinklab.models.toy_file import FORMAT, read_toy
from sinklab.run import Run, fingerprint, library_versions, plain
from sinklab.training.budget import budget
from sinklab.training.checkpoint import save_model
from sinklab.training.finished import begun_status, reach, read_rows
from sinklab.training.loop import METRICS, Progress, Recipe, read_metrics, train
from sinklab.training.toy_config import (
    Member,
    NopBranchConfig,
    PathwayConfig,
    TrainConfig,
    config_from,
    members,
)
from sinklab.training.toy_edits import layers_of, sink_scores
from sinklab.training.toy_measure import evaluate
from sinklab.training.toy_tables import Evaluated, tables
from sinklab.training.toy_views import Seen, views

FOLDER = "training"


def build_task(config: TrainConfig, seed: int) -> ToyTask:
    """The task of a config and seed; all arms of one seed share it."""
    return task_from(config.kind, seed, asdict(config))


def build_model(config: TrainConfig, arm: str, seed: int) -> ToyModel:
    """A model with its first weights; arms of one seed share those of attention and MLP. Leaves torch's own state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator_for("initialisation", seed).initial_seed())
        return build_toy(config.kind, arm, asdict(config))


def build_recipe(member: Member, device: str | torch.device = "cpu", *, compile: bool = False) -> Recipe:
    """How one member of a run is trained."""
    config, seed = member.config, member.seed
    task, model = build_task(config, seed), build_model(config, member.arm, seed).to(device)
    weight = config.penalty if isinstance(config, PathwayConfig) and member.arm.endswith("+penalty") else 0.0

    def score(done: int) -> Mapping[str, float]:
        fresh = task.batch(done, config.score_batch, purpose="scores", device=device)
        return sink_scores(model, fresh.x, fixed=not isinstance(task, BroadcastTask))

    return Recipe(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay),
        steps=config.steps,
        batch=lambda step: task.batch(step, config.batch, device=device),
        loss=lambda batch: losses(model, batch, config, weight),
        rate=config.rate,
        score=score,
        score_every=config.score_every,
        record_every=config.record_every,
        checkpoint_every=config.checkpoint_every,
        fingerprint=fingerprint(_saved_settings(member)),
        compile=compile,
    )


def losses(model: ToyModel, batch: Batch, config: TrainConfig, penalty_weight: float = 0.0) -> dict[str, Tensor]:
    """The task's loss, and with it what is minimised ("total"); with a pathway also the penalty without its weight."""
    updates: list[tuple[Tensor, Tensor | None]] = []
    produced = model(batch.x, updates)
    if isinstance(config, NopBranchConfig):
        produced = updates[0][0]
        if config.loss == "block":
            produced = layers_of(model)[0].normalised(batch.x) + produced
    loss = task_loss(produced, batch.target, batch.weight)
    if not isinstance(config, PathwayConfig):
        return {"total": loss, "loss": loss.detach()}
    penalty = broadcast_penalty(
        [update for update, _ in updates],
        reduce=config.penalty_layers,
        ratio=config.penalty_ratio,
        denominator=config.penalty_denominator,
    )
    total = loss + penalty_weight * penalty if penalty_weight else loss
    return {"total": total, "loss": loss.detach(), "penalty": penalty.detach()}


def _saved_settings(member: Member) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": member.config.kind,
        "arm": member.arm,
        "seed": member.seed,
        "config": asdict(member.config),
    }


def train_toy(
    path: str | Path,
    config: TrainConfig,
    seeds: Sequence[int] = (0,),
    *,
    sweep: str | None = None,
    device: str = "cpu",
    compile: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] = (),
    progress: Callable[[Member, Progress], None] | None = None,
) -> Run:
    """Train and evaluate every arm of every seed (or every point of a sweep) into the run folder `path`.

    `resume` skips what is finished and goes on within what is not; the results are those of a run never interrupted.
    Raises InputError or NotFoundError for what cannot be, WriteError where the folder cannot be written, and Stopped
    after SIGTERM or Ctrl-C.
    """
    trained = members(config, seeds, sweep)
    settings = {
        "kind": config.kind,
        "config": asdict(config),
        "seeds": list(seeds),
        "sweep": sweep,
        "device": torch.device(device).type,  # batches are drawn there
        "compile": compile,
    }
    with _full_precision(), Run.create(path, settings=settings, overwrite=overwrite, resume=resume) as run:
        run.update(
            status=begun_status(run),
            command=list(command),
            purpose="training",
            versions=library_versions(["sinklab", "torch"]),
            threads=torch.get_num_threads(),
            budget=budget(config, sweep),
            members=[member.name for member in trained],
            tasks={member.name: build_task(member.config, member.seed).fingerprint() for member in trained},
            first_weights={member.name: first_weights(member) for member in trained},
        )
        for member in trained:
            if not _is_finished(run, member):
                _train_member(run, member, device, compile, resume, progress)
        _write_tables(run, config.kind, trained, sweep)
        run.update(status="complete")
    return run


@contextmanager
def _full_precision() -> Iterator[None]:
    """Matrix products in float32 and not TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def first_weights(member: Member) -> str:
    """SHA-256 of the weights of attention and MLP before the first step: equal for arms that may be compared."""
    digest = hashlib.sha256()
    for name, value in build_model(member.config, member.arm, member.seed).state_dict().items():
        if ".pathway." not in name:
            digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def _is_finished(run: Run, member: Member) -> bool:
    """Whether its evaluation, its metrics and its weights are there and whole, and are this member's."""
    folder, settings = run.path / FOLDER / member.name, _saved_settings(member)
    try:
        read_evaluation(run, member.name)
        _, saved = read_toy(folder / "model.safetensors")
    except (InputError, NotFoundError):
        return False
    described = {name: saved.get(name) for name in settings} == plain(settings) and "signature" in saved
    return described and reach(read_metrics(folder / METRICS), member.config.steps)


def _train_member(
    run: Run,
    member: Member,
    device: str,
    compile: bool,
    resume: bool,
    progress: Callable[[Member, Progress], None] | None,
) -> None:
    folder = run.path / FOLDER / member.name
    recipe = build_recipe(member, device, compile=compile)
    clocks = time.monotonic(), time.process_time()
    told = None if progress is None else lambda state: progress(member, state)
    last = train(recipe, folder, resume=resume, progress=told)
    seconds = {"train_seconds": time.monotonic() - clocks[0], "train_cpu_seconds": time.process_time() - clocks[1]}
    config, model = member.config, recipe.model
    assert isinstance(model, ToyModel)
    task = build_task(config, member.seed)
    save_model(
        folder / "model.safetensors",
        model,
        _saved_settings(member) | {"task": task.fingerprint(), "signature": task.signature()},
    )
    rows = evaluate(model, task, batches=config.evaluation_batches, size=config.evaluation_size, device=device)
    seconds["evaluate_seconds"] = time.monotonic() - clocks[0] - seconds["train_seconds"]
    timings = {**run.config.get("timings", {}), member.name: seconds}  # of the last session, where there were several
    run.update(timings=timings, final={**run.config.get("final", {}), member.name: last})
    run.write_json(f"{FOLDER}/{member.name}/evaluation.json", rows)  # last: with it the member is finished


def read_evaluation(run: Run, member: str) -> list[dict[str, Any]]:
    """`toy_measure.evaluate`'s rows for one member, named as in run.json.

    Raises NotFoundError before it is done, InputError where its file is damaged.
    """
    path = run.path / FOLDER / member / "evaluation.json"
    rows = read_rows(path, ("edit", "metric"), ("layer", "mean", "sem"))
    return [{**row, "mean": float("nan") if row["mean"] is None else row["mean"]} for row in rows]


def _write_tables(run: Run, kind: str, trained: Sequence[Member], sweep: str | None) -> None:
    evaluated, seen = [], []
    for member in trained:
        folder = run.path / FOLDER / member.name
        rows, metrics = read_evaluation(run, member.name), read_metrics(folder / METRICS)
        evaluated.append(Evaluated(member=member, rows=rows, metrics=metrics))
        held = load_toy(folder / "model.safetensors")
        seen.append(Seen(seed=held.seed, arm=held.arm, model=held.model, task=held.task))
    for name, table in {**tables(kind, evaluated, sweep), **views(kind, seen)}.items():
        run.write_table(f"tables/{name}.csv", table)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedToy:
    """A trained controlled model, with the task that it was trained on."""

    model: ToyModel
    task: ToyTask
    config: TrainConfig
    arm: str
    seed: int


def load_toy(path: str | Path) -> TrainedToy:
    """A model from its .safetensors file and the .json beside it, with the task that it was trained on.

    Raises NotFoundError if one is missing, InputError if they are not of a controlled task, do not fit each other, or
    name a task that this version draws differently.
    """
    model, saved = read_toy(path)
    try:
        config = config_from(saved["kind"], saved["config"])
        task = build_task(config, saved["seed"])
        same = all(abs(a - b) < 1e-3 for a, b in zip(saved["signature"], task.signature(), strict=True))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"The .json of {path} does not say which task it was trained on.") from error
    if not same:
        raise InputError(f"{path} was trained on a task that this version of sinklab and torch draws differently.")
    return TrainedToy(model=model, task=task, config=config, arm=saved["arm"], seed=saved["seed"])
