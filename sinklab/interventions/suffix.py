"""The rows of a group that begin at one layer, run together: the unedited images first, then their edits.

Letters: G images of the group, R rows, H heads, Q queries, N tokens, D head dim, C model dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.change import Changes
from sinklab.hooks.manager import HookManager
from sinklab.interventions.checks import TOLERANCE, identity_error, own_error, recomputed_error, routing_error
from sinklab.interventions.replay import Unedited, resuming

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.handle import Model
    from sinklab.hooks.seam import AttentionCall
    from sinklab.hooks.site import Site


@dataclass(frozen=True, kw_only=True, eq=False)
class Members:
    """What the rows of a batch do, one entry a member; all tensors on the CPU, [M] or [M D], but for `origin`."""

    origin: Tensor
    """[R], which image of the group each row of the batch is of; the first G rows are unedited and have no member."""
    row: Tensor
    """Which row of the batch."""
    layer: Tensor
    head: Tensor
    key: Tensor
    routes: Tensor
    """bool: the key is hidden; else its value becomes `value`."""
    value: dict[int, Tensor]
    """Member → [D] float64."""
    factor: dict[int, float]
    """Member → what its value is multiplied by, where it is not replaced."""
    own: frozenset[int] = frozenset()
    """Members whose queries read their own value in place of the key's."""

    def at(self, layer: int) -> list[int]:
        """Members that act in a layer."""
        return (self.layer == layer).nonzero()[:, 0].tolist()


class Editor:
    """Computes the attention of edited layers, checks every edit, and counts what fired."""

    def __init__(self, members: Members, *, null: bool = False) -> None:
        self.members, rows = members, len(members.origin)
        self.null = null
        """Put back the value that is there already: nothing may change."""
        self.fired = torch.zeros(rows, dtype=torch.int64)
        self.kept = torch.zeros(rows, dtype=torch.int64)
        self.error = torch.zeros(rows, dtype=torch.float64)

    def attend(self, site: Site, call: AttentionCall) -> Tensor:
        """z of the call with this layer's members, for HookManager's `attend`."""
        z, own = call.run(), self.members.at(site.layer)
        if not own:
            return z
        changes, m = Changes(call), self.members
        routed = [i for i in own if bool(m.routes[i]) and not self.null]
        given = [i for i in own if i in m.own and not self.null]
        valued = [i for i in own if i not in {*routed, *given}]
        pieces = [call.v.new_empty(0, call.v.shape[-1])]
        for some in self._rounds(valued):
            places = (m.row[some], m.head[some], m.key[some])
            there = changes.value(*places)  # [M D], as earlier edits of the same place leave it
            if not self.null:
                new = [m.value[i].to(there) if i in m.value else there[n] * m.factor[i] for n, i in enumerate(some)]
                there = torch.stack(new)
            pieces.append(there)
            changes.set_value(*places, pieces[-1])
        values = torch.cat(pieces)  # [M D]
        if routed:
            changes.hide(m.row[routed], m.head[routed], m.key[routed])
        if given:
            changes.give_own(m.row[given], m.head[given], m.key[given])
        after = changes.applied(z)
        self._check(call, valued, values, routed, z, after)
        self._check_own(site, call, given, z, after)
        self.fired.index_add_(0, m.row[own], torch.ones(len(own), dtype=torch.int64))
        for pair, count in changes.kept.items():
            self.kept[pair // z.shape[1]] += count
        return after

    def _rounds(self, members: list[int]) -> list[list[int]]:
        """The members in order, cut wherever one acts on a place that its round has already."""
        m = self.members
        rounds: list[list[int]] = []
        seen: set[tuple[int, int, int]] = set()
        for i in members:
            place = (int(m.row[i]), int(m.head[i]), int(m.key[i]))
            if place in seen or not rounds:
                rounds.append([])
                seen = set()
            rounds[-1].append(i)
            seen.add(place)
        return rounds

    def _check(
        self, call: AttentionCall, valued: list[int], values: Tensor, routed: list[int], z: Tensor, after: Tensor
    ) -> None:
        """Keep the worst error of every row: alone, an edit is held to its identity; several of a head to the sum."""
        m, heads = self.members, z.shape[1]
        pair = m.row * heads + m.head
        counts = pair[valued + routed].bincount(minlength=len(self.fired) * heads)
        several = [i for i in valued + routed if counts[pair[i]] > 1]
        alone = set(valued + routed) - set(several)
        places = {i: n for n, i in enumerate(valued)}
        with torch.autocast(z.device.type, enabled=False):
            for members in ([i for i in valued if i in alone], [i for i in routed if i in alone]):
                if members:
                    sub, before, then, keys = self._pairs(call, members, z, after)
                    if members[0] in places:
                        own = values[[places[i] for i in members]].to(before.device)
                        found = identity_error(sub, before, then, keys, own)
                    else:
                        found = routing_error(sub, before, then, keys)
                    self.error.scatter_reduce_(0, m.row[members], found.cpu(), "amax")
            for one in dict.fromkeys(int(pair[i]) for i in several):
                members = [i for i in several if int(pair[i]) == one]
                sub, before, then, _ = self._pairs(call, members[:1], z, after)
                v = sub.v[:, 0].double()
                for i in members:
                    if i in places:
                        v[0, m.key[i]] = values[places[i]].to(v)
                hidden = m.key[[i for i in members if i not in places]].to(v.device)
                found = recomputed_error(sub, before, then, v, hidden)
                self.error[one // heads] = max(self.error[one // heads], found.cpu()[0])

    def _check_own(self, site: Site, call: AttentionCall, members: list[int], z: Tensor, after: Tensor) -> None:
        """Keep the worst error of the rows whose queries read their own value in place of the sink's."""
        if not members:
            return
        phase = site.parts.phase
        if phase is None:
            raise InputError(
                f"The values of layer {site.layer} are no phases: nothing of a reader's own can replace one."
            )
        with torch.autocast(z.device.type, enabled=False):
            sub, before, then, keys = self._pairs(call, members, z, after)
            found = own_error(sub, before, then, keys, phase)
            self.error.scatter_reduce_(0, self.members.row[members], found.cpu(), "amax")

    def _pairs(
        self, call: AttentionCall, members: list[int], z: Tensor, after: Tensor
    ) -> tuple[AttentionCall, Tensor, Tensor, Tensor]:
        """The members' own call, z before and after, and keys; on the CPU where the device has no float64."""
        rows, heads, keys = (x[members].to(z.device) for x in (self.members.row, self.members.head, self.members.key))
        sub, before, then = call.pairs(rows, heads), z[rows, heads], after[rows, heads]
        if z.device.type == "mps":
            return sub.to("cpu"), before.cpu(), then.cpu(), keys.cpu()
        return sub, before, then, keys


@contextmanager
def edited(model: Model, start: Unedited, layer: int, editor: Editor, layers: list[int]) -> Iterator[HookManager]:
    """Within, `run(start.pixels)` of what is yielded gives the final tokens [R N C] of all rows."""
    with (
        resuming(model, start, layer, editor.members.origin),
        HookManager(model, attend=editor.attend, layers=layers) as hooks,
    ):
        yield hooks


def run_rows(model: Model, start: Unedited, layer: int, members: Members) -> tuple[Tensor, Editor]:
    """Final tokens [R N C] of the unedited images (the first G rows) and of their edits, which begin at `layer`.

    Raises NotFoundError if an edit never fired, InputError if one did something else to its head than it says.
    """
    editor, rows = Editor(members), len(members.origin)
    layers = sorted(set(members.layer.tolist()))
    with edited(model, start, layer, editor, layers) as hooks:
        tokens = hooks.run(start.pixels)
    expected = torch.zeros(rows, dtype=torch.int64).index_add_(0, members.row, torch.ones_like(members.row))
    if not torch.equal(editor.fired, expected):
        raise NotFoundError(f"Of the edits that begin in layer {layer}, some never fired: the layer did not run.")
    return tokens, editor


def null_check(model: Model, start: Unedited, layer: int, members: Members) -> None:
    """Edits that put back what is there must leave every bit of the output: InputError if one does not."""
    nothing = Members(
        **{name: getattr(members, name)[:0] for name in ("row", "layer", "head", "key", "routes")},
        origin=members.origin,
        value={},
        factor={},
    )
    layers = sorted(set(members.layer.tolist()))
    found = []
    for own in (members, nothing):
        with edited(model, start, layer, Editor(own, null=True), layers) as hooks:
            found.append(hooks.run(start.pixels))
    if not torch.equal(found[0], found[1]):
        raise InputError(
            f"In layer {layer}, putting back the values that are there already changes the output by "
            f"{float((found[0] - found[1]).abs().max()):.2e}: this model cannot be edited faithfully."
        )


def check_identity(error: float, dtype: torch.dtype, layer: int) -> None:
    """Raise InputError if an edit did not do to its head's update what it says."""
    if not error <= TOLERANCE[dtype]:
        raise InputError(
            f"An edit in layer {layer} changed its head's update by something else than the edit says (off by "
            f"{error:.1e} of the update, against {TOLERANCE[dtype]:.0e} for {str(dtype).removeprefix('torch.')})."
        )
