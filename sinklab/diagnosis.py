"""`diagnose`: a model, some images, and a run folder with the answer; the command line calls the same function.

run = sinklab.diagnose(sinklab.load("demo"), "photos/", output="runs/mine")
run.sinks; run.heads; run.summary; run.report()
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.device import pick_device
from sinklab.errors import InputError, NotFoundError
from sinklab.run import Run, WriteError, plain, utc_now
from sinklab.settings import layer_numbers, safe_name

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import nn

    from sinklab.data.input_list import InputList
    from sinklab.handle import Model
    from sinklab.sinks.classify import SinkDefinition
    from sinklab.sinks.options import ScanOptions
    from sinklab.sinks.ranks import Ranks
    from sinklab.sinks.rule import SinkRule
    from sinklab.sinks.scan import Progress


class Diagnosis(Run):
    """A diagnosed run: its tables, and its report."""

    @property
    def effects(self) -> pd.DataFrame:
        """One row per image, layer, head and edit, if the run was patched; NotFoundError if it was not."""
        from sinklab.interventions.experiment import EFFECT_KEYS
        from sinklab.parts import read_parts, read_rows

        about = self.config.get("patch") or {}
        if about.get("status") != "complete":
            raise NotFoundError(f"The run {self.path} was not patched, or not to the end: sinklab patch {self.path}.")
        return read_rows(read_parts(self.path / "effects", about["fingerprint"]), by=EFFECT_KEYS)

    def report(self) -> Path:
        """Write (or write again) `report.html` with its figures and tables, from the saved tables alone."""
        from sinklab.reports.page import write_report
        from sinklab.reports.training import is_training, write_training_report

        return write_training_report(self) if is_training(self) else write_report(self)


def open_run(path: str | Path) -> Diagnosis:
    """A finished run, to be read. NotFoundError for a folder that is not one, InputError for an unfinished one.

    A run that trained models has tables and a report; what its models do is in the runs below `RUN/diagnosed/`.
    """
    from sinklab.reports.training import is_training

    if not isinstance(path, (str, Path)):
        raise InputError(f"A run is opened by the path of its folder, not by {path!r}.")
    run = Diagnosis.open(path)
    assert isinstance(run, Diagnosis)
    if run.config.get("status") != "complete":
        raise InputError(
            f"The run {path} is not complete (status: {run.config.get('status')}): go on with --resume first."
        )
    if not is_training(run):
        from sinklab.sinks.resume import require_readable, require_whole  # which load torch

        require_whole(run)
        require_readable(run)
    return run


def diagnose(
    model: Model | nn.Module | str,
    images: str | Path | Sequence[str | Path] | InputList | None = None,
    output: str | Path | None = None,
    *,
    text: str | Path | None = None,
    rule: SinkRule | str | None = None,
    definition: SinkDefinition | str = "causal",
    layers: str | Sequence[int] | None = None,
    size: int | str | None = None,
    batch_size: int | None = None,
    dtype: str = "float32",
    device: str | torch.device | None = None,
    workers: int = 0,
    limit: int | None = None,
    seed: int = 0,
    fast: bool = False,
    strict_images: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    report: bool = True,
    command: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Measure every attention head of a model on every image, name its sinks, and write a run folder.

    Args:
        model: a handle from `load` or `attach`, a name for `load`, or an nn.Module for `attach`.
        images: files, folders, `@list.txt`, tar shards, "demo"; one or several; or an ImageList. None is the demo
            photographs or, for a model of sequences or one that sinklab trained on pictures, its own.
        text: for a language model: "stdlib", "enwik8=PATH", a file or a folder; its validation split is read or, where
            that holds too few windows, all of it. limit: of a text 512 windows if None.
        output: the run folder, `runs/` and the model's name if not given; it must be new, unless `resume` or
            `overwrite`.
        rule: when a head counts as sunk, or its name (default `SinkRule.relaxed()`; a controlled model may have another
            that fits its task). definition: "causal", "counts" or one of your own, which the report leads with; the two
            are always computed. batch_size: inputs at once (16; 256 of a controlled task).
        layers: only these layers, as numbers or as "0,5,7-9". size: None is 224, or the size that a model of a training
            run was trained at. The options up to `strict_images`: see `ScanOptions`.
        device: "cpu", "cuda", "cuda:1", "mps", "auto"; None leaves the model where it is.
        report: also write `report.html`. progress: told (images done, images in all).

    Under torchrun every rank calls this; rank 0 creates and finishes the run.
    Raises InputError and NotFoundError with a sentence before anything is written wherever that is possible.
    """
    from sinklab.data.images import find_images
    from sinklab.data.input_list import InputList
    from sinklab.handle import as_model
    from sinklab.inputs import find_inputs
    from sinklab.sinks.arguments import require_arguments, require_precision
    from sinklab.sinks.classify import SinkDefinition
    from sinklab.sinks.options import ScanOptions
    from sinklab.sinks.ranks import ranks
    from sinklab.sinks.rule import SinkRule

    numbers = {"batch_size": batch_size, "workers": workers, "limit": limit, "seed": seed}
    require_arguments(images=images, layers=layers, size="native" if size is None else size, **numbers)
    given: dict[str, Any] = {"batch_size": batch_size, "size": size}
    options = ScanOptions(
        **{name: value for name, value in given.items() if value is not None},
        dtype=dtype,
        workers=workers,
        limit=limit,
        seed=seed,
        rule=SinkRule.relaxed() if rule is None else SinkRule.named(rule),
        definition=SinkDefinition.named(definition),
        layers=layer_numbers(layers),
        fast=fast,
        strict_images=strict_images,
    )
    found: InputList | None = None
    if isinstance(images, InputList):
        found = images.sample(limit, seed=seed)
    elif images is not None:
        found = find_images(images, limit=limit, seed=seed)  # before the model: it is the quicker error
    model = as_model(model)
    require_precision(model, dtype)
    found = find_inputs(model, found, text=text, limit=limit, seed=seed)
    options = options.fitting(model, rule=rule is None, batch_size=batch_size is None, size=size is None)
    with ranks() as own:
        if device is not None:
            model.module.to(pick_device(str(device), own.local))
        folder = Path("runs") / safe_name(model.name) if output is None else Path(output)
        return _diagnose(model, found, folder, options, own, overwrite, resume, report, command, progress)


def _diagnose(
    model: Model,
    images: InputList,
    output: Path,
    options: ScanOptions,
    own: Ranks,
    overwrite: bool,
    resume: bool,
    report: bool,
    command: Sequence[str] | None,
    progress: Progress | None,
) -> Diagnosis:
    from sinklab.reports.stale import remove_report
    from sinklab.sinks.account import after_scan, before_scan
    from sinklab.sinks.findings import write_findings
    from sinklab.sinks.resume import go_on, require_spared
    from sinklab.sinks.scan import check_input, first_readable, prove_attachment, rehearse, scan, unchecked

    if options.layers is not None:
        unknown = sorted(set(options.layers) - {site.layer for site in model.sites})
        if unknown:
            raise NotFoundError(
                f"Layer {unknown[0]} does not exist: {model.name} has layers 0 to {len(model.sites) - 1}."
            )
    transform = options.transform(model)
    notes = check_input(model, transform)
    pixels = first_readable(images, transform, strict=options.strict_images)
    notes += unchecked(prove_attachment(model, pixels, options))
    rehearse(model, pixels, transform, options)
    if overwrite:
        require_spared(images, output)
    if resume:
        options = options.judging(_settings_in(output))
    settings = options.settings(model, images, model.device.type)
    run = _open(output, settings, own, overwrite, resume, lambda run: go_on(run, images, transform, options))
    with run, _how_to_go_on(run):
        if own.first:
            for note in (*images.notes, *notes):
                warnings.warn(note, stacklevel=3)
            run.update(**before_scan(model, images, transform, options, own, notes, command))
        own.wait()
        problem, timings = None, None
        try:
            timings = scan(model, images, transform, run, options, own, progress)
        except Exception as error:  # the other ranks must hear of it, or they would wait for this one for ever
            problem = str(error) or type(error).__name__
            if own.world == 1:
                raise
            own.any_failed(problem)
            raise
        said = own.any_failed(problem)
        if said is not None:
            raise InputError(f"Another rank stopped: {said}")
        own.wait()
        if own.first:
            assert timings is not None
            before = _summary_in(run)
            gone = write_findings(model, images, transform, run, options)
            if not report and before not in (None, plain(run.summary)):  # an earlier report would tell of other numbers
                remove_report(run.path)
            for note in gone:
                warnings.warn(note, stacklevel=3)
            notes_now = [*run.config["notes"], *gone]
            run.update(status="complete", finished=utc_now(), notes=notes_now, **after_scan(run, timings, own))
            if report:
                run.report()
        own.wait()
    return run


def _settings_in(output: Path) -> dict[str, Any]:
    """The settings of the run in a folder; empty where there is none (`_open` says why)."""
    try:
        found: dict[str, Any] = Run.open(output).config.get("settings", {})
    except (InputError, NotFoundError, OSError):
        return {}
    return found


def _summary_in(run: Run) -> dict[str, Any] | None:
    """What an earlier session found; None if it did not come so far."""
    try:
        return run.summary
    except (NotFoundError, ValueError):
        return None


@contextmanager
def _how_to_go_on(run: Run) -> Iterator[None]:
    """Errors that leave a run to go on with say so, in a note of their own."""
    from sinklab.data.images import UnreadableImage

    try:
        yield
    except WriteError as error:
        error.add_note(f"Once there is room in {run.path}, the same command with --resume goes on.")
        raise
    except UnreadableImage as error:
        error.add_note(f"The run in {run.path} goes on with --resume and without --strict-images.")
        raise


def _open(
    output: Path, settings: dict[str, Any], own: Ranks, overwrite: bool, resume: bool, go_on: Callable[[Run], None]
) -> Diagnosis:
    """Rank 0 creates, or takes an earlier run up again; the others join; a refusal reaches them all as one sentence."""
    run, problem, refusal = None, None, None
    if own.first:
        try:
            run = Diagnosis.create(output, settings=settings, overwrite=overwrite, resume=resume)
            if run.resumed:
                go_on(run)
        except (InputError, NotFoundError, OSError) as error:
            problem, refusal = str(error), error
            if run is not None:
                run.close()
    said = own.agree(problem)
    if refusal is not None:
        raise refusal
    if said is not None:
        raise InputError(said)
    if run is None:
        run = Diagnosis.join(output, settings=settings, rank=own.rank)
    assert isinstance(run, Diagnosis)
    return run
