"""What edits ask of one attention call, and z with it: values replaced, keys hidden, for (image, head) pairs.

The pattern of a value edit stays what it was, because it does not depend on v; a hidden key has the logit −∞, which
is the same as a sequence without it. The model's own kernel computes the pairs that are asked for, and only those.

Letters: B batch, H heads, Q queries, N keys, D head dim, R (image, head) pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sinklab.errors import InputError
from sinklab.hooks.seam import AttentionCall

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.hooks.site import Site


OWN_ROWS = 128
"""Queries at a time whose pattern is computed anew."""


class Change(Protocol):
    """What `HookManager.edit` takes: it says where it acts, and asks for changes when its layer's call comes."""

    @property
    def layers(self) -> Collection[int]:
        """The layers it acts on."""

    def check(self, sites: Sequence[Site]) -> None:
        """Raise NotFoundError unless its layer and head are among these."""

    def request(self, site: Site, changes: Changes, tokens: Any) -> int:
        """Ask for changes to this call; returns how many (image, key) places they touch."""


class Changes:
    """The changes asked for in one attention call, in order."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.kept: dict[int, int] = {}
        """After `applied`: pair (row · H + head) → queries that lost their only key, and keep what they had."""
        self._values: list[tuple[Tensor, Tensor, Tensor]] = []  # pair numbers, keys, values
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._own: list[tuple[Tensor, Tensor]] = []

    def set_value(self, rows: Tensor, heads: Tensor, keys: Tensor, values: Tensor) -> None:
        """v of `keys` becomes `values` [R D] in the heads of the images `rows`; all indices [R] int64."""
        self._values.append((self._pair(rows, heads), keys, values))

    def value(self, rows: Tensor, heads: Tensor, keys: Tensor) -> Tensor:
        """v of these places [R D], as the changes asked for so far leave it."""
        call, device, pair = self.call, self.call.v.device, self._pair(rows, heads)
        group = call.q.shape[1] // call.k.shape[1]
        found = call.v[rows.to(device), heads.to(device) // group, keys.to(device)]
        for earlier, where, values in self._values:
            same = (pair[:, None] == earlier) & (keys.cpu()[:, None] == where.cpu())  # [R earlier]
            if bool(same.any()):
                last = same.shape[1] - 1 - same.flip(1).int().argmax(1)
                found = torch.where(same.any(1)[:, None].to(device), values[last.to(values.device)].to(found), found)
        return found

    def hide(self, rows: Tensor, heads: Tensor, keys: Tensor) -> None:
        """No query attends to `keys` [R] any longer; the rows of the pattern still sum to 1."""
        self._hidden.append((self._pair(rows, heads), keys))

    def give_own(self, rows: Tensor, heads: Tensor, keys: Tensor) -> None:
        """Every query reads its own value in place of that of `keys` [R]: where values are phases, nothing at all.

        Raises InputError, when applied, for a head of which something else is asked as well.
        """
        self._own.append((self._pair(rows, heads), keys))

    def _pair(self, rows: Tensor, heads: Tensor) -> Tensor:
        return rows.cpu() * self.call.q.shape[1] + heads.cpu()

    def applied(self, z: Tensor) -> Tensor:
        """z [B H Q D] with the pairs that were asked for computed anew; the same tensor if there are none.

        A pair whose values turn out to be those already there keeps its very z. A query all of whose keys are hidden
        keeps its z too, and is counted in `kept`.
        """
        z = self._with_own(z)
        asked = [pair for pair, *_ in (*self._values, *self._hidden)]
        if not asked or not sum(map(len, asked)):
            return z
        pairs = torch.cat(asked).unique()
        hidden = torch.zeros(len(pairs), dtype=torch.bool)
        for pair, _ in self._hidden:
            hidden[torch.searchsorted(pairs, pair)] = True
        z = z.clone()
        for some, hiding in ((pairs[~hidden], False), (pairs[hidden], True)):
            if len(some):
                rows, heads = (x.to(z.device) for x in (some // z.shape[1], some % z.shape[1]))
                before = z[rows, heads]
                z[rows, heads] = self._computed(some, self.call.pairs(rows, heads), before, hiding=hiding)
        return z

    def _with_own(self, z: Tensor) -> Tensor:
        """z + A_:s (v_i − v_s) for the pairs that `give_own` named, in float64 where the device has it."""
        if not self._own:
            return z
        pairs, keys = (torch.cat(own) for own in zip(*self._own, strict=True))
        others = torch.cat([pair for pair, *_ in (*self._values, *self._hidden)] or [pairs[:0]])
        if len(pairs.unique()) < len(pairs) or bool(torch.isin(pairs, others).any()):
            raise InputError("A head whose queries read their own value in place of a key's takes no other edit.")
        z, keys = z.clone(), keys.to(z.device)
        rows, heads = (x.to(z.device) for x in (pairs // z.shape[1], pairs % z.shape[1]))
        call, exact = self.call.pairs(rows, heads), torch.float32 if z.device.type == "mps" else torch.float64
        v = call.v[:, 0].to(exact)  # [R N D]
        sink = v.gather(1, keys[:, None, None].expand(-1, 1, v.shape[-1]))
        own = v[:, v.shape[1] - z.shape[2] :]  # of the queries, [R Q D]
        for start in range(0, z.shape[2], OWN_ROWS):
            some = slice(start, start + OWN_ROWS)
            pattern = call.pattern(some, dtype=exact)[:, 0]  # [R q N]
            paid = pattern.gather(-1, keys[:, None, None].expand(-1, pattern.shape[1], 1))
            z[rows, heads, some] = (z[rows, heads, some].to(exact) + paid * (own[:, some] - sink)).to(z.dtype)
        return z

    def _computed(self, pairs: Tensor, call: AttentionCall, before: Tensor, *, hiding: bool) -> Tensor:
        """z [R Q D] of these pairs."""
        v, device = call.v.clone(), call.v.device
        for pair, keys, values in self._values:
            place = torch.searchsorted(pairs, pair).clamp(max=len(pairs) - 1)
            here = pairs[place] == pair
            v[place[here].to(device), 0, keys[here.to(keys.device)].to(device)] = values[here.to(values.device)].to(v)
        if not hiding:
            z = replace(call, v=v).run()[:, 0].to(before.dtype)
            changed = (v != call.v).flatten(1).any(-1)
            return torch.where(changed[:, None, None], z, before)
        bias = torch.zeros(len(pairs), 1, 1, call.k.shape[2], dtype=call.q.dtype, device=device)
        for pair, keys in self._hidden:
            bias[torch.searchsorted(pairs, pair).to(device), 0, 0, keys.to(device)] = -torch.inf
        own = call.bias(slice(None), slice(None), slice(None))
        if own is not None:
            bias = torch.where(hidden_by(call, own), -torch.inf, bias + own.to(bias.dtype))
        blind = (bias == -torch.inf).all(-1)[:, 0]  # [R Q or 1]
        bias = bias.expand(-1, -1, call.q.shape[2], -1)
        z = replace(call, v=v, mask=bias, is_causal=False).run()[:, 0].to(before.dtype)
        counts = blind.expand(-1, call.q.shape[2]).sum(-1).tolist()
        self.kept |= {int(pair): count for pair, count in zip(pairs, counts, strict=True) if count}
        return torch.where(blind[..., None], before, z)


def hidden_by(call: AttentionCall, bias: Tensor) -> Tensor:
    """Where a mask hides a key: −inf, or the most negative number of the mask's type, as Hugging Face writes it."""
    lowest = -torch.inf
    if call.mask is not None and call.mask.is_floating_point():
        lowest = torch.finfo(call.mask.dtype).min
    return bias <= lowest


_editors: dict[tuple[int, int | None], list[Any]] = {}


@contextmanager
def edited_by(manager: Any, places: Sequence[tuple[int, int | None]]) -> Iterator[None]:
    """Within, this manager edits these (attention module, head) places: no other one may, as neither would see both.

    Raises InputError where another manager edits one of them.
    """
    taken = [place for place in places if any(other is not manager for other in _editors.get(place, []))]
    if taken:
        raise InputError(f"Another HookManager edits head {taken[0][1]} of that layer: give one manager both edits.")
    for place in places:
        _editors.setdefault(place, []).append(manager)
    try:
        yield
    finally:
        for place in places:
            _editors[place].remove(manager)
            if not _editors[place]:
                del _editors[place]
