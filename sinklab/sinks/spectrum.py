"""Largest eigenvalues of small Gram matrices, and the D×D geometry that stands in for C-wide updates.

Letters: H heads, C model dim, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

CHECKPOINTS = (3, 5, 7)  # squarings after which the bounds are compared
CHUNK = 48  # matrices at a time: with D = 64 in fp32, what is squared stays in an L2 cache
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


def _square(power: Tensor, log_norm: Tensor, times: int) -> tuple[Tensor, Tensor, Tensor]:
    """X ← X^(2^times), kept at ‖X‖_F = 1 with its logarithm aside; also log(‖X²‖/‖X‖²) of the last squaring."""
    for left in range(times, 0, -1):
        power = power @ power
        if (
            left <= 2
        ):  # both norms of the last squaring; before that, ‖X²‖ ≥ ‖X‖²/D stays far from fp32's smallest number
            norm = torch.linalg.matrix_norm(power)
            power = power.div_(norm[:, None, None])
            step = norm.double().log()
            log_norm = 2 * log_norm + step
        else:
            log_norm = 2 * log_norm
    return power, log_norm, step


def _certified(start: Tensor) -> Tensor:
    """λ₁ of matrices of trace one, [n, D, D] → [n].

    Let r_i = (λ_i/λ₁)^(2^p) ≤ 1 for i > 1, and δ = −log(‖Y²‖/‖Y‖²) for Y = G^(2^(p−1)). Then
    δ = log(1+Σr) − ½ log(1+Σr²) ≥ ½ log(1+Σr), so a small δ means a small Σr, and ‖Y²‖_F^(1/2^p) exceeds λ₁ by
    the factor (1+Σr²)^(1/2^(p+1)) ≤ exp(δ²/2^p) as long as δ ≤ 0.1.
    """
    result = start.new_empty(len(start), dtype=torch.float64)
    todo = torch.arange(len(start), device=start.device)
    power, log_norm, done = start, torch.zeros(len(start), dtype=torch.float64, device=start.device), 0
    for squarings in CHECKPOINTS:
        power, log_norm, step = _square(power, log_norm, squarings - done)
        done = squarings
        result[todo] = (log_norm / 2**squarings).exp()
        doubtful = ~((step.square() / 2**squarings <= TOLERANCE) & (step >= -0.1))
        if not bool(doubtful.any()):
            return result
        if not bool(doubtful.all()):
            todo, start, power, log_norm = todo[doubtful], start[doubtful], power[doubtful], log_norm[doubtful]
    result[todo] = torch.linalg.eigvalsh(start.double())[:, -1]
    return result


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """λ₁ of symmetric positive semidefinite matrices [n, D, D], in float64 [n]; relative error below 1e-6.

    Repeated squaring closes in on λ₁ from above, with a bound on what is left. Where that is small enough, the answer
    is certified; the few matrices whose largest eigenvalues nearly coincide go to a full eigendecomposition, which
    would cost several times as much for all. Zero gives 0, and what is not finite gives NaN.
    """
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).double()  # λ₁ ≤ trace, and 0 only if G = 0
    result = torch.where(torch.isfinite(trace), torch.zeros_like(trace), torch.nan)
    good = ((trace > 0) & torch.isfinite(trace)).nonzero()[:, 0]
    for some in good.split(CHUNK):
        result[some] = _certified(gram[some] / trace[some].to(gram.dtype)[:, None, None]) * trace[some]
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
