"""Text as a language model sees it: bytes of a file or folder, memory-mapped, in three splits.

| source | what it is | splits |
|---|---|---|
| `stdlib` | the library source of the Python that runs, without its tests | 90/5/5 |
| `enwik8=PATH` | the first 100,000,000 bytes of a Wikipedia dump | 90M / 5M / 5M |
| a file | its bytes | 90/5/5 |
| a folder | its files' bytes, in order of their names | 90/5/5 |
| a folder of three files train, validation and test (any endings) | these | the files |

A token is a byte, numbered among those that occur in the text ("observed"), or the byte itself ("bytes").
Letters: B batch, N context.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sinklab.data.toy import generator_for
from sinklab.errors import InputError, NotFoundError
from sinklab.settings import require_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPLITS = ("train", "validation", "test")
VOCABULARIES = ("observed", "bytes")
ENWIK8 = (90_000_000, 5_000_000, 5_000_000)
SHARES = (90.0, 5.0, 5.0)
CHUNK = 1 << 24
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Folders of the standard library's place that other packages or tests lie in; not every machine has them."""


@dataclass(frozen=True, eq=False)
class Text:
    """A text's bytes, their numbering, and where its splits begin and end."""

    name: str
    content: NDArray[np.uint8] = field(repr=False)
    splits: dict[str, tuple[int, int]]
    """Split → (first byte, byte after the last)."""
    symbols: bytes = field(repr=False)
    """Token i is the byte symbols[i]."""
    notes: tuple[str, ...] = ()
    given_splits: bool = False
    """Whether the splits came with the text, and are not shares of it."""

    @cached_property
    def sha256(self) -> str:
        """Of the whole content."""
        digest = hashlib.sha256()
        for chunk in _chunks(self.content):
            digest.update(chunk.tobytes())
        return digest.hexdigest()

    @cached_property
    def _token_of(self) -> NDArray[np.int64]:
        table = np.full(256, -1, dtype=np.int64)
        table[list(self.symbols)] = np.arange(len(self.symbols))
        return table

    def length(self, split: str) -> int:
        """Bytes of a split. Raises NotFoundError for a split that a text does not have."""
        if split not in self.splits:
            raise NotFoundError(f"A text is split into {', '.join(self.splits)}; there is no split {split!r}.")
        first, end = self.splits[split]
        return end - first

    def tokens(self, start: int, length: int) -> Tensor:
        """Tokens [length] from a byte of the whole text on."""
        return torch.from_numpy(self._token_of[self.content[start : start + length]])

    def rows(self, starts: Sequence[int] | NDArray[np.int64], length: int) -> Tensor:
        """Tokens [B length] from each of these bytes of the whole text on."""
        places = np.asarray(starts, dtype=np.int64)[:, None] + np.arange(length)
        return torch.from_numpy(self._token_of[self.content[places]])

    def encode(self, content: bytes) -> Tensor:
        """Tokens of other bytes. Raises InputError for one that this text does not have."""
        tokens = self._token_of[np.frombuffer(content, dtype=np.uint8)]
        if (tokens < 0).any():
            strange = content[int((tokens < 0).argmax())]
            raise InputError(f"The byte {strange} is none of the {len(self.symbols)} symbols of {self.name}.")
        return torch.from_numpy(tokens)

    def decode(self, tokens: Tensor) -> bytes:
        """The bytes of tokens [N]."""
        return bytes(self.symbols[int(token)] for token in tokens)

    def batch(self, seed: int, step: int, size: int, context: int, rows: slice = slice(None)) -> Tensor:
        """Training sequences [B N + 1] with the next token, from places that depend on seed and step alone.

        `rows` picks some of them, where several processes share a batch.
        """
        first, end = self.splits["train"]
        drawn = torch.randint(end - first - context, (size,), generator=generator_for("batches", seed, step))
        return self.rows(first + drawn.numpy()[rows], context + 1)

    def numbered_by(self, symbols: bytes, *, shipped: bool = False) -> Text:
        """The same text with a model's symbols; `shipped` if that comes with sinklab.

        Raises InputError where it has bytes that are none of these.
        """
        own = sorted(set().union(*(np.unique(chunk).tolist() for chunk in _chunks(self.content))))
        strange = [byte for byte in own if byte not in symbols]
        if strange:
            from sinklab.data.strange_bytes import refusal

            raise InputError(refusal(self.name, self.content, strange, shipped))
        return replace(self, symbols=symbols)

    def windows(self, split: str, length: int) -> list[tuple[str, int]]:
        """(id, first byte) of a split's windows that do not overlap; ids are like "validation/00012"."""
        first, _ = self.splits[split] if self.length(split) else (0, 0)
        count = self.length(split) // length
        return [(f"{split}/{number:05d}", first + number * length) for number in range(count)]

    def require(self, context: int) -> None:
        """Raises InputError unless every split holds a sequence of `context` tokens and one more."""
        for split in self.splits:
            if self.length(split) <= context:
                raise InputError(
                    f"The {split} split of {self.name} has {self.length(split)} bytes, but sequences of {context} and "
                    "the byte after them are to be read from it: give more text, or a smaller context."
                )

    def settings(self) -> dict[str, Any]:
        """What a run's numbers depend on."""
        return {"name": self.name, "sha256": self.sha256, "splits": self.splits, "symbols": list(self.symbols)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """A list of sequences [N] with ids, read when asked for."""

    text: Text
    split: str = "validation"
    length: int = 256
    limit: int | None = None
    """Only so many, evenly spread over the split."""

    def __post_init__(self) -> None:
        if self.length < 1 or not self.entries:
            raise InputError(
                f"The {self.split} split of {self.text.name} has {self.text.length(self.split)} bytes: no window of "
                f"{self.length} fits."
            )

    @cached_property
    def entries(self) -> list[tuple[str, int]]:
        """(id, first byte of the whole text)."""
        every = self.text.windows(self.split, self.length)
        if self.limit is None or self.limit >= len(every):
            return every
        return [every[i * len(every) // self.limit] for i in range(self.limit)]

    @property
    def ids(self) -> list[str]:
        return [name for name, _ in self.entries]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Tensor:
        return self.text.tokens(self.entries[index][1], self.length)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))


def open_text(source: str | Path, *, vocabulary: str = "observed", shares: Sequence[float] = SHARES) -> Text:
    """A text by its source (see the table above).

    Args:
        vocabulary: "observed" or "bytes".
        shares: of train, validation and test, in any unit; for texts whose splits are not given.

    Raises NotFoundError for a path that does not exist, InputError for what cannot be a text.
    """
    if vocabulary not in VOCABULARIES:
        raise InputError(f"The vocabulary is {' or '.join(VOCABULARIES)}, not {vocabulary!r}.")
    require_text(source, "The text")
    if not str(source).strip():
        raise InputError("A text has a name that is not empty: stdlib, enwik8=PATH, a file or a folder.")
    if len(shares) != 3 or not all(0 < share < np.inf for share in shares):
        raise InputError(f"A text is split by three positive shares, such as 90,5,5; {list(shares)} was given.")
    kind, equals, path = str(source).partition("=")
    given: Sequence[int] | None = None
    if str(source) == "stdlib":
        name, content = "stdlib", _joined(_library_files())
    elif kind == "enwik8" and (equals or not Path(source).exists()):
        name, content, given = "enwik8", _mapped(Path(path or "enwik8")), ENWIK8
        if len(content) != sum(ENWIK8):
            raise InputError(f"enwik8 has 100,000,000 bytes; {path} has {len(content):,}: it is another file, or cut.")
    elif Path(source).is_dir():
        files = _files_below(Path(source))
        name = Path(source).resolve().name
        in_order = _named_splits(files)
        given = [path.stat().st_size for path in in_order] if in_order else None
        content = _joined(in_order or files)
    else:
        name, content = Path(source).name, _mapped(Path(source))
    if not len(content):
        raise InputError(f"{source} is empty: there is nothing in it to read.")
    counts = sum((np.bincount(chunk, minlength=256) for chunk in _chunks(content)), np.zeros(256, dtype=np.int64))
    notes: tuple[str, ...] = ()
    if counts[0]:
        notes = (f"{name} is not plain text: {int(counts[0]):,} of its bytes are 0. It is read as bytes all the same.",)
    symbols = bytes(np.flatnonzero(counts).tolist()) if vocabulary == "observed" else bytes(range(256))
    return Text(
        name=name,
        content=content,
        splits=_splits(len(content), shares, given),
        symbols=symbols,
        notes=notes,
        given_splits=given is not None,
    )


def _splits(size: int, shares: Sequence[float], given: Sequence[int] | None) -> dict[str, tuple[int, int]]:
    if given is not None:
        ends = [given[0], given[0] + given[1], size]
    else:
        ends = [int(size * shares[0] / sum(shares)), int(size * (shares[0] + shares[1]) / sum(shares)), size]
    return dict(zip(SPLITS, zip([0, *ends[:2]], ends, strict=True), strict=True))


def _chunks(content: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    return (content[start : start + CHUNK] for start in range(0, len(content), CHUNK))


def _mapped(path: Path) -> NDArray[np.uint8]:
    if not path.is_file():
        raise NotFoundError(f"There is no text {path}: --text takes stdlib, enwik8=PATH, a file or a folder.")
    if not path.stat().st_size:
        raise InputError(f"{path} is empty: there is nothing in it to read.")
    return np.memmap(path, dtype=np.uint8, mode="r")


def _files_below(folder: Path) -> list[Path]:
    """Every file that is not hidden, by its path."""
    found = [
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not found:
        raise InputError(f"The folder {folder} holds no files: --text takes stdlib, enwik8=PATH, a file or a folder.")
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _named_splits(files: Sequence[Path]) -> list[Path] | None:
    """Train, validation and test, if these are the files, whatever their endings."""
    names = ("train|training", "valid|validation|val|dev", "test")
    fitting = [[path for path in files if re.fullmatch(pattern, path.stem)] for pattern in names]
    return [group[0] for group in fitting] if len(files) == 3 and all(len(group) == 1 for group in fitting) else None


def _library_files() -> list[Path]:
    """The modules of the Python that runs, without what only this machine's build or its user has added."""
    import sysconfig

    root = Path(sysconfig.get_paths()["stdlib"])
    found = {
        path.relative_to(root).as_posix(): path
        for path in root.rglob("*.py")
        if not NOT_LIBRARY & set(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    }
    if not found:
        raise NotFoundError(f"This Python has no library source in {root}: give a file or folder with --text.")
    return [found[name] for name in sorted(found)]


def _joined(files: Sequence[Path]) -> NDArray[np.uint8]:
    """The files' bytes one behind the other: memory-mapped, as if they were one file."""
    import tempfile

    with tempfile.TemporaryFile() as stream:
        for path in files:
            stream.write(path.read_bytes())
        stream.flush()
        if not stream.tell():
            return np.zeros(0, dtype=np.uint8)
        return np.memmap(stream, dtype=np.uint8, mode="r")
