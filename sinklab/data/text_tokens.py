"""Windows of a text as token ids of a tokenizer: the split is tokenised once, in pieces, and cut into windows.

Only which part is read depends on how many windows are asked for. Letters: N tokens of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sinklab.data.sequences import SequenceList
from sinklab.data.text_sequences import WHOLE, WINDOWS, too_few, which_part
from sinklab.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sinklab.data.text import Text

PIECE = 1 << 20
"""Bytes that are tokenised at once; pieces end behind a line where there is one."""
UNKNOWN = 0.5
"""A text of which as many tokens are unknown is refused."""


@dataclass(frozen=True, eq=False)
class TokenWindow:
    """One window's ids, with what stands before and after them."""

    id: str
    ids: NDArray[np.int64] = field(repr=False)

    @property
    def path(self) -> str:
        """A text may be many files, and none of them is a result of ours."""
        return ""

    @property
    def size(self) -> int:
        """Bytes."""
        return int(self.ids.nbytes)

    def content(self) -> bytes:
        """The ids, 8 bytes each."""
        return self.ids.tobytes()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a model reads a text."""

    name: str
    """The model's, for sentences."""
    encode: Callable[[str], Sequence[int]]
    length: int
    """N, with `before` and `after`."""
    before: tuple[int, ...]
    after: tuple[int, ...]
    unknown: int | None
    vocabulary: int
    """Ids from this on have no vector in the model."""

    @property
    def inside(self) -> int:
        """Tokens of text in a window."""
        return self.length - len(self.before) - len(self.after)


def token_sequences(
    text: Text, reading: Reading, *, split: str = "validation", limit: int | None = None
) -> SequenceList:
    """Windows of a split that do not overlap, `limit` of them (512 for None), evenly spread; ids "validation/00012".

    Of a text whose split holds too few (see `too_few`), or none, the whole is read ("text/00012"): a model that comes
    with its own tokenizer was not trained on the rest. Raises InputError where that holds none either, and where the
    tokens are not the model's.
    """
    if reading.inside < 1:
        raise InputError(
            f"{reading.name} takes {reading.length} tokens at once, and {len(reading.before) + len(reading.after)} of "
            "them are its own: none is left for the text."
        )
    notes = list(text.notes)
    ids, lost = _tokenised(text, split, reading.encode)
    held, whole = len(ids) // reading.inside, False
    if too_few(text, held, limit) or not held:
        whole, (ids, lost) = True, _tokenised(text, None, reading.encode)
        if len(ids) < reading.inside:
            raise InputError(
                f"{text.name} has {len(ids)} tokens to {reading.name}: no window of {reading.inside} fits. Give a "
                "longer text."
            )
    notes += _require_vocabulary(ids, text.name, reading)
    if lost:
        notes.append(
            f"{text.name} is not UTF-8 text at {lost:,} {'place' if lost == 1 else 'places'}, read as the replacement "
            "character: write it as UTF-8."
        )
    count, wanted = len(ids) // reading.inside, WINDOWS if limit is None else limit
    numbers = range(count) if wanted >= count else [i * count // wanted for i in range(wanted)]
    notes.append(which_part(text, split, held, len(numbers), count if whole else None))
    refs = tuple(TokenWindow(f"{WHOLE if whole else split}/{n:05d}", _window(ids, n, reading)) for n in numbers)
    return SequenceList(refs=refs, sources=(text.name,), notes=tuple(notes))


def _window(ids: NDArray[np.int64], number: int, reading: Reading) -> NDArray[np.int64]:
    inside = ids[number * reading.inside : (number + 1) * reading.inside]
    return np.concatenate([np.array(reading.before, "int64"), inside, np.array(reading.after, "int64")])


def _tokenised(text: Text, split: str | None, encode: Callable[[str], Sequence[int]]) -> tuple[NDArray[np.int64], int]:
    """All ids of a split, or of the whole text, and at how many places it is no UTF-8. Raises InputError where it is
    none at all."""
    lost = 0
    first, end = (0, len(text.content)) if split is None else text.splits[split]
    found: list[NDArray[np.int64]] = []
    while first < end:
        last = min(first + PIECE, end)
        piece = text.content[first:last].tobytes()
        if last < end:
            kept = piece.rfind(b"\n") + 1 or _whole_characters(piece)
            piece = piece[:kept]
        written = piece.decode("utf-8", errors="replace").strip("\ufffd")  # a split may begin within a character
        if piece and not written and len(piece) > 3:
            raise InputError(f"{text.name} is not UTF-8 text: a tokenizer reads nothing else.")
        lost += written.count("\ufffd") - piece.count(b"\xef\xbf\xbd")  # those that the text itself has are its own
        found.append(np.asarray(encode(written), dtype="int64"))
        first += len(piece)
    return (np.concatenate(found) if found else np.zeros(0, dtype="int64")), max(lost, 0)


def _whole_characters(piece: bytes) -> int:
    """How many bytes of a piece come before a character that it may cut."""
    start = len(piece) - 1
    while start > len(piece) - 4 and piece[start] & 0xC0 == 0x80:
        start -= 1
    return start if piece[start] & 0xC0 == 0xC0 else len(piece)


def _require_vocabulary(ids: NDArray[np.int64], name: str, reading: Reading) -> list[str]:
    """A note where some of the text is unknown to the tokenizer. InputError where the tokens are not the model's."""
    most = max([int(ids.max()), *reading.before, *reading.after])  # a tokenizer may add nothing
    if most >= reading.vocabulary:
        raise InputError(
            f"The tokenizer of {reading.name} gives {name} the id {most}, and the model has vectors for "
            f"{reading.vocabulary} ids: this tokenizer belongs to another checkpoint."
        )
    share = 0.0 if reading.unknown is None else float((ids == reading.unknown).mean())
    if share >= UNKNOWN:
        raise InputError(
            f"{share:.0%} of the tokens of {name} are unknown to the tokenizer of {reading.name}: it was made for "
            "other text, such as another language."
        )
    return [f"{share:.1%} of the tokens of {name} are unknown to the tokenizer"] if share >= 0.01 else []
