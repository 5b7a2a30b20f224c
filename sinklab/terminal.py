"""What the command line says and how: a bar on a terminal, plain lines in a pipe, errors as one sentence.

Results go to standard output; progress, notes and errors go to standard error.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

MIN_FOLDED = 20  # letters of a folded column that can still be read
PLAIN_EVERY = 10.0  # seconds between lines in a pipe


def say(words: str) -> None:
    """A note on standard error, from rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(words, file=sys.stderr, flush=True)


def note(remark: object) -> None:
    """A remark about the model, the images or the run, which run.json keeps too: one line, and only once."""
    if str(remark) not in _noted:
        _noted.add(str(remark))
        say(f"sinklab: note: {remark}")


_noted: set[str] = set()


def warnings_as_lines() -> None:
    """Warnings as one line each, without the source line of whoever issued them; sinklab's own are notes."""
    _noted.clear()

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if category is UserWarning:
            note(message)
        else:
            say(f"sinklab: warning: {message}")

    warnings.showwarning = show


class _Bar:
    """Progress on a terminal (rich): images, images/s, time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("images"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            expand=True,
        )
        self._task: Any = None
        self._start: tuple[float, int] = (time.monotonic(), 0)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._task is None:
            self._task = self._progress.add_task("images", total=total, completed=done, rate="")
            self._start = (time.monotonic(), done)
        self._progress.update(self._task, completed=done, total=total, rate=_rate(self._start, done))


class _Lines:
    """Progress in a pipe or a log file: a line now and then, and one at the end."""

    def __init__(self) -> None:
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
            say(f"images {done}/{total}")
        elif now - self._last >= PLAIN_EVERY or (done >= total and not first):
            self._last = now
            say(f"images {done}/{total}  {_rate(self._start, done)}  {_left(self._start, done, total)}".rstrip())


def _rate(start: tuple[float, int], done: int) -> str:
    seconds, images = time.monotonic() - start[0], done - start[1]
    return f"{images / seconds:.1f} images/s" if images and seconds > 0 else ""


def _left(start: tuple[float, int], done: int, total: int) -> str:
    seconds, images = time.monotonic() - start[0], done - start[1]
    return f"{(total - done) * seconds / images:.0f} s left" if images and done < total else ""


def progress() -> Any:
    """A with-block that gives a callable (done, total)."""
    return _Bar() if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0" else _Lines()


class _Training:
    """Progress of trainings: on a terminal one line that is written over, in a pipe a line now and then."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._last, self._name = list(names), -PLAIN_EVERY, ""
        self._over = sys.stderr.isatty()

    def __enter__(self) -> _Training:
        return self

    def __exit__(self, *error: object) -> None:
        if self._over and self._name:
            print(file=sys.stderr)

    def __call__(
        self, name: str, step: int, steps: int, loss: float, score: Mapping[str, float], left: float | None
    ) -> None:
        now = time.monotonic()
        if step < steps and name == self._name and now - self._last < (0.2 if self._over else PLAIN_EVERY):
            return
        self._last, begun = now, name != self._name and bool(self._name)
        self._name = name
        sinks = " ".join(f"{value:.2f}" for value in score.values())
        place = f"{self._names.index(name) + 1}/{len(self._names)} " if len(self._names) > 1 else ""
        line = f"{place}{name}  step {step}/{steps}  loss {loss:.4f}" + (f"  sink {sinks}" if sinks else "")
        if left is not None and step < steps:
            line += f"  {left:.0f} s left"
        if self._over:
            print("\n" * begun + f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            say(line)


def training(names: Sequence[str]) -> _Training:
    """A with-block that gives a callable (name, step, steps, loss, sink scores, seconds left) for these trainings."""
    return _Training(names)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, whole: Sequence[str] = ()) -> None:
    """A table on standard output: drawn and folded on a terminal, tab-separated in a pipe.

    Where the terminal is too narrow for the columns named in `whole`, each row is a paragraph and their cells stand on
    lines of their own, for the terminal itself to wrap: what is copied from there is in one piece.
    """
    if not sys.stdout.isatty():
        print("\t".join(columns))
        for row in rows:
            print("\t".join(row))
        return

    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    widest = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    if len(columns) > 3 and sum(widest) + len(columns) > console.width:  # a grid of folded numbers cannot be read
        console.print(Text(title, style="bold"))
        for row in rows:
            facts = [f"{name} {cell}" for name, cell in zip(columns[1:], row[1:], strict=True) if cell]
            console.print(Text(f"{row[0]}: " + ", ".join(facts)))
        return
    held = [width if name in whole else MIN_FOLDED for name, width in zip(columns, widest, strict=True)]
    if whole and sum(held) + len(columns) > console.width:
        console.print(Text(title, style="bold"))
        for row in rows:
            for place, (name, cell) in enumerate(zip(columns, row, strict=True)):
                indented = (
                    Padding(Text(cell), (0, 0, 0, 2))
                    if place and name not in whole
                    else Text("  " * (place > 0) + cell)
                )
                console.print(indented, soft_wrap=name in whole)
        return
    drawn = Table(
        title=title, title_justify="left", header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in columns:
        drawn.add_column(column, overflow="fold", no_wrap=column in whole)
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    console.print(drawn)


@contextmanager
def errors_as_sentences(how_to_go_on: Callable[[], str] = str) -> Iterator[None]:
    """Within, what the user can mend ends in a sentence and exit code 2; after Ctrl-C, `how_to_go_on` is said."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"\nsinklab: stopped. {how_to_go_on()}".rstrip())
        raise SystemExit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone; so do we
        raise SystemExit(1) from None
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        print("sinklab:", sentence, *getattr(error, "__notes__", ()), file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _sentence(error: Exception) -> str | None:
    """What to tell the user of an error that is not a fault of the program; None for one that is."""
    from sinklab.errors import InputError, NotFoundError

    if isinstance(error, (InputError, NotFoundError)):
        return str(error)
    if isinstance(error, OSError):
        return str(error)
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower() or "can't allocate" in str(error):
        return "The machine ran out of memory: use a smaller --batch-size or --size, or fewer --workers."
    return None


def examination(found: Any) -> None:
    """What `sinklab doctor` prints: the proof site by site, then the precision."""
    columns = ["site", "fired", "heads", "kv", "dim", "|Δout|", "|rows-1|", "|Av-z|", "|ΣU-Δx|", "dtype", "note"]
    rows = []
    for proof in found.proofs:
        group = proof.heads // proof.kv_heads
        kv = str(proof.kv_heads) if group == 1 else f"{proof.kv_heads} (h//{group})"
        update = "not visible" if proof.update is None else f"{proof.update:.0e}"
        errors = [f"{error:.0e}" if error else "0" for error in (proof.difference, proof.row_sums, proof.kernel)]
        facts = [str(proof.fired), str(proof.heads), kv, str(proof.head_dim)]
        rows.append([proof.name, *facts, *errors, update, proof.dtype, proof.note])
    table(f"Attachment, {len(found.proofs)} sites: every error is relative", columns, rows)
    drifts = [[drift.column, f"{drift.worst:.1e}", f"layer {drift.layer}, head {drift.head}"] for drift in found.drifts]
    table("Statistics against a float64 copy of the model, one image", ["column", "worst", "where"], drifts)
    print("  ".join(f"{name}: {value}" for name, value in found.facts.items()))
    print(f"heads whose sink differs from float64's: {found.moved} of {found.heads}; not finite: {found.not_finite}")
