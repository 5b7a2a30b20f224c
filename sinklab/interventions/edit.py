"""Edit: one change to one head, as a frozen value that can be written down, composed and applied anywhere.

    with sinklab.HookManager(model) as hooks, hooks.edit([Edit.zero(head=(5, 3), at="sink")]):
        tokens = hooks.run(pixels)

Edits of one head act in their order, each on what the one before left: a later value replaces an earlier one, factors
multiply, hidden keys add up.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError
from sinklab.models.tokens import KINDS, SEQUENCE_KINDS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sinklab.hooks.change import Changes
    from sinklab.hooks.seam import AttentionCall
    from sinklab.hooks.site import Site

Where = int | str | Callable[["AttentionCall"], Any]

ANYWHERE = ("zero", "value", "scale", "route")
"""What can be asked of any forward pass."""
IN_A_RUN = ("mean", "donor", "ordinary", "zero_ordinary", "self")
"""What needs other images, and so a diagnosed run: `sinklab patch`."""
PLACES = ("sink", *KINDS, *SEQUENCE_KINDS)


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A change to one head. Make it with `Edit.zero(head=(layer, head), at=...)` and its neighbours.

    `at` says which keys: a token's index (negative ones count from the end), "sink" (the key with the largest inflow,
    found in the very call that is edited), a token kind ("cls", "patch", "bos", "text", …: all tokens of that kind), or
    a function of the AttentionCall that returns one index an image, [B], or several, [B T]. An edit with a function
    cannot be written down.
    """

    kind: str
    layer: int
    head: int
    at: Where = "sink"
    value: tuple[float, ...] | None = None
    """What the values become, [D]; for "value" only."""
    factor: float | None = None
    """What they are multiplied by; for "scale" only."""

    def __post_init__(self) -> None:
        for name in ("layer", "head", "at"):  # NumPy's whole numbers and tensors of one, as they come from tables
            given = getattr(self, name)
            if not isinstance(given, (bool, str)) and hasattr(given, "__index__") and not getattr(given, "shape", ()):
                object.__setattr__(self, name, _whole(given))
        if self.kind not in (*ANYWHERE, *IN_A_RUN):
            raise InputError(f"An edit is one of {', '.join((*ANYWHERE, *IN_A_RUN))}, not {self.kind!r}.")
        for name, number in (("layer", self.layer), ("head", self.head)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise InputError(f"An edit's {name} is a whole number from 0, not {number!r}.")
        if isinstance(self.at, str) and self.at not in PLACES:
            raise InputError(f"An edit acts at a token's index, a function, or one of {PLACES}, not at {self.at!r}.")
        if isinstance(self.at, bool) or not (isinstance(self.at, (int, str)) or callable(self.at)):
            raise InputError(f"An edit acts at a token's index, a function, or one of {PLACES}, not at {self.at!r}.")
        if (self.kind == "value") != (self.value is not None):
            raise InputError("The edit 'value' needs value=, the numbers that v becomes; the other edits take none.")
        if (self.kind == "scale") != (self.factor is not None):
            raise InputError("The edit 'scale' needs factor=, which v is multiplied by; the other edits take none.")
        numbers = [*(self.value or ()), *([] if self.factor is None else [self.factor])]
        if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) for x in numbers):
            raise InputError(f"An edit's numbers are finite, not {next(x for x in numbers if not _finite(x))!r}.")

    @classmethod
    def zero(cls, *, head: tuple[int, int], at: Where = "sink") -> Edit:
        """v becomes 0."""
        return cls(kind="zero", at=at, **_place(head))

    @classmethod
    def set_value(cls, value: Sequence[float] | Tensor, *, head: tuple[int, int], at: Where = "sink") -> Edit:
        """v becomes `value` [D]."""
        return cls(kind="value", at=at, value=_numbers(value), **_place(head))

    @classmethod
    def scale(cls, factor: float, *, head: tuple[int, int], at: Where = "sink") -> Edit:
        """v is multiplied by `factor`."""
        return cls(kind="scale", at=at, factor=_number(factor), **_place(head))

    @classmethod
    def route(cls, *, head: tuple[int, int], at: Where = "sink") -> Edit:
        """No query attends to the key any longer: its logit is −∞, and the rows of the pattern are normalised anew."""
        return cls(kind="route", at=at, **_place(head))

    def as_dict(self) -> dict[str, Any]:
        """For JSON or TOML; InputError if `at` is a function."""
        if callable(self.at):
            raise InputError("An edit whose place is a function cannot be written down; name a token or a kind.")
        whole = {"edit": self.kind, "layer": self.layer, "head": self.head, "at": self.at}
        if self.value is not None:
            whole["value"] = list(self.value)
        return whole if self.factor is None else whole | {"factor": self.factor}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> Edit:
        """The inverse of `as_dict`; InputError for anything that it does not write."""
        if not isinstance(written, dict) or not {"edit", "layer", "head"} <= written.keys():
            raise InputError(f"An edit is written with edit, layer and head (and at, value, factor), not {written!r}.")
        unknown = sorted(written.keys() - {"edit", "layer", "head", "at", "value", "factor"})
        if unknown:
            raise InputError(f"An edit has no {unknown[0]!r}: it has edit, layer, head, at, value and factor.")
        given = {key: written[key] for key in ("layer", "head", "at", "factor") if key in written}
        value = written.get("value")
        numbers = None if value is None else _numbers(value)
        if given.get("factor") is not None:
            given["factor"] = _number(given["factor"])
        return cls(kind=written["edit"], value=numbers, **given)

    def __str__(self) -> str:
        where = "a function's choice" if callable(self.at) else self.at
        return f"{self.kind} at {where} in head {self.layer}:{self.head}"

    # What HookManager.edit asks of an edit.

    @property
    def layers(self) -> tuple[int, ...]:
        """The one layer it acts on."""
        return (self.layer,)

    def check(self, sites: Sequence[Site]) -> None:
        """Raises NotFoundError unless the model has this layer and head, InputError for an edit that needs a run."""
        if self.kind in IN_A_RUN:
            raise InputError(f"The edit {self.kind!r} needs other inputs: use sinklab patch on a diagnosed run.")
        own = next((site for site in sites if site.layer == self.layer), None)
        if own is None:
            raise NotFoundError(f"Layer {self.layer} does not exist among the {len(sites)} layers attached to.")
        if self.head >= own.heads:
            raise NotFoundError(f"Head {self.head} does not exist: layer {self.layer} has heads 0 to {own.heads - 1}.")
        if self.value is not None and len(self.value) != own.head_dim:
            raise InputError(f"A value of layer {self.layer} has {own.head_dim} numbers, not {len(self.value)}.")

    def request(self, site: Site, changes: Changes, tokens: Any) -> int:
        """Ask for this edit in every image of the call; returns how many (image, key) places that touches."""
        import torch

        call = changes.call
        keys = self.places(call, tokens)  # [B T]
        rows = torch.arange(len(keys)).repeat_interleave(keys.shape[1])
        heads, keys = torch.full_like(rows, self.head), keys.reshape(-1)
        if self.kind == "route":
            changes.hide(rows, heads, keys)
            return len(rows)
        before = changes.value(rows, heads, keys)  # [R D], as earlier edits of this head leave it
        if self.kind == "zero":
            after = torch.zeros_like(before)
        elif self.value is not None:
            after = torch.tensor(self.value, dtype=torch.float64).to(before).expand_as(before)
        else:
            after = before * float(self.factor or 0.0)
        changes.set_value(rows, heads, keys, after)
        return len(rows)

    def places(self, call: AttentionCall, tokens: Any) -> torch.Tensor:
        """The keys of every image, [B T] int64 on the CPU."""
        import torch

        batch, number = len(call.q), call.k.shape[2]
        if self.at == "sink":
            from sinklab.sinks.stream import dominant_keys

            return dominant_keys(call)[:, self.head, None].cpu()
        if isinstance(self.at, str):
            if tokens is None:
                raise InputError(f"Where the {self.at} tokens are is not known: give HookManager a sinklab handle.")
            own = [index for index in range(number) if tokens.kind(index, number) == self.at]
            if not own:
                raise NotFoundError(f"This model has no {self.at} token.")
            return torch.tensor([own]).expand(batch, -1)
        said = self.at if isinstance(self.at, int) else self.at(call)
        try:
            chosen = torch.as_tensor(said).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"The function of an edit returns token indices, not {said!r}.") from error
        if chosen.is_floating_point() or chosen.dtype == torch.bool:
            raise InputError(f"Places are token indices (whole numbers), not {chosen.dtype}.")
        chosen = chosen.long().reshape(-1, 1) if chosen.dim() < 2 else chosen.long()
        if chosen.dim() != 2 or len(chosen) not in (1, batch):
            raise InputError(f"Places are [B] or [B T] token indices for {batch} inputs, not {tuple(chosen.shape)}.")
        if chosen.numel() and not (-number <= int(chosen.min()) and int(chosen.max()) < number):
            raise InputError(f"There are {number} tokens; {self} names one that does not exist.")
        return torch.where(chosen < 0, chosen + number, chosen).expand(batch, -1)


def _place(head: Any) -> dict[str, Any]:
    """layer and head from a (layer, head) pair."""
    try:
        layer, number = head
    except (TypeError, ValueError) as error:
        raise InputError(f"head= is a (layer, head) pair like (5, 3), not {head!r}.") from error
    return {"layer": layer, "head": number}


def _whole(given: Any) -> int:
    return int(operator.index(given))


def _finite(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)


def _number(given: Any) -> float:
    try:
        if isinstance(given, (bool, str)):
            raise TypeError
        return float(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"A factor is a number, not {given!r}.") from error


def _numbers(given: Any) -> tuple[float, ...]:
    """A value's numbers, [D]."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(listed, (str, Mapping)) or not isinstance(listed, Sequence):
        raise InputError(f"A value is a list of numbers, [D], not {given!r}.")
    if not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in listed):
        raise InputError(f"A value is a list of numbers, [D]; its numbers cannot be read: {listed!r}.")
    return tuple(float(x) for x in listed)
