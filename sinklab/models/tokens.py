"""Which token is what: the prefix (CLS and registers, or a beginning of sequence) and the ordinary tokens after it.

Letters: B batch, N tokens, P prefix tokens, S suffix tokens (0 for images); grid rows × columns, so N is P + S plus
rows · columns. A sequence is a grid of one row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sinklab.errors import InputError

KINDS = ("cls", "register", "patch")
"""Of vision models."""
SEQUENCE_KINDS = ("bos", "special", "text", "token")
"""Of sequences: text, or the controlled tasks' random tokens."""
PREFIX_KINDS = ("cls", "register", "bos", "special")
ORDINARY_KINDS = ("patch", "text", "token")


def kinds_among(seen: Iterable[str]) -> tuple[str, ...]:
    """The kinds that tables of these tokens have: those of vision models, unless a kind of sequences is among them."""
    return SEQUENCE_KINDS if set(seen) & set(SEQUENCE_KINDS) else KINDS


@dataclass(frozen=True, kw_only=True)
class TokenMap:
    """The order of a model's tokens: prefix tokens by kind, then ordinary ones (patches row by row, or a sequence).

    Nothing here is a constant of a family: the loader reads the prefix from the model itself, and
    `grid` is asserted against the number of tokens of every batch.
    """

    prefix: tuple[str, ...]
    """Kinds of the tokens before the ordinary ones, in order: any of "cls", "register"; "bos", "special" in text."""
    patch_size: tuple[int, int]
    """Height and width of a patch in pixels; (1, 1) for sequences."""
    ordinary: str = "patch"
    """What the other tokens are: "patch"; "text", or "token" for tokens that are neither."""
    suffix: tuple[str, ...] = ()
    """Kinds of the tokens after the ordinary ones: "special" for a text's end, as BERT's [SEP]."""

    def __post_init__(self) -> None:
        unknown = [kind for kind in (*self.prefix, *self.suffix) if kind not in PREFIX_KINDS]
        if unknown:
            raise InputError(f"A prefix or suffix token is one of {PREFIX_KINDS}, not {unknown[0]!r}.")
        if min(self.patch_size) < 1:
            raise InputError(f"A patch needs a positive height and width, not {self.patch_size}.")
        if self.ordinary not in ORDINARY_KINDS:
            raise InputError(f"Ordinary tokens are of one of the kinds {ORDINARY_KINDS}, not {self.ordinary!r}.")

    @classmethod
    def sequence(
        cls, prefix: tuple[str, ...] = (), *, ordinary: str = "token", suffix: tuple[str, ...] = ()
    ) -> TokenMap:
        """The map of a model that reads sequences: so many prefix tokens, tokens of one kind, so many suffix tokens."""
        return cls(prefix=prefix, patch_size=(1, 1), ordinary=ordinary, suffix=suffix)

    @property
    def prefix_tokens(self) -> int:
        """How many tokens stand before the ordinary ones."""
        return len(self.prefix)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of whole patches in an image of `height` × `width` pixels; a sequence has one row.

        Raises InputError if the image is smaller than one patch. Pixels beyond the last whole patch are
        not seen by the model (`edge_lost` says how many).
        """
        rows, columns = height // self.patch_size[0], width // self.patch_size[1]
        if columns < 1 and self.ordinary != "patch":
            raise InputError("A sequence holds at least one token besides those that stand at its ends.")
        if rows < 1 or columns < 1:
            raise InputError(
                f"An image of {height}x{width} pixels is smaller than one patch of "
                f"{self.patch_size[0]}x{self.patch_size[1]}."
            )
        return rows, columns

    def edge_lost(self, height: int, width: int) -> tuple[int, int]:
        """Pixels at the bottom and at the right edge that no whole patch covers."""
        return height % self.patch_size[0], width % self.patch_size[1]

    def tokens(self, height: int, width: int) -> int:
        """N for an image of that size."""
        rows, columns = self.grid(height, width)
        return self.prefix_tokens + rows * columns + len(self.suffix)

    def ordinary_among(self, tokens: int) -> range:
        """The indices of the ordinary ones among N tokens."""
        return range(self.prefix_tokens, tokens - len(self.suffix))

    def kind(self, index: int, tokens: int | None = None) -> str:
        """The kind of the token at one index, of N tokens; without N the suffix is not told apart."""
        if index < self.prefix_tokens:
            return self.prefix[index]
        if tokens is not None and index >= tokens - len(self.suffix):
            return self.suffix[index - tokens]
        return self.ordinary

    def check(self, tokens: int, height: int, width: int) -> None:
        """Raise InputError unless a sequence of `tokens` is this map's for an image of that size."""
        expected = self.tokens(height, width)
        if tokens == expected:
            return
        rows, columns = self.grid(height, width)
        of = f"{rows}x{columns} patches of an image of {height}x{width}"
        raise InputError(
            f"The attention sees {tokens} tokens where the token map expects {expected} ({self.prefix_tokens} prefix + "
            f"{of if self.ordinary == 'patch' else f'{columns} of the sequence'}"
            f"{f' + {len(self.suffix)} suffix' if self.suffix else ''}): the map does not belong to this "
            "model."
        )
