"""From the moments of attention calls to the numbers of sinks.md section 2.

Several layers are finished together, because what remains are many small operations.

Letters: M calls, B batch, H heads, N keys, D head dim.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from sinklab.sinks.spectrum import CHUNK_BYTES, largest_eigenvalue
from sinklab.sinks.stream import HeadGeometry, Moments, measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from sinklab.hooks.seam import AttentionCall


STACKED = ("inflow", "sink", "paid", "entropy", "value_norms", "projected_norms", "update")


def _stack(moments: Sequence[Moments], name: str) -> Tensor:
    return torch.stack([getattr(m, name) for m in moments])


def over(size: Tensor, typical: Tensor) -> Tensor:
    """size / typical in float64, whatever the scale of both; where typical is exactly 0, it is taken for 1e-12.

    sinks.md clamps every such mean at 1e-12: a head whose values are all that small would then be called a NOP for its
    scale. What fp32 cannot hold is cut off at its largest number.
    """
    ratio = size / torch.where(typical == 0, 1e-12, typical)
    return ratio.clamp(max=torch.finfo(torch.float32).max)


def _against_others(norms: Tensor, sink: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """norm_s, and norm_s over the mean norm of the other keys that some counted query sees; norms [M B H N]."""
    norms = norms.double()
    own = norms.gather(-1, sink[..., None])[..., 0]
    if seen is None:
        total, number = norms.sum(-1), torch.full_like(own, norms.shape[-1])
    else:
        total, number = (norms * (seen > 0)).sum(-1), (seen > 0).sum(-1).double()
    return own, over(own, (total - own) / (number - 1))


def _ranks(moments: Sequence[Moments]) -> Tensor:
    """Stable ranks of z and of U, [M B 2 H]; a zero matrix has none: NaN."""
    grams = _stack(moments, "grams")  # [M B 2 H D D]
    trace = grams.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)
    return (trace / largest_eigenvalue(grams.flatten(0, -3)).view_as(trace)).clamp_min(1.0)  # but for rounding


def _routing(paid: Tensor, attention: float) -> tuple[Tensor, Tensor, Tensor]:
    """Over the queries that count and see s: their number, how many give s at least `attention`, the least given."""
    counts = paid < torch.inf
    routed = ((paid >= (math.log2(attention) if attention > 0 else -math.inf)) & counts).sum(-1)
    # two roundings of one large logit may leave a little above 1
    return counts.sum(-1), routed, paid.amin(-1).clamp(max=0.0).double().exp2()


def finish(moments: Sequence[Moments], *, attention: float = 0.5) -> dict[str, Tensor]:
    """Name → [M B H] for M calls of one shape: float64, int64 for counts and indices, bool for `finite`.

    `attention` is the threshold that makes a query "routed". A head with a NaN or Inf anywhere in q, k, v, its weights
    or its statistics has finite False, sink_index −1, counts 0 and NaN for every number; nothing is replaced by a
    number. A head whose update is exactly zero is finite and has no stable rank (NaN).
    """
    with torch.no_grad():
        value = {name: _stack(moments, name) for name in STACKED}
        seen = None if moments[0].seen is None else _stack(moments, "seen")
        sink = value["sink"]
        counted = value["paid"].shape[-1] if moments[0].counted is None else _stack(moments, "counted")
        scale = _stack(moments, "scale")[:, None]  # [M 1 H]
        inflow = value["inflow"].gather(-1, sink[..., None])[..., 0]
        runner_up = value["inflow"].scatter(-1, sink[..., None], -torch.inf).amax(-1)
        queries, routed, least = _routing(value["paid"], attention)
        norm, ratio_head = _against_others(value["value_norms"], sink, seen)
        _, ratio_out = _against_others(value["projected_norms"], sink, seen)
        few = max(1, CHUNK_BYTES // moments[0].grams.nbytes)  # calls at a time, so that their matrices stay in cache
        ranks = torch.cat([_ranks(moments[first : first + few]) for first in range(0, len(moments), few)])
        numbers = {
            "inflow": inflow.double(),
            "inflow_margin": (inflow - runner_up).double(),
            "routed_fraction": routed / queries.double(),
            "min_attention": least,
            "entropy": value["entropy"] * (math.log(2) / counted),
            "value_norm_head": norm,
            "value_ratio_head": ratio_head,
            "value_ratio_out": ratio_out,
            "update_norm": value["update"] * scale / counted,
        }
        by_rank = {
            "stable_rank": ranks[:, :, 1],
            "rank1_energy": 1 / ranks[:, :, 1],
            "stable_rank_head": ranks[:, :, 0],
        }
        # ‖v_j‖ is finite exactly when v_j is; hidden tokens count too
        norms = (value[name].sum(-1, dtype=torch.float64) for name in ("value_norms", "projected_norms"))
        sums = [*numbers.values(), *norms]
        if moments[0].check is not None:
            sums.append(_stack(moments, "check"))
        finite = torch.isfinite(torch.stack(sums).sum(0)) & (queries > 0)  # [M B H]
        floats = torch.stack([*numbers.values(), *by_rank.values()]).masked_fill_(~finite, torch.nan)
        counts = torch.stack([queries, routed, sink]).masked_fill_(~finite, 0)
        return {
            "queries": counts[0],
            "sink_index": counts[2].masked_fill_(~finite, -1),
            "routed_count": counts[1],
            **dict(zip((*numbers, *by_rank), floats, strict=True)),
            "finite": finite,
        }


def attention_statistics(
    call: AttentionCall, geometry: HeadGeometry, *, attention: float = 0.5, compute_z: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """Every statistic of one attention call, name → [B H], and z: `measure`, then `finish`."""
    moments, z = measure(call, geometry, compute_z=compute_z)
    return {name: values[0] for name, values in finish([moments], attention=attention).items()}, z
