"""What a head really adds where a gate multiplies z before W_O: the same numbers, of the gated update.

    U_i = Γ W_h (g_i ⊙ z_i)                                       what is added to token i
    ‖u_j‖ = ( mean_i ‖Γ W_h (g_i ⊙ v_j)‖² )^½                     what key j hands out, over the queries that take it

The second is a root of a quadratic form, v_jᵀ (M ⊙ G) v_j with M = W_hᵀ Γ² W_h and G = mean_i g_i g_iᵀ, so no pair of
tokens has to be built; M ⊙ G is positive semidefinite (Schur). A gate that is one number a head and query leaves the
ratio of the ungated values as it is, and changes norm and rank of the update.

Letters: B batch, H heads, K key/value heads, Q queries, N keys, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sinklab.sinks.spectrum import largest_eigenvalue
from sinklab.sinks.statistics import over
from sinklab.sinks.table import GATED

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.hooks.seam import AttentionCall
    from sinklab.sinks.stream import HeadGeometry


def gated_statistics(call: AttentionCall, factor: Tensor, geometry: HeadGeometry, sink: Tensor) -> dict[str, Tensor]:
    """Name → [B H] in float64.

    Args:
        call: with its z [B H Q D]. factor: g [B H Q D] or [B H Q 1].
        geometry: the layer's L_h, whose products L_h L_hᵀ are M. sink: s [B H].

    All queries count: a model with such a gate hides no keys. What is not finite is left so, or NaN.
    """
    with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
        assert call.z is not None
        root = geometry.factor.double()  # [H D D]
        opened = factor.double().expand(call.z.shape)
        added = torch.einsum("bhqd,hde->bhqe", opened * call.z.double(), root)
        norms = torch.linalg.vector_norm(added, dim=-1)  # [B H Q]
        gram = added.transpose(-1, -2) @ added  # [B H D D]
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        rank = (trace / largest_eigenvalue(gram.flatten(0, 1)).view_as(trace)).clamp_min(1.0)  # but for rounding
        ratio = _value_ratio(call, opened, root, sink)
        return dict(zip(GATED, (ratio, norms.mean(-1) * geometry.scale.double(), rank), strict=True))


def _value_ratio(call: AttentionCall, opened: Tensor, root: Tensor, sink: Tensor) -> Tensor:
    """‖u_s‖ over the mean of the other keys' ‖u_j‖, [B H]."""
    second = opened.transpose(-1, -2) @ opened / opened.shape[2]  # G [B H D D]
    form = (root @ root.transpose(-1, -2)) * second  # M ⊙ G
    v = call.v[:, call.kv_head].double()  # [B H N D]
    norms = ((v @ form) * v).sum(-1).clamp_min(0).sqrt()
    own = norms.gather(-1, sink[..., None])[..., 0]
    return over(own, (norms.sum(-1) - own) / (norms.shape[-1] - 1))
