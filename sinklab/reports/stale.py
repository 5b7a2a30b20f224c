"""What an earlier report left in a run folder and the present one does not write: it would contradict the present one.

A run is judged anew under another rule or definition by resuming it; then other heads are shown, and figures that are
drawn for sunk heads alone may have no head. Only files with names that a report gives are removed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

FIGURE = re.compile(
    r"(((fig\d+|lemma\d+|overlay|phase)-.+|lm-(curves|learning-rate|ablations)|vit-[a-z-]+)\.(svg|png|csv))|overlays\.csv"
)
TABLES = ("heads", "counts_per_image", "table14", "table15", "sensitivity", "routes")
"""The tables that a report writes, by their names without ending."""


def remove_stale_figures(folder: Path, kept: Collection[str] = ()) -> None:
    """Remove a report's files from RUN/figures, but for the names (without folder) that are kept."""
    for path in sorted((folder / "figures").glob("*")):
        if FIGURE.fullmatch(path.name) and path.name not in kept:
            path.unlink(missing_ok=True)


def remove_report(folder: Path) -> None:
    """Remove RUN/report.html with its figures and tables: they tell of numbers that no longer hold."""
    (folder / "report.html").unlink(missing_ok=True)
    remove_stale_figures(folder)
    for name in TABLES:
        (folder / f"tables/{name}.csv").unlink(missing_ok=True)
