"""What one process would compute with the batches of all: means that can be differentiated, batch norm, wrappers.

`mean_over_ranks` is exact together with DDP: every rank computes the same loss from the joined means, and DDP's average
of the gradients is the gradient of that loss over the joined batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sinklab.errors import InputError
from sinklab.training.distributed import Ranks

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WrappedRanks(Ranks):
    """Ranks whose gradients a wrapper (DDP, FSDP2) averages while backward runs."""

    wrapped: nn.Module | None = None
    """The DDP wrapper; None for FSDP2."""

    def unsynchronised(self) -> AbstractContextManager[Any]:
        wrapped: Any = self.wrapped
        return nullcontext() if wrapped is None else wrapped.no_sync()

    def reduce(self, gradients: Iterable[Tensor]) -> None:
        """Nothing: it has been done."""


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


def first(ranks: Ranks, make: Callable[[], T]) -> T | None:
    """What `make` gives on the rank that writes, None on the others; its InputError is raised on all of them."""
    made: T | None = None
    said: str | None = None
    if ranks.first:
        try:
            made = make()
        except InputError as error:
            if ranks.world == 1:
                raise
            said = str(error)
    said = ranks.gathered(said)[0]
    if said is not None:
        raise InputError(said)
    return made


def shard_over_ranks(model: nn.Module, parts: Iterable[nn.Module]) -> None:
    """FSDP2: each rank keeps its share of weights, gradients and optimizer state, and gathers a part as it runs.

    `parts` come from the innermost on; what is called on its own (the backbone, to measure it) has to be among them.
    """
    from torch.distributed.fsdp import fully_shard

    for part in parts:
        fully_shard(part)
    fully_shard(model)
