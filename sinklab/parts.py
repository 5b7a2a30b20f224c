"""The table of a long run as many small files, each whole: a kill at any moment loses only the batches not yet written.

A part is `heads/part-RANK-SEQUENCE.parquet`. Beside its rows it holds, in the Parquet schema's metadata, the numbers of
the batches it covers (those without rows too) and the images that could not be used. So what is done is read from the
parts themselves, and there is no second record that could disagree.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from sinklab.atomic import WriteError, atomically, write_error
from sinklab.errors import InputError
from sinklab.sealed import DamagedTable, read_about, read_sealed, write_sealed

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

KEYS = ("image_index", "layer", "head")
"""What a row of the head table is found by, and sorted by."""

PART = re.compile(r"part-(\d+)-(\d+)\.parquet")


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one part file says about itself."""

    path: Path
    fingerprint: str
    """Of the settings of the run that wrote it."""
    batches: tuple[int, ...]
    skipped: tuple[tuple[int, str, str], ...]
    """(batch, image, reason)."""
    images: tuple[tuple[int, str], ...] = ()
    """(image_index, digest of the bytes that were measured), where the writer was told them."""


class PartWriter:
    """Gathers the rows of finished batches and writes them as parts; a with-block writes the rest at its end.

    `schema` fixes the columns' types; without it they follow from the first frames of each part. After an error or
    Ctrl-C inside the block the finished batches are still written.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        rank: int = 0,
        *,
        schema: pa.Schema | None = None,
        every_batches: int = 16,
        every_seconds: float = 20.0,
    ) -> None:
        """Parts go to `folder`; one is written after so many batches or seconds, whichever comes first."""
        if every_batches < 1:
            raise InputError(f"A part holds at least one batch, not {every_batches}.")
        self.folder = folder
        self.rank = rank
        self._fingerprint = fingerprint
        self._schema = schema
        self._every_batches, self._every_seconds = every_batches, every_seconds
        named = [match for path in part_paths(folder) if (match := PART.fullmatch(path.name))]
        self._sequence = max((int(match[2]) for match in named if int(match[1]) == rank), default=-1) + 1
        self._forget()

    def add(
        self,
        batch: int,
        frame: pd.DataFrame | None,
        skipped: Sequence[tuple[str, str]] = (),
        images: Iterable[tuple[int, str]] = (),
    ) -> None:
        """The rows of one finished batch (None or an empty frame if there are none) and its (image, reason) pairs.

        `images` are (image_index, digest of its bytes) of those measured. Raises WriteError when a part was due and
        could not be written.
        """
        assert batch not in self._batches, f"batch {batch} was added twice"
        if frame is not None and len(frame.columns):
            self._tables.append(to_arrow(frame, self._schema))
        self._batches.append(batch)
        self._skipped += [(batch, image, reason) for image, reason in skipped]
        self._images += images
        due = time.monotonic() - self._since >= self._every_seconds
        if due or len(self._batches) >= self._every_batches:
            self.flush()

    def flush(self) -> None:
        """Write what was gathered as one part. Nothing gathered, nothing written. Raises WriteError."""
        if not self._batches:
            return
        import pyarrow as pa

        schema = self._schema if self._schema is not None else pa.schema([])
        table = pa.concat_tables(self._tables, promote_options="default") if self._tables else schema.empty_table()
        about = {"fingerprint": self._fingerprint, "batches": self._batches, "skipped": self._skipped}
        about |= {"images": self._images}
        with atomically(self.folder / f"part-{self.rank:03d}-{self._sequence:05d}.parquet") as stream:
            write_sealed(table, stream, about)
        self._sequence += 1
        self._forget()

    def _forget(self) -> None:
        self._tables: list[pa.Table] = []
        self._batches: list[int] = []
        self._skipped: list[tuple[int, str, str]] = []
        self._images: list[tuple[int, str]] = []
        self._since = time.monotonic()

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, WriteError):  # what could not be written a moment ago cannot be written now
            self.flush()


def to_arrow(frame: pd.DataFrame, schema: pa.Schema | None = None) -> pa.Table:
    """A frame as an Arrow table without its index; text of any kind (categories, objects) becomes plain strings."""
    import pyarrow as pa

    if schema is not None:
        schema = schema.remove_metadata()
        table = pa.Table.from_pandas(frame[schema.names], preserve_index=False)
        return table.cast(schema).replace_schema_metadata(None)
    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    for i, column in enumerate(table.schema):
        text = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if pa.types.is_large_string(text) or (text != column.type and pa.types.is_string(text)):
            table = table.set_column(i, column.name, table.column(i).cast(pa.string()))
    return table


def part_paths(folder: Path) -> list[Path]:
    """Every part in the folder, by name."""
    return sorted(folder.glob("part-*.parquet"))


def read_parts(folder: Path, fingerprint: str) -> list[Part]:
    """What each part says about itself.

    Raises InputError, naming the file, for one that is damaged, foreign, or of a run with other settings, and where a
    batch lies in two parts.
    """
    parts = [_read_part(path) for path in part_paths(folder)]
    owner: dict[int, Path] = {}
    for part in parts:
        if part.fingerprint != fingerprint:
            raise InputError(f"{part.path} was written by a run with other settings: move it out of the folder.")
        for batch in part.batches:
            if batch in owner:
                raise InputError(f"Batch {batch} lies both in {owner[batch]} and in {part.path}: remove one of them.")
            owner[batch] = part.path
    return parts


def read_rows(parts: Sequence[Part], columns: Sequence[str] | None = None, *, by: Sequence[str] = KEYS) -> pd.DataFrame:
    """The rows of all parts, sorted by the keys as far as they are among the columns; text as pandas strings."""
    import pandas as pd
    import pyarrow as pa

    wanted = None if columns is None else list(dict.fromkeys([*by, *columns]))
    tables = [_table(part.path, wanted) for part in parts]
    tables = [table for table in tables if table.num_columns]
    if not tables:
        return pd.DataFrame()
    frame: pd.DataFrame = pa.concat_tables(tables, promote_options="default").to_pandas()
    keys = [key for key in by if key in frame.columns]
    if keys:
        frame = frame.sort_values(keys, kind="stable", ignore_index=True)
        if len(keys) == len(by) and (again := frame.duplicated(keys)).any():
            row = frame[again].iloc[0]
            raise InputError(f"The table has two rows for {', '.join(f'{key} {row[key]}' for key in by)}.")
    return frame if columns is None else frame[list(columns)]


def forget_batches(part: Part, batches: Collection[int], batch_size: int) -> None:
    """Write the part again without some of its batches, which then count as not done; whole at any moment.

    Raises InputError for a damaged part, WriteError where the system refuses.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kept = [batch for batch in part.batches if batch not in batches]
    if not kept:
        try:
            part.path.unlink()
        except OSError as error:
            raise write_error(part.path, error) from error
        return
    table = _table(part.path, None)
    if table.num_columns:
        number = pc.divide(table["image_index"], batch_size)
        table = table.filter(pc.invert(pc.is_in(number, value_set=pa.array(sorted(batches), number.type))))
    about = {
        "fingerprint": part.fingerprint,
        "batches": kept,
        "skipped": [entry for entry in part.skipped if entry[0] not in batches],
        "images": [entry for entry in part.images if entry[0] // batch_size not in batches],
    }
    with atomically(part.path) as stream:
        write_sealed(table, stream, about)


def _table(path: Path, columns: Sequence[str] | None) -> pa.Table:
    """A part's rows. Raises InputError, naming the file, for one that is not what was written."""
    try:
        return read_sealed(path, columns)
    except DamagedTable as error:
        raise _not_whole(path, error.reason) from error


def _read_part(path: Path) -> Part:
    try:
        about = read_about(path)
        return Part(
            path=path,
            fingerprint=about["fingerprint"],
            batches=tuple(about["batches"]),
            skipped=tuple((batch, image, reason) for batch, image, reason in about["skipped"]),
            images=tuple((index, digest) for index, digest in about["images"]),
        )
    except DamagedTable as error:
        raise _not_whole(path, error.reason) from error
    except (KeyError, ValueError, TypeError) as error:
        raise _not_whole(path, type(error).__name__) from error


def _not_whole(path: Path, reason: str) -> InputError:
    return InputError(
        f"{path} is not a whole part of a sinklab run ({reason}): move it away and run again with "
        "--resume; the batches that it held are computed again."
    )
