"""What is told of a forward pass, and the hooks on modules that tell it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sinklab.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.hooks.seam import AttentionCall
    from sinklab.hooks.site import Site

MOMENTS = ("attention", "resid_pre", "resid_mid", "resid_post", "projected", "gated")


class Reader:
    """What is told of a forward pass. Override what you need; only overridden moments cost anything.

    Shapes: the residual stream is [B N C] whatever order the model runs in.
    """

    def resid_pre(self, site: Site, x: Tensor) -> None:
        """The block's input."""

    def resid_mid(self, site: Site, x: Tensor) -> None:
        """The residual stream after the attention's update, before the MLP."""

    def resid_post(self, site: Site, x: Tensor) -> None:
        """The block's output."""

    def projected(self, site: Site, x: Tensor, update: Tensor) -> None:
        """Input [B Q H·D] and output [B Q C] of the projection W_O."""

    def attention(self, site: Site, call: AttentionCall) -> None:
        """The attention call, with the z that the model goes on with."""

    def gated(self, site: Site, factor: Tensor) -> None:
        """The factor on z [B H Q D] or [B H Q 1] where there is a gate before W_O, after the attention call."""


def overrides(reader: Reader, moment: str) -> bool:
    """Does this reader want to be told of that moment?"""
    return getattr(type(reader), moment) is not getattr(Reader, moment) or moment in vars(reader)


def require_reader(reader: object) -> None:
    """Raise InputError unless it is a Reader that overrides at least one moment: a misspelled one is never called."""
    if not isinstance(reader, Reader):
        raise InputError(f"A reader is an instance of a subclass of sinklab.Reader, not {_kind(reader)}.")
    if not any(overrides(reader, moment) for moment in MOMENTS):
        own = [name for name in vars(type(reader)) if not name.startswith("_")]
        has = f"; it has {', '.join(own)}" if own else ""
        raise InputError(
            f"{type(reader).__name__} would never be told of anything: a reader overrides at least one of "
            f"{', '.join(MOMENTS)}{has}."
        )


def _kind(given: object) -> str:
    return f"the class {given.__name__} itself" if isinstance(given, type) else type(given).__name__


def recomputing() -> bool:
    """Whether backward is running a checkpointed block again: only the forward is read and counted."""
    return bool(torch._C._current_graph_task_id() != -1)


def _batch_first(site: Site, x: Tensor) -> Tensor:
    return x.transpose(0, 1) if site.tokens_first else x


def _first_tensor(values: Any) -> Tensor:
    return next(value for value in values if isinstance(value, torch.Tensor))


Now = Callable[[], bool]
"""Whether the module that just ran did so for the site: blocks may share it."""


def on_input(tell: Callable[[Site, Tensor], None], site: Site, now: Now = lambda: True) -> Callable[..., None]:
    """A forward pre-hook (with_kwargs) that tells of the module's input."""

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        if not recomputing() and now():
            tell(site, _batch_first(site, _first_tensor((*args, *kwargs.values()))))

    return hook


def on_output(tell: Callable[[Site, Tensor], None], site: Site) -> Callable[..., None]:
    """A forward hook that tells of the module's output."""

    def hook(module: Any, args: Any, result: Any) -> None:
        if not recomputing():
            tell(site, _batch_first(site, result if isinstance(result, torch.Tensor) else result[0]))

    return hook


def on_factor(reader: Reader, site: Site, now: Now) -> Callable[..., None]:
    """A forward hook that tells of what a gate returns."""

    def hook(module: Any, args: Any, result: Any) -> None:
        if not recomputing() and now():
            reader.gated(site, result)

    return hook


def on_projection(reader: Reader, site: Site, now: Now) -> Callable[..., None]:
    """A forward hook that tells of the projection's input and output."""

    def hook(module: Any, args: Any, result: Any) -> None:
        if not recomputing() and now():
            reader.projected(site, args[0], result)

    return hook
