"""Which token is what: the prefix (CLS, registers) and the grid of patches, for one vision model.

Letters: B batch, N tokens, P prefix tokens; grid rows × columns, so N = P + rows · columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from sinklab.errors import InputError

KINDS = ("cls", "register", "patch")


@dataclass(frozen=True, kw_only=True)
class TokenMap:
    """The order of a vision model's tokens: prefix tokens by kind, then patches row by row.

    Nothing here is a constant of a family: the loader reads the prefix from the model itself, and
    `grid` is asserted against the number of tokens of every batch.
    """

    prefix: tuple[str, ...]
    """Kinds of the tokens before the patches, in order: any of "cls", "register"."""
    patch_size: tuple[int, int]
    """Height and width of a patch in pixels."""

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.prefix if kind not in KINDS[:2]]
        if unknown:
            raise InputError(f"A prefix token is one of {KINDS[:2]}, not {unknown[0]!r}.")
        if min(self.patch_size) < 1:
            raise InputError(f"A patch needs a positive height and width, not {self.patch_size}.")

    @property
    def prefix_tokens(self) -> int:
        """How many tokens stand before the patches."""
        return len(self.prefix)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of whole patches in an image of `height` × `width` pixels.

        Raises InputError if the image is smaller than one patch. Pixels beyond the last whole patch are
        not seen by the model (`edge_lost` says how many).
        """
        rows, columns = height // self.patch_size[0], width // self.patch_size[1]
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
        return self.prefix_tokens + rows * columns

    def kind(self, index: int) -> str:
        """ "cls", "register" or "patch" for one token index."""
        return self.prefix[index] if index < self.prefix_tokens else "patch"

    def check(self, tokens: int, height: int, width: int) -> None:
        """Raise InputError unless a sequence of `tokens` is this map's for an image of that size."""
        expected = self.tokens(height, width)
        if tokens != expected:
            rows, columns = self.grid(height, width)
            raise InputError(
                f"The attention sees {tokens} tokens where the token map expects {expected} "
                f"({self.prefix_tokens} prefix + {rows}x{columns} patches of an image of {height}x{width}): "
                "the map does not belong to this model."
            )
