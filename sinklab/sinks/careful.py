"""The pass over the tiles of heads for which the quick one will not do: hidden keys, huge logits, one-hot rows.

Powers are taken relative to each row's maximum. With t = S − max S, and Z = 1 + R where R leaves one largest entry
out, the entropy is log(1 + R) − Σ t exp(t) / (1 + R): all terms are positive, none cancels.

Letters: B batch, H query heads, Q queries, N keys, D head dim; h heads and q queries of a tile.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from sinklab.hooks.change import hidden_by
from sinklab.sinks.tiles import LOG2_E, Rows, Tiling, working_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.hooks.seam import AttentionCall


def hides(call: AttentionCall) -> bool:
    """Does a query not see a key?"""
    if call.is_causal:
        return True
    if call.mask is None:
        return False
    if call.mask.dtype == torch.bool:
        return not bool(call.mask.all())
    return bool(hidden_by(call, call.mask).any())


def careful_rows(call: AttentionCall, tiling: Tiling) -> Rows:
    """Empty rows for a call that hides keys, to be filled by `careful_pass`."""
    return Rows(
        tiling.inflow.zero_(),
        tiling.total,
        torch.zeros(call.q.shape[:2], dtype=torch.float64, device=call.q.device),
        seen=torch.zeros_like(tiling.inflow),
        counted=torch.ones(call.q.shape[:3], dtype=torch.bool, device=call.q.device),
    )


def careful_pass(call: AttentionCall, rows: Rows, tiling: Tiling, chosen: Tensor | None) -> None:
    """Fill the rows of the chosen heads [B H], None for all; z is left as in the quick pass."""
    flags = torch.ones(call.q.shape[:2], dtype=torch.bool) if chosen is None else chosen
    step = tiling.groups[0][0].stop
    for image, row in enumerate(flags.tolist()):
        heads = [head for head, flag in enumerate(row) if flag]
        for first in range(0, len(heads), step):
            _some_heads(call, rows, tiling, image, heads[first : first + step])


def _some_heads(call: AttentionCall, rows: Rows, tiling: Tiling, image: int, heads: list[int]) -> None:
    work, keys = working_dtype(call.q.dtype), call.k.shape[2]
    own = [call.kv_head[head] for head in heads]
    k, v = call.k[image, own].to(work).transpose(1, 2), call.v[image, own].to(work)
    rows.inflow[image, heads] = 0.0
    rows.entropy[image, heads] = 0.0
    for queries in tiling.groups[0][1]:
        where = (image, heads, queries)
        q = call.q[where].to(work)
        logits, power = tiling.pair(*q.shape[:2], keys)
        torch.baddbmm(logits, q, k, beta=0, alpha=call.scale * LOG2_E, out=logits)
        hidden = _add_mask(call, rows, logits, where)
        top, first = logits.max(-1, keepdim=True)
        blind = top == -math.inf  # a row whose every key is hidden is zero, as in the kernels
        logits.sub_(top.masked_fill(blind, 0.0))
        rest = torch.exp2(logits, out=power).scatter_(-1, first, 0.0).sum(-1)
        weight = (1 + rest).reciprocal_().masked_fill_(blind[..., 0], 0.0)
        power.scatter_(-1, first, 1.0)
        log_total = rest.log1p_().mul_(LOG2_E)
        rows.lse[where] = log_total + top[..., 0]
        tiling.weight[where] = weight
        if tiling.z is not None:
            tiling.z[where] = torch.bmm(power, v)
        counting = weight if rows.counted is None else weight * rows.counted[where]
        rows.inflow[image, heads] += torch.bmm(counting[:, None], power)[:, 0]
        if hidden is not None:
            logits.masked_fill_(hidden, 0.0)  # 0 · −inf
        entropy = log_total - power.mul_(logits).sum(-1).mul_(weight)
        if rows.counted is not None:
            entropy.masked_fill_(~rows.counted[where], 0.0)
        rows.entropy[image, heads] += entropy.sum(-1, dtype=torch.float64)


def _add_mask(call: AttentionCall, rows: Rows, logits: Tensor, where: tuple[int, list[int], slice]) -> Tensor | None:
    """Add the mask to a tile of logits, and count what it hides; returns which entries it hides, where it can."""
    image, heads, queries = where
    everyone = call.bias(slice(image, image + 1), slice(None), queries)
    if everyone is None:
        return None
    bias = everyone[0].expand(call.q.shape[1], *logits.shape[1:])[heads]
    logits.add_(bias, alpha=LOG2_E)
    if rows.seen is None or rows.counted is None:
        return None
    hidden = hidden_by(call, bias)
    logits.masked_fill_(hidden, -math.inf)
    counted = (~hidden).sum(-1) >= 2
    rows.counted[where] = counted
    rows.seen[image, heads] += (~hidden & counted[..., None]).sum(1)
    return hidden
