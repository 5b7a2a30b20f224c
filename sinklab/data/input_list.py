"""What a model is given, as a list: a reference to each input in a fixed order, and how an input becomes a tensor.

Images and sequences differ in where they come from and in nothing else that a diagnosis or an experiment knows of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from sinklab.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

Self = TypeVar("Self", bound="InputList")


class InputRef(Protocol):
    """Where one input lies; a worker can be sent it."""

    @property
    def id(self) -> str:
        """Its name in every table."""

    @property
    def path(self) -> str:
        """The file that it lies in; "" where it lies in none."""

    @property
    def size(self) -> int:
        """Bytes, or -1."""

    def content(self) -> bytes:
        """The bytes; raises an InputError where they cannot be had."""


class View(Protocol):
    """How an input is shown to a model; height and width are what its token map is asked about."""

    @property
    def height(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor, without the batch."""

    def of(self, content: bytes, name: str) -> Tensor:
        """The tensor of an input's bytes; `name` is for the sentence of an error."""

    def sentence(self) -> str:
        """In words."""


@dataclass(frozen=True, kw_only=True)
class InputList:
    """A frozen, ordered list of inputs; `image_index` in every table is a position in it."""

    noun: ClassVar[str] = "input"
    """What one of them is called."""
    refs: tuple[Any, ...]
    """Each an `InputRef`."""
    sources: tuple[str, ...]
    """What was asked for, as it was written."""
    notes: tuple[str, ...] = ()
    """What the user should know about how the list came to be (files given twice, members left out)."""

    def __len__(self) -> int:
        return len(self.refs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.refs)

    def __getitem__(self, index: int) -> Any:
        return self.refs[index]

    @cached_property
    def sha256(self) -> str:
        """Hash of ids and sizes in order: cheap, and it differs when one is added, renamed, moved or resaved."""
        digest = hashlib.sha256()
        for ref in self.refs:
            digest.update(f"{ref.id}\0{ref.size}\n".encode())
        return digest.hexdigest()

    def sample(self: Self, limit: int | None, *, seed: int = 0) -> Self:
        """At most `limit` of them, drawn uniformly without replacement, in list order; all of them for None.

        They are ranked by a hash of seed and id, and the first `limit` are kept. So the draw is the same on every
        machine and Python, does not depend on the order of the sources, and a larger limit keeps a smaller one's picks.
        Raises InputError if `limit` is below 1.
        """
        if limit is not None and limit < 1:
            raise InputError(f"A limit is a number of {self.noun}s from 1 on, not {limit}.")
        if limit is None or limit >= len(self):
            return self
        ranks = [hashlib.sha256(f"{seed}\0{ref.id}".encode()).digest() for ref in self.refs]
        kept = sorted(sorted(range(len(self)), key=ranks.__getitem__)[:limit])
        return replace(self, refs=tuple(self.refs[i] for i in kept))
