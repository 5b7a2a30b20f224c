"""What attention does to phases in one layer: order, agreement, repulsion, and in which way it does nothing.

The update before the bound is a product of four sizes. With A_tt the attention to oneself, W the rest of the row
brought back to sum 1, and G' = Σ W_tu e^{iθ_u} the resultant of the others,

    RMS_j(v_tj a_tj) = (1 − A_tt) · RMS|G'| · ‖a'‖/‖G'‖ · ‖v a'‖/‖a'‖,    a' = Im(e^{−iθ_t} G')

A token is at rest where the product is at most `REST`, in radians. Why is said by the first of the four that alone is
at most `REST`, else by the smallest (phase.md section 5): it attends to itself, its partners' phases cancel, they are
its own (locked), or v is nearly 0. The shares of the four and of the tokens that are moved ("acts") sum to 1. Tokens
that see nobody but themselves are left out of everything but global order and repulsion.

Letters: B batch, H heads, N tokens, m phases of a head, D = 2m; q queries of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sinklab.hooks.change import hidden_by
from sinklab.sinks.phase_measures import MEASURES, REST, SATURATED, WAYS

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.hooks.phase import Phase
    from sinklab.hooks.seam import AttentionCall

ROWS = 128  # queries at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class PhaseCall:
    """One attention call of a phase layer with the phases round it."""

    call: AttentionCall
    phase: Phase
    velocity: Tensor
    """v(θ) [B N k]."""
    before: Tensor
    """θ [B N k] that the block is given."""
    between: Tensor
    """θ with attention's increment."""
    after: Tensor
    """θ that the block gives."""


def synchrony(seen: PhaseCall) -> dict[str, Tensor]:
    """Name → [B H], every one of `MEASURES`, in float64.

    order: mean |G_tj|, beside it order_reference, mean |Σ_{u ≤ t} e^{iθ_uj}| / (t + 1) of the tokens that t sees, all
    alike. agreement: mean cos(θ_tj − arg G_tj) before and after attention's increment. repulsion: share of negative
    v_tj. saturated: share of increments that have reached `SATURATED` of their radius. global_order: mean over j of
    |mean_t e^{iθ_tj}|, before and after the block. update_rms: RMS_j(v_tj a_tj), radians.
    """
    call, phase = seen.call, seen.phase
    before, between, after = (x.double() for x in (seen.before, seen.between, seen.after))
    v = phase.by_head(seen.velocity.double())  # [B H N m]
    moved = phase.by_head(between - before)
    sums = {name: v.new_zeros(v.shape[:2]) for name in MEASURES}
    counted = v.new_zeros(v.shape[:2])
    whole = []  # of all heads: where the bound is radial, they share it
    for start in range(0, call.q.shape[2], ROWS):
        rows = slice(start, min(start + ROWS, call.q.shape[2]))
        found, counts, x = _tile(call, phase, v[:, :, rows], moved[:, :, rows], rows)
        for name, value in found.items():
            sums[name] += torch.where(counts, value, 0.0).sum(-1)
        counted += counts.expand_as(found["order"]).sum(-1)
        whole.append(torch.where(counts[..., None], x, torch.nan))
    result = {name: value / counted for name, value in sums.items()}
    x = torch.cat(whole, 2)  # [B H N m]
    counts = torch.isfinite(x)
    reached = phase.saturation(torch.nan_to_num(x).transpose(1, 2).flatten(2)) >= SATURATED
    result["saturated"] = (phase.by_head(reached) & counts).sum((-2, -1)) / counts.sum((-2, -1))
    result["repulsion"] = (v < 0).double().mean((-2, -1))
    for name, theta in (("global_order_before", before), ("global_order_after", after)):
        angles = phase.by_head(theta)
        result[name] = torch.hypot(angles.cos().mean(-2), angles.sin().mean(-2)).mean(-1)
    finite = torch.isfinite(torch.stack([*result.values()])).all(0)
    return {name: value.masked_fill(~finite, torch.nan) for name, value in result.items()}


def _tile(
    call: AttentionCall, phase: Phase, v: Tensor, moved: Tensor, rows: slice
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Name → [B H q] of some queries, which of them count, and v ⊙ a [B H q m]; v and moved are the queries' own."""
    z = call.v.double()  # [B H N D]
    pattern = call.pattern(rows)  # [B H q N]
    queries = torch.arange(rows.start, rows.stop, device=z.device) + call.k.shape[2] - call.q.shape[2]
    own = z[:, :, queries]
    g = pattern @ z
    bias = call.bias(slice(None), slice(None), rows)
    sees = torch.ones_like(pattern[:1, :1], dtype=torch.bool) if bias is None else ~hidden_by(call, bias)
    alike = sees.double() / sees.sum(-1, keepdim=True)
    to_self = queries.view(1, 1, -1, 1).expand(*pattern.shape[:3], 1)
    a = phase.tangent(g, own)
    found = {
        "order": _modulus(g).mean(-1),
        "order_reference": _modulus(alike @ z).mean(-1),
        "agreement_before": _agreement(g, own),
        "agreement_after": _agreement(g, _turned(own, moved)),
        "update_rms": _rms(v * a),
    }
    if phase.projected:
        others = pattern.scatter(-1, to_self, 0.0)
        rest = others.sum(-1, keepdim=True)  # not 1 − A_tt, which loses digits
        resultant = others @ z / rest.clamp_min(torch.finfo(torch.float64).tiny)
    else:  # to attend to oneself is not nothing there
        rest, resultant = torch.ones_like(a[..., :1]), g
    sizes = factors(rest[..., 0], resultant, own, v, phase)
    found |= ways(sizes)
    return found, (sees.sum(-1) >= 2).expand(found["order"].shape), v * a


def factors(rest: Tensor, resultant: Tensor, own: Tensor, v: Tensor, phase: Phase) -> Tensor:
    """The four sizes, [4 …]: 1 − A_tt [… q], and the rest from G' [… q D], the readers' own numbers, and v [… q m].

    Their product is RMS_j(v_tj a_tj). Where G' or a' is 0, what is divided by it counts as 1.
    """
    a = phase.tangent(resultant, own)
    size, pull, push = _rms(_modulus(resultant)), _rms(a), _rms(v * a)
    return torch.stack([rest, size, _over(pull, size), _over(push, pull)])


def ways(sizes: Tensor) -> dict[str, Tensor]:
    """Name of each of `WAYS` and "acts" → 1.0 where that is what the token does, else 0.0; exactly one is 1."""
    at_rest = sizes.prod(0) <= REST
    small = sizes <= REST
    why = torch.where(small.any(0), small.int().argmax(0), sizes.argmin(0))  # the first of equals
    found = {name: (at_rest & (why == place)).double() for place, name in enumerate(WAYS)}
    return found | {"acts": (~at_rest).double()}


def _over(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1.0), 1.0)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def _modulus(z: Tensor) -> Tensor:
    """|z_j| [… m] of complex numbers [… D], real parts first."""
    real, imaginary = z.chunk(2, -1)
    return torch.hypot(real, imaginary)


def _agreement(g: Tensor, own: Tensor) -> Tensor:
    """Mean over j of cos(θ − arg G), [… q]; 0 where G has no direction."""
    (real, imaginary), (cos, sin) = g.chunk(2, -1), own.chunk(2, -1)
    modulus = torch.hypot(real, imaginary)
    return (torch.where(modulus > 0, (real * cos + imaginary * sin) / modulus.clamp_min(1e-300), 0.0)).mean(-1)


def _turned(own: Tensor, by: Tensor) -> Tensor:
    """Unit numbers [… D] turned by angles [… m]."""
    cos, sin = own.chunk(2, -1)
    return torch.cat([cos * by.cos() - sin * by.sin(), sin * by.cos() + cos * by.sin()], -1)
