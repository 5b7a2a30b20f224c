"""The unedited prefix of a network, run once a group of images and reused: an edit at layer ℓ runs layers ℓ … L only.

While a forward resumes at layer ℓ, the blocks before it hand their input through, and block ℓ is given the input that
it had in the unedited forward, once for every row of edits. Whatever stands before and after the blocks runs as ever.
A group is one image, or several small sequences.

Letters: G images of a group, R rows of edits, N tokens, C model dim.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sinklab.hooks.manager import HookManager, Reader

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sinklab.handle import Model
    from sinklab.hooks.seam import AttentionCall
    from sinklab.hooks.site import Site


@dataclass(eq=False)
class Unedited:
    """A group's forward without edits."""

    pixels: Tensor
    """[G 3 H W], or sequences, as the model takes them."""
    inputs: dict[int, Tensor]
    """Layer → the block's input, [G N C] (or [N G C] where the model runs tokens first)."""
    tokens: Tensor
    """Final tokens [G N C]."""
    calls: dict[int, AttentionCall] = field(default_factory=dict)
    """Layer → its attention call."""
    beside: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """Layer → what the block returned beside its tokens, where it returned a tuple."""


class _Inputs(Reader):
    def __init__(self, wanted: Collection[int]) -> None:
        self.wanted = wanted
        self.inputs: dict[int, Tensor] = {}
        self.calls: dict[int, AttentionCall] = {}

    def resid_pre(self, site: Site, x: Tensor) -> None:
        if site.layer in self.wanted:
            self.inputs[site.layer] = (x.transpose(0, 1) if site.tokens_first else x).clone()  # the model's own layout

    def attention(self, site: Site, call: AttentionCall) -> None:
        if site.layer in self.wanted:
            self.calls[site.layer] = call


def unedited(model: Model, pixels: Tensor, layers: Collection[int]) -> Unedited:
    """Run a group, pixels [G 3 H W], and keep what edits in these layers start from."""
    reader, beside = _Inputs(layers), {}

    def look(layer: int) -> Any:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            if isinstance(result, tuple):
                beside[layer] = result[1:]

        return hook

    with ExitStack() as stack:
        for site in model.sites:
            stack.callback(site.block_module.register_forward_hook(look(site.layer)).remove)
        hooks = stack.enter_context(HookManager(model, reader))
        tokens = hooks.run(pixels)
    return Unedited(pixels, reader.inputs, tokens, reader.calls, beside)


@contextmanager
def resuming(model: Model, start: Unedited, layer: int, origin: Tensor) -> Iterator[None]:
    """Within, `model(start.pixels)` begins at the block of `layer`; row r starts from image origin[r] [R]."""
    sites = {site.layer: site for site in model.sites}
    own, stored = sites[layer], start.inputs[layer]

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        x = stored.index_select(1 if own.tokens_first else 0, origin.to(stored.device))
        if args and isinstance(args[0], torch.Tensor):
            return (x, *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
        return args, {**kwargs, name: x}

    with ExitStack() as stack:
        for site in model.sites:
            if site.layer < layer:
                stack.enter_context(_handing_through(site.block_module, start.beside.get(site.layer)))
        handle = own.block_module.register_forward_pre_hook(begin, with_kwargs=True)
        stack.callback(handle.remove)
        yield


@contextmanager
def _handing_through(block: nn.Module, beside: tuple[Any, ...] | None) -> Iterator[None]:
    """Within, the block returns its first tensor untouched: alone, or before what it returned beside it."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        return x if beside is None else (x, *beside)

    before = block.__dict__.get("forward")
    block.__dict__["forward"] = forward
    try:
        yield
    finally:
        block.__dict__.pop("forward")
        if before is not None:
            block.__dict__["forward"] = before
