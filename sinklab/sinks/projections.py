"""Norms of values and updates, and the Gram matrices of z: what a call's statistics need of v, z and W_O.

Squares of fp32 numbers vanish below 1e-19 and overflow above 1e19, and so would those of a head that is nearly dead.
Ratios and ranks do not depend on a head's scale, so v and z of such a head are brought to size first, by a power of
two: not a bit of them changes.

Letters: B batch, H query heads, K key/value heads, Q queries, N keys, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sinklab.sinks.tiles import Tiling, working_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.hooks.seam import AttentionCall

SAFE = (1e-10, 1e15)  # largest norms of a head whose squares neither vanish nor overflow, its smaller norms included
FORMATS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}  # mantissa's bits, bias


@dataclass(frozen=True, eq=False)
class Projections:
    """What v and z leave of themselves."""

    value_norms: Tensor  # [B H N] ‖v_j‖
    projected_norms: Tensor  # [B H N] ‖v_j L‖
    update: Tensor  # [B H] Σ_i ‖z_i L‖ over counted queries, float64
    grams: Tensor  # [B 2 H D D] of z and of z L, counted queries; a head's are those of its z over a power of two


def project(
    call: AttentionCall,
    z: Tensor,
    factor: Tensor,
    counted: Tensor | None,
    tiling: Tiling,
    *,
    unasked: bool | None = None,
) -> Projections:
    """Norms and Gram matrices of one call, with L = `factor` [H D D]; `counted` [B H Q] leaves queries out.

    `unasked` brings every head to size without asking which need it, as is done on a GPU: asking would halt it.
    """
    unasked = z.is_cuda if unasked is None else unasked
    (batch, heads, queries, dim), keys = z.shape, call.v.shape[2]
    work = working_dtype(z.dtype)
    norms = torch.empty(batch, heads, keys + queries, dtype=work, device=z.device)
    grams = torch.empty(batch, 2, heads, dim, dim, dtype=work, device=z.device)
    value_norms = torch.linalg.vector_norm(call.v, dim=-1, dtype=work)
    value_norms = value_norms if value_norms.shape[1] == heads else value_norms[:, call.kv_head]
    space = tiling.projections(keys + queries, dim)
    for image in range(batch):
        v, own = _of_image(call, z, counted, image)
        if unasked:
            right = None
        else:
            _measure(v, own, factor, space, norms[image], grams[image])
            right = _in_range(value_norms[image], norms[image], grams[image])
        if right is None or not bool(right.all()):
            places = (value_norms[image], norms[image], grams[image])
            for place, number in zip(places, _at_unit_size(v, own, factor, space), strict=True):
                place.copy_(number if right is None else torch.where(_along(right, number), place, number))
    return Projections(value_norms, norms[..., :keys], norms[..., keys:].sum(-1, dtype=torch.float64), grams)


def _of_image(call: AttentionCall, z: Tensor, counted: Tensor | None, image: int) -> tuple[Tensor, Tensor]:
    """v [H N D] and the counted z [H Q D] in the working type."""
    work = working_dtype(z.dtype)
    v, own = call.v[image].to(work), z[image].to(work)
    v = v[call.kv_head] if len(v) != len(own) else v
    return v, own if counted is None else own * counted[image, :, :, None]


def _measure(v: Tensor, own: Tensor, factor: Tensor, space: Tensor, norms: Tensor, grams: Tensor) -> None:
    """Fill norms [H N+Q] and grams [2 H D D] of one image, as many heads at a time as `space` holds."""
    keys = v.shape[1]
    for first in range(0, len(v), len(space)):
        some = slice(first, min(first + len(space), len(v)))
        projected = space[: some.stop - first]
        torch.bmm(v[some], factor[some], out=projected[:, :keys])
        torch.bmm(own[some], factor[some], out=projected[:, keys:])
        torch.linalg.vector_norm(projected, dim=-1, out=norms[some])
    torch.bmm(own.transpose(1, 2), own, out=grams[0])
    torch.bmm(torch.bmm(factor.transpose(1, 2), grams[0]), factor, out=grams[1])


def _in_range(value_norms: Tensor, norms: Tensor, grams: Tensor) -> Tensor:
    """Which heads of one image need no rescaling, [H]."""
    keys = value_norms.shape[1]
    trace = grams.diagonal(dim1=-2, dim2=-1).sum(-1)  # [2 H] sums of squares
    sizes = torch.stack([value_norms.amax(-1), norms[:, :keys].amax(-1), norms[:, keys:].amax(-1), *trace.sqrt()])
    return ((sizes > SAFE[0]) & (sizes < SAFE[1])).all(0)


def _unit(x: Tensor) -> Tensor:
    """A power of two near the largest entry of each head of x [H rows D], as [H 1 1]; 1 for zero, NaN and Inf."""
    largest = torch.linalg.vector_norm(x, torch.inf, dim=(-2, -1), keepdim=True)
    whole, mantissa, bias = FORMATS[x.dtype]
    exponent = torch.frexp(largest).exponent.clamp(1 - bias, bias - 1)  # of a unit whose inverse is a normal number too
    exponent = torch.where(torch.isfinite(largest) & (largest > 0), exponent, 0)
    return ((exponent.to(whole) + bias) << mantissa).view(x.dtype)  # not 2 ** exponent, which may be rounded


def _at_unit_size(v: Tensor, own: Tensor, factor: Tensor, space: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """‖v_j‖ [H N], the norms and the Gram matrices as `_measure` gives them, of one image, by way of unit size."""
    keys, of_v, of_z = v.shape[1], _unit(v), _unit(own)
    v, own = v / of_v, own / of_z
    norms = v.new_empty(len(v), keys + own.shape[1])
    grams = v.new_empty(2, *factor.shape)
    _measure(v, own, factor, space, norms, grams)
    norms[:, :keys] *= of_v[..., 0]
    norms[:, keys:] *= of_z[..., 0]
    return torch.linalg.vector_norm(v, dim=-1) * of_v[..., 0], norms, grams


def _along(heads: Tensor, like: Tensor) -> Tensor:
    """[H] to be broadcast over [H rows] or [2 H D D]."""
    return heads[:, None] if like.dim() == 2 else heads[None, :, None, None]
