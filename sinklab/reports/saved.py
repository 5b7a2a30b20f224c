"""Reading what a run has saved: a damaged file is a sentence that names it and says how to get it anew.

A report is refused then, and no section left out: a page without its photographs would look like a run without sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sinklab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError, SyntaxError, RecursionError)
"""What garbage makes pandas, Pillow and json raise; where a page's own facts are missing, jinja2's UndefinedError."""


DIAGNOSED = "the command that made the run, with --resume,"
PATCHED = "sinklab patch RUN --resume, with the options of the patching,"
"""What writes a table again, as the beginning of a sentence."""


@contextmanager
def reading(path: Path, writer: str = DIAGNOSED) -> Iterator[None]:
    """Within, whatever a damaged file makes its readers raise becomes an InputError about `path`."""
    from jinja2 import UndefinedError

    try:
        yield
    except (*DAMAGE, UndefinedError) as error:
        reason = getattr(error, "reason", None) if isinstance(error, InputError) else None
        words = reason if isinstance(reason, str) else f"{type(error).__name__}: {error}"
        words = words.strip().partition("\n")[0][:160].rstrip(".")
        raise InputError(f"{path} is damaged, and the report needs it ({words}): {writer} writes it again.") from error


def read_spectrum(path: Path) -> pd.DataFrame | None:
    """tables/spectrum.csv, one row per (layer, head), numbers all; None for a run without. Raises InputError."""
    import pandas as pd

    from sinklab.reports.tables import PAIR, SPECTRUM

    if not path.is_file():
        return None
    with reading(path):
        table = pd.read_csv(path)
        table = table[SPECTRUM].astype(dict.fromkeys(SPECTRUM, "float64")).astype(dict.fromkeys(PAIR, "int64"))
        if table.duplicated(PAIR).any():
            raise ValueError("a head has two rows")
        return table
