"""Windows of a text as a list that a diagnosis can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sinklab.data.sequences import SequenceList
from sinklab.data.text import Windows

if TYPE_CHECKING:
    from sinklab.data.text import Text

WINDOWS = 512
"""How many are read where no number is asked for."""


@dataclass(frozen=True, eq=False)
class TextWindow:
    """So many bytes of a text from a place on."""

    text: Text
    id: str
    start: int
    size: int

    @property
    def path(self) -> str:
        """A text may be many files, and none of them is a result of ours."""
        return ""

    def content(self) -> bytes:
        """The bytes."""
        held: bytes = self.text.content[self.start : self.start + self.size].tobytes()
        return held


def text_sequences(text: Text, length: int, *, split: str = "validation", limit: int | None = None) -> SequenceList:
    """Windows of a split that do not overlap, `limit` of them (512 for None), evenly spread.

    Raises InputError where not even one fits.
    """
    every = Windows(text=text, split=split, length=length)
    some = Windows(text=text, split=split, length=length, limit=WINDOWS if limit is None else limit)
    notes = list(text.notes)
    if limit is None and len(some) < len(every):
        notes.append(f"{len(some)} of the {len(every):,} windows of the {split} split are read, evenly spread.")
    refs = tuple(TextWindow(text, name, start, length) for name, start in some.entries)
    return SequenceList(refs=refs, sources=(text.name,), notes=tuple(notes))
