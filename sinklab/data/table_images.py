"""The pictures of Parquet and Arrow tables as a list of inputs, to be looked at."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sinklab.data.image_list import as_text
from sinklab.data.image_tables import ImageTable, row_content
from sinklab.data.input_list import InputList


@dataclass(frozen=True, slots=True)
class TableImage:
    """One row's picture."""

    id: str
    """The table's path below the folder that all have in common, and the row."""
    path: str
    offset: int
    """The row."""
    column: str

    size: ClassVar[int] = -1
    """It is not known before the row is read."""

    def content(self) -> bytes:
        """The bytes. Raises UnreadableImage."""
        return row_content(self.path, self.column, self.offset, self.id)


@dataclass(frozen=True, kw_only=True)
class TableList(InputList):
    """A frozen, ordered list of pictures in tables."""

    noun: ClassVar[str] = "image"
    refs: tuple[TableImage, ...]


def table_images(table: ImageTable) -> TableList:
    """All pictures of a set of tables, in its order."""
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in table.files])
    refs = []
    for index in range(len(table)):
        path, row = table.place(index)
        whole = os.path.abspath(path)
        name = f"{as_text(Path(os.path.relpath(whole, root)).as_posix())}/{row}"
        refs.append(TableImage(name, whole, row, table.image_column))
    return TableList(refs=tuple(refs), sources=table.sources)
