"""The reader that turns a forward pass into statistics, layer by layer, and keeps nothing else.

Letters: B batch, N tokens, L layers, H heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sinklab.hooks.manager import Reader
from sinklab.sinks.statistics import finish
from sinklab.sinks.stream import HeadGeometry, Moments, measure, working_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from sinklab.hooks.seam import AttentionCall
    from sinklab.hooks.site import Site

PENDING_BYTES = 2 * 1024 * 1024  # of Gram matrices that wait to be finished together


class StatisticsReader(Reader):
    """Collects every statistic of every attention call of a forward pass.

    Use it as the reader of a HookManager, and with `fast=True` also as its `attend`: then z is computed in the
    same pass over the tiles and the model's own kernel does not run (output equal to rounding, not bit for bit).
    `take()` hands over what one forward gave and forgets it.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        *,
        attention: float = 0.5,
        device: torch.device | str | None = None,
        fast: bool = False,
    ) -> None:
        self.threshold = attention
        self.fast = fast
        self.geometry = {s.name: HeadGeometry.of(s.output_weight(), device, s.projection_dtype) for s in sites}
        self._norms: dict[str, Tensor] = {}
        self._pending: list[tuple[int, Moments]] = []
        self._finished: dict[int, dict[str, Tensor]] = {}
        self._token_norms: dict[int, Tensor] = {}
        self._tokens: dict[int, int] = {}

    def resid_pre(self, site: Site, x: Tensor) -> None:
        """Token norms of the block's input, for the outliers of Lemma 3."""
        self._token_norms[site.layer] = torch.linalg.vector_norm(x, dim=-1, dtype=working_dtype(x.dtype))  # [B N]

    def attention(self, site: Site, call: AttentionCall) -> None:
        """Measure a call that the model's own kernel has computed."""
        if not self.fast:
            moments, _ = measure(call, self.geometry[site.name], attention=self.threshold)
            self._keep(site, call, moments)

    def attend(self, site: Site, call: AttentionCall) -> Tensor:
        """z and the moments in one pass; give it to HookManager's `attend` when `fast`."""
        moments, z = measure(call, self.geometry[site.name], attention=self.threshold, compute_z=True)
        self._keep(site, call, moments)
        return z

    def _keep(self, site: Site, call: AttentionCall, moments: Moments) -> None:
        self._tokens[site.layer] = call.k.shape[2]
        if self._pending and self._pending[-1][1].value_norms.shape != moments.value_norms.shape:
            self._finish()
        self._pending.append((site.layer, moments))
        if sum(m.grams.numel() * 4 for _, m in self._pending) >= PENDING_BYTES:
            self._finish()

    def _finish(self) -> None:
        if self._pending:
            layers, moments = zip(*self._pending, strict=True)
            self._finished |= dict(zip(layers, finish(moments), strict=True))
        self._pending = []

    def take(self) -> tuple[list[int], dict[str, Tensor], list[int]]:
        """(layers, name → [B L H] on the CPU, tokens per layer) of the forward that just ran."""
        self._finish()
        layers = sorted(self._finished)
        tables = [self._finished[layer] for layer in layers]
        stacked = {name: torch.stack([table[name] for table in tables], 1) for name in tables[0]}
        stacked["token_norm_ratio"] = self._outliers(layers, stacked["sink_index"])
        tokens = [self._tokens[layer] for layer in layers]
        self._finished, self._token_norms, self._tokens = {}, {}, {}
        return layers, {name: values.cpu() for name, values in stacked.items()}, tokens

    def _outliers(self, layers: list[int], sink: Tensor) -> Tensor:
        """‖x_s‖ over the median token norm of the layer's input, [B L H]; NaN where there is no sink."""
        ratios = []
        for position, layer in enumerate(layers):
            norms, own = self._token_norms.get(layer), sink[:, position]
            if norms is None or norms.shape[-1] != self._tokens[layer]:
                ratios.append(torch.full(own.shape, torch.nan, dtype=torch.float64, device=own.device))
                continue
            norms = norms.double()
            ratio = norms / norms.median(-1, keepdim=True).values.clamp_min(1e-12)
            ratios.append(ratio.gather(-1, own.clamp(min=0)).masked_fill(own < 0, torch.nan))
        return torch.stack(ratios, 1)
