"""What a key contributes where values are phases (sinks.md section 5): its size depends on who reads it.

Every value has the same norm there, so a norm says nothing. What key j adds to reader i, for an attention of 1, is
c_ij = ‖v(θ_i) ⊙ sin(θ_j − θ_i)‖, which vanishes where the two phases are equal. With unit numbers e^{iθ},

    ‖v_i ⊙ sin(θ_j − θ_i)‖² = ½ Σ v_i² − ½ (v_i² ⊙ [cos 2θ_i, sin 2θ_i]) · [cos 2θ_j, sin 2θ_j]

so a tile of queries is one product, and no map is stored. It is taken in float64: nearly locked phases cancel, and the
floor that this leaves is 1e-8 of ‖v_i‖.

Letters: B batch, H heads, Q queries, N keys, m phases of a head, D = 2m; q queries of a tile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sinklab.hooks.change import hidden_by

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.hooks.phase import Phase
    from sinklab.hooks.seam import AttentionCall
    from sinklab.sinks.stream import Moments

TILE_BYTES = 2 * 1024 * 1024  # of one float64 tile


def contributions(call: AttentionCall, phase: Phase, velocity: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """For each key j, the mean of c_ij over the chosen queries that see it, and how many these are; both [B H N].

    Args:
        velocity: v(θ) of the queries, [B Q k].
        sees: [B H Q] bool, the chosen queries: those that count and see the sink.

    A key that none of them sees has mean 0 and number 0.
    """
    (batch, heads, queries, _), keys = call.q.shape, call.k.shape[2]
    exact = _exact(call.v)
    total = torch.zeros(batch, heads, keys, dtype=exact, device=call.v.device)
    number = torch.zeros_like(total)
    step = max(1, min(queries, TILE_BYTES // (8 * keys * heads)))
    for image in range(batch):
        z = call.v[image].to(exact)  # [H N D]
        squared = phase.by_head(velocity[image, None].to(exact))[0].square()  # [H Q m]
        readers = phase.own(z[None], queries)[0]
        for start in range(0, queries, step):
            rows = slice(start, min(start + step, queries))
            size = _squares(z, readers[:, rows], squared[:, rows], projected=phase.projected)  # [H q N]
            chosen = sees[image, :, rows, None]
            bias = call.bias(slice(image, image + 1), slice(None), rows)
            if bias is not None:
                chosen = chosen & ~hidden_by(call, bias[0])
            total[image] += torch.where(chosen, size.clamp_min(0).sqrt(), 0.0).sum(1)
            number[image] += chosen.expand_as(size).sum(1)
    return total / number.clamp_min(1), number


def _squares(z: Tensor, readers: Tensor, squared: Tensor, *, projected: bool) -> Tensor:
    """c² [H q N] from the keys' unit numbers [H N D], the readers' own [H q D] and v² [H q m]."""
    if not projected:  # what arrives is Re + Im, whoever reads it
        real, imaginary = z.chunk(2, -1)
        return squared @ (real + imaginary).square().transpose(1, 2)
    twice, weighted = _doubled(z), _doubled(readers) * torch.cat([squared, squared], -1)
    return 0.5 * (squared.sum(-1, keepdim=True) - weighted @ twice.transpose(1, 2))


def _doubled(z: Tensor) -> Tensor:
    """[cos 2θ, sin 2θ] from [cos θ, sin θ]; exact for unit numbers whatever little their rounding leaves."""
    cos, sin = z.chunk(2, -1)
    norm = cos.square() + sin.square()
    return torch.cat([(cos.square() - sin.square()) / norm, 2 * cos * sin / norm], -1)


def with_contributions(call: AttentionCall, z: Tensor, phase: Phase, velocity: Tensor, moments: Moments) -> Moments:
    """The moments of a phase layer: contributions in place of projected norms, and ‖v ⊙ a‖ in place of ‖U‖.

    z [B H Q D] is the head's share of G; its Gram matrices stay, so the rank is that of G. v [B Q k].
    """
    means, number = contributions(call, phase, velocity, moments.paid < torch.inf)
    own = phase.own(call.v, z.shape[2])
    x = phase.by_head(velocity).to(_exact(z)) * phase.tangent(z.to(_exact(z)), own.to(_exact(z)))  # [B H Q m]
    norms = torch.linalg.vector_norm(x, dim=-1)
    if moments.counted is not None:
        norms = torch.where(_counting(call), norms, 0.0)
    return replace(moments, projected_norms=means, seen=number, update=norms.sum(-1))


def _exact(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


def _counting(call: AttentionCall) -> Tensor:
    """Which queries see two keys at least, [1 or B, 1 or H, Q]; only where something hides keys."""
    found = []
    for row in range(0, call.q.shape[2], 256):
        bias = call.bias(slice(None), slice(None), slice(row, row + 256))
        assert bias is not None
        seen = (~hidden_by(call, bias)).sum(-1)
        found.append((seen if bias.shape[-1] > 1 else seen * call.k.shape[2]) >= 2)
    return torch.cat(found, -1)
