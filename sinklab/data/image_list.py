"""Which pictures a run looks at: a reference to each, in a fixed order, and a hash that says it is the same list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sinklab.data.input_list import InputList


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Where the bytes of one picture lie."""

    id: str
    """Path relative to the given folder, with "/"; for a member of a shard "shard.tar/member.jpg"."""
    path: str
    """The file that holds the bytes, as an absolute path with links resolved: the picture itself, or the shard."""
    size: int
    """Bytes; -1 where a link points nowhere (opening such a picture then fails and says so)."""
    offset: int | None = None
    """Where a shard's member starts, in bytes; None for a file of its own."""

    def content(self) -> bytes:
        """The bytes. Raises UnreadableImage."""
        from sinklab.data.decode import content_of

        return content_of(self)


@dataclass(frozen=True, kw_only=True)
class ImageList(InputList):
    """A frozen, ordered list of pictures; `image_index` in every table is a position in it."""

    noun: ClassVar[str] = "image"
    refs: tuple[ImageRef, ...]


def as_text(name: str) -> str:
    r"""A file's name that any table can hold: bytes that are not UTF-8 become "\xff" instead of failing later."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
