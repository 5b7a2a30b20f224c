"""Checks that run inside every experiment: the edit did to the head's update exactly what it says.

Everything is computed anew in float64 from the call's q, k and mask, some queries at a time.
Letters: R (image, head) pairs, Q queries, N keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from sinklab.hooks.change import hidden_by

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.hooks.phase import Phase
    from sinklab.hooks.seam import AttentionCall

ROWS = 192  # queries at a time
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}
"""Of the update's own size. The kernels' softmax is only as exact as the logits are: half a unit in the last place of a
logit of 60 is 2e-6."""


def identity_error(call: AttentionCall, before: Tensor, after: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """How far U' − U is from A_:p (u'_p − u_p), over the larger of ‖U‖ and ‖U'‖, [R] (head space).

    Args:
        call: the pairs' own call, q [R 1 Q D] and k, v [R 1 N D], before the edit.
        before, after: z without and with the edit, [R Q D]. keys: p, [R]. values: v'_p, [R D].
    """
    step = values.double() - _at(call.v, keys)  # v'_p − v_p
    gap = before.new_zeros(len(keys), dtype=torch.float64)
    for rows, pattern in _patterns(call):
        paid = pattern.gather(-1, keys[:, None, None].expand(-1, pattern.shape[1], 1))  # [R q 1]
        moved = after[:, rows].double() - before[:, rows].double()
        gap += (moved - paid * step[:, None]).square().sum((-2, -1))
    return gap.sqrt() / _size(before, after)


def routing_error(call: AttentionCall, before: Tensor, after: Tensor, keys: Tensor) -> Tensor:
    """How far z' is from attention over all keys but p, over the larger of ‖z‖ and ‖z'‖, [R]."""
    v, gap = call.v[:, 0].double(), before.new_zeros(len(keys), dtype=torch.float64)
    for rows, pattern in _patterns(call, without=keys):
        blind = pattern.sum(-1, keepdim=True) == 0  # such a query keeps what it had
        expected = torch.where(blind, before[:, rows].double(), pattern @ v)
        gap += (after[:, rows].double() - expected).square().sum((-2, -1))
    return gap.sqrt() / _size(before, after)


def own_error(call: AttentionCall, before: Tensor, after: Tensor, keys: Tensor, phase: Phase) -> Tensor:
    """How far the pull of z' is from that of all keys but p, over the larger of ‖z‖ and ‖z'‖, [R]; no renormalisation.

    Where values are phases and p's are replaced by the reader's own, a'_i = Σ_{u≠p} A_iu sin(θ_u − θ_i) exactly. What
    reads Re + Im instead of a pull is held to z' = z + A_:p (z_i − z_p).
    """
    v, gap = call.v[:, 0].double(), before.new_zeros(len(keys), dtype=torch.float64)
    own = v[:, v.shape[1] - before.shape[1] :]
    for rows, pattern in _patterns(call):
        where = keys[:, None, None].expand(-1, pattern.shape[1], 1)
        paid, others = pattern.gather(-1, where), pattern.scatter(-1, where, 0.0) @ v
        moved = after[:, rows].double()
        if phase.projected:
            moved, others = (phase.tangent(z, own[:, rows]) for z in (moved, others))
        else:
            others = others + paid * own[:, rows]
        gap += (moved - others).square().sum((-2, -1))
    return gap.sqrt() / _size(before, after)


def recomputed_error(call: AttentionCall, before: Tensor, after: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """How far z' of one pair is from attention with values v [1 N D] and without the keys `hidden`, as above, [1]."""
    gap = before.new_zeros(1, dtype=torch.float64)
    for rows, pattern in _patterns(call, without=hidden):
        blind = pattern.sum(-1, keepdim=True) == 0
        expected = torch.where(blind, before[:, rows].double(), pattern @ v)
        gap += (after[:, rows].double() - expected).square().sum((-2, -1))
    return gap.sqrt() / _size(before, after)


def _at(v: Tensor, keys: Tensor) -> Tensor:
    return v[torch.arange(len(keys), device=v.device), 0, keys].double()


def _size(before: Tensor, after: Tensor) -> Tensor:
    sizes = [torch.linalg.vector_norm(z.double(), dim=(-2, -1)) for z in (before, after)]
    return torch.maximum(*sizes).clamp_min(1e-12)


def _patterns(call: AttentionCall, without: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time: (which, A [R q N]); a row without keys is zero."""
    queries = call.q.shape[2]
    for start in range(0, queries, ROWS):
        rows = slice(start, min(start + ROWS, queries))
        yield rows, _pattern(call, rows, without)


def _pattern(call: AttentionCall, rows: slice, without: Tensor | None) -> Tensor:
    logits = call.q[:, 0, rows].double() @ call.k[:, 0].double().transpose(-1, -2) * call.scale  # [R q N]
    bias = call.bias(slice(None), slice(None), rows)
    if bias is not None:
        bias = bias[:, 0].expand_as(logits)
        logits = (logits + bias.double()).masked_fill(hidden_by(call, bias), -torch.inf)
    if without is not None:
        without = without.reshape(len(logits), 1, -1)  # keys of each pair
        logits = logits.scatter(-1, without.expand(-1, logits.shape[1], -1), -torch.inf)
    return torch.nan_to_num(logits.softmax(-1), nan=0.0)
