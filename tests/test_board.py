"""TensorBoard follows metrics.jsonl: every number once, in its member's folder; without the package, a sentence."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from command_line import in_process

from sinklab.board import Board


class Written:
    """Stands where TensorBoard's writer would."""

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars = folder, list[tuple[str, float, int]]()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        """Nothing is held back."""


def test_each_line_is_told_once_and_a_line_that_is_not_whole_waits(tmp_path: Path) -> None:
    made: list[Written] = []
    board = Board(tmp_path, lambda folder: made.append(Written(folder)) or made[-1])  # type: ignore[func-returns-value]
    board.follow("seed-0/a")  # nothing was written yet
    path = tmp_path / "training/seed-0/a/metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"step": 1, "total": 2.5, "rate": 0.5}\n{"step": 2, "tot')
    board.follow("seed-0/a")
    path.write_text('{"step": 1, "total": 2.5, "rate": 0.5}\n{"step": 2, "total": 2.0}\n')
    board.follow("seed-0/a")
    assert made[0].folder == str(tmp_path / "tensorboard/seed-0/a") and len(made) == 1
    assert made[0].scalars == [("total", 2.5, 1), ("rate", 0.5, 1), ("total", 2.0, 2)]


@pytest.mark.skipif(find_spec("tensorboard") is not None, reason="tensorboard is installed")
def test_without_the_package_it_is_said_before_anything_is_written(tmp_path: Path) -> None:
    ended = in_process("train", "vit", "--tensorboard", "-o", tmp_path / "run")
    assert ended.returncode == 2 and "needs the package tensorboard" in ended.stderr
    assert not (tmp_path / "run").exists()
