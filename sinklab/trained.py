"""The models of a training run, each diagnosed and patched into a folder of its own: RUN/diagnosed/MEMBER."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sinklab.errors import InputError, NotFoundError
from sinklab.models.from_training import WEIGHTS, members_in, members_named

if TYPE_CHECKING:
    from sinklab.data.input_list import InputList

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


def unfinished_sentence(folder: Path) -> str:
    """Which models of a training run are not finished, and which of them are looked at nevertheless; "" for none."""
    names, within = members_named(folder), folder / "training"
    weighed = {name for name in names if (within / name / WEIGHTS).is_file()}
    ended = {name for name in names if (within / name / "evaluation.json").is_file()}
    groups = {
        "not finished, and so left out": [name for name in names if name not in weighed | ended],
        "not finished, and looked at as far as they are": [name for name in names if name in weighed - ended],
        f"without {WEIGHTS}, and so left out": [name for name in names if name in ended - weighed],
    }
    said = [f"{words}: {', '.join(mine)}" for words, mine in groups.items() if mine]
    if not said:
        return ""
    onward = "" if len(ended) == len(names) else " The training's own command with --resume goes on with it."
    return f"of the {len(names)} models of {folder} {len(weighed & ended)} can be looked at; {'; '.join(said)}.{onward}"


def not_begun(to_do: list[tuple[str, Path]], images: InputList | None) -> tuple[list[tuple[str, Path]], str]:
    """(the models of a training run that hold no diagnosis yet, what is said of the others).

    Where all hold one they are left in, for the refusal that this is.
    """
    held = [(name, into) for name, into in to_do if (into / "run.json").is_file()]
    rest = [one for one in to_do if one not in held]
    if not held or not rest:
        return to_do, ""
    said = (
        f"diagnosed already, and left as they are: {', '.join(str(into) for _, into in held)}; --resume goes on with "
        "all of a run, --overwrite measures all anew"
    )
    other = [str(into) for _, into in held if images is not None and _list_in(into) not in (None, images.sha256)]
    return rest, said + (f". Of other images than these are {', '.join(other)}." if other else ".")


def _list_in(run: Path) -> str | None:
    """The hash of the list of inputs that a run looked at; None where it does not say."""
    try:
        found = json.loads((run / "run.json").read_text(encoding="utf-8"))["images"]["list_sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None


def not_diagnosed_sentence(run: Path, found: Sequence[Path]) -> str:
    """Which models of a training run are not patched, for they were not diagnosed; "" for none."""
    seen = {path.relative_to(run / DIAGNOSED).as_posix() for path in found if path.is_relative_to(run / DIAGNOSED)}
    left = [name for name in members_named(run) if name not in seen]
    return f"not diagnosed, and so not patched: {', '.join(left)}." if left and seen else ""


def to_patch(run: Path) -> list[Path] | None:
    """The diagnosed runs of a training run, in the order of its members; None where `run` is no training run.

    `run` is the training run or, where its models were diagnosed into another folder (`-o`), that folder.
    Raises NotFoundError where none was diagnosed yet.
    """
    if not (run / "run.json").is_file():
        return _diagnosed_into(run) or None
    members = members_in(run)
    if not members:
        return None
    found = [run / DIAGNOSED / name for name in members]
    present = [path for path in found if (path / "run.json").is_file()]
    if not present:
        raise NotFoundError(f"{run} trained models that were not diagnosed yet: sinklab diagnose {run}.")
    return present


def _diagnosed_into(folder: Path) -> list[Path]:
    """The runs FOLDER/MEMBER of trained models that are called MEMBER, in the order of their names' numbers."""
    found = []
    for path in folder.glob("*/**/run.json"):
        try:
            name = Path(json.loads(path.read_text(encoding="utf-8"))["model"]["request"]["name"])
        except (OSError, ValueError, LookupError, TypeError):  # another kind of folder
            continue
        member = path.parent.relative_to(folder).parts
        if name.name == WEIGHTS and name.parent.parts[-len(member) - 1 :] == ("training", *member):
            found.append(path.parent)
    return sorted(found, key=lambda path: [part.zfill(12) for part in re.split(r"(\d+)", str(path))])


def renew_report(folder: Path) -> str | None:
    """Write the report of a training of language models or vision transformers again, now that its models were
    diagnosed or patched.

    Returns why not, where its tables cannot be read; None where it was written or `folder` is another run, whose page
    does not say what the models' sinks are.
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
