"""One process or many: who reads which batches, and when all are done.

Under `torchrun` each process is a rank; the images are shared out batch by batch, so the table does not depend on how
many ranks there are. Only barriers and one broadcast pass between them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        """Is this the process that creates the run, summarises it and speaks?"""
        return self.rank == 0

    def wait(self) -> None:
        """Until every rank is here."""
        if self.world > 1:
            import torch.distributed as dist

            dist.barrier()

    def agree(self, problem: str | None) -> str | None:
        """What rank 0 says; every rank must call it."""
        if self.world == 1:
            return problem
        import torch.distributed as dist

        said: list[Any] = [problem]
        dist.broadcast_object_list(said, src=0)
        return said[0]

    def any_failed(self, problem: str | None) -> str | None:
        """The first rank's problem, if any rank has one; every rank must call it."""
        return next((words for words in self.gathered(problem) if words is not None), None)

    def gathered(self, own: Any) -> list[Any]:
        """What every rank gives, by rank; every rank must call it."""
        if self.world == 1:
            return [own]
        import torch.distributed as dist

        said: list[Any] = [None] * self.world
        dist.all_gather_object(said, own)
        return said


@contextmanager
def ranks() -> Iterator[Ranks]:
    """The ranks that torchrun's environment describes, or the only one. Joins and leaves the process group."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    from datetime import timedelta

    import torch.distributed as dist

    mine = not dist.is_initialized()
    if (
        mine
    ):  # gloo also where there are GPUs: nothing but words is exchanged. A rank may decode far longer than another
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))
    finally:
        if mine:
            dist.destroy_process_group()
