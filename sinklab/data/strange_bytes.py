"""Bytes of a text that a model has no symbol for: which they are, where, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK = 1 << 24
SHOWN = 10


def refusal(name: str, content: NDArray[np.uint8], strange: Sequence[int], shipped: bool) -> str:
    """The sentence for a text that has these bytes; `shipped` if the model comes with sinklab."""
    places = {byte: _first(content, byte) for byte in strange}
    shown = ", ".join(_shown(content, byte, places[byte]) for byte in strange[:SHOWN])
    shown += (", …" if len(strange) > SHOWN else "") + f"; the first is byte {min(places.values()):,} of the text"
    which, them = ("1 byte", "it") if len(strange) == 1 else (f"{len(strange)} different bytes", "them")
    advice = (
        "The models that come with sinklab know the bytes of Python's library source only."
        if shipped
        else "A model trained with --vocabulary bytes reads any text."
    )
    return (
        f"{name} has {which} that the model has no symbol for ({shown}): it was trained on a text without {them}. "
        f"{advice}"
    )


def _first(content: NDArray[np.uint8], byte: int) -> int:
    """Where a byte that occurs is first, from 0."""
    found = ((start, content[start : start + CHUNK] == byte) for start in range(0, len(content), CHUNK))
    return next(start + int(here.argmax()) for start, here in found if here.any())


def _shown(content: NDArray[np.uint8], byte: int, place: int) -> str:
    """A byte's number and, where it is printable, the character that it is or is part of at this place."""
    start = place
    while start > max(place - 3, 0) and content[start] & 0xC0 == 0x80:
        start -= 1
    letter = content[start : start + 4].tobytes().decode("utf-8", errors="replace")[:1]
    if not letter.isprintable() or letter == "\ufffd":
        return str(byte)
    return f"{byte} “{letter}”" if byte < 128 else f"{byte} in “{letter}”"
