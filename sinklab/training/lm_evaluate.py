"""Trained language models on a text, which need not be the one that they were trained on."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sinklab.data.text import Text
from sinklab.errors import InputError, NotFoundError
from sinklab.models.lm_file import SavedLM, read_lm, shipped_lm
from sinklab.run import Run
from sinklab.training.finished import whole_weights
from sinklab.training.lm_measure import bits_per_byte

if TYPE_CHECKING:
    import pandas as pd


def trained_models(path: str | Path, members: Sequence[str] = ()) -> dict[str, Path]:
    """Name → weights file: of a training run, all finished members or those named; or of a weights file, itself.

    A warning names those that are left out. Also of a member's own folder, or of a name like lm:phase-tiny that comes
    with sinklab.
    Raises NotFoundError for a member that is not there, InputError for a run of another kind.
    """
    alone = str(path).startswith("lm:") or Path(path).expanduser().is_file()
    if members and (alone or (Path(path).expanduser() / "model.safetensors").is_file()):
        raise InputError(f"{path} is one model: members are named of a run that trained several.")
    if str(path).startswith("lm:"):
        return {str(path): shipped_lm(str(path).removeprefix("lm:"))}
    path = Path(path).expanduser()
    if path.is_file():
        return {path.stem: path}
    if (path / "model.safetensors").is_file():
        return {path.resolve().name: path / "model.safetensors"}
    run = Run.open(path)
    kind = run.config.get("settings", {}).get("kind")
    if kind != "lm":
        raise InputError(
            f"sinklab evaluate reads runs of `sinklab train lm`; {path} is of kind {kind or 'diagnose'!r}."
        )
    known = {name: path / "training" / name / "model.safetensors" for name in map(str, run.config.get("members", []))}
    strange = [name for name in members if name not in known]
    if strange:
        raise NotFoundError(f"The run {path} has no {strange[0]!r}; it has {', '.join(known)}.")
    asked = {name: file for name, file in known.items() if not members or name in members}
    finished = {
        name: file for name, file in asked.items() if whole_weights(file) and file.with_suffix(".json").is_file()
    }
    if finished and len(finished) < len(asked):
        missing = ", ".join(name for name in asked if name not in finished)
        warnings.warn(f"left out, for their weights are not there or not whole: {missing}.", stacklevel=2)
    if not finished and members:
        raise NotFoundError(
            f"The weights of {', '.join(asked)} in the run {path} are not there or not whole: go on with it, by "
            "its own command and --resume."
        )
    if not finished:
        raise NotFoundError(
            f"Nothing in the run {path} is trained yet: go on with it, by its own command and --resume."
        )
    return finished


def evaluate_models(
    files: dict[str, Path],
    text: Text,
    *,
    splits: Sequence[str] = ("validation", "test"),
    context: int | None = None,
    stride: int | None = None,
    batch: int = 64,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """[member, split, bpc, bytes, context, stride, same_text]: one row a model and split.

    Args:
        context, stride: of the sliding window; those of the training where they are None.

    Raises InputError where the text has bytes that a model has no symbol for, and for what cannot be.
    """
    import pandas as pd

    splits = list(dict.fromkeys(splits))
    for split in splits:
        text.length(split)  # refuses a strange one before the first model runs
    rows = []
    for done, (name, file) in enumerate(files.items()):
        held = read_lm(file)
        own = text.numbered_by(held.symbols, shipped=name.startswith("lm:"))
        for split in splits:
            bits = bits_per_byte(
                held.model.to(device),
                own,
                split,
                context=context or held.context,
                stride=stride or min(int(held.saved["config"]["stride"]), context or held.context),
                batch=batch,
            )
            rows.append(
                {
                    "member": name,
                    "split": split,
                    "bpc": bits.bpc,
                    "bytes": bits.predicted,
                    "context": bits.context,
                    "stride": bits.stride,
                    "same_text": trained_on(held, text),
                }
            )
        if progress is not None:
            progress(done + 1, len(files))
    return pd.DataFrame(rows)


def trained_on(held: SavedLM, text: Text) -> bool:
    """Whether the model was trained on this very text, with these splits."""
    saved = held.saved.get("text", {})
    same_splits = json.loads(json.dumps(saved.get("splits"))) == json.loads(json.dumps(text.splits))
    return saved.get("sha256") == text.sha256 and same_splits
