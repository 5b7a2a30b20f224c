"""Processes that train together, started by torchrun: each takes a share of every batch, gradients are averaged.

The averages run over one flat tensor; models of this size gain nothing from overlapping them with the backward pass.
A run's numbers are those of one process, to rounding.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among `world`; on its own, every method leaves things as they are."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    """Where tensors lie that pass between the processes."""

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    @property
    def share(self) -> slice:
        """Which rows of a batch, or windows of a list, are this process's."""
        return slice(self.rank, None, self.world)

    def wait(self) -> None:
        """Until every process is here."""
        if self.world > 1:
            torch.distributed.barrier()

    def unsynchronised(self) -> AbstractContextManager[Any]:
        """Within, backward leaves each process's gradients where they are: for all but a step's last batch."""
        return nullcontext()

    def reduce(self, gradients: Iterable[Tensor]) -> None:
        """Make each process's gradients the mean over the processes."""
        self.average(gradients)

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Put the mean over the processes into each tensor; all have the same tensors in the same order."""
        if self.world == 1:
            return
        mine = list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in mine])
        torch.distributed.all_reduce(flat)
        flat /= self.world
        for tensor, mean in zip(mine, flat.split([tensor.numel() for tensor in mine]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def averaged(self, scalars: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The scalars' means over the processes."""
        if self.world == 1:
            return scalars
        values = torch.stack([value.detach().float() for value in scalars.values()])
        self.average([values])
        return dict(zip(scalars, values, strict=True))

    def total(self, numbers: Iterable[float]) -> list[float]:
        """The sums over the processes, in float64."""
        if self.world == 1:
            return list(numbers)
        values = torch.tensor(list(numbers), dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(values)
        return [float(value) for value in values]

    def any(self, mine: bool) -> bool:
        """Whether it is so in any process."""
        return self.total([float(mine)])[0] > 0

    def gathered(self, mine: Any) -> list[Any]:
        """What each process has, in order of rank."""
        if self.world == 1:
            return [mine]
        held: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(held, mine)
        return held


@contextmanager
def together(device: str) -> Iterator[tuple[Ranks, str]]:
    """Within, this process is one of torchrun's (nccl on CUDA, else gloo); gives the ranks and this one's device."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks(), device
        return
    import torch._dynamo  # before there is a group, see _let_go
    import torch.distributed as dist

    kind = torch.device(device).type
    if kind == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    mine = not dist.is_initialized()
    if mine:
        # a first process may evaluate, or write, for long while the others wait
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(days=1))
    try:
        yield Ranks(rank=dist.get_rank(), world=dist.get_world_size(), device=device), device
    finally:
        if mine:
            _let_go()


def _let_go() -> None:
    """End the process group with all that refers to it, so that its threads end here and not with the interpreter.

    A thread of gloo's that lets go of a tensor while the interpreter ends aborts the process, after all was done. Two
    things keep a group, and its threads, beyond `destroy_process_group`: DDP's wrapper, which refers to itself; and
    the modules that torch._dynamo brings along, which keep the group that there is when they are imported. DDP and the
    optimizers import them at their first use, so they are imported before there is a group.
    FSDP2 keeps the group of its mesh for good.
    """
    import gc

    gc.collect()
    torch.distributed.destroy_process_group()
