"""A pass over the inputs that an experiment needs: fixed groups, shared out between ranks, written in whole parts.

A group is one image, or as many short sequences as run well together. Which group an input belongs to follows from its
position in the list alone, so the number of ranks, and where a kill fell, cannot change a number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.data.images import batches
from sinklab.errors import InputError
from sinklab.parts import PartWriter, read_parts, read_rows
from sinklab.settings import asked_dtype
from sinklab.sinks.scan import as_input, precision

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    from torch import Tensor

    from sinklab.data.images import Batch
    from sinklab.data.input_list import InputList, View
    from sinklab.handle import Model
    from sinklab.run import Run
    from sinklab.sinks.ranks import Ranks
    from sinklab.sinks.scan import Progress


@dataclass(frozen=True, kw_only=True, eq=False)
class Passes:
    """Where the parts of an experiment lie, and who computes which."""

    model: Model
    run: Run
    view: View
    fingerprint: str
    ranks: Ranks
    workers: int

    @property
    def together(self) -> int:
        """Inputs of a group."""
        own = self.model.loaded.sequences
        return 1 if own is None else own.together

    def is_mine(self, index: int) -> bool:
        """Whether this rank has the input at that position of the list."""
        return index // self.together % self.ranks.world == self.ranks.rank

    def read(self, name: str, keys: Iterable[str]) -> pd.DataFrame:
        """The rows of all parts of one kind, in the order of `keys`."""
        return read_rows(read_parts(self._place(name), self.fingerprint), by=tuple(keys))

    def _place(self, name: str) -> Path:
        return self.run.path / "effects" / name if name else self.run.path / "effects"

    def among(self, batch: Batch, wanted: Collection[int]) -> tuple[list[int], Tensor]:
        """A batch's wanted inputs: their positions in the list, and pixels as the model takes them."""
        kept = [place for place, index in enumerate(batch.indices) if index in wanted]
        return [batch.indices[place] for place in kept], as_input(self.model, batch.pixels[kept])

    def over(
        self,
        name: str,
        images: InputList,
        wanted: Collection[int],
        one: Callable[[Batch], pd.DataFrame],
        progress: Progress | None = None,
        *,
        schema: pyarrow.Schema,
        alone: bool = False,
    ) -> None:
        """Run `one` on this rank's groups that have wanted inputs and lie in no part yet, and write its rows.

        `alone` takes every input for itself, and leaves out one that cannot be read; otherwise that is an InputError,
        because it could be read when the run was diagnosed.
        """
        together, folder = 1 if alone else self.together, self._place(name)
        done = {batch for part in read_parts(folder, self.fingerprint) for batch in part.batches}
        members: dict[int, list[int]] = {}
        for index in sorted(wanted):
            members.setdefault(index // together, []).append(index)
        mine = [number for number in members if number % self.ranks.world == self.ranks.rank]
        todo = [number for number in mine if number not in done]
        total = sum(len(members[number]) for number in mine)
        finished = total - sum(len(members[number]) for number in todo)
        if progress is not None:
            progress(finished, total)
        if not todo:
            return
        share: dict[str, Any] = {"rank": self.ranks.rank, "world": self.ranks.world, "workers": self.workers}
        leave = set(range(-(-len(images) // together))) - set(todo)
        stream = batches(images, self.view, batch_size=together, skip_batches=leave, **share)
        with (
            PartWriter(folder, self.fingerprint, self.ranks.rank, schema=schema) as parts,
            precision(asked_dtype(self.run.config), self.model.device),
        ):
            for batch in stream:
                if not alone and set(members[batch.number]) - set(batch.indices):
                    wanted_ids = {images[index].id for index in members[batch.number]}
                    image, reason = next(pair for pair in batch.skipped if pair[0] in wanted_ids)
                    raise InputError(f"{image} could be read when the run was diagnosed, and now cannot: {reason}.")
                parts.add(batch.number, one(batch) if batch.ids else None, batch.skipped)
                finished += len(members[batch.number])
                if progress is not None:
                    progress(finished, total)
