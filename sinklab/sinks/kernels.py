"""Triton kernels behind `cuda`; imported only where they run, because Triton itself is imported here.

Letters: Q queries, N keys, D head dim of one head; logits are in bits (scale includes log2 e).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(start, rows, length, row_stride, dims, dim, dim_stride):
    """[rows dims] of one head, zero beyond its edges."""
    inside = (rows < length)[:, None] & (dims < dim)[None, :]
    return tl.load(start + rows[:, None] * row_stride + dims[None, :] * dim_stride, mask=inside, other=0.0)


@triton.jit
def rows_kernel(
    q, k, lse, entropy, scale, heads, group, queries, keys, dim,
    q_batch, q_head, q_row, q_dim, k_batch, k_head, k_row, k_dim,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """log2 Z and entropy in bits of BLOCK_Q queries of one head, into lse and entropy [B·H Q].

    With m the largest logit so far, Z = 2^m (1 + r), where r leaves one largest entry out, and
    e = Σ 2^(s−m) (s−m): nothing cancels in rows that are nearly one-hot.
    """
    own = tl.program_id(1).to(tl.int64)
    image, head = own // heads, own % heads
    row, dims, columns = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, DIM), tl.arange(0, BLOCK_K)
    q_tile = _load(q + image * q_batch + head * q_head, row, queries, q_row, dims, dim, q_dim)
    k_start = k + image * k_batch + (head // group) * k_head
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    r = tl.full([BLOCK_Q], -1.0, tl.float32)
    e = tl.zeros([BLOCK_Q], tl.float32)
    for first in range(0, keys, BLOCK_K):
        key = first + columns
        k_tile = _load(k_start, key, keys, k_row, dims, dim, k_dim)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        there = (key < keys)[None, :]
        s = tl.where(there, s, float("-inf"))
        best, where = tl.max(s, axis=1, return_indices=True)
        new = best > m
        top = tl.maximum(m, best)
        t = s - top[:, None]
        p = tl.exp2(t)
        shrink = tl.exp2(m - top)
        e = shrink * (e + (1.0 + r) * tl.where(m == float("-inf"), 0.0, m - top))
        e += tl.sum(tl.where(there, p * t, 0.0), axis=1)
        r = tl.where(new, (1.0 + r) * shrink, r)
        r += tl.sum(tl.where((columns[None, :] == where[:, None]) & new[:, None], 0.0, p), axis=1)
        m = top
    small = r * (1.0 - r * (0.5 - r * (1.0 / 3.0))) * 1.4426950408889634  # log2(1 + r), where 1 + r loses digits
    log_total = tl.where(r < 1e-3, small, tl.log2(1.0 + r))
    place = own * queries + row
    tl.store(lse + place, m + log_total, mask=row < queries)
    tl.store(entropy + place, log_total - e / (1.0 + r), mask=row < queries)


@triton.jit
def columns_kernel(
    q, k, lse, inflow, scale, heads, group, queries, keys, dim,
    q_batch, q_head, q_row, q_dim, k_batch, k_head, k_row, k_dim,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Σ_i A_ij of BLOCK_K keys of one head, in the order of the queries, into inflow [B·H N]."""
    own = tl.program_id(1).to(tl.int64)
    image, head = own // heads, own % heads
    key, dims, rows = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, DIM), tl.arange(0, BLOCK_Q)
    k_tile = tl.trans(_load(k + image * k_batch + (head // group) * k_head, key, keys, k_row, dims, dim, k_dim))
    q_start = q + image * q_batch + head * q_head
    total = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, queries, BLOCK_Q):
        row = first + rows
        q_tile = _load(q_start, row, queries, q_row, dims, dim, q_dim)
        s = tl.dot(q_tile, k_tile, input_precision="ieee") * scale
        own_lse = tl.load(lse + own * queries + row, mask=row < queries, other=float("inf"))  # A = 0 beyond the edge
        total += tl.sum(tl.exp2(s - own_lse[:, None]), axis=0)
    tl.store(inflow + own * keys + key, total, mask=key < keys)
