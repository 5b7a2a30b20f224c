"""Windows of a text as a list that a diagnosis can read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sinklab.data.sequences import SequenceList
from sinklab.data.text import Windows

if TYPE_CHECKING:
    from sinklab.data.text import Text

WINDOWS = 512
"""How many are read where no number is asked for."""
ENOUGH = 64
"""Of a split that holds fewer, and fewer than are asked for, the whole text is read where that may be."""
WHOLE = "text"
"""What the whole text is called in the ids of its windows."""


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


def text_sequences(
    text: Text, length: int, *, split: str = "validation", limit: int | None = None, whole: bool = False
) -> SequenceList:
    """Windows of a split that do not overlap, `limit` of them (512 for None), evenly spread; ids "validation/00012".

    Where the split holds too few (see `too_few`) and `whole` allows it, the whole text is read ("text/00012").
    Raises InputError where not even one fits.
    """
    held, part = len(text.windows(split, length)), split
    if whole and too_few(text, held, limit) and len(text.content) >= length:
        text, part = replace(text, splits={**text.splits, WHOLE: (0, len(text.content))}), WHOLE
    every = Windows(text=text, split=part, length=length)
    some = Windows(text=text, split=part, length=length, limit=WINDOWS if limit is None else limit)
    notes = (*text.notes, which_part(text, split, held, len(some), len(every) if part == WHOLE else None))
    refs = tuple(TextWindow(text, name, start, length) for name, start in some.entries)
    return SequenceList(refs=refs, sources=(text.name,), notes=notes)


def too_few(text: Text, held: int, limit: int | None) -> bool:
    """Whether a split that is a share of the text holds fewer windows than are asked for, or than 64 for None."""
    return not text.given_splits and held < (ENOUGH if limit is None else limit)


def which_part(text: Text, split: str, held: int, read: int, in_all: int | None) -> str:
    """Which windows are read, as a note: `read` of the `held` of a split or, if given, of `in_all` of the text."""
    count = held if in_all is None else in_all
    spread = "" if read == count else ", evenly spread"
    if in_all is not None:
        own = f"{held} window{'' if held == 1 else 's'}"
        return f"the whole text is read: its {split} split holds {own} (of {count:,} in all, {read} are read{spread})."
    which = f"all {held}" if read == held else f"{read} of the {held:,}"
    share = 100 * text.length(split) / len(text.content)
    return f"{which} windows of the {split} split are read{spread}; that split is {share:.3g} % of the text."
