"""Pictures that lie in tables: Parquet files, and what Hugging Face's `save_to_disk` writes (Arrow files).

A row is a picture: its bytes in the column `image` (or `img`), plain or as the struct {bytes, path} that the Hub uses,
and its class in `label` (or `cls`), as a number or a name. Arrow files are mapped into memory and read where a picture
lies; of a Parquet file a whole row group is read, so that shuffled training is faster from Arrow.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.data.decode import UnreadableImage, decoded
from sinklab.data.folders import is_run, scan
from sinklab.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from torch import Tensor

ENDINGS = (".parquet", ".arrow")
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "cls", "labels", "fine_label")
GROUPS_KEPT = 8
"""Row groups of Parquet files that are kept for the next picture."""


def table_files(source: str | Path) -> list[Path]:
    """The tables that a file stands for, or those with pictures in a folder, sorted by name; none if there are none.

    Sinklab's own runs and what is hidden are left out, as among pictures that are files. A table that is damaged, or
    whose column `image` holds no pictures, is one of a folder's only beside tables with pictures, or where there are no
    pictures otherwise: then whoever reads it says what is wrong. In a folder of photographs it is none of ours.
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        return [path] if path.suffix in ENDINGS else []
    found, suspect = list[Path](), list[Path]()
    for table in _below(path):
        try:
            schema = _schema(str(table))
        except (InputError, NotFoundError):
            suspect.append(table)
            continue
        named = [schema.field(name).type for name in IMAGE_COLUMNS if name in schema.names]
        if named:
            (found if any(map(_holds_pictures, named)) else suspect).append(table)
    return sorted([*found, *suspect]) if found or (suspect and not scan(path, "")[0]) else []


def _below(folder: Path) -> Iterator[Path]:
    """Every file with a table's ending in a folder at any depth, but for runs and what is hidden."""
    for where, folders, names in os.walk(folder):
        run = is_run(where)
        folders[:] = [name for name in folders if not run and not name.startswith(".")]
        if not run:
            yield from (Path(where, name) for name in names if name.endswith(ENDINGS) and not name.startswith("."))


def _holds_pictures(kind: Any) -> bool:
    """Whether a column of this Arrow type may hold pictures: bytes, or a struct with bytes."""
    import pyarrow.types as types

    kind = getattr(kind, "storage_type", kind)
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _holds_pictures(kind.field(place).type)
    known = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    return any(is_kind(kind) for is_kind in known)


class ImageTable:
    """Pictures and labels of one or more tables with the same columns, in the order of the files.

    `classes` are those of the training pictures, when these are for validation, and `sources` what was asked for, as it
    was written. Raises NotFoundError for no files and InputError for tables without pictures.
    """

    def __init__(
        self, files: Sequence[Path], *, classes: Sequence[str] | None = None, sources: Sequence[str] | None = None
    ) -> None:
        if not files:
            raise NotFoundError("No tables of images (.parquet, .arrow) were given.")
        self.files = [str(path) for path in files]
        self.sources = tuple(self.files if sources is None else sources)
        counts = [_rows(path) for path in self.files]
        self._ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        self.image_column, self.label_column, names = _columns(self.files[0])
        for path in self.files[1:]:
            if (found := _columns(path)[:2]) != (self.image_column, self.label_column):
                raise InputError(
                    f"{path} has its pictures and labels in the columns {_words(found)}, {self.files[0]} in "
                    f"{_words((self.image_column, self.label_column))}: tables given together have the same ones."
                )
        said = [name for path in self.files for name in _labels(path, self.label_column)]
        beyond = [value for value in said if names and isinstance(value, int) and value >= len(names)]
        if beyond:
            raise InputError(f"{self.files[0]} names {len(names)} classes, but a row has the label {beyond[0]}.")
        told = [names[value] if names and isinstance(value, int) and value >= 0 else value for value in said]
        spelled = [None if value is None or value == -1 else str(value) for value in told]
        known = classes if classes is not None else names or sorted({name for name in spelled if name}, key=_order)
        self.classes = tuple(known) if len(known) > 1 else ()
        numbers = {name: number for number, name in enumerate(self.classes)}
        strange = sorted({name for name in spelled if name} - numbers.keys()) if self.classes else []
        if strange:
            raise InputError(f"The label {strange[0]!r} is none of the {len(self.classes)} classes.")
        self._numbers = [numbers.get(name or "", -1) for name in spelled]

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def sha256(self) -> str:
        """Of the files' names and sizes, the labels and their classes."""
        sizes = [(Path(path).name, Path(path).stat().st_size) for path in self.files]
        return hashlib.sha256(f"{sizes} {self._numbers} {self.classes}".encode()).hexdigest()

    def label(self, index: int) -> int:
        """−1 for none."""
        return self._numbers[index]

    def picture(self, index: int) -> Tensor:
        """uint8 [3 H W], upright. Raises UnreadableImage."""
        from torchvision.transforms.v2 import functional as v2

        path, row = self.place(index)
        name = f"{Path(path).name}/{row}"
        pixels: Tensor = v2.pil_to_tensor(decoded(row_content(path, self.image_column, row, name), name))
        return pixels

    def place(self, index: int) -> tuple[str, int]:
        """The file of a picture, and its row there."""
        number = bisect_right(self._ends, index)
        return self.files[number], index - (self._ends[number - 1] if number else 0)


def row_content(path: str, column: str, row: int, name: str) -> bytes:
    """The bytes of a row's picture. Raises UnreadableImage, which calls it `name`."""
    import pyarrow as pa

    try:
        held = _cell(path, column, row)
    except (pa.ArrowException, OSError, InputError, NotFoundError) as error:
        raise UnreadableImage(name, f"its row cannot be read: {error}") from error
    content = held.get("bytes") if isinstance(held, dict) else held
    if not content:
        raise UnreadableImage(name, "its row holds no bytes")
    return bytes(content)


def _words(columns: tuple[str, str | None]) -> str:
    return f"{columns[0]} and {columns[1] or 'none'}"


def _order(name: str) -> tuple[bool, int, str]:
    return (False, int(name), "") if name.isdecimal() else (True, 0, name)


@lru_cache(maxsize=256)
def _mapped(path: str) -> Any:
    """An Arrow file's table; its pictures stay on the disk until they are asked for."""
    import pyarrow as pa

    try:
        source = pa.memory_map(path)
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no file {path}.") from error
    try:
        return pa.ipc.open_stream(source).read_all()
    except (pa.ArrowInvalid, OSError):
        try:
            return pa.ipc.open_file(source).read_all()
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{path} is not a whole Arrow file: {str(error).rstrip('.')}.") from error


@lru_cache(maxsize=256)
def _parquet(path: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no file {path}.") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} is not a whole Parquet file: {str(error).rstrip('.')}.") from error


@lru_cache(maxsize=GROUPS_KEPT)
def _group(path: str, number: int, column: str) -> Any:
    return _parquet(path).read_row_group(number, columns=[column])[column]


def _rows(path: str) -> int:
    return int(_mapped(path).num_rows if path.endswith(".arrow") else _parquet(path).metadata.num_rows)


def _cell(path: str, column: str, row: int) -> Any:
    if path.endswith(".arrow"):
        return _mapped(path)[column][row].as_py()
    metadata, first = _parquet(path).metadata, 0
    for number in range(metadata.num_row_groups):
        count = metadata.row_group(number).num_rows
        if row < first + count:
            return _group(path, number, column)[row - first].as_py()
        first += count
    raise InputError(f"{path} has no row {row}.")


def _labels(path: str, column: str | None) -> list[Any]:
    if column is None:
        return [None] * _rows(path)
    held = _mapped(path)[column] if path.endswith(".arrow") else _parquet(path).read(columns=[column])[column]
    values: list[Any] = held.to_pylist()
    return values


def _schema(path: str) -> Any:
    return _mapped(path).schema if path.endswith(".arrow") else _parquet(path).schema_arrow


def _columns(path: str) -> tuple[str, str | None, list[str]]:
    """The columns of pictures and labels, and the classes' names where the table tells them."""
    schema = _schema(path)
    named = [name for name in IMAGE_COLUMNS if name in schema.names]
    if not named:
        raise InputError(f"{path} holds no images: it has no column {' or '.join(IMAGE_COLUMNS)}, but {schema.names}.")
    image = next((name for name in named if _holds_pictures(schema.field(name).type)), None)
    if image is None:
        raise InputError(
            f"{path} holds no images: its column {named[0]} is of type {schema.field(named[0]).type}; a picture is its "
            "file's bytes, plain or as the struct {bytes, path}."
        )
    label = next((name for name in LABEL_COLUMNS if name in schema.names), None)
    try:
        told = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]["names"]
        names = [str(name) for name in told]
    except (KeyError, TypeError, ValueError):
        names = []
    return image, label, names
