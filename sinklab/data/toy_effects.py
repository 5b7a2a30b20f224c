"""What a controlled task says of an edited output, sequence by sequence (Tables 2 and 3, Fig. 7B).

Sums of squares are kept beside the number of tokens, so that a root mean square over many sequences can be taken of
all their tokens, as the tables of App. A take it. Letters: R rows, N tokens, C model dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from sinklab.data.toy import BroadcastTask, NopBranchTask, ToyTask

if TYPE_CHECKING:
    from torch import Tensor

ERRORS = ("task_mse", "donor_target_mse", "no_payload_mse")
"""Mean squared errors of an output: against the task's target; against x + the donor's payload; against x alone."""


def groups_of(task: ToyTask) -> tuple[str, ...]:
    """The groups of tokens that a change of the output is averaged over."""
    return ("recipients",) if isinstance(task, BroadcastTask) else ("nop", "active")


def columns_of(task: ToyTask) -> tuple[str, ...]:
    """The columns of `task_effects`, in order."""
    errors = ERRORS if isinstance(task, BroadcastTask) else ERRORS[:1]
    columns = [f"{name}{when}" for name in errors for when in ("", "_before")]
    columns += [f"{name}_{group}" for group in groups_of(task) for name in ("moved", "tokens")]
    return (*columns, "payload_cosine") if isinstance(task, BroadcastTask) else tuple(columns)


def task_effects(task: ToyTask, x: Tensor, donor: Tensor, before: Tensor, after: Tensor) -> dict[str, Tensor]:
    """Column → [R] float64 on the CPU, for rows with inputs x, their donors', and outputs before and after [R N C].

    `moved_GROUP` is Σ over the group's tokens of the mean square over channels of the change, `tokens_GROUP` their
    number; `payload_cosine` = cos(mean_i Δ_i, p_donor − p_own) over recipients. The branch-supervised NOP task is
    about attention's update, which is what its one layer adds to x.
    """
    own = task.of(x.float())
    produced = {"": after, "_before": before}
    if isinstance(task, NopBranchTask):
        produced = {when: tokens - x for when, tokens in produced.items()}
    targets = {"task_mse": own.target}
    if isinstance(task, BroadcastTask):
        payload, donated = task.payload(x.float()), task.payload(donor.float())
        targets |= {"donor_target_mse": x + donated[:, None], "no_payload_mse": x}
    found = {
        f"{name}{when}": _error(tokens, target, own.weight)
        for name, target in targets.items()
        for when, tokens in produced.items()
    }
    change, counts = after.double() - before.double(), (own.weight > 0).expand_as(own.flags)
    flagged = {"nop": own.flags & counts, "active": ~own.flags & counts, "recipients": ~own.flags}
    for group in groups_of(task):
        found[f"moved_{group}"] = (change.square().mean(-1) * flagged[group]).sum(-1)
        found[f"tokens_{group}"] = flagged[group].sum(-1).double()
    if isinstance(task, BroadcastTask):
        mean = (change * flagged["recipients"][..., None]).sum(-2)
        cosine = F.cosine_similarity(mean, (donated - payload).double(), dim=-1)
        found["payload_cosine"] = torch.where(mean.square().sum(-1) > 0, cosine, torch.nan)
    return {name: found[name].cpu() for name in columns_of(task)}


def _error(produced: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """[R]: mean over channels and over the tokens that count."""
    squares = (produced.double() - target.double()).square().mean(-1) * weight.double()
    return squares.sum(-1) / weight.double().sum()
