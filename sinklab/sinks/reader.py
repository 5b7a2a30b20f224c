"""The reader that turns a forward pass into statistics, layer by layer, and keeps nothing else.

Letters: B batch, N tokens, L layers, H heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.manager import Reader
from sinklab.sinks.contribution import with_contributions
from sinklab.sinks.gated import gated_statistics
from sinklab.sinks.statistics import finish, over
from sinklab.sinks.stream import HeadGeometry, Moments, measure
from sinklab.sinks.table import GATED
from sinklab.sinks.tiles import Workspace, working_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from sinklab.hooks.seam import AttentionCall
    from sinklab.hooks.site import Site

PENDING_BYTES = 4 * 1024 * 1024  # of moments that wait to be finished together


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
        numbers = sorted({site.heads for site in sites})
        if len(numbers) > 1:
            raise InputError(
                f"The layers have different numbers of heads ({', '.join(map(str, numbers))}), which one table cannot "
                "hold: read layers of one number at a time."
            )
        self.threshold = attention
        self.fast = fast
        self.geometry = {s.name: HeadGeometry.of(s.output_weight(), device, s.projection_dtype) for s in sites}
        self._space = Workspace()
        self._pending: list[tuple[int, Moments]] = []
        self._finished: list[tuple[list[int], dict[str, Tensor]]] = []  # (layers, name → [L B H])
        self._token_norms: dict[int, Tensor] = {}
        self._tokens: dict[int, int] = {}
        self._velocity: dict[int, Tensor] = {}  # of phase layers, v(θ) [B N k]
        self._sinks: dict[int, Tensor] = {}
        self._held: tuple[int, AttentionCall] | None = None  # of a layer with a gate, until it has opened
        self._opened: dict[int, dict[str, Tensor]] = {}  # layer → name → [B H]

    def resid_pre(self, site: Site, x: Tensor) -> None:
        """Token norms of the block's input, for the outliers of Lemma 3: 1 all of them where it is phases."""
        phase = site.parts.phase
        if phase is not None:
            self._velocity[site.layer] = phase.velocity(x.detach())
            x = torch.cat([x.cos(), x.sin()], -1)
        norms = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=working_dtype(x.dtype))
        self._token_norms[site.layer] = norms  # [B N]

    def attention(self, site: Site, call: AttentionCall) -> None:
        """Measure a call that the model's own kernel has computed."""
        if not self.fast:
            moments, _ = measure(call, self.geometry[site.name], space=self._space)
            assert call.z is not None
            self._keep(site, call, self._contributed(site, call, call.z, moments))
        if site.parts.gate is not None:
            self._held = (site.layer, call)

    def gated(self, site: Site, factor: Tensor) -> None:
        """Measure what the gate lets through of the call that was read just before."""
        if self._held is not None and self._held[0] == site.layer:
            call, self._held = self._held[1], None
            with torch._C.DisableTorchFunction():
                found = gated_statistics(call, factor.detach(), self.geometry[site.name], self._sinks[site.layer])
            self._opened[site.layer] = found

    def attend(self, site: Site, call: AttentionCall) -> Tensor:
        """z and the moments in one pass; give it to HookManager's `attend` when `fast`."""
        moments, z = measure(call, self.geometry[site.name], compute_z=True, space=self._space)
        self._keep(site, call, self._contributed(site, call, z, moments))
        return z

    def _contributed(self, site: Site, call: AttentionCall, z: Tensor, moments: Moments) -> Moments:
        """The moments, with what keys contribute where values are phases."""
        if site.parts.phase is None:
            return moments
        with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
            return with_contributions(call, z, site.parts.phase, self._velocity.pop(site.layer), moments)

    def _keep(self, site: Site, call: AttentionCall, moments: Moments) -> None:
        if site.layer in self._tokens:
            raise InputError("A second forward began before take() had handed over the first one's statistics.")
        self._tokens[site.layer], self._sinks[site.layer] = call.k.shape[2], moments.sink
        if self._pending and not moments.stacks_with(self._pending[-1][1]):
            self._finish()
        self._pending.append((site.layer, moments))
        if len(self._pending) * moments.nbytes >= PENDING_BYTES:
            self._finish()

    def _finish(self) -> None:
        if self._pending:
            layers, moments = zip(*self._pending, strict=True)
            self._finished.append((list(layers), finish(moments, attention=self.threshold)))
        self._pending = []

    def take(self) -> tuple[list[int], dict[str, Tensor], list[int]]:
        """(layers, name → [B L H] on the CPU, tokens per layer) of the forward that just ran."""
        with torch._C.DisableTorchFunction():  # where a seam is still active, every call here would pass through it
            self._finish()
            if not self._finished:
                raise NotFoundError("No forward pass has been read since the last take(): run the model first.")
            unsorted = [layer for those, _ in self._finished for layer in those]
            order = sorted(range(len(unsorted)), key=unsorted.__getitem__)
            layers = [unsorted[position] for position in order]
            tables = [table for _, table in self._finished]
            stacked = {name: torch.cat([table[name] for table in tables])[order].transpose(0, 1) for name in tables[0]}
            stacked["token_norm_ratio"] = self._outliers(layers, stacked["sink_index"])
            if self._opened:
                stacked |= self._gated(layers, stacked["inflow"], stacked["finite"])
            tokens = [self._tokens[layer] for layer in layers]
            self._finished, self._token_norms, self._tokens, self._velocity = [], {}, {}, {}
            self._sinks, self._opened, self._held = {}, {}, None
            return layers, {name: values.contiguous().cpu() for name, values in stacked.items()}, tokens

    def _gated(self, layers: list[int], like: Tensor, finite: Tensor) -> dict[str, Tensor]:
        """The numbers of the gated update, name → [B L H]; NaN in layers without a gate, and where not finite."""
        nothing = {name: torch.full_like(like[:, 0], torch.nan) for name in GATED}
        own = [self._opened.get(layer, nothing) for layer in layers]
        found = {name: torch.stack([each[name] for each in own], 1) for name in GATED}
        return {name: values.masked_fill(~finite, torch.nan) for name, values in found.items()}

    def _outliers(self, layers: list[int], sink: Tensor) -> Tensor:
        """‖x_s‖ over the median token norm of the layer's input, [B L H]; NaN where there is no sink."""
        ratios = torch.full(sink.shape, torch.nan, dtype=torch.float64, device=sink.device)
        alike: dict[torch.Size, list[int]] = {}
        for position, layer in enumerate(layers):
            norms = self._token_norms.get(layer)
            if norms is not None and norms.shape[-1] == self._tokens[layer]:
                alike.setdefault(norms.shape, []).append(position)
        for positions in alike.values():
            norms = torch.stack([self._token_norms[layers[position]] for position in positions], 1).double()  # [B L N]
            relative = over(norms, norms.median(-1, keepdim=True).values)
            own = sink[:, positions]
            ratios[:, positions] = relative.gather(-1, own.clamp(min=0)).masked_fill(own < 0, torch.nan)
        return ratios
