"""Processes that read pictures, and signals that reach a whole process group: only the parent should answer them.

torchrun and batch systems send SIGTERM to every process of a training, and a terminal sends Ctrl-C. The training
finishes its step and saves; were its readers, or the fork server that they come from, gone at once, there would be no
step to finish.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)
GRACE = 60
"""Seconds that a reader goes on after SIGTERM, unless it is told again."""


@contextmanager
def sheltered() -> Iterator[None]:
    """Within, SIGTERM and Ctrl-C wait, and processes that are started inherit that: a fork server for good, a reader
    until it calls `answer_late`."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # later it would let them through as it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def answer_late() -> None:
    """In a reader: Ctrl-C is nothing to it, the first SIGTERM ends it after `GRACE` seconds, a second one at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.signal(signal.SIGTERM, _linger)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def answer_at_once() -> None:
    """In a reader that nobody waits for: Ctrl-C is nothing to it, and SIGTERM ends it, even if its fork server was
    started `sheltered`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _linger(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(GRACE)
