"""Sequences in the place of images: the same list, the same batches, tensors [N C] of vectors or [N] of token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sinklab.data.input_list import InputList, InputRef
from sinklab.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SequenceList(InputList):
    """A frozen, ordered list of sequences."""

    noun: ClassVar[str] = "sequence"
    refs: tuple[InputRef, ...]


@dataclass(frozen=True, kw_only=True)
class SequenceView:
    """How a sequence becomes the tensor that a model takes: [N C] float32 of vectors, or [N] int64 of token ids."""

    tokens: int
    """N."""
    prefix: int = 0
    """How many of them are prefix tokens of the model's map."""
    suffix: int = 0
    """How many are suffix tokens."""
    channels: int | None = None
    """C; None for token ids."""
    vocabulary: tuple[int, ...] | None = None
    """For ids: the bytes that have one, in their order; None takes the content for ids of 8 bytes each."""

    @property
    def height(self) -> int:
        """A sequence is a grid of one row."""
        return 1

    @property
    def width(self) -> int:
        """Ordinary tokens."""
        return self.tokens - self.prefix - self.suffix

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.tokens,) if self.channels is None else (self.tokens, self.channels)

    def sentence(self) -> str:
        """In words."""
        if self.channels is not None:
            return f"{self.tokens} tokens of {self.channels} numbers, as they are"
        return f"windows of {self.tokens} {'tokens' if self.vocabulary is None else 'bytes'}"

    def of(self, content: bytes, name: str) -> Tensor:
        """The tensor. Raises InputError where the content is of another length, or holds what has no id."""
        import numpy as np
        import torch

        kind = "float32" if self.channels is not None else "int64" if self.vocabulary is None else "uint8"
        held = np.frombuffer(content, dtype=kind)
        if held.size != int(np.prod(self.shape)):
            raise InputError(f"The sequence {name} has {held.size} numbers where {self.shape} are expected.")
        if self.vocabulary is None:
            return torch.from_numpy(held.reshape(self.shape).copy())
        ids = np.full(256, -1, dtype="int64")
        ids[list(self.vocabulary)] = np.arange(len(self.vocabulary))
        found = ids[held]
        if (found < 0).any():
            raise InputError(
                f"The sequence {name} holds the byte {int(held[found < 0][0])}, which the model's vocabulary of "
                f"{len(self.vocabulary)} symbols lacks: it was trained on other text."
            )
        return torch.from_numpy(found)
