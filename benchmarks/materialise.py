"""The baseline: every quantity as a whole tensor, the way a script beside a paper computes it.

For one attention layer: the pattern A [H N N], projected values u [H N C], updates U [H N C], and the stable rank from
the eigenvalues of the N×N Gram matrix U Uᵀ in float64. Written for comparison only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sinklab.hooks.manager import Reader

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.hooks.seam import AttentionCall
    from sinklab.hooks.site import Site


class Materialiser(Reader):
    """Inflow, value ratio and stable rank of every head, from whole maps and C-wide updates."""

    def __init__(self, layers: set[int] | None = None) -> None:
        self.layers = layers
        self.found: dict[int, dict[str, Tensor]] = {}

    def attention(self, site: Site, call: AttentionCall) -> None:
        if self.layers is not None and site.layer not in self.layers:
            return
        weight = site.output_weight().float()  # [H C D]
        pattern = (call.q.float() @ call.k.float().transpose(-1, -2) * call.scale).softmax(-1)  # [B H N N]
        values = torch.einsum("bhnd,hcd->bhnc", call.v.float(), weight)  # [B H N C]
        updates = pattern @ values
        inflow = pattern.mean(2)
        best, sink = inflow.max(-1)
        norms = values.norm(dim=-1)
        own = norms.gather(-1, sink[..., None])[..., 0]
        others = (norms.sum(-1) - own) / (norms.shape[-1] - 1)
        gram = updates.double() @ updates.double().transpose(-1, -2)  # [B H N N]
        eigenvalues = torch.linalg.eigvalsh(gram)
        self.found[site.layer] = {
            "inflow": best,
            "value_ratio_out": own / others,
            "stable_rank": eigenvalues.sum(-1) / eigenvalues[..., -1],
        }
