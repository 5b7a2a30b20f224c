"""What the command line says and how: a bar on a terminal, plain lines in a pipe, errors as one sentence.

Results go to standard output; progress, notes and errors go to standard error.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sinklab.errors import printable

PLAIN_EVERY = 10.0  # seconds between lines in a pipe
FIRST_RANK_SPEAKS = 10.0
"""Seconds that a rank above 0 waits with an error. If the first rank has it too, it has said so by then, and torchrun
has ended this one; if this rank alone has it, somebody must speak."""


def say(words: str) -> None:
    """A note on standard error, from rank 0 only; nothing in it steers the terminal, but lines may end."""
    if os.environ.get("RANK", "0") == "0":
        print(printable(words, keep="\n"), file=sys.stderr, flush=True)


def note(remark: object) -> None:
    """A remark about the model, the images or the run, which run.json keeps too: one line, and only once."""
    if str(remark) not in _noted:
        _noted.add(str(remark))
        say(f"sinklab: note: {printable(str(remark))}")


_noted: set[str] = set()


def verdict(lines: Sequence[str]) -> None:
    """What was found, on standard error: folded between words on a terminal, a line each and plain in a pipe."""
    if not sys.stderr.isatty():
        for line in lines:
            say(line)
    elif os.environ.get("RANK", "0") == "0":
        from rich.console import Console
        from rich.text import Text

        for line in lines:
            Console(stderr=True, highlight=False).print(Text(line, style="bold"))


def warnings_as_lines() -> None:
    """Warnings as one line each, without the source line of whoever issued them; sinklab's own are notes."""
    _noted.clear()

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if category is UserWarning:
            note(message)
        else:
            say(f"sinklab: warning: {printable(str(message))}")

    warnings.showwarning = show


class _Bar:
    """Progress on a terminal (rich): images, images/s, time left; or whatever is counted."""

    def __init__(self, nouns: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn(nouns),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            expand=True,
        )
        self._nouns = nouns
        self._task: Any = None
        self._start: tuple[float, int] = (time.monotonic(), 0)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._task is None:
            self._task = self._progress.add_task(self._nouns, total=total, completed=done, rate="")
            self._start = (time.monotonic(), done)
        self._progress.update(self._task, completed=done, total=total, rate=_rate(self._start, done, self._nouns))


class _Lines:
    """Progress in a pipe or a log file: a line now and then, and one at the end."""

    def __init__(self, nouns: str) -> None:
        self._nouns = nouns
        self._start: tuple[float, int] | None = None
        self._last = time.monotonic()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        first = self._start is None
        if self._start is None:
            self._start = (now, done)
        if first and done < total:
            say(f"{self._nouns} {done}/{total}")
        elif now - self._last >= PLAIN_EVERY or (done >= total and not first):
            self._last = now
            rate, left = _rate(self._start, done, self._nouns), _left(self._start, done, total)
            say(f"{self._nouns} {done}/{total}  {rate}  {left}".rstrip())


def _rate(start: tuple[float, int], done: int, nouns: str) -> str:
    seconds, seen = time.monotonic() - start[0], done - start[1]
    return f"{seen / seconds:.1f} {nouns}/s" if seen and seconds > 0 else ""


def _left(start: tuple[float, int], done: int, total: int) -> str:
    seconds, seen = time.monotonic() - start[0], done - start[1]
    return f"{(total - done) * seconds / seen:.0f} s left" if seen and done < total else ""


def progress(nouns: str = "images") -> Any:
    """A with-block that gives a callable (done, total); `nouns` is what is counted."""
    drawn = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
    return _Bar(nouns) if drawn else _Lines(nouns)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, titled: bool = False) -> None:
    """A table on standard output: drawn on a terminal, listed on a narrow one, tab-separated in a pipe.

    In a pipe the title is left out, unless it is asked for: then it stands in a line of its own after a #.
    """
    if not sys.stdout.isatty():
        if titled:
            print(f"# {title}")
        for row in (columns, *rows):
            print("\t".join(printable(cell) for cell in row))
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [[printable(cell, keep="\n") for cell in row] for row in rows]
    console = Console(highlight=False)
    console.print(Text(title, style="bold italic"))
    widest = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    if sum(widest) + len(columns) > console.width:  # folded cells cannot be read, nor broken names copied
        for line in _listed(columns, rows, console.width):
            print(line)
        return
    drawn = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        drawn.add_column(column, no_wrap=True)
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    console.print(drawn)


def _listed(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Row by row, its first cell in a line of its own; no word is broken, even one that is longer than a line."""
    told = [[f"{name} {cell}" for name, cell in zip(columns[1:], row[1:], strict=True) if cell] for row in rows]
    in_one_line = len(columns) > 3 or all(len(", ".join(facts)) + 2 <= width for facts in told)
    for row, facts in zip(rows, told, strict=True):
        yield row[0]
        for fact in [", ".join(facts)] if in_one_line else facts:
            yield from _wrapped(fact, width, "  ")


def _wrapped(words: str, width: int, indent: str = "") -> list[str]:
    import textwrap

    return textwrap.wrap(
        words,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


@contextmanager
def errors_as_sentences(
    how_to_go_on: Callable[[], str] = str, lighter: str = "a smaller --batch-size or --size, or fewer --workers"
) -> Iterator[None]:
    """Within, what the user can mend ends in a sentence and exit code 2. `lighter` is what takes less memory."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"\nsinklab: stopped. {how_to_go_on()}".rstrip())
        raise SystemExit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone; so do we
        raise SystemExit(1) from None
    except Exception as error:
        sentence = _sentence(error, lighter)
        if sentence is None:
            raise
        if os.environ.get("RANK", "0") != "0":
            time.sleep(FIRST_RANK_SPEAKS)
        words = " ".join(["sinklab:", sentence, *getattr(error, "__notes__", ())])
        print(printable(words, keep="\n"), file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _sentence(error: Exception, lighter: str) -> str | None:
    """What to tell the user of an error that is not a fault of the program; None for one that is."""
    from sinklab.errors import InputError, NotFoundError

    if isinstance(error, (InputError, NotFoundError, OSError)):
        return str(error)
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower() or "can't allocate" in str(error):
        return f"The machine ran out of memory: use {lighter}."
    return None


LEGEND = (
    ("|Δout|", "output attached against plain"),
    ("|rows-1|", "rows of the rebuilt pattern against 1"),
    ("|Av-z|", "that pattern times v against the kernel's z"),
    ("|ΣU-Δx|", "all heads' updates and the bias against what the block adds"),
    ("kv", "key/value heads, and which of them query head h reads"),
)


def examination(found: Any) -> None:
    """What `sinklab doctor` prints: the proof site by site, then the precision, and last a verdict in one line."""
    columns = ["site", "fired", "heads", "kv", "dim", "|Δout|", "|rows-1|", "|Av-z|", "|ΣU-Δx|", "dtype", "note"]
    rows = []
    for proof in found.proofs:
        group = proof.heads // proof.kv_heads
        kv = str(proof.kv_heads) if group == 1 else f"{proof.kv_heads} (h//{group})"
        update = "not visible" if proof.update is None else f"{proof.update:.0e}"
        errors = [f"{error:.0e}" if error else "0" for error in (proof.difference, proof.row_sums, proof.kernel)]
        facts = [str(proof.fired), str(proof.heads), kv, str(proof.head_dim)]
        rows.append([proof.name, *facts, *errors, update, proof.dtype, proof.note])
    table(f"Attachment, {len(found.proofs)} sites: every error is relative", columns, rows, titled=True)
    if sys.stdout.isatty():
        import shutil

        meaning = " · ".join(f"{mark}: {words}" for mark, words in LEGEND)
        print("\n".join(_wrapped(meaning, shutil.get_terminal_size().columns)))
    print()
    drifts = []
    for drift in found.drifts:
        where = "" if math.isnan(drift.worst) else f"layer {drift.layer}, head {drift.head}"
        drifts.append([drift.column, f"{drift.worst:.1e}", where])
    said = "Statistics against a float64 copy of the model, one image"
    table(said, ["column", "worst", "where"], drifts, titled=True)
    print()
    counts = {
        "heads": str(found.heads),
        "heads whose sink is not float64's": str(found.moved),
        "heads not finite": str(found.not_finite),
    }
    table("Conditions", ["what", "is"], [[*fact] for fact in (found.facts | counts).items()], titled=True)
    print()
    print(found.verdict())
