"""Managers that overlap: in two threads, nested, and left in any order."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from families import HEADS, LAYERS, fresh, pixels
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from sinklab.errors import InputError
from sinklab.hooks.manager import HookManager, Reader
from sinklab.interventions.edit import Edit


class Updates(Reader):
    """Keeps z of every layer."""

    def __init__(self) -> None:
        self.z: list[torch.Tensor] = []

    def attention(self, site: Any, call: Any) -> None:
        self.z.append(call.z.clone())


def twice(site: Any, call: Any) -> torch.Tensor:
    return call.run() * 2


def own_formula(site: Any, call: Any) -> torch.Tensor:
    """z without the kernel."""
    return (call.pattern(dtype=torch.float32) @ call.v) * 3


def left(model: nn.Module) -> list[object]:
    found: list[object] = [torch.backends.mha.get_fastpath_enabled(), len(_get_current_function_mode_stack())]
    for child in model.modules():
        hooks = (child._forward_hooks, child._forward_pre_hooks, child._forward_hooks_always_called)
        found.append(([len(h) for h in hooks], sorted(child.__dict__), child._compiled_call_impl is None))
    return found


@pytest.mark.parametrize("name", ["timm dinov2", "openclip", "compiled"])
@pytest.mark.parametrize("first_out", [0, 1, 2])
def test_managers_left_in_any_order_leave_nothing_and_the_others_go_on(name: str, first_out: int) -> None:
    model = fresh("timm dinov2" if name == "compiled" else name)
    if name == "compiled":
        model.compile(backend="eager")
    x = pixels("timm dinov2" if name == "compiled" else name)
    before = left(model)
    managers = [HookManager(model, Updates()) for _ in range(3)]
    with torch.inference_mode():
        for manager in managers:
            manager.__enter__()
        managers[0].run(x)
        order = [managers[first_out], *(m for i, m in enumerate(managers) if i != first_out)]
        order[0].__exit__(None, None, None)
        order[1].run(x)
        assert [len(m.reader.z) for m in order] == [LAYERS, 2 * LAYERS, 2 * LAYERS]  # type: ignore[union-attr]
        for manager in order[1:]:
            manager.__exit__(None, None, None)
    assert left(model) == before


def test_two_threads_with_two_towers_leave_torchs_fast_path_as_it_was() -> None:
    torch.backends.mha.set_fastpath_enabled(True)
    models, x = [fresh("openclip"), fresh("openclip")], pixels("openclip")
    before = [left(model) for model in models]
    inside, gone = threading.Barrier(2), threading.Event()
    counts = [0, 0]

    def work(number: int) -> None:
        reader = Updates()
        with torch.no_grad():
            if number:
                inside.wait()
            with HookManager(models[number], reader) as hooks:
                hooks.run(x)
                if number == 0:
                    inside.wait()
                inside.wait()
                if number:  # entered last while the other was in, leaves after it
                    gone.wait()
                    hooks.run(x)
            if number == 0:
                gone.set()
        counts[number] = len(reader.z)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [LAYERS, 2 * LAYERS]
    assert [left(model) for model in models] == before


@pytest.mark.parametrize("editor_is", ["inner", "outer"])
@pytest.mark.parametrize("attend", [twice, own_formula])
def test_every_reader_is_told_of_the_z_that_the_model_goes_on_with(editor_is: str, attend: Any) -> None:
    model, x = fresh("timm dinov2"), pixels("timm dinov2")
    used: list[torch.Tensor] = []
    projections = [block.attn.proj for block in model.blocks]  # type: ignore[union-attr]
    for projection in projections:
        projection.register_forward_pre_hook(lambda module, args: used.append(args[0]))
    plain, editing = Updates(), Updates()
    managers = [HookManager(model, plain), HookManager(model, editing, attend=attend)]
    with torch.inference_mode(), ExitStack() as stack:
        for manager in managers if editor_is == "inner" else reversed(managers):
            stack.enter_context(manager)
        managers[0].run(x)
    for reader in (plain, editing):
        assert len(reader.z) == LAYERS
        for z, given in zip(reader.z, used, strict=True):
            assert torch.equal(z.transpose(1, 2).flatten(2), given)


def test_two_that_attend_compose() -> None:
    model, x, reader = fresh("timm dinov2"), pixels("timm dinov2"), Updates()
    with torch.inference_mode(), HookManager(model, attend=twice), HookManager(model, reader, attend=twice) as hooks:
        hooks.run(x)
    once = Updates()
    with torch.inference_mode(), HookManager(model, once) as hooks:
        hooks.run(x)
    torch.testing.assert_close(reader.z[0], 4 * once.z[0])


def test_an_edit_inside_another_manager_acts_and_both_see_it() -> None:
    """The kernel that computes the edited head is no call of the model, and no reader is told of it."""
    model, x, outer, inner = fresh("timm dinov2"), pixels("timm dinov2"), Updates(), Updates()
    edit = Edit.zero(head=(0, 1), at=0)
    with torch.inference_mode(), HookManager(model, outer), HookManager(model, inner) as hooks, hooks.edit([edit]):
        hooks.run(x)
    plain = Updates()
    with torch.inference_mode(), HookManager(model, plain) as hooks:
        hooks.run(x)
    assert torch.equal(outer.z[0], inner.z[0]) and len(outer.z) == LAYERS
    changed = [bool((outer.z[0][:, head] != plain.z[0][:, head]).any()) for head in range(HEADS)]
    assert changed == [head == 1 for head in range(HEADS)]


def test_a_reader_may_read_another_model_on_the_way() -> None:
    inner_model, x, inner = fresh("timm dinov2"), pixels("timm dinov2"), Updates()

    class Asking(Updates):
        def attention(self, site: Any, call: Any) -> None:
            super().attention(site, call)
            with HookManager(inner_model, inner) as hooks:
                hooks.run(x)

    outer = Asking()
    with torch.inference_mode(), HookManager(fresh("timm dinov2"), outer) as hooks:
        hooks.run(x)
    assert (len(outer.z), len(inner.z)) == (LAYERS, LAYERS * LAYERS)


def test_a_model_run_in_another_thread_is_refused_and_told_so() -> None:
    """Hooks are of the module, and so of all threads; what torch calls is seen in the attaching thread alone."""
    model, said = fresh("timm dinov2"), []

    def work() -> None:
        try:
            model(pixels("timm dinov2"))
        except InputError as error:
            said.append(str(error))

    with HookManager(model, attend=lambda site, call: call.run()) as hooks:
        other = threading.Thread(target=work)
        other.start()
        other.join()
        hooks.run(pixels("timm dinov2"))
    assert len(said) == 1 and "another thread" in said[0]
