"""Which pictures a run looks at: a reference to each, in a fixed order, and a hash that says it is the same list."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from sinklab.errors import InputError


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


@dataclass(frozen=True, kw_only=True)
class ImageList:
    """A frozen, ordered list of pictures; `image_index` in every table is a position in it."""

    refs: tuple[ImageRef, ...]
    sources: tuple[str, ...]
    """What was asked for, as it was written."""
    notes: tuple[str, ...] = ()
    """What the user should know about how the list came to be (files given twice, members left out)."""

    def __len__(self) -> int:
        return len(self.refs)

    def __iter__(self) -> Iterator[ImageRef]:
        return iter(self.refs)

    def __getitem__(self, index: int) -> ImageRef:
        return self.refs[index]

    @cached_property
    def sha256(self) -> str:
        """Hash of ids and sizes in order: cheap, and it differs when a picture is added, renamed, moved or resaved."""
        digest = hashlib.sha256()
        for ref in self.refs:
            digest.update(f"{ref.id}\0{ref.size}\n".encode())
        return digest.hexdigest()

    def sample(self, limit: int | None, *, seed: int = 0) -> ImageList:
        """At most `limit` pictures, drawn uniformly without replacement, in list order; all of them for None.

        Pictures are ranked by a hash of seed and id, and the first `limit` are kept. So the draw is the same on every
        machine and Python, does not depend on the order of the sources, and a larger limit keeps a smaller one's picks.
        Raises InputError if `limit` is below 1.
        """
        if limit is not None and limit < 1:
            raise InputError(f"A limit is a number of images from 1 on, not {limit}.")
        if limit is None or limit >= len(self):
            return self
        ranks = [hashlib.sha256(f"{seed}\0{ref.id}".encode()).digest() for ref in self.refs]
        kept = sorted(sorted(range(len(self)), key=ranks.__getitem__)[:limit])
        return ImageList(refs=tuple(self.refs[i] for i in kept), sources=self.sources, notes=self.notes)


def as_text(name: str) -> str:
    r"""A file's name that any table can hold: bytes that are not UTF-8 become "\xff" instead of failing later."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
