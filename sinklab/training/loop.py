"""The training loop: steps, metrics, checkpoints that are whole, and going on bit for bit.

A recipe says what is trained and how one step is scored; the loop knows nothing else about it. Its state is all in one
checkpoint: weights, optimizer, step, generators. A recipe whose batches follow from the step number alone, or from the
generators that it names, goes on after a kill exactly as if nothing had happened, on the same device.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sinklab.atomic import atomically
from sinklab.errors import InputError
from sinklab.training.checkpoint import load_checkpoint, save_checkpoint
from sinklab.training.distributed import Ranks
from sinklab.training.finished import reach, read_metrics

CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.jsonl"
__all__ = ["CHECKPOINT", "METRICS", "Diverged", "Progress", "Recipe", "Stopped", "read_metrics", "train"]


class Memory(Protocol):
    """Something that remembers what has happened so far, in JSON's own types."""

    def remembered(self) -> Any:
        """What a checkpoint keeps of it; all ranks call this together."""

    def remind(self, remembered: Any) -> None:
        """Put it back, on every rank."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and how."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    """Optimisation steps in all."""
    batch: Callable[[int], Any]
    """Batch number (from 0) → what `loss` takes; batch and step have one number unless steps accumulate."""
    loss: Callable[[Any], Mapping[str, Tensor]]
    """A batch → scalars; "total" is what is minimised, all others are recorded."""
    rate: Callable[[int], float] = lambda step: 1.0
    """Step number → factor on every learning rate of the optimizer."""
    score: Callable[[int], Mapping[str, float]] | None = None
    """Steps done → further numbers to record, such as sink scores; run without gradients, every `score_every` steps."""
    score_every: int = 10
    record_every: int = 10
    """Steps between lines of metrics.jsonl; the last step has one in any case."""
    checkpoint_every: int = 1000
    clip: float | None = None
    """Largest norm of the gradient; None does not clip."""
    generators: Mapping[str, torch.Generator] = field(default_factory=dict)
    """Every generator that is drawn from as training goes on; their states are part of a checkpoint."""
    fingerprint: str = ""
    """Of the settings; a checkpoint of other settings is refused."""
    compile: bool = False
    """Compile `loss` with torch.compile."""
    accumulate: int = 1
    """Batches in a step, over which gradients and numbers are averaged."""
    after: Callable[[int], None] | None = None
    """Steps done → whatever has to happen then (validation, weights to keep), before any checkpoint."""
    memory: Memory | None = None
    """What else goes on with a training that is resumed."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that train together, each on its share of a batch: gradients and scalars are averaged over them,
    the first alone writes. Every recipe's `total` is weighted so that the plain average is the whole batch's."""

    def __post_init__(self) -> None:
        for name in ("steps", "score_every", "record_every", "checkpoint_every", "accumulate"):
            if getattr(self, name) < 1:
                raise InputError(f"A recipe's {name} is at least 1; {getattr(self, name)} was given.")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What the loop tells its caller at every line of metrics."""

    step: int
    """Steps done."""
    steps: int
    loss: float
    score: Mapping[str, float]
    """The latest of `Recipe.score`."""
    seconds_left: float | None
    """At the pace of this session; None before there is one."""


class Stopped(KeyboardInterrupt):
    """SIGTERM or Ctrl-C: the step was finished and a checkpoint written."""


class Diverged(InputError):
    """The loss is no longer a number."""


def train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    until: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, float]:
    """Train to the end and leave `metrics.jsonl` and `checkpoint.safetensors` in `folder`.

    Args:
        resume: go on from the folder's checkpoint; where there is none, start.
        until: stop, with a checkpoint, after so many steps of the recipe; None for all.
        progress: called at every line of metrics.

    Returns the last line of the metrics. Raises InputError for a checkpoint of another recipe, Diverged for a loss
    that is no longer a number, WriteError where the folder cannot be written, and Stopped after a signal.
    """
    done = load_checkpoint(folder / CHECKPOINT, recipe) if resume and (folder / CHECKPOINT).is_file() else 0
    recipe.ranks.wait()  # every process has read the checkpoint before the first writes again
    metrics = _Metrics(folder / METRICS, recipe, done)
    end = min(recipe.steps, recipe.steps if until is None else until)
    rates = [group.get("initial_lr", group["lr"]) for group in recipe.optimizer.param_groups]
    loss_of: Callable[[Any], Mapping[str, Tensor]] = torch.compile(recipe.loss) if recipe.compile else recipe.loss
    started, first, stopped = time.monotonic(), done, False
    with _signals() as asked_to_stop:
        while done < end and not (stopped := recipe.ranks.any(bool(asked_to_stop))):
            factor = recipe.rate(done)
            for group, rate in zip(recipe.optimizer.param_groups, rates, strict=True):
                group["initial_lr"], group["lr"] = rate, rate * factor
            try:
                scalars = _step(recipe, loss_of, done)
            except InputError:  # a loss that is no number: what was seen before it is what one wants to look at
                metrics.flush()
                raise
            done += 1
            if done % recipe.score_every == 0 or done == recipe.steps:
                metrics.scores(recipe, done)
            if done % recipe.record_every == 0 or done == recipe.steps:
                metrics.record(done, recipe.ranks.averaged(scalars), factor)
                if progress is not None:
                    pace = (time.monotonic() - started) / (done - first)
                    left = pace * (end - done)
                    progress(_progress(recipe, done, metrics, left))
            if recipe.after is not None:
                recipe.after(done)
            if done % recipe.checkpoint_every == 0 and done < end:
                metrics.flush()
                require_finite(recipe.model, recipe.ranks, done)
                save_checkpoint(folder / CHECKPOINT, recipe, done)
        metrics.flush()
        if done > first or not (folder / CHECKPOINT).is_file():
            require_finite(recipe.model, recipe.ranks, done)
            save_checkpoint(folder / CHECKPOINT, recipe, done)
    if stopped:
        name = asked_to_stop[0].name if asked_to_stop else "another process"
        raise Stopped(f"stopped by {name} after {done} of {recipe.steps} steps")
    return metrics.last


def require_finite(model: nn.Module, ranks: Ranks, done: int) -> None:
    """Raise Diverged, on all ranks alike, for weights that are no longer numbers: the loss of a step is from before
    the weights that the step leaves, so that the last one's would be kept unseen."""
    own = (getattr(weight, "to_local", lambda weight=weight: weight)() for weight in model.parameters())
    if ranks.any(not all(bool(torch.isfinite(weight).all()) for weight in own)):
        raise Diverged(
            f"After {done} steps weights are no longer numbers: the training has diverged. They are not kept; try a "
            "smaller learning rate."
        )


def _step(recipe: Recipe, loss_of: Callable[[Any], Mapping[str, Tensor]], step: int) -> Mapping[str, Tensor]:
    recipe.optimizer.zero_grad(set_to_none=True)
    seen: list[Mapping[str, Tensor]] = []
    for i in range(recipe.accumulate):
        waits = i + 1 < recipe.accumulate
        with recipe.ranks.unsynchronised() if waits else nullcontext():
            scalars = loss_of(recipe.batch(step * recipe.accumulate + i))
            total = scalars["total"] / recipe.accumulate if recipe.accumulate > 1 else scalars["total"]
            total.backward()  # type: ignore[no-untyped-call]
        seen.append({name: value.detach() for name, value in scalars.items()})
    recipe.ranks.reduce(p.grad for p in recipe.model.parameters() if p.grad is not None)
    if recipe.clip is not None:
        nn.utils.clip_grad_norm_(recipe.model.parameters(), recipe.clip)
    recipe.optimizer.step()
    if len(seen) == 1:
        return seen[0]
    return {name: torch.stack([scalars[name] for scalars in seen]).mean(0) for name in seen[0]}


def _progress(recipe: Recipe, done: int, metrics: _Metrics, left: float) -> Progress:
    loss = metrics.last.get("loss", metrics.last["total"])
    return Progress(step=done, steps=recipe.steps, loss=loss, score=metrics.score, seconds_left=left)


class _Metrics:
    """metrics.jsonl: one line a recorded step, none twice. Lines after the checkpoint are dropped on resuming."""

    def __init__(self, path: Path, recipe: Recipe, done: int) -> None:
        """Raises InputError where lines are missing that the checkpoint's steps had."""
        self.last: dict[str, float] = {}
        self.score: dict[str, float] = {}
        self._scored = 0
        self._path, self._waiting = path, []  # type: tuple[Path, list[str]]
        self._silent = not recipe.ranks.first
        kept = [line for line in read_metrics(path) if line["step"] <= done] if done else []
        due = done if done == recipe.steps else done - done % recipe.record_every
        if due and not reach(kept, due):
            raise InputError(
                f"{path} has lost the line of step {due}, and the checkpoint beside it is past that: put it back, or "
                f"remove {path.parent}, and --resume trains that model from its beginning."
            )
        if kept:
            self.last = kept[-1]
        if self._silent:
            return
        with atomically(path) as stream:
            stream.write("".join(json.dumps(line) + "\n" for line in kept).encode())

    def scores(self, recipe: Recipe, done: int) -> None:
        """Score, and keep the numbers for the line of this step or the next recorded one."""
        if recipe.score is None:
            return
        with torch.no_grad():
            self.score = {name: float(value) for name, value in recipe.score(done).items()}
            self._scored = done
        if done % recipe.record_every and done != recipe.steps:
            self._waiting.append(json.dumps({"step": done, **self.score}))

    def record(self, done: int, scalars: Mapping[str, Tensor], factor: float) -> None:
        """Add a line. Raises Diverged if the loss is no longer a number."""
        values = {name: float(value.detach()) for name, value in scalars.items()}
        if not math.isfinite(values["total"]):
            self.flush()  # what was seen before it is what one wants to look at
            raise Diverged(
                f"The loss is {values['total']} after {done} steps: the training has diverged. Try a smaller learning "
                "rate."
            )
        self.last = {"step": done, **values, "rate": factor, **(self.score if self._scored == done else {})}
        self._waiting.append(json.dumps(self.last))
        if len(self._waiting) >= 100:
            self.flush()

    def flush(self) -> None:
        """Append what waits, in the process that writes."""
        if self._waiting and not self._silent:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write("".join(line + "\n" for line in self._waiting))
                stream.flush()
                os.fsync(stream.fileno())  # a checkpoint is never ahead of its metrics, even after a power cut
        self._waiting = []


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Within, the first SIGTERM or Ctrl-C only fills the list; a second one acts as it did before."""
    asked: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():  # signals belong to the main thread
        yield asked
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: Any) -> None:
        asked.append(signal.Signals(number))
        signal.signal(number, before[signal.Signals(number)])

    try:
        for number in before:
            signal.signal(number, ask)
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
