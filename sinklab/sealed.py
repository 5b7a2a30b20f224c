"""Parquet files that show when a bit of them has changed: a damaged one is refused, never read as other numbers.

Pages carry checksums, which Parquet itself verifies; but names, types, positions and our own notes lie outside them. So
each file also holds a digest of every column's values, and one of the notes with these digests, in the schema's
metadata. What is read is compared with them: either it is what was written, or it is an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sinklab.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

METADATA = b"sinklab"


class DamagedTable(InputError):
    """A table cannot be read, or is not what was written; `reason` is a phrase."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged, or was not written by sinklab ({reason}).")
        self.path = path
        self.reason = reason


def write_sealed(table: pa.Table, stream: BinaryIO, about: Mapping[str, Any] | None = None) -> None:
    """Write a table with its digests and, as JSON, whatever `about` says of it."""
    import pyarrow.parquet as pq

    notes = {**(about or {}), "columns": {field.name: column_digest(table[field.name]) for field in table.schema}}
    words = json.dumps({**notes, "seal": _seal(notes)}).encode()
    kept = {key: value for key, value in (table.schema.metadata or {}).items() if key != METADATA}
    table = table.replace_schema_metadata({**kept, METADATA: words})
    pq.write_table(table, stream, compression="zstd", write_page_checksum=True)


def read_about(path: Path) -> dict[str, Any]:
    """What a file says about itself: `about` and "columns", the digests by name. Raises DamagedTable."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        words = (pq.read_schema(path).metadata or {})[METADATA]
        about: dict[str, Any] = json.loads(words)
        seal = about.pop("seal")
        same = seal == _seal(about) and isinstance(about["columns"], dict)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedTable(path, _phrase(error)) from error
    if not same:
        raise DamagedTable(path, "what it says about itself does not fit its digest")
    return about


def read_sealed(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The table, or some of its columns (those it has), without metadata. Raises DamagedTable for other values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    digests = read_about(path)["columns"]
    wanted = [name for name in digests if columns is None or name in columns]
    try:
        table = pq.read_table(path, columns=wanted, page_checksum_verification=True, partitioning=None)
        table = table.replace_schema_metadata(None)
        other = [name for name in wanted if column_digest(table[name]) != digests[name]]
    except (pa.ArrowException, OSError, LookupError, ValueError, TypeError, MemoryError) as error:
        raise DamagedTable(path, _phrase(error)) from error
    if other or table.column_names != wanted:
        raise DamagedTable(path, f"the values of {', '.join(map(repr, other)) or 'its columns'} do not fit the digest")
    return table


def column_digest(column: pa.ChunkedArray | pa.Array) -> str:
    """A hash of a column's type, its values and where it has none; how it is cut into chunks does not matter."""
    import pyarrow as pa

    digest = hashlib.sha256()
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # text beyond 2 GB stays in chunks
        digest.update(b"".join(column_digest(chunk).encode() for chunk in array.chunks))
    else:
        _update(digest, array)
    return digest.hexdigest()[:32]


def _update(digest: Any, array: pa.Array) -> None:
    import numpy as np
    import pyarrow as pa

    nested = pa.types.is_nested(array.type) or pa.types.is_temporal(array.type)  # Parquet names and counts these anew
    digest.update(f"{'nested' if nested else array.type} {len(array)} {array.null_count}\n".encode())
    if array.null_count:
        digest.update(np.packbits(array.is_null().to_numpy(zero_copy_only=False)).tobytes())
        array = array.drop_null()
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        coded = array.dictionary_encode()  # in the order in which values first appear
        digest.update(json.dumps(coded.dictionary.to_pylist()).encode())
        digest.update(coded.indices.to_numpy().astype("int32").tobytes())
    elif pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        digest.update(array.value_lengths().to_numpy(zero_copy_only=False).astype("int64").tobytes())
        _update(digest, array.flatten())
    elif pa.types.is_boolean(array.type) or pa.types.is_integer(array.type) or pa.types.is_floating(array.type):
        digest.update(np.ascontiguousarray(array.to_numpy(zero_copy_only=False)).tobytes())
    else:
        digest.update(repr(array.to_pylist()).encode())


def _seal(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def _phrase(error: BaseException) -> str:
    """The kind of an error and the start of its first line."""
    line = str(error).strip().partition("\n")[0][:120].rstrip(".")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
