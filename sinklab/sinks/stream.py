"""One attention call, measured in tiles: sums per query and per key, and never an N×N map.

Queries are taken in tiles that fit the processor's cache: the tile's logits and pattern give the column sums, the
rows' log-sum-exp and entropy, and are overwritten by the next tile. Once the dominant key s is known, the
attention paid to it is exp(scale·q_i·k_s − lse_i), an N×D product. Updates are measured through the D×D factor of
`spectrum.head_factor`, so nothing C-wide is built either.

Conventions where a mask hides keys (definitions: README "What is measured"): a query that sees fewer than two keys
is left out of everything; the inflow of key j is the mean over the remaining queries that can see j.

Letters: B batch, H query heads, K key/value heads, Q queries, N keys, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sinklab.sinks.spectrum import head_factor

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.hooks.seam import AttentionCall

TILE_BYTES = 2 * 1024 * 1024  # of one fp32 tile on a CPU: smaller ones lose more to calls than they gain in cache
TILE_BYTES_ACCELERATOR = 64 * 1024 * 1024
TILE_ROWS = 192  # at most this many queries at once, and never all of them


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


@dataclass(eq=False)
class _Rows:
    """What the tiles leave behind: per query and per key, never per pair."""

    inflow: Tensor  # [B H N] sums of attention over counted queries
    seen: Tensor | None  # [B H N] how many counted queries see each key; None if every query sees every key
    lse: Tensor  # [B H Q]
    entropy: Tensor  # [B H Q]
    counted: Tensor | None  # [B H Q] bool
    z: Tensor | None  # [B H Q D], computed in the same pass if asked for


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: fp32, also for half precision; float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tiles(call: AttentionCall) -> list[tuple[slice, slice]]:
    """(heads, rows) of each tile: some rows of one head or, where maps are small, of several heads."""
    heads, queries, keys = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    budget = (TILE_BYTES if call.q.device.type == "cpu" else TILE_BYTES_ACCELERATOR) // 4
    rows = max(1, min(TILE_ROWS, -(-queries // 2), budget // keys))
    rows = -(-queries // -(-queries // rows))  # as equal as possible: a last tile of one row is slow
    group = max(1, min(heads, budget // (rows * keys)))
    return [
        (slice(head, min(head + group, heads)), slice(row, min(row + rows, queries)))
        for head in range(0, heads, group)
        for row in range(0, queries, rows)
    ]


def _hidden(call: AttentionCall, bias: Tensor) -> Tensor:
    """Where a mask hides a key: −inf, or the most negative number of the mask's type, as Hugging Face writes it."""
    lowest = -math.inf
    if call.mask is not None and call.mask.is_floating_point():
        lowest = torch.finfo(call.mask.dtype).min
    return bias <= lowest


def _hides(call: AttentionCall) -> bool:
    if call.is_causal:
        return True
    if call.mask is None:
        return False
    if call.mask.dtype == torch.bool:
        return not bool(call.mask.all())
    return bool(_hidden(call, call.mask).any())


def _mask_tile(call: AttentionCall, rows: _Rows, tile: Tensor, where: tuple[int, slice, slice]) -> Tensor | None:
    """Add the mask to a tile of logits; returns which entries are hidden, where any can be."""
    image, heads, queries = where
    bias = call.bias(slice(image, image + 1), heads, queries)
    if bias is None:
        return None
    bias = bias[0].expand_as(tile)
    if rows.seen is None or rows.counted is None:
        tile.add_(bias)
        return None
    hidden = _hidden(call, bias)
    tile.add_(bias).masked_fill_(hidden, -math.inf)
    counted = (~hidden).sum(-1) >= 2
    rows.counted[image, heads, queries] = counted
    rows.seen[image, heads] += (~hidden & counted[..., None]).sum(1)
    return hidden


def _pass_over_tiles(call: AttentionCall, *, want_z: bool) -> _Rows:
    batch, heads, queries, _ = call.q.shape
    keys = call.k.shape[2]
    kind: dict[str, Any] = {"device": call.q.device, "dtype": working_dtype(call.q.dtype)}
    hides = _hides(call)
    rows = _Rows(
        inflow=torch.zeros(batch, heads, keys, **kind),
        seen=torch.zeros(batch, heads, keys, **kind) if hides else None,
        lse=torch.empty(batch, heads, queries, **kind),
        entropy=torch.empty(batch, heads, queries, **kind),
        counted=torch.ones(batch, heads, queries, dtype=torch.bool, device=call.q.device) if hides else None,
        # token before head, as the fused kernels lay it out: the model's next reshape is then a view
        z=torch.empty(batch, queries, heads, call.v.shape[-1], **kind).transpose(1, 2) if want_z else None,
    )
    tiles, kv = _tiles(call), call.kv_head
    largest = max((h.stop - h.start) * (r.stop - r.start) for h, r in tiles) * keys
    logits_space, pattern_space = (torch.empty(largest, **kind) for _ in range(2))
    grouped = call.k.shape[1] != heads
    for image in range(batch):
        for head, row in tiles:
            shape = (head.stop - head.start, row.stop - row.start, keys)
            size = shape[0] * shape[1] * shape[2]
            logits, pattern = logits_space[:size].view(shape), pattern_space[:size].view(shape)
            own = kv[head] if grouped else head
            q, k = call.q[image, head, row].to(kind["dtype"]), call.k[image, own].to(kind["dtype"])
            torch.baddbmm(logits, q, k.transpose(1, 2), beta=0, alpha=call.scale, out=logits)
            hidden = _mask_tile(call, rows, logits, (image, head, row))
            _one_tile(rows, logits, pattern, hidden, (image, head, row))
            if rows.z is not None:
                rows.z[image, head, row] = torch.bmm(pattern, call.v[image, own].to(kind["dtype"]))
    return rows


def _one_tile(
    rows: _Rows, logits: Tensor, pattern: Tensor, hidden: Tensor | None, where: tuple[int, slice, slice]
) -> None:
    """Logits [h q N] → column sums, log-sum-exp, entropy. Both tiles are used up."""
    image, head, row = where
    top = logits.amax(-1, keepdim=True)
    if hidden is not None:
        top.masked_fill_(top == -math.inf, 0.0)
    logits.sub_(top)
    torch.softmax(logits, -1, out=pattern)
    # softmax's largest entry is 1/Σexp(S − max): it gives the log-sum-exp without a second exp
    log_total = -pattern.amax(-1).log_()
    if hidden is not None:
        logits.masked_fill_(hidden, 0.0)  # 0 · −inf
        pattern.masked_fill_(hidden, 0.0)  # a row with every key hidden is NaN in softmax, zero in the kernels
        assert rows.counted is not None
        rows.inflow[image, head] += (pattern * rows.counted[image, head, row, None]).sum(1)
    else:
        rows.inflow[image, head] += pattern.sum(1)
    rows.lse[image, head, row] = top[..., 0] + log_total
    rows.entropy[image, head, row] = log_total - logits.mul_(pattern).sum(-1)


@dataclass(frozen=True, eq=False)
class Moments:
    """What one attention call leaves for `statistics.finish`; nothing here grows with N².

    All [B H …]: sums over counted queries where a mask hides keys, over all queries otherwise.
    """

    sink: Tensor  # [B H] s, the key with the largest inflow; ties go to the lowest index
    inflow: Tensor  # [B H]
    runner_up: Tensor  # [B H] the largest inflow of any other key; −inf if there is none
    queries: Tensor  # [B H] counted queries that see s
    routed: Tensor  # [B H] how many of those give s at least the threshold
    least: Tensor  # [B H] the least that any of those gives s
    entropy: Tensor  # [B H] sum over counted queries
    counted: Tensor  # [B H] number of counted queries
    value_norms: Tensor  # [B H N]
    projected_norms: Tensor  # [B H N] ‖v_j L‖, before the geometry's scale
    seen: Tensor | None  # [B H N] how many counted queries see each key; None if all see all
    update: Tensor  # [B H] Σ_i ‖z_i L‖
    grams: Tensor  # [B H 2 D D] of z and of z L
    scale: Tensor  # [H]
    check: Tensor  # [B H] a number that is finite exactly if q and k are


def _dominant(rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
    if rows.seen is None:
        inflow = rows.inflow / rows.lse.shape[-1]
    else:
        inflow = torch.where(rows.seen > 0, rows.inflow / rows.seen.clamp(min=1), -math.inf)
    best, sink = inflow.max(-1)
    return sink, best, inflow.scatter_(-1, sink[..., None], -math.inf).amax(-1)


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


def _routing(call: AttentionCall, rows: _Rows, sink: Tensor, attention: float) -> tuple[Tensor, Tensor, Tensor]:
    """Over the counted queries that see s: their number, how many give s at least `attention`, and the least given."""
    key = call.k[:, call.kv_head] if call.k.shape[1] != call.q.shape[1] else call.k
    key = key.gather(2, sink[..., None, None].expand(-1, -1, 1, key.shape[-1]))  # [B H 1 D]
    work = working_dtype(call.q.dtype)
    logits = (call.q.to(work) @ key.to(work).transpose(-1, -2))[..., 0] * call.scale  # [B H Q]
    counted = rows.counted
    if call.mask is not None or call.is_causal:
        column = _mask_column(call, sink)
        logits = logits + column
        counted = None if counted is None else counted & ~_hidden(call, column)
    paid = (logits - rows.lse).exp()
    if counted is None:
        return torch.full_like(sink, paid.shape[-1]), (paid >= attention).sum(-1), paid.amin(-1)
    least = paid.masked_fill(~counted, math.inf).amin(-1)
    return counted.sum(-1), ((paid >= attention) & counted).sum(-1), least


def _value_norms(call: AttentionCall, geometry: HeadGeometry) -> tuple[Tensor, Tensor]:
    """‖v_j‖ and ‖v_j L‖, [B H N] each."""
    v, heads = call.v, call.q.shape[1]
    work = working_dtype(v.dtype)
    norms = torch.linalg.vector_norm(v, dim=-1, dtype=work)
    projected = torch.empty(len(v), heads, v.shape[2], dtype=work, device=v.device)
    grouped = v.shape[1] != heads
    for image in range(len(v)):  # image by image: the projected values of one image stay in cache
        own = v[image, call.kv_head] if grouped else v[image]
        projected[image] = torch.linalg.vector_norm(torch.bmm(own.to(work), geometry.factor), dim=-1)
    return (norms[:, call.kv_head] if grouped else norms), projected


def _updates(z: Tensor, geometry: HeadGeometry, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Σ_i ‖z_i L‖ [B H], and the Gram matrices of z and of z L [B H 2 D D]."""
    batch, heads, _, dim = z.shape
    norms = torch.empty(batch, heads, dtype=torch.float64, device=z.device)
    work = working_dtype(z.dtype)
    grams = torch.empty(batch, heads, 2, dim, dim, dtype=work, device=z.device)
    for image in range(batch):
        own = z[image].to(work)
        if counted is not None:
            own = own * counted[image, :, :, None]
        norms[image] = torch.linalg.vector_norm(torch.bmm(own, geometry.factor), dim=-1).sum(-1, dtype=torch.float64)
        gram = torch.bmm(own.transpose(1, 2), own)
        grams[image, :, 0] = gram
        grams[image, :, 1] = geometry.factor.transpose(1, 2) @ gram @ geometry.factor
    return norms, grams


def measure(
    call: AttentionCall, geometry: HeadGeometry, *, attention: float = 0.5, compute_z: bool = False
) -> tuple[Moments, Tensor]:
    """Pass over one attention call in tiles.

    Args:
        call: the call; its z is read unless `compute_z`.
        geometry: the layer's `HeadGeometry`.
        attention: the threshold that makes a query "routed".
        compute_z: compute z in the same pass, in place of the fused kernel (equal to fp32 rounding).

    Returns:
        The call's `Moments` and z [B H Q D] in the dtype of q. Softmax and sums are fp32 or better whatever the
        model's dtype. Memory: two tiles, and O(B·N·C) for the projected values of one image at a time.
    """
    with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
        rows = _pass_over_tiles(call, want_z=compute_z)
        z = call.z if rows.z is None else rows.z.to(call.q.dtype)
        assert z is not None, "the call has not run, and its z was not asked for"
        sink, inflow, runner_up = _dominant(rows)
        queries, routed, least = _routing(call, rows, sink, attention)
        value_norms, projected_norms = _value_norms(call, geometry)
        update, grams = _updates(z, geometry, rows.counted)
        entropy, counted = rows.entropy, torch.full_like(sink, rows.entropy.shape[-1])
        if rows.counted is not None:
            entropy, counted = entropy.masked_fill(~rows.counted, 0.0), rows.counted.sum(-1)
        work = working_dtype(call.q.dtype)
        keys = call.k.sum((-2, -1), dtype=work)
        keys = keys[:, call.kv_head] if keys.shape != sink.shape else keys
        return Moments(
            sink=sink,
            inflow=inflow,
            runner_up=runner_up,
            queries=queries,
            routed=routed,
            least=least,
            entropy=entropy.sum(-1, dtype=torch.float64),
            counted=counted,
            value_norms=value_norms,
            projected_norms=projected_norms,
            seen=rows.seen,
            update=update,
            grams=grams,
            scale=geometry.scale,
            check=call.q.sum((-2, -1), dtype=work) + keys,
        ), z
