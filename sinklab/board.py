"""TensorBoard beside metrics.jsonl, where it is installed: the same lines as scalars, as they are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sinklab.errors import InputError

FOLDER = "tensorboard"


def require_tensorboard() -> None:
    """Raise InputError unless the package can be imported."""
    if find_spec("tensorboard") is None:
        raise InputError(
            "--tensorboard needs the package tensorboard, which is not installed: install it, or read each model's "
            "metrics.jsonl, which holds the same numbers."
        )


class Board:
    """Follows the metrics.jsonl of each member of a run into RUN/tensorboard/MEMBER."""

    def __init__(self, run: Path, writer: Callable[[str], Any] | None = None) -> None:
        """`writer`: folder → what has add_scalar(name, value, step) and flush(); TensorBoard's own if not given."""
        if writer is None:
            require_tensorboard()
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter
        self.run = run
        self._writer = writer
        self._writers: dict[str, Any] = {}
        self._told: dict[str, int] = {}

    def follow(self, member: str) -> None:
        """Tell of the lines that have come since the last time; a line that is not whole yet waits."""
        path = self.run / "training" / member / "metrics.jsonl"
        if not path.is_file():
            return
        if member not in self._writers:
            self._writers[member] = self._writer(str(self.run / FOLDER / member))
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            held = json.loads(line)
            step = int(held.pop("step"))
            if step <= self._told.get(member, 0):
                continue
            self._told[member] = step
            for name, value in held.items():
                if isinstance(value, (int, float)):
                    self._writers[member].add_scalar(name, value, step)
        self._writers[member].flush()
