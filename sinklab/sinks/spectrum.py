"""Largest eigenvalues of small Gram matrices, and the D×D geometry that stands in for C-wide updates.

Letters: H heads, C model dim, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

PRODUCTS = 8  # vector-matrix products before the bounds are compared; 18 of them cost as much as one squaring
CHUNK_BYTES = 5 * 2**19  # of matrices at a time: they stay in cache while they are multiplied again and again
SQUARINGS = 4  # of the matrices that were not settled by the products
TOLERANCE = 4e-7


def head_factor(output_weight: Tensor) -> tuple[Tensor, Tensor]:
    """L_h with L_h L_hᵀ = W_hᵀ Γ² W_h (sinks.md section 1), from Γ W_h given as [H, C, D].

    Then ‖Γ W_h x‖ = ‖x L_h‖ for every x, and the singular values of U = z W_hᵀ Γ are those of z L_h.
    Returns L [H, D, D], scaled so that its largest entry is 1, and that scale [H], in float64: a LayerScale of 1e-5,
    raised to high powers, must not underflow in fp32. A head whose weights are not finite gets NaN.
    """
    gram = output_weight.transpose(-1, -2).double() @ output_weight.double()  # [H, D, D]
    size = gram.diagonal(dim1=-2, dim2=-1).amax(-1)
    good = torch.isfinite(gram).all(-1).all(-1)
    unit = torch.where(good & (size > 0), size, torch.ones_like(size))
    scaled = torch.where(good[:, None, None], gram, torch.zeros_like(gram)) / unit[:, None, None]
    factor, failed = torch.linalg.cholesky_ex(scaled)
    if bool((failed != 0).any()):  # singular: the symmetric square root serves as well
        values, vectors = torch.linalg.eigh(scaled)
        root = vectors * values.clamp(min=0).sqrt()[:, None, :]
        factor = torch.where((failed != 0)[:, None, None], root, factor)
    factor = torch.where(good[:, None, None], factor, torch.full_like(factor, torch.nan))
    return factor, unit.sqrt()


def _iterated(power: Tensor, x: Tensor) -> Tensor:
    """x [n 1 D] after PRODUCTS products with power [n D D], at length one."""
    for _ in range(PRODUCTS):
        x = torch.bmm(x, power)
    x = x / x.abs().amax(-1, keepdim=True)  # first, so that no square vanishes
    return x.div_(torch.linalg.vector_norm(x, dim=-1, keepdim=True))


def _certified(gram: Tensor, x: Tensor, log_norm: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """(ρ, whether λ₁ is within TOLERANCE of it), [n] each, for matrices of trace one and unit vectors x [n 1 D].

    With ρ = xGxᵀ and r = xG − ρx, (λ₁ − ρ)(ρ − λ₂) ≤ ‖r‖² (Temple). λ₂ is bounded by the trace, λ₂ ≤ 1 − ρ, and by
    log_norm = log ‖G^p‖ of some power p = exponent: ‖G^p‖² = Σ λ_i^2p ≥ ρ^2p + λ₂^2p.
    """
    y = torch.bmm(x, gram)
    value = (y.double() * x).sum(-1)  # [n 1]
    residual = torch.linalg.vector_norm(y - value[..., None] * x, dim=(-2, -1))
    value = value[:, 0]
    others = torch.expm1(2 * (log_norm - exponent * value.log())).clamp_min(0)
    second = torch.minimum(value * others ** (0.5 / exponent), 1 - value)
    return value, residual.double().square() <= TOLERANCE * value * (value - second)


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """λ₁ of symmetric positive semidefinite matrices [n, D, D], in float64 [n]; relative error below 1e-6.

    Power iteration, with a bound on what is left: where that is small enough, the answer is certified. The others are
    squared a few times and iterated again, and the few whose largest eigenvalues nearly coincide go to a full
    eigendecomposition, which would cost ten times as much for all. Zero gives 0, and what is not finite gives NaN.
    """
    return (
        torch.cat([_largest(some) for some in gram.split(max(1, CHUNK_BYTES // (4 * gram.shape[-1] ** 2)))])
        if len(gram)
        else gram.new_empty(0).double()
    )


def _largest(gram: Tensor) -> Tensor:
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)  # λ₁ ≤ trace, and 0 only if G = 0
    sound = (trace > 0) & (trace < torch.inf)
    if bool(sound.all()):
        return _of_trace_one(gram / trace.to(gram.dtype)[:, None, None]).mul_(trace)
    result = torch.where(trace == 0, trace, torch.nan)
    if bool(sound.any()):
        result[sound] = _largest(gram[sound])
    return result


def _of_trace_one(unit: Tensor) -> Tensor:
    result, todo = unit.new_empty(len(unit), dtype=torch.float64), torch.arange(len(unit), device=unit.device)
    largest = unit.diagonal(dim1=-2, dim2=-1).argmax(-1)
    x, power = unit.gather(1, largest[:, None, None].expand(-1, 1, unit.shape[-1])), unit
    log_scale = torch.zeros_like(result)  # log ‖power‖ + log_scale = log ‖G^exponent‖
    exponent = 1
    for squarings in (0, SQUARINGS):
        for _ in range(squarings):
            power = torch.bmm(power, power)
            size = power.diagonal(dim1=-2, dim2=-1).sum(-1)
            power.div_(size[:, None, None])
            log_scale, exponent = 2 * log_scale + size.double().log(), 2 * exponent
        x = _iterated(power, x)
        log_norm = torch.linalg.matrix_norm(power).double().log() + log_scale
        value, good = _certified(unit, x, log_norm, exponent)
        result[todo] = value
        if bool(good.all()):
            return result
        todo, unit, power, x, log_scale = (each[~good] for each in (todo, unit, power, x, log_scale))
    result[todo] = torch.linalg.eigvalsh(unit.double())[:, -1]
    return result


def theta_spectrum(query_weight: Tensor, key_weight: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Singular values of Θ = W_Q W_Kᵀ per head, [H, D], largest first (paper, Lemma 3), in float64.

    query_weight [H·D, C], key_weight [K·D, C]. Norm weights before the projection are not folded in, and a rotary
    embedding between q and k is not part of Θ.
    """
    q = query_weight.detach().double().reshape(heads, -1, query_weight.shape[-1])  # [H, D, C]
    k = key_weight.detach().double().reshape(kv_heads, -1, key_weight.shape[-1])
    k = k.repeat_interleave(heads // kv_heads, dim=0)
    if not bool(torch.isfinite(q).all() and torch.isfinite(k).all()):
        return torch.full(q.shape[:2], torch.nan, dtype=torch.float64)
    # Θ = Q_qᵀ R_q … : the C×C matrix is never built, its singular values are those of R_q R_kᵀ
    r_q, r_k = (torch.linalg.qr(w.transpose(-1, -2), mode="r").R for w in (q, k))
    return torch.linalg.svdvals(r_q @ r_k.transpose(-1, -2))
