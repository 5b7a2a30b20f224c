"""The two errors that a user's input can raise; the command line turns them into one sentence and exit code 2.

And how a name that somebody else chose may stand in such a sentence.
"""


class InputError(ValueError):
    """What was given does not fit: the message says what was asked, what arrived and what would fit."""


class NotFoundError(LookupError):
    """What was named does not exist, or a name matched nothing."""

    def __str__(self) -> str:  # LookupError's children (KeyError) print a repr; a sentence must stay a sentence
        return str(self.args[0]) if self.args else ""


class NothingToEdit(NotFoundError):
    """A diagnosed run has no head that could be edited: of several runs the others still may."""


def printable(text: str, *, keep: str = "") -> str:
    r"""Text that a terminal shows and does not obey: what steers it ("\x1b", "\n", a turn of the writing direction)
    is written out as Python would; `keep` are characters that may stay."""
    from unicodedata import category

    return "".join(
        letter
        if letter.isprintable() or category(letter) == "Zs" or letter in keep
        else letter.encode("unicode_escape").decode()
        for letter in text
    )
