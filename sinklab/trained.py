"""The models of a training run, each diagnosed and patched into a folder of its own: RUN/diagnosed/MEMBER."""

from __future__ import annotations

from pathlib import Path

from sinklab.errors import InputError, NotFoundError
from sinklab.models.from_training import members_in

DIAGNOSED = "diagnosed"


def to_diagnose(model: str, output: Path | None) -> list[tuple[str, Path]] | None:
    """(what `load` takes, run folder) of every model of a training run; None where `model` names no training run.

    Raises NotFoundError for a training run without a trained model.
    """
    folder = Path(model).expanduser()
    if not (folder / "run.json").is_file():
        return None
    found = members_in(folder)
    within = folder / DIAGNOSED if output is None else output
    return [(str(path.parent), within / name) for name, path in found.items()] or None


def to_patch(run: Path) -> list[Path] | None:
    """The diagnosed runs of a training run, in the order of its members; None where `run` is no training run.

    Raises NotFoundError where none was diagnosed yet.
    """
    if not (run / "run.json").is_file():
        return None
    members = members_in(run)
    if not members:
        return None
    found = [run / DIAGNOSED / name for name in members]
    present = [path for path in found if (path / "run.json").is_file()]
    if not present:
        raise NotFoundError(f"{run} trained models that were not diagnosed yet: sinklab diagnose {run}.")
    return present


def renew_report(folder: Path) -> str | None:
    """Write a language model training's report again, now that its models were diagnosed or patched.

    Returns why not, where its tables cannot be read; None where it was written or `folder` is no finished training of
    language models, whose page alone says what the models' sinks are.
    """
    from sinklab.reports.training import shows_sinks, write_training_report
    from sinklab.run import Run

    if not (folder / "run.json").is_file():
        return None
    run = Run.open(folder)
    if not shows_sinks(run):
        return None
    try:
        write_training_report(run)
    except InputError as error:  # what was measured is kept; only the page that gathers it is missing
        return str(error)
    return None


def one_to_patch(run: Path) -> Path:
    """The run itself or, of a training run, its one diagnosed model. InputError where there are several."""
    found = to_patch(run)
    if found is None:
        return run
    if len(found) > 1:
        raise InputError(f"{run} holds {len(found)} diagnosed models: name one, like {found[0]}.")
    return found[0]
