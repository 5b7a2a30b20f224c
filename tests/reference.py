"""The naive truth: every statistic of a head by materialised maps in float64, one (image, head) at a time.

Written from the definitions alone and sharing no code with the package, so that the two can be compared.
Letters: B batch, H heads, K key/value heads, Q queries, N keys, D head dim, E value dim, C model dim.

Where the definitions leave a choice, this file makes it:

- A key is hidden where a boolean mask is False, where an additive mask is at or below the lowest finite number
  of its dtype (so −inf and `finfo.min` both hide), and under `is_causal` where j > i (aligned at the top left,
  as torch does for Q ≠ N). A mask together with `is_causal` is refused, as torch refuses it.
- A query counts if it sees at least two keys; with one key its attention is 1 by construction, with none there
  is no row. Queries that do not count are in no statistic.
- inflow_j is the mean of A_ij over the counted queries, 0 from those that cannot see j. Keys that no counted query
  sees are no candidates. The sink s is the argmax, the lowest index among exact ties.
- `queries`, `routed_count`, `routed_fraction` and `min_attention` speak of the counted queries that see s;
  `entropy`, `update_norm` and the ranks of all counted queries.
- Value ratios compare s with the other candidates; a mean of exactly 0 counts as 1e-12.
- A zero update has no direction: its stable rank and rank-one energy are NaN, and the head stays finite.
- A head is not finite if its q, k, v (hidden tokens too), its columns of W_O, γ or its mask hold a NaN or Inf
  (−inf in a mask is not one), if no query counts, or if a statistic overflows. Then every statistic is NaN,
  the sink index −1 and both counts 0.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

COUNTS = ("queries", "sink_index", "routed_count")
FLOATS = (
    "inflow",
    "inflow_margin",
    "routed_fraction",
    "min_attention",
    "entropy",
    "value_norm_head",
    "value_ratio_head",
    "value_ratio_out",
    "update_norm",
    "stable_rank",
    "rank1_energy",
    "stable_rank_head",
)
MAY_BE_UNDEFINED = ("stable_rank", "rank1_energy", "stable_rank_head")
"""NaN for a zero update, in a head that is finite all the same."""


def reference_statistics(
    q: Tensor,  # [B H Q D]
    k: Tensor,  # [B K N D]
    v: Tensor,  # [B K N E]
    *,
    weight: Tensor,  # [C, H·E]
    mask: Tensor | None = None,  # bool (True = may attend) or additive; broadcastable to [B H Q N]
    is_causal: bool = False,
    scale: float | None = None,
    layer_scale: Tensor | None = None,  # [C]
    attention: float = 0.5,
) -> dict[str, np.ndarray]:
    """All statistics of one attention call, each [B H], and "pattern" [B H Q N]; float64 and int64.

    Raises ValueError where shapes do not belong together or a mask comes with `is_causal`.
    """
    batch, heads, queries, dim = q.shape
    tokens, value_dim, group = k.shape[2], v.shape[3], heads // k.shape[1]
    if heads % k.shape[1] or k.shape[:3] != v.shape[:3] or weight.shape[1] != heads * value_dim:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape} and weight {weight.shape} do not belong together.")
    visible, bias = _read_mask(mask, is_causal, (batch, heads, queries, tokens))
    weight = weight.detach().double()
    gamma = torch.ones(weight.shape[0]).double() if layer_scale is None else layer_scale.detach().double()
    scale = 1 / math.sqrt(dim) if scale is None else scale

    result: dict[str, np.ndarray] = {name: np.zeros((batch, heads), np.int64) for name in COUNTS}
    result |= {name: np.full((batch, heads), np.nan) for name in FLOATS}
    result["sink_index"][:] = -1
    result["finite"] = np.zeros((batch, heads), bool)
    result["pattern"] = np.zeros((batch, heads, queries, tokens))
    for b in range(batch):
        for h in range(heads):
            q_h, k_h, v_h = (t.detach().double() for t in (q[b, h], k[b, h // group], v[b, h // group]))
            weight_h = weight[:, h * value_dim : (h + 1) * value_dim]  # [C E]
            pattern = _pattern(q_h @ k_h.T * scale + bias[b, h], visible[b, h])
            result["pattern"][b, h] = pattern.numpy()
            inputs = (q_h, k_h, v_h, weight_h, gamma, bias[b, h])
            if not all(bool(t.isfinite().all()) for t in inputs):
                continue
            row = _one_head(pattern, visible[b, h], v_h, weight_h, gamma, attention)
            if row and all(math.isfinite(row[name]) for name in FLOATS if name not in MAY_BE_UNDEFINED):
                result["finite"][b, h] = True
                for name, number in row.items():
                    result[name][b, h] = number
    return result


def _read_mask(mask: Tensor | None, is_causal: bool, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Who sees whom (bool) and what is added to the logits of those who do (float64), both [B H Q N]."""
    if mask is not None and is_causal:
        raise ValueError("A mask together with is_causal: torch refuses the pair, and so does the reference.")
    visible, bias = torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.float64)
    if is_causal:
        return visible.tril(), bias
    if mask is None:
        return visible, bias
    if mask.dtype == torch.bool:
        return mask.expand(shape), bias
    hidden = mask <= torch.finfo(mask.dtype).min
    return ~hidden.expand(shape), mask.double().masked_fill(hidden, 0.0).expand(shape)


def _pattern(logits: Tensor, visible: Tensor) -> Tensor:
    """softmax over the visible keys, [Q N]; a query that sees nothing gets a row of zeros."""
    pattern = logits.masked_fill(~visible, -math.inf).softmax(dim=-1)
    return pattern.masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)


def _one_head(
    pattern: Tensor, visible: Tensor, value: Tensor, weight_h: Tensor, gamma: Tensor, attention: float
) -> dict[str, float]:
    """The statistics of one head of one image; empty if no query counts or a logit overflowed."""
    counted = visible.sum(dim=-1) >= 2  # [Q]
    if not counted.any() or not pattern.isfinite().all():
        return {}
    pattern, visible = pattern[counted], visible[counted]  # [R N]
    candidates = visible.any(dim=0).nonzero().flatten().tolist()
    inflow = {j: pattern[:, j].mean().item() for j in candidates}
    largest = max(inflow.values())
    sink = min(j for j in candidates if inflow[j] == largest)
    others = [j for j in candidates if j != sink]
    attended = pattern[visible[:, sink], sink]  # A_is of the counted queries that see s

    output_value = gamma[:, None] * (weight_h @ value.T)  # u, one column a token: [C N]
    z = pattern @ value  # [R E]
    update = pattern @ output_value.T  # U: [R C]
    norm, output_norm = value.norm(dim=1), output_value.norm(dim=0)
    stable_rank = _stable_rank(update)
    return {
        "queries": len(attended),
        "sink_index": sink,
        "inflow": largest,
        "inflow_margin": largest - max(inflow[j] for j in others),
        "routed_count": int((attended >= attention).sum()),
        "routed_fraction": (attended >= attention).double().mean().item(),
        "min_attention": attended.min().item(),
        "entropy": torch.special.entr(pattern).sum(dim=1).mean().item(),
        "value_norm_head": norm[sink].item(),
        "value_ratio_head": norm[sink].item() / (norm[others].mean().item() or 1e-12),
        "value_ratio_out": output_norm[sink].item() / (output_norm[others].mean().item() or 1e-12),
        "update_norm": update.norm(dim=1).mean().item(),
        "stable_rank": stable_rank,
        "rank1_energy": 1 / stable_rank,
        "stable_rank_head": _stable_rank(z),
    }


def _stable_rank(matrix: Tensor) -> float:
    """‖M‖_F² / σ₁², uncentred, by all singular values; NaN for a zero matrix."""
    if not matrix.isfinite().all():
        return math.inf
    sigma = torch.linalg.svdvals(matrix)
    # dividing first keeps the squares of very small singular values from vanishing
    return (sigma / sigma[0]).square().sum().item()
