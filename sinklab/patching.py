"""`patch`: edit the sinks of a diagnosed run, one head at a time, and measure what follows; the command line calls it.

run = sinklab.patch("runs/demo")
run.effects; run.table("effects"); run.table("causal_verdicts"); run.report()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from time import perf_counter
from typing import TYPE_CHECKING, Any

from sinklab.atomic import FolderLock
from sinklab.diagnosis import Diagnosis, open_run
from sinklab.errors import InputError, NotFoundError, NothingToEdit
from sinklab.reopened import experiment_on
from sinklab.settings import differences, utc_now
from sinklab.trained import one_to_patch

if TYPE_CHECKING:
    from sinklab.handle import Model
    from sinklab.interventions.choose import Choice
    from sinklab.interventions.design import Design
    from sinklab.interventions.experiment import Experiment
    from sinklab.interventions.options import PatchOptions
    from sinklab.sinks.ranks import Ranks
    from sinklab.sinks.scan import Progress

RESULTS = (
    "effects",
    *(f"tables/{name}.csv" for name in ("effects", "causal_verdicts", "task_effects", "position_effects")),
)


def patch(
    run: str | Path | Diagnosis,
    model: Model | None = None,
    images: str | Path | Sequence[str | Path] | None = None,
    *,
    text: str | Path | None = None,
    options: PatchOptions | None = None,
    held_out: float | str | Path | None = None,
    device: str | None = None,
    workers: int = 0,
    overwrite: bool = False,
    resume: bool = False,
    report: bool = True,
    command: Sequence[str] | None = None,
    progress: Progress | None = None,
    **chosen: Any,
) -> Diagnosis:
    """Test by intervention what each sink of a diagnosed run does, and add the answer to the run.

    Args:
        run: the run, or its folder; of a training run with one diagnosed model, that.
        model: the run's model; None loads it again as the run was told to.
        images: where the run's images are now; None looks where they were.
        text: where a language model's text is now; None looks where it was.
        options: a `PatchOptions`, or give its fields by name: heads, edits, classes, per_class, joint, seed, …
        held_out: images that are not edited and give the mean values: a share of the run's own, or a folder.
        device: "cpu", "cuda", "auto", …; None leaves the model where it is.
        overwrite, resume: replace an earlier patching of this run, or go on with it. report: write the report again.

    In a model with a global pathway, and in sinklab's own vision transformers, the branches are edited too (table
    "branch_effects"), also where no head can be.
    Under torchrun every rank calls this. Returns the run, with `effects`, and tables "effects" and "causal_verdicts".
    Raises InputError and NotFoundError with a sentence before anything is written wherever that is possible.
    """
    from sinklab.interventions.branch_effects import choice_or_branches
    from sinklab.interventions.options import options_from
    from sinklab.sinks.ranks import ranks

    if options is not None and (chosen or isinstance(held_out, (int, float))):
        raise InputError(f"Give options= or its fields ({', '.join(chosen) or 'held_out'}), not both.")
    if not isinstance(run, (str, Path, Diagnosis)):
        raise InputError(f"A run to patch is its folder, or what diagnose and open_run give, not {run!r}.")
    opened = open_run(one_to_patch(Path(run))) if isinstance(run, (str, Path)) else run
    share = isinstance(held_out, (int, float))
    folder = None if held_out is None or isinstance(held_out, (int, float)) else held_out
    if options is None:
        options = options_from(chosen | ({"held_out": held_out} if share else {}))
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 0:
        raise InputError(f"The number of workers is 0 or more, not {workers!r}.")
    if resume and overwrite:
        raise InputError("--resume goes on with a patching and --overwrite replaces it: give one of them.")
    with ranks() as own:
        experiment = experiment_on(opened, model, images, text, options, folder, device, workers, own)
        choice = choice_or_branches(experiment)
        _run(experiment, choice, own, overwrite, resume, command, progress)
        if report and own.first:
            opened.report()
        own.wait()
    return opened


def _run(
    experiment: Experiment,
    choice: Choice | None,
    own: Ranks,
    overwrite: bool,
    resume: bool,
    command: Sequence[str] | None,
    progress: Progress | None,
) -> None:
    from sinklab.interventions.branch_effects import write_branch_effects
    from sinklab.interventions.results import write_results

    if choice is None:
        with _locked(experiment, own, overwrite, resume):
            _told_to_all(own, lambda: _branches(experiment, own, overwrite))
        return
    run, started = experiment.run, perf_counter()
    before = run.config.get("patch") or {}
    # whatever refuses does so before anything is written, or removed
    known = _design(experiment, choice) if experiment.folder is None else None
    experiment.rehearse(known)
    with _locked(experiment, own, overwrite, resume):
        if own.first:
            about = {"status": "running", "created": before.get("created", utc_now()) if resume else utc_now()}
            about |= {"fingerprint": experiment.fingerprint, "settings": experiment.settings}
            about |= {"command": None if command is None else list(command)}
            run.update(patch={**before, **about} if resume else about)
        own.wait()
        steps: list[Any] = []

        def work() -> None:
            experiment.measure_folder(choice)
            _together(own)
            design = known or _design(experiment, choice)
            first, second = _in_turn(progress, *experiment.sizes(design))
            experiment.collect(design, first)
            _together(own)
            steps.extend((design, experiment.measure(design, experiment.values(), second)))

        _told_to_all(own, work)
        checked: dict[int, int] = {}
        for one in own.gathered(steps[1]):
            checked |= {layer: checked.get(layer, 0) + count for layer, count in one.items()}
        if own.first:
            seconds = perf_counter() - started
            write_results(experiment, choice, steps[0], checked, seconds)
            write_branch_effects(experiment, again=overwrite)


def _branches(experiment: Experiment, own: Ranks, again: bool) -> None:
    """The branch edits of a model that has a pathway, by rank 0."""
    from sinklab.interventions.branch_effects import write_branch_effects

    if own.first:
        write_branch_effects(experiment, again=again)


def _design(experiment: Experiment, choice: Choice) -> Design:
    """What will be done; NotFoundError if that is nothing."""
    design = experiment.design(choice)
    if not len(design.rows):
        noun = experiment.images.noun
        folder = ", or give a folder of held-out images" if noun == "image" else ""
        raise NothingToEdit(
            f"Every event of the chosen heads is on a held-out {noun}, or could not be edited: hold out fewer "
            f"(--heldout){folder}."
        )
    return design


def _in_turn(progress: Progress | None, first: int, second: int) -> tuple[Progress | None, Progress | None]:
    """One bar for two passes over the inputs."""
    if progress is None:
        return None, None
    told = progress
    return lambda done, _: told(done, first + second), lambda done, _: told(first + done, first + second)


def _together(own: Ranks) -> None:
    """Wait for the others between two passes, or learn that one of them failed."""
    said = own.any_failed(None)
    if said is not None:
        raise InputError(f"Another rank stopped: {said}")


def _told_to_all(own: Ranks, work: Callable[[], None]) -> None:
    """Run the work; a failure here is heard by the ranks that wait for this one."""
    try:
        work()
    except Exception as error:
        if own.world > 1 and not str(error).startswith("Another rank stopped"):
            own.any_failed(str(error) or type(error).__name__)
        raise
    _together(own)


@contextmanager
def _locked(experiment: Experiment, own: Ranks, overwrite: bool, resume: bool) -> Iterator[None]:
    """Rank 0 locks the run and makes room; a refusal reaches every rank."""
    problem: Exception | None = None
    lock = None
    try:
        if own.first:
            lock = FolderLock(experiment.run.path)
            _make_room(experiment, overwrite, resume)
    except (InputError, NotFoundError, OSError) as error:
        problem = error
    said = own.agree(None if problem is None else str(problem))
    try:
        if problem is not None:
            raise problem
        if said is not None:
            raise InputError(said)
        yield
    finally:
        if lock is not None:
            lock.release()


def _make_room(experiment: Experiment, overwrite: bool, resume: bool) -> None:
    """Raise InputError where an earlier patching is in the way; remove it if it is to be replaced."""
    run = experiment.run
    before = run.config.get("patch")
    if before and not (overwrite or resume):
        raise InputError(f"{run.path} has been patched already: --resume goes on with that, --overwrite replaces it.")
    if before and resume:
        if before.get("fingerprint") != experiment.fingerprint:
            changed = "; ".join(differences(before.get("settings", {}), experiment.settings))
            raise InputError(
                f"{run.path} was patched with other settings and cannot be resumed with these: {changed}. Give the "
                "same settings, or --overwrite."
            )
        return
    if before:
        run.update(patch=None)  # first, so that a kill in between leaves no half of it
    for name in RESULTS:
        path = run.path / name
        if path.is_dir() and not path.is_symlink():
            rmtree(path)
        else:
            path.unlink(missing_ok=True)
