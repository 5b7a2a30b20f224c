"""What a caller asked of `load`, handed from the entry to the family that can meet it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


DEFAULT_SIDE = 224
"""Pixels, where nobody says otherwise; of a model that reads no pictures nobody has asked anything by it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `load`, checked together."""

    name: str
    """As the user wrote it."""
    weights: Path | None = None
    random_weights: bool = False
    seed: int = 0
    offline: bool = False
    allow_pickle: bool = False
    image_size: tuple[int, int] | None = None
    """Height and width of the position table to build; for random weights only."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The architecture's own options, from a sidecar config."""

    def __post_init__(self) -> None:
        if self.random_weights and self.weights is not None:
            raise InputError(
                f"Random weights were asked for and a weights file was named ({self.weights}): choose one."
            )
        if self.image_size is not None and not self.random_weights:
            height, width = self.image_size
            raise InputError(
                f"image_size={height}x{width} would need the position table in the weights to be rewritten, and "
                "sinklab does not rewrite weights: leave image_size out (most models take other sizes as they run), "
                "or ask for random weights."
            )

    def saved(self, name: str | None = None) -> dict[str, Any]:
        """The arguments of `load` that give this model again, as JSON can hold them; from any folder.

        `name` replaces the user's own where that holds a path relative to the present folder.
        """
        return {
            "name": name or self.name,
            "weights": str(self.weights.resolve()) if self.weights else None,
            "random_weights": self.random_weights,
            "seed": self.seed,
            "image_size": list(self.image_size) if self.image_size else None,
        }

    @property
    def random_source(self) -> str:
        """How random weights are named in a provenance."""
        return f"random weights (seed {self.seed})"

    def drawn(self, build: Callable[[], nn.Module]) -> nn.Module:
        """What `build` makes with this request's seed; the caller's own random state is left as it was."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return build()


def size_pair(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Height and width from one number or two; raises InputError for anything else."""
    if size is None:
        return None
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, tuple | list) or len(sides) != 2 or not all(_is_length(side) for side in sides):
        raise InputError(f"image_size is one positive whole number or (height, width), not {size!r}.")
    return (sides[0], sides[1])


def _is_length(side: object) -> bool:
    return isinstance(side, int) and not isinstance(side, bool) and side > 0


def pair(size: Any) -> tuple[int, int]:
    """Height and width from a configuration's number or list of two."""
    return (int(size[0]), int(size[1])) if isinstance(size, list | tuple) else (int(size), int(size))


def close_matches(word: str, known: Iterable[str], what: str = "Close") -> str:
    """ " Close: a, b." for the known names most like `word`, or an empty string."""
    known = list(known)
    matches = get_close_matches(word, known, n=4, cutoff=0.6)
    matches += [name for name in known if word and name.startswith(word) and name not in matches][: 4 - len(matches)]
    return f" {what}: {', '.join(matches)}." if matches else ""


@contextmanager
def building(what: str, options: Any) -> Iterator[None]:
    """Within, what a library says of `options` that do not fit, be it an assertion, becomes a sentence."""
    try:
        yield
    except (InputError, NotFoundError, MemoryError):
        raise
    except Exception as error:
        if not options:
            raise
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        shown = str(options) if len(str(options)) <= 300 else f"{str(options)[:300]}…"
        raise InputError(f"{what} cannot be built with the options {shown}: {said.rstrip('.')}.") from error


@contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Silence the loading chatter of other libraries' loggers; what matters is in our own report."""
    import logging

    levels = {name: logging.getLogger(name).level for name in loggers}
    try:
        for name in loggers:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
