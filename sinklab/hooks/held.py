"""What several with-blocks may change at once: changed for the first that comes, put back after the last that leaves.

Whoever restores what it found on entering restores the wrong thing as soon as two overlap without nesting: in two
threads, or when managers are left in another order than they were entered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_held: dict[Hashable, tuple[int, Callable[[], object]]] = {}  # key → how many hold it, and what puts it back


@contextmanager
def held(key: Hashable, change: Callable[[], Callable[[], object]]) -> Iterator[None]:
    """Within, `change` has been made; it returns what undoes it. What is held already is not changed again."""
    with _lock:
        count, undo = _held[key] if key in _held else (0, change())
        _held[key] = (count + 1, undo)
    try:
        yield
    finally:
        with _lock:
            count, undo = _held[key]
            if count > 1:
                _held[key] = (count - 1, undo)
            else:
                del _held[key]
                undo()


def is_held(key: Hashable) -> bool:
    """Whether some with-block holds the key now."""
    return key in _held
