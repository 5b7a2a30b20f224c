"""The two errors that a user's input can raise; the command line turns them into one sentence and exit code 2."""


class InputError(ValueError):
    """What was given does not fit: the message says what was asked, what arrived and what would fit."""


class NotFoundError(LookupError):
    """What was named does not exist, or a name matched nothing."""

    def __str__(self) -> str:  # LookupError's children (KeyError) print a repr; a sentence must stay a sentence
        return str(self.args[0]) if self.args else ""
