"""From the moments of attention calls to the numbers of sinks.md section 2.

Several layers are finished together: what remains are many small operations, and a batch of eigenvalues.

Letters: M calls, B batch, H heads, N keys, D head dim.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from sinklab.sinks.spectrum import largest_eigenvalue
from sinklab.sinks.stream import HeadGeometry, Moments, measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from sinklab.hooks.seam import AttentionCall


def _stack(moments: Sequence[Moments], name: str) -> Tensor:
    return torch.stack([getattr(m, name) for m in moments])


def _against_others(norms: Tensor, sink: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """norm_s, and norm_s over the mean norm of the other keys that some counted query sees; norms [M B H N]."""
    norms = norms.double()
    own = norms.gather(-1, sink[..., None])[..., 0]
    if seen is None:
        total, number = norms.sum(-1), torch.full_like(own, norms.shape[-1])
    else:
        total, number = (norms * (seen > 0)).sum(-1), (seen > 0).sum(-1).double()
    return own, own / ((total - own) / (number - 1)).clamp_min(1e-12)


def _ranks(moments: Sequence[Moments]) -> tuple[Tensor, Tensor]:
    """Stable ranks of z and of U, [M B H] each; a zero matrix has none: NaN."""
    grams = _stack(moments, "grams")  # [M B H 2 D D]
    dim = grams.shape[-1]
    largest = largest_eigenvalue(grams.reshape(-1, dim, dim)).reshape(grams.shape[:-2])
    ranks = grams.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64) / largest
    return ranks[..., 0], ranks[..., 1]


def finish(moments: Sequence[Moments]) -> list[dict[str, Tensor]]:
    """One dict of [B H] tensors for each call: float64, int64 for counts and indices, bool for `finite`.

    The calls must agree in shape. A head with a NaN or Inf anywhere in q, k, v, its weights or its statistics has
    finite False, sink_index −1, counts 0 and NaN for every number; nothing is replaced by a number. A head whose
    update is exactly zero is finite and has no stable rank (NaN).
    """
    with torch.no_grad():
        value = {f.name: _stack(moments, f.name) for f in fields(Moments) if f.name not in ("grams", "seen", "scale")}
        seen = None if moments[0].seen is None else _stack(moments, "seen")
        sink, counted = value["sink"], value["counted"]
        scale = _stack(moments, "scale")[:, None]  # [M 1 H]
        norm, ratio_head = _against_others(value["value_norms"], sink, seen)
        _, ratio_out = _against_others(value["projected_norms"], sink, seen)
        rank_head, rank = _ranks(moments)
        found = {
            "queries": value["queries"],
            "sink_index": sink,
            "inflow": value["inflow"].double(),
            "inflow_margin": (value["inflow"] - value["runner_up"]).double(),
            "routed_count": value["routed"],
            "routed_fraction": value["routed"] / value["queries"].double(),
            "min_attention": value["least"].double(),
            "entropy": value["entropy"] / counted,
            "value_norm_head": norm,
            "value_ratio_head": ratio_head,
            "value_ratio_out": ratio_out,
            "update_norm": value["update"] * scale / counted,
            "stable_rank": rank,
            "rank1_energy": 1 / rank,
            "stable_rank_head": rank_head,
        }
        # ‖v_j‖ is finite exactly when v_j is; hidden tokens count too
        finite = torch.isfinite(value["check"] + value["value_norms"].sum(-1) + value["projected_norms"].sum(-1))
        finite &= value["queries"] > 0
        for name, values in found.items():
            if values.is_floating_point() and "rank" not in name:
                finite &= torch.isfinite(values)
        for name, values in found.items():
            empty = torch.nan if values.is_floating_point() else -1 if name == "sink_index" else 0
            found[name] = values.masked_fill(~finite, empty)
        found["finite"] = finite
        return [{name: values[i] for name, values in found.items()} for i in range(len(moments))]


def attention_statistics(
    call: AttentionCall, geometry: HeadGeometry, *, attention: float = 0.5, compute_z: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """Every statistic of one attention call, and z: `measure`, then `finish`."""
    moments, z = measure(call, geometry, attention=attention, compute_z=compute_z)
    return finish([moments])[0], z
