"""How trainings are followed: on a terminal one line that is written over, in a pipe a line now and then."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sinklab.terminal import PLAIN_EVERY, say

DRAWN_EVERY = 0.2
"""Seconds between two lines on a terminal."""
SHORTEST_NAME = 12


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


class _Training:
    def __init__(self, names: Sequence[str], score: str, unit: str) -> None:
        self._names, self._last, self._name, self._score = list(names), -PLAIN_EVERY, "", score
        self._unit = f" {unit}" if unit else ""
        self._over = sys.stderr.isatty()
        self._open = False
        """Whether the terminal's line is to be written over."""

        self._before: Any = None
        """What SIGTERM did before."""

    def __enter__(self) -> _Training:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _stop)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if self._open:
            print(file=sys.stderr)

    def __call__(
        self, name: str, step: int, steps: int, loss: float, score: Mapping[str, float], left: float | None
    ) -> None:
        now = time.monotonic()
        if step < steps and name == self._name and now - self._last < (DRAWN_EVERY if self._over else PLAIN_EVERY):
            return
        begun = self._open and name != self._name
        self._last, self._name = now, name
        scores = " ".join(f"{value:.2f}" for value in score.values())
        place = f"{self._names.index(name) + 1}/{len(self._names)} " if len(self._names) > 1 else ""
        told = [f"step {step}/{steps}", f"loss {loss:.4f}{self._unit}"]
        told += [f"{self._score} {scores}{self._unit}"] if scores else []
        told += [f"{left:.0f} s left"] if left is not None and step < steps else []
        if self._over:
            line = fitted(place, name, told, _columns() - 1)  # a full line would wrap, and only its end be written over
            self._open = step < steps  # at its end a training's line stays, and notes come below it
            end = "" if self._open else "\n"
            print("\n" * begun + f"\r{line}\x1b[K", end=end, file=sys.stderr, flush=True)
        else:
            say("  ".join([f"{place}{name}", *told]))


def training(names: Sequence[str], score: str = "sink", unit: str = "") -> _Training:
    """A with-block that gives a callable (name, step, steps, loss, scores, seconds left) for these trainings, and in
    which SIGTERM is a KeyboardInterrupt, before the first step and after the last, too.

    `score` says what the scores are, `unit` what loss and scores are counted in, if they are in one.
    """
    return _Training(names, score, unit)


def fitted(place: str, name: str, told: Sequence[str], width: int) -> str:
    """Place, name and what is told in one line of at most `width` letters: first the name loses its beginning, then
    what is told last, then the line its end."""
    for count in range(len(told), 0, -1):
        rest = "".join(f"  {part}" for part in told[:count])
        room = width - len(place) - len(rest)
        if len(name) <= room:
            return f"{place}{name}{rest}"
        if room >= SHORTEST_NAME:
            return f"{place}…{name[len(name) - room + 1 :]}{rest}"
    return f"{place}{name}  {told[0]}"[: max(width, 0)] if told else f"{place}{name}"[: max(width, 0)]


def _columns() -> int:
    """Of the terminal that standard error is, whatever standard output is."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told):
        return int(told)
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
