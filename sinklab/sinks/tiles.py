"""One pass over the pattern of an attention call, tile by tile: sums per query and per key, never an N×N map.

Queries are taken in tiles that fit the processor's cache. A tile's logits give its pattern, both give the column
sums, the rows' log-sum-exp and the entropy, and the next tile overwrites them. Logits are kept in base 2 (scaled by
log2 e on their way out of q kᵀ): exp2 is a third of the cost of exp, and half that of a softmax.

The quick pass takes powers of the logits as they are, and the entropy of a row as log Z − Σ A_ij S_ij. Heads in which a
power overflows or vanishes, or in which rows are so nearly one-hot that this difference loses digits, are left to
`careful`, and so are calls whose mask hides keys.

Between layers the processor's caches lose everything, memory and code: fresh pages, and every call into torch that
could be spared, cost more here than they seem to. So views are made once and kept.

Letters: B batch, H query heads, K key/value heads, Q queries, N keys, D head dim; h heads and q queries of a tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.hooks.seam import AttentionCall

TILE_BYTES = 1024 * 1024  # of one fp32 tile on a CPU: smaller ones lose more to calls than they gain in cache
TILE_BYTES_ACCELERATOR = 64 * 1024 * 1024
TILE_ROWS = 192  # at most this many queries at once, and never all of them
LITTLE_ENTROPY = 0.36  # bits: below this mean, log Z − Σ A S may be off by more than a few times 1e-5 of itself
SAFE = (-80.0, 100.0)  # log2 Z of rows in which no power has overflowed, and none that matters has vanished
LOG2_E = math.log2(math.e)


@dataclass(eq=False)
class Rows:
    """What the tiles leave behind: per query and per key, never per pair. Valid until the workspace's next call."""

    inflow: Tensor  # [B H N] sums of attention over counted queries
    lse: Tensor  # [B H Q] log-sum-exp of the logits, in bits: log2 Z
    entropy: Tensor  # [B H] sums over counted queries, in bits, float64
    seen: Tensor | None = None  # [B H N] how many counted queries see each key; None if every query sees every key
    counted: Tensor | None = None  # [B H Q] bool


@dataclass(frozen=True, eq=False)
class Tile:
    """Where a tile lies, and views of the memory that it fills."""

    image: int
    heads: slice
    queries: slice
    logits: Tensor  # [h q N], base 2
    power: Tensor  # [h q N], 2^logits
    total: Tensor  # [h q] Z
    weight: Tensor  # [h q] 1/Z
    row_weight: Tensor  # [h 1 q] the same
    product: Tensor  # [h q] Σ_j 2^S_ij S_ij
    inflow: Tensor  # [h 1 N]
    z: Tensor | None  # [h q D]


class Tiling:
    """The tiles of all calls of one shape, dtype and device, and the memory that they share."""

    def __init__(self, call: AttentionCall, *, want_z: bool) -> None:
        (batch, heads, queries, _), keys = call.q.shape, call.k.shape[2]
        tile_bytes = TILE_BYTES if call.q.device.type == "cpu" else TILE_BYTES_ACCELERATOR
        self.groups = plan(heads, queries, keys, tile_bytes, TILE_ROWS)
        head, cuts = self.groups[0]
        kind: dict[str, Any] = {"dtype": working_dtype(call.q.dtype), "device": call.q.device}
        one_head = (keys + queries) * call.v.shape[-1]  # of projected values and updates: they use the same space
        self.space = torch.empty(max(2 * head.stop * cuts[0].stop * keys, one_head), **kind)
        self.total, self.weight, self.product = torch.empty(3, batch, heads, queries, **kind)
        self.inflow = torch.empty(batch, heads, keys, **kind)
        self.z = torch.empty(batch, heads, queries, call.v.shape[-1], **kind) if want_z else None
        self.tiles = [
            [self._tile(image, head, row, keys) for row in cuts] for image in range(batch) for head, cuts in self.groups
        ]

    def _tile(self, image: int, head: slice, row: slice, keys: int) -> Tile:
        where = (image, head, row)
        weight = self.weight[where]
        return Tile(
            image=image,
            heads=head,
            queries=row,
            **dict(zip(("logits", "power"), self.pair(*weight.shape, keys), strict=True)),
            total=self.total[where],
            weight=weight,
            row_weight=weight[:, None],
            product=self.product[where],
            inflow=self.inflow[image, head, None],
            z=None if self.z is None else self.z[where],
        )

    def pair(self, *shape: int) -> Tensor:
        """Room for logits and powers, [2 *shape]; every tile uses the same."""
        return self.space[: 2 * math.prod(shape)].view(2, *shape)

    def projections(self, rows: int, dim: int) -> Tensor:
        """The same room, still in cache, for projected rows of as many heads as fit, [h rows D]."""
        heads = min(self.weight.shape[1], self.space.numel() // (rows * dim))
        return self.space[: heads * rows * dim].view(heads, rows, dim)


class Workspace:
    """Memory that is used again from layer to layer."""

    def __init__(self) -> None:
        self._tilings: dict[tuple[object, ...], Tiling] = {}

    def tiling(self, call: AttentionCall, *, want_z: bool) -> Tiling:
        """The tiles for calls shaped like this one; those of other shapes are forgotten."""
        key = (call.q.shape, call.k.shape[2], call.v.shape[-1], call.q.dtype, call.q.device, want_z)
        if key not in self._tilings:
            with torch.inference_mode(False):  # memory made in inference mode could not be written to outside of it
                self._tilings = {key: Tiling(call, want_z=want_z)}
        return self._tilings[key]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: fp32, also for half precision; float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


Groups = tuple[tuple[slice, tuple[slice, ...]], ...]


@lru_cache(maxsize=64)
def plan(heads: int, queries: int, keys: int, tile_bytes: int, tile_rows: int) -> Groups:
    """Groups of heads, and the rows of their tiles: some rows of one head, or of several where maps are small."""
    budget = tile_bytes // 4
    rows = max(1, min(tile_rows, -(-queries // 2), budget // keys))
    rows = -(-queries // -(-queries // rows))  # as equal as possible: a last tile of one row is slow
    group = max(1, min(heads, budget // (rows * keys)))
    group = -(-heads // -(-heads // group))
    cuts = tuple(slice(row, min(row + rows, queries)) for row in range(0, queries, rows))
    return tuple((slice(head, min(head + group, heads)), cuts) for head in range(0, heads, group))


def quick_pass(call: AttentionCall, tiling: Tiling) -> tuple[Rows, Tensor | None]:
    """All heads of a call in which every query sees every key; also the heads that need care, [B H], None if none do.

    z is left in `tiling.z` if it has one, rows still to be multiplied by `tiling.weight`.
    """
    work, alpha = working_dtype(call.q.dtype), call.scale * LOG2_E
    kv = call.kv_head if call.k.shape[1] != call.q.shape[1] else None
    tiling.inflow.zero_()
    for tiles in tiling.tiles:
        image, heads = tiles[0].image, tiles[0].heads
        own = heads if kv is None else kv[heads]
        q, k = call.q[image, heads].to(work), call.k[image, own].to(work).transpose(1, 2)
        v = call.v[image, own].to(work) if tiling.z is not None else None
        for tile in tiles:
            torch.baddbmm(tile.logits, q[:, tile.queries], k, beta=0, alpha=alpha, out=tile.logits)
            if call.mask is not None:
                bias = call.bias(slice(image, image + 1), heads, tile.queries)
                assert bias is not None
                tile.logits.add_(bias[0], alpha=LOG2_E)
            torch.exp2(tile.logits, out=tile.power)
            torch.sum(tile.power, -1, out=tile.total)
            torch.reciprocal(tile.total, out=tile.weight)
            tile.inflow.baddbmm_(tile.row_weight, tile.power)
            if v is not None and tile.z is not None:
                torch.bmm(tile.power, v, out=tile.z)
            torch.sum(tile.power.mul_(tile.logits), -1, out=tile.product)
    lse, entropy = tiling.total, tiling.product
    for own, product, weight in zip(lse, entropy, tiling.weight, strict=True):
        # image by image: the last numbers of a tensor are rounded otherwise than the rest, and a batch has one end
        torch.addcmul(own.log2_(), product, weight, value=-1, out=product)
    rows = Rows(tiling.inflow, lse, entropy.sum(-1, dtype=torch.float64))
    lowest, highest = torch.aminmax(lse)
    little = LITTLE_ENTROPY * call.q.shape[2]
    if SAFE[0] < float(lowest) and float(highest) < SAFE[1] and float(rows.entropy.min()) >= little:
        return rows, None
    return rows, ~((lse > SAFE[0]) & (lse < SAFE[1])).all(-1) | ~(rows.entropy >= little)
