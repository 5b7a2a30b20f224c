"""The controlled tasks' evaluation sequences as a list that a diagnosis can read: 64 batches of 256 (App. A)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from sinklab.data.sequences import SequenceList
from sinklab.data.toy import ToyTask, task_from
from sinklab.errors import InputError

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
    """The evaluation sequences of a trained model's task; `saved` holds kind, seed, config and the task's signature.

    Raises InputError where that is not the task that the model was trained on: other sequences would be measured.
    """
    kind, seed = saved["kind"], saved["seed"]
    try:
        task = task_from(kind, seed, saved["config"])
        drawn = task.signature()
        same = len(drawn) == len(saved["signature"]) and np.allclose(drawn, saved["signature"], rtol=0, atol=1e-3)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        said = str(error).rstrip(".")
        raise InputError(f"The model's .json names no task ({kind}, seed {seed}) that can be drawn: {said}.") from error
    if not same:
        raise InputError(
            f"The model was trained on another task than {kind} of seed {seed} as it is drawn here: its .json was "
            "changed, or this version of sinklab and torch draws that task differently."
        )
    refs = tuple(ToySequence(task, number) for number in range(BATCHES * SIZE))
    return SequenceList(refs=refs, sources=(f"evaluation sequences of {kind}, seed {seed}",))
