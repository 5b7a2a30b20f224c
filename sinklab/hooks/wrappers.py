"""Looking through what people wrap round a model: torch.compile, DDP, FSDP, DataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from sinklab.errors import InputError
from sinklab.hooks.held import held, is_held

if TYPE_CHECKING:
    from torch import nn

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside any nest of torch.compile, DDP, FSDP and DataParallel wrappers.

    Raises InputError for what has no module inside: a scripted or traced model, an exported program.
    """
    import torch

    while True:
        if isinstance(model, torch.jit.ScriptModule):
            raise InputError(
                f"{type(model).__name__} is a TorchScript model: its attention runs outside Python and cannot be read. "
                "Give the original nn.Module."
            )
        if not isinstance(model, torch.nn.Module):
            raise InputError(
                f"sinklab attaches to an nn.Module, not to {type(model).__name__}"
                + (": give the model itself, not a compiled function." if callable(model) else ".")
            )
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in WRAPPERS:
            inner = model.module
        if inner is None:
            return model
        model = inner


@contextmanager
def run_eagerly(model: nn.Module) -> Iterator[None]:
    """Within, modules compiled in place (`module.compile()`) run their plain forward.

    A compiled call ignores hooks added after it was compiled (pytorch #117758), so a reader would see nothing.
    """
    with ExitStack() as stack:
        for child in model.modules():
            if child._compiled_call_impl is not None or is_held(("compiled", id(child))):
                stack.enter_context(held(("compiled", id(child)), partial(_plain_call, child)))
        yield


def _plain_call(module: nn.Module) -> Callable[[], object]:
    implementation = module._compiled_call_impl
    module._compiled_call_impl = None

    def undo() -> None:
        module._compiled_call_impl = implementation

    return undo
