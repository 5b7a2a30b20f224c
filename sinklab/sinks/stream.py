"""One attention call, measured in tiles: sums per query and per key, and never an N×N map.

Queries are taken in tiles that fit the processor's cache: the tile's logits and pattern give the column sums, the
rows' log-sum-exp and entropy, and are overwritten by the next tile. Once the dominant key s is known, the
attention paid to it is exp(scale·q_i·k_s − lse_i), an N×D product. Updates are measured through the D×D factor of
`spectrum.head_factor`, so nothing C-wide is built either.

Conventions where a mask hides keys (definitions: README "What is measured"): a query that sees fewer than two keys
is left out of everything; the inflow of key j is Σ_i A_ij over the number of the remaining queries (Eq. 2), so a key
that few of them can see cannot have much; what is paid to s is taken over those that see it.

Letters: B batch, H query heads, K key/value heads, Q queries, N keys, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sinklab.hooks.change import hidden_by
from sinklab.sinks.careful import careful_pass, careful_rows, hides
from sinklab.sinks.cuda import rows_on_device
from sinklab.sinks.projections import project
from sinklab.sinks.spectrum import head_factor
from sinklab.sinks.tiles import LOG2_E, TILE_ROWS, Rows, Tiling, Workspace, quick_pass, working_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.hooks.seam import AttentionCall


@dataclass(frozen=True, eq=False)
class HeadGeometry:
    """What the updates of a layer's heads are measured with: L_h [H D D] and its scale [H] in float64."""

    factor: Tensor
    scale: Tensor

    @classmethod
    def of(
        cls, output_weight: Tensor, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> HeadGeometry:
        """From Γ W_h as [H, C, D] (`Site.output_weight`); L_h in the working type of a model of that dtype."""
        factor, scale = head_factor(output_weight)
        return cls(factor.to(device, working_dtype(dtype)), scale.to(device))


@dataclass(frozen=True, eq=False)
class Moments:
    """What one attention call leaves for `statistics.finish`; nothing here grows with N²."""

    inflow: Tensor  # [B H N] mean attention paid to each key by the counted queries; −inf if none of them sees it
    sink: Tensor  # [B H] s, the key with the largest inflow; ties go to the lowest index
    paid: Tensor  # [B H Q] log2 A_is; +inf for queries that do not count or do not see s
    entropy: Tensor  # [B H] sum over counted queries, bits
    counted: Tensor | None  # [B H] number of counted queries; None if all count
    value_norms: Tensor  # [B H N]
    projected_norms: Tensor  # [B H N] ‖v_j L‖, before the geometry's scale
    seen: Tensor | None  # [B H N] how many counted queries see each key; None if all see all
    update: Tensor  # [B H] Σ_i ‖z_i L‖ over counted queries
    grams: Tensor  # [B 2 H D D] of z and of z L, counted queries, each head's up to a factor
    scale: Tensor  # [H]
    check: Tensor | None  # [B H] finite exactly if q and k are; None where a NaN or Inf in them reaches the entropy

    def stacks_with(self, other: Moments) -> bool:
        """May both be finished together?"""
        kinds = [(m.paid.shape, m.inflow.shape, m.grams.shape, m.grams.dtype, m.seen is None) for m in (self, other)]
        return kinds[0] == kinds[1]

    @property
    def nbytes(self) -> int:
        """Memory held, about."""
        return self.grams.nbytes + self.paid.nbytes + 4 * self.inflow.nbytes


def _pass(call: AttentionCall, tiling: Tiling) -> Rows:
    if call.q.is_cuda and tiling.z is None and (rows := rows_on_device(call)) is not None:
        return rows
    if hides(call):
        rows = careful_rows(call, tiling)
        careful_pass(call, rows, tiling, None)
        return rows
    rows, delicate = quick_pass(call, tiling)
    if delicate is not None:
        careful_pass(call, rows, tiling, delicate)
    return rows


def _inflow(rows: Rows) -> Tensor:
    if rows.seen is None:
        return rows.inflow / rows.lse.shape[-1]
    assert rows.counted is not None
    queries = rows.counted.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(rows.seen > 0, rows.inflow / queries, -math.inf)


def _mask_column(call: AttentionCall, sink: Tensor) -> Tensor:
    """What the mask adds to the logits of key s, [B H Q]; some rows at a time, so no causal triangle is whole."""
    batch, heads, queries = *sink.shape, call.q.shape[2]
    column = torch.empty(batch, heads, queries, dtype=working_dtype(call.q.dtype), device=sink.device)
    for image in range(batch):
        index = sink[image, :, None, None]
        for start in range(0, queries, TILE_ROWS):
            row = slice(start, min(start + TILE_ROWS, queries))
            bias = call.bias(slice(image, image + 1), slice(None), row)
            assert bias is not None
            bias = bias[0].expand(heads, row.stop - start, call.k.shape[2])
            column[image, :, row] = bias.gather(-1, index.expand(-1, bias.shape[1], 1))[..., 0]
    return column


def _paid(call: AttentionCall, rows: Rows, sink: Tensor) -> Tensor:
    """log2 of the attention that each query pays to s, [B H Q]: one more N×D product, no second pass."""
    work, grouped = working_dtype(call.q.dtype), call.k.shape[1] != call.q.shape[1]
    index = sink[..., None, None].expand(-1, -1, 1, call.q.shape[-1])
    paid = torch.empty_like(rows.lse)
    for image in range(len(sink)):
        k = call.k[image, call.kv_head] if grouped else call.k[image]
        key, q = k.gather(1, index[image]).to(work), call.q[image].to(work)  # [H 1 D], [H Q D]
        own = rows.lse[image, :, None]
        torch.baddbmm(own, key, q.transpose(1, 2), beta=-1, alpha=call.scale * LOG2_E, out=paid[image, :, None])
    if call.mask is None and not call.is_causal:
        return paid
    column = _mask_column(call, sink)
    paid.add_(column, alpha=LOG2_E)
    return paid if rows.counted is None else paid.masked_fill_(~rows.counted | hidden_by(call, column), math.inf)


def measure(
    call: AttentionCall, geometry: HeadGeometry, *, compute_z: bool = False, space: Workspace | None = None
) -> tuple[Moments, Tensor]:
    """Pass over one attention call in tiles.

    Args:
        call: the call; its z is read unless `compute_z`.
        geometry: the layer's `HeadGeometry`.
        compute_z: compute z in the same pass, in place of the fused kernel (equal to fp32 rounding).
        space: memory to work in, if calls follow one another.

    Returns:
        The call's `Moments` and z [B H Q D] in the dtype of q. Softmax and sums are fp32 or better whatever the
        model's dtype. Memory: two tiles, and O(N·C) for the projected values of one image at a time.
    """
    tiling = (Workspace() if space is None else space).tiling(call, want_z=compute_z)
    with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
        rows = _pass(call, tiling)
        z = call.z if tiling.z is None else _weighted(call, tiling.z, tiling.weight)
        assert z is not None, "the call has not run, and its z was not asked for"
        inflow = _inflow(rows)
        sink = inflow.max(-1).indices
        found = project(call, z, geometry.factor, rows.counted, tiling)
        return Moments(
            inflow=inflow,
            sink=sink,
            paid=_paid(call, rows, sink),
            entropy=rows.entropy,
            counted=None if rows.counted is None else rows.counted.sum(-1),
            value_norms=found.value_norms,
            projected_norms=found.projected_norms,
            seen=rows.seen,
            update=found.update,
            grams=found.grams,
            scale=geometry.scale,
            check=None if rows.counted is None else _check(call),
        ), z


def _weighted(call: AttentionCall, z: Tensor, weight: Tensor) -> Tensor:
    """z [B H Q D], laid out with token before head as the fused kernels do: the model's next reshape is a view."""
    batch, heads, queries, _ = call.q.shape
    room = call.q.new_empty(batch, queries, heads, call.v.shape[-1]).transpose(1, 2)
    return torch.mul(z, weight[..., None], out=room)


def _check(call: AttentionCall) -> Tensor:
    """Sums over q and k: where keys are hidden, what is wrong with them shows nowhere else."""
    work = working_dtype(call.q.dtype)
    keys = call.k.sum((-2, -1), dtype=work)
    return call.q.sum((-2, -1), dtype=work) + (keys[:, call.kv_head] if keys.shape[1] != call.q.shape[1] else keys)


def dominant_keys(call: AttentionCall) -> Tensor:
    """s = argmax_j of the inflow, [B H] (sinks.md section 2), of a call that may not have run yet."""
    with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
        return _inflow(_pass(call, Workspace().tiling(call, want_z=False))).max(-1).indices
