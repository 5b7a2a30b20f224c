"""Read a file of weights, safely: safetensors first, then tensors-only torch files, pickles only when allowed.

Whatever the file turns out to be, the reader says so in a sentence: an HTML page, a Git LFS pointer, a truncated
download, a TorchScript archive, a pickle that would run code.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from torch import Tensor, dtype

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
"""Endings by which a word is recognised as the name of a checkpoint file."""

# Where training scripts keep the weights inside a checkpoint; averaged weights come before raw ones, the DINO teacher
# before everything, because that is the network that is published and evaluated.
_NESTS = ("teacher", "model_ema", "state_dict_ema", "state_dict", "model", "module")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Named tensors as they stood in the file, and what the file was."""

    state: dict[str, Tensor]
    paths: tuple[Path, ...]
    """The file, or the shards of one checkpoint."""
    sha256: str
    """Of the file; for shards, of the lines "digest  name" in order."""
    notes: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The file's name, without its folder."""
        return self.paths[0].name if len(self.paths) == 1 else f"{len(self.paths)} shards, first {self.paths[0].name}"

    @property
    def dtype(self) -> dtype:
        """bfloat16 if every floating tensor in the file is bfloat16, else float32: what the module is loaded in."""
        import torch

        kinds = {value.dtype for value in self.state.values() if value.is_floating_point()}
        return torch.bfloat16 if kinds == {torch.bfloat16} else torch.float32


def read(path: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """The named tensors of one checkpoint file, or of all shards named by a `*.index.json`.

    Raises NotFoundError if there is no such file, InputError if it cannot be read as weights.
    """
    if not path.is_file():
        raise NotFoundError(f"There is no weights file {path}.")
    paths = _shards(path) if path.name.endswith(".index.json") else (path,)
    state: dict[str, Tensor] = {}
    notes: list[str] = []
    for part in paths:
        held, within = _named_tensors(_payload(part, allow_pickle), part)
        state |= held
        if within:
            notes.append(f"weights taken from {within!r} inside {part.name}")
    notes += _dtype_notes(state)
    digests = [sha256_of(part) for part in paths]
    lines = "".join(f"{digest}  {part.name}\n" for digest, part in zip(digests, paths, strict=True))
    digest = digests[0] if len(digests) == 1 else hashlib.sha256(lines.encode()).hexdigest()
    return Checkpoint(state=state, paths=paths, sha256=digest, notes=tuple(notes))


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{index} is not a list of weight shards: it needs a JSON object 'weight_map'.") from error
    paths = tuple(index.parent / name for name in names)
    absent = [part.name for part in paths if not part.is_file()]
    if absent:
        raise NotFoundError(
            f"{index.name} names {len(paths)} shards; {len(absent)} are not beside it, first {absent[0]}."
        )
    return paths


def _payload(path: Path, allow_pickle: bool) -> Any:
    with path.open("rb") as stream:
        head = stream.read(512)
    if not head:
        raise InputError(f"{path} is empty: the download or the copy did not finish.")
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise InputError(f"{path} is a web page, not weights: the download was answered by a login or error page.")
    if text.startswith(b"version https://git-lfs"):
        raise InputError(f"{path} is a Git LFS pointer, not the weights themselves: fetch it with `git lfs pull`.")
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        return _read_safetensors(path)
    if not head.startswith((b"PK\x03\x04", b"\x80")):  # a zip archive, as torch writes it, or a bare pickle
        raise InputError(f"{path} is not a file of weights: it is neither safetensors nor a torch file.")
    return _read_torch(path, allow_pickle)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise InputError(f"{path} cannot be read as safetensors (truncated or damaged?): {error}.") from error


def _read_torch(path: Path, allow_pickle: bool) -> Any:
    import pickle
    import warnings

    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of TorchScript archives; they are handled below
            return torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        if "weights only" in str(error).lower() or "weights_only" in str(error):
            raise InputError(_pickle_sentence(path, str(error))) from error
        raise InputError(f"{path} is not a file of weights: it is neither safetensors nor a torch file.") from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError) as error:
        if "torchscript" in str(error).lower():
            raise InputError(_pickle_sentence(path, "it is a TorchScript archive")) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{path} cannot be read as a torch file (truncated or damaged?): {reason}") from error
    except (AttributeError, ModuleNotFoundError, TypeError) as error:  # a pickle whose classes are not importable here
        raise InputError(f"{path} holds Python objects that cannot be rebuilt here: {error}.") from error


def _pickle_sentence(path: Path, reason: str) -> str:
    import re

    named = re.search(r"GLOBAL ([\w.]+)", reason)
    what = f"Python objects beyond tensors (first: {named.group(1)})" if named else "more than plain tensors"
    if "TorchScript" in reason:
        what = "a TorchScript program"
    return (
        f"{path} holds {what}, and reading them may run code from the file. If you trust its origin, "
        "allow it with allow_pickle=True (command line: --allow-pickle); better, save its state_dict as safetensors."
    )


def _named_tensors(payload: Any, path: Path) -> tuple[dict[str, Tensor], str]:
    """The deepest dictionary of tensors in a payload and the name it was found under."""
    from torch import Tensor, nn

    within: list[str] = []
    while True:
        if isinstance(payload, nn.Module):
            payload = payload.state_dict()
        if not isinstance(payload, dict):
            break
        nest = next((name for name in _NESTS if isinstance(payload.get(name), dict | nn.Module)), None)
        if nest is None:
            break
        within.append(nest)
        payload = payload[nest]
    held = payload if isinstance(payload, dict) else {}
    state = {str(name): value.detach() for name, value in held.items() if isinstance(value, Tensor)}
    if not state:
        raise InputError(
            f"{path} holds no named tensors (found: {type(payload).__name__}); what would fit is a state_dict, alone "
            f"or under one of {', '.join(_NESTS)}."
        )
    return state, ".".join(within)


def _dtype_notes(state: dict[str, Tensor]) -> list[str]:
    kinds = sorted({str(value.dtype).removeprefix("torch.") for value in state.values() if value.is_floating_point()})
    if kinds == ["bfloat16"]:
        return ["the weights are stored and loaded in bfloat16; a run in float32 widens them without loss"]
    if kinds and kinds != ["float32"]:
        return [f"weights stored as {', '.join(kinds)}, loaded as float32"]
    return []
