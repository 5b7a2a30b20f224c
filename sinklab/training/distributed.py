"""The processes of one training: who writes, what they agree on, and means over all of them that can be differentiated.

`mean_over_ranks` is exact together with DDP: every rank computes the same loss from the joined means, and DDP's average
of the gradients is the gradient of that loss over the joined batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sinklab.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """One process among `world` equal ones; the default is alone."""

    rank: int = 0
    world: int = 1
    wrapped: nn.Module | None = None
    """The DDP wrapper whose gradients are averaged, where there is one."""

    @property
    def writes(self) -> bool:
        """Whether this process writes metrics and checkpoints."""
        return self.rank == 0

    def agree(self, flag: bool) -> bool:
        """Whether any rank says yes; all have to ask."""
        if self.world == 1:
            return flag
        told = torch.tensor(float(flag), device=_device())
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return bool(told > 0)

    def means(self, scalars: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same numbers averaged over ranks, without gradients."""
        if self.world == 1:
            return {name: value.detach() for name, value in scalars.items()}
        joined = torch.stack([value.detach().float() for value in scalars.values()])
        dist.all_reduce(joined)
        return dict(zip(scalars, (joined / self.world).unbind(), strict=True))

    def unsynchronised(self) -> AbstractContextManager[Any]:
        """Within, backward leaves gradients where they are: for all but the last batch of an accumulated step."""
        wrapped: Any = self.wrapped
        return nullcontext() if wrapped is None else wrapped.no_sync()

    def barrier(self) -> None:
        """Wait for all."""
        if self.world > 1:
            dist.barrier()


ALONE = Ranks()
T = TypeVar("T")


class _Mean(torch.autograd.Function):
    """Forward and backward are the same mean over ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        joined = value.clone()
        dist.all_reduce(joined)
        return joined / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        joined = gradient.contiguous().clone()
        dist.all_reduce(joined)
        return joined / dist.get_world_size()


def world_size() -> int:
    """How many processes train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of one tensor over all ranks, each of which gets it and its gradient."""
    if world_size() == 1:
        return value
    joined: Tensor = _Mean.apply(value)  # type: ignore[no-untyped-call]
    return joined


class JoinedBatchNorm(nn.BatchNorm1d):
    """BatchNorm over the rows of all ranks, [R C]; alone it is torch's own, and unlike SyncBatchNorm it runs on CPUs.

    All ranks bring equally many rows.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or world_size() == 1:
            return super().forward(x)
        x = x if x.dtype == torch.float64 else x.float()  # sums over a batch are not for bfloat16
        mean = mean_over_ranks(x.mean(0))
        variance = mean_over_ranks((x - mean).square().mean(0))
        rows = len(x) * world_size()
        with torch.no_grad():
            assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
            self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
            self.running_var.lerp_((variance * rows / (rows - 1)).to(self.running_var), self.momentum)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked += 1
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


def _device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def launched(device: str) -> Iterator[tuple[Ranks, str]]:
    """The ranks that torchrun started, and this one's device; alone where it did not.

    NCCL for CUDA, gloo otherwise. Raises InputError where there are more ranks than GPUs.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield ALONE, device
        return
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    cuda = device.startswith("cuda")
    if cuda:
        if local >= torch.cuda.device_count():
            raise InputError(f"Rank {rank} needs a GPU of its own, and there are {torch.cuda.device_count()}.")
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world)
    try:
        yield Ranks(rank=rank, world=world), device
    finally:
        dist.destroy_process_group()


def first(ranks: Ranks, make: Callable[[], T]) -> T | None:
    """What `make` gives on the rank that writes, None on the others; its InputError is raised on all of them."""
    if ranks.world == 1:
        return make()
    made: T | None = None
    said: list[str | None] = [None]
    if ranks.writes:
        try:
            made = make()
        except InputError as error:
            said = [str(error)]
    dist.broadcast_object_list(said, device=_device())
    if said[0] is not None:
        raise InputError(said[0])
    return made


def shard_over_ranks(model: nn.Module, parts: Iterable[nn.Module]) -> None:
    """FSDP2: each rank keeps its share of weights, gradients and optimizer state, and gathers a part as it runs.

    `parts` come from the innermost on; what is called on its own (the backbone, to measure it) has to be among them.
    """
    from torch.distributed.fsdp import fully_shard

    for part in parts:
        fully_shard(part)
    fully_shard(model)
