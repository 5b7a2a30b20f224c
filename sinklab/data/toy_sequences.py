"""The controlled tasks' evaluation sequences as a list that a diagnosis can read: 64 batches of 256 (App. A)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from sinklab.data.sequences import SequenceList
from sinklab.data.toy import ToyTask, task_from

BATCHES, SIZE = 64, 256
"""How many sequences there are: those of the evaluation of App. A."""


@dataclass(frozen=True, slots=True)
class ToySequence:
    """One evaluation sequence: number i is row i mod 256 of the task's evaluation batch i // 256."""

    task: ToyTask
    number: int

    @property
    def id(self) -> str:
        return f"sequence-{self.number:05d}"

    @property
    def path(self) -> str:
        """It lies in no file: it is drawn."""
        return ""

    @property
    def size(self) -> int:
        return 4 * self.task.tokens * self.task.dim

    def content(self) -> bytes:
        """Its numbers, float32."""
        drawn: bytes = _drawn(self.task, self.number // SIZE)[self.number % SIZE].numpy().tobytes()
        return drawn


@lru_cache(maxsize=4)
def _drawn(task: ToyTask, batch: int) -> Tensor:
    return task.batch(batch, SIZE, purpose="evaluation").x


def toy_sequences(saved: Mapping[str, Any]) -> SequenceList:
    """The evaluation sequences of a trained model's task; `saved` holds kind, seed and config."""
    task = task_from(saved["kind"], saved["seed"], saved["config"])
    refs = tuple(ToySequence(task, number) for number in range(BATCHES * SIZE))
    return SequenceList(refs=refs, sources=(f"evaluation sequences of {saved['kind']}, seed {saved['seed']}",))
