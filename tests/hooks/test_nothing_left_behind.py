"""Attaching changes nothing for good, and what cannot be read is refused with a sentence that names it."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from families import LAYERS, fresh, module, openclip_tower, pixels, timm_vit
from torch import nn

from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.proof import prove
from sinklab.hooks.site import find_sites
from sinklab.hooks.wrappers import unwrap

READ = ("timm dinov2", "openclip", "hf dinov2")


class Count(Reader):
    """Counts calls, and raises at the one it is told to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.seen = 0
        self.fail_at = fail_at

    def resid_pre(self, site: Any, x: torch.Tensor) -> None:
        assert x.dim() == 3

    def attention(self, site: Any, call: Any) -> None:
        self.seen += 1
        if self.seen == self.fail_at:
            raise RuntimeError("the reader failed")


def traces(model: nn.Module) -> list[object]:
    """Everything that attaching could leave: hooks, instance attributes, compiled calls, torch's fast path flag."""
    found: list[object] = [torch.backends.mha.get_fastpath_enabled()]
    for name, child in model.named_modules():
        hooks = (
            child._forward_hooks,
            child._forward_pre_hooks,
            child._backward_hooks,
            child._forward_hooks_always_called,
        )
        found.append((name, [len(h) for h in hooks], sorted(child.__dict__), child._compiled_call_impl is None))
    return found


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("ending", ["well", "reader fails", "model fails"])
def test_nothing_is_left_on_the_model(name: str, ending: str) -> None:
    """Complaint 15."""
    model = fresh(name)
    before = traces(model)
    reader = Count(fail_at=2 if ending == "reader fails" else None)
    with torch.inference_mode():
        if ending == "well":
            with HookManager(model, reader) as hooks:
                hooks.run(pixels(name))
        else:
            wrong = pixels(name) if ending == "reader fails" else torch.zeros(1, 3, 32, 33)[:, :2]
            with pytest.raises((RuntimeError, ValueError, AssertionError)), HookManager(model, reader) as hooks:
                hooks.run(wrong)
        assert traces(model) == before
        with HookManager(model, Count()) as hooks:  # and it can be attached again
            hooks.run(pixels(name))


def test_other_peoples_hooks_survive() -> None:
    """Complaint 15: clean-up removes its own handles only."""
    model, calls = fresh("timm dinov2"), []
    model.blocks[0].attn.register_forward_hook(lambda *_: calls.append("theirs"))
    with torch.inference_mode():
        with HookManager(model, Count()) as hooks:
            hooks.run(pixels("timm dinov2"))
        model(pixels("timm dinov2"))
    assert calls == ["theirs", "theirs"]


def test_managers_nest_and_both_read() -> None:
    outer, inner = Count(), Count()
    model = fresh("timm dinov2")
    with torch.inference_mode(), HookManager(model, outer), HookManager(model, inner) as hooks:
        hooks.run(pixels("timm dinov2"))
    assert (outer.seen, inner.seen) == (LAYERS, LAYERS)


def test_only_the_layers_asked_for_are_read() -> None:
    reader = Count()
    with torch.inference_mode(), HookManager(fresh("timm dinov2"), reader, layers=[1]) as hooks:
        hooks.run(pixels("timm dinov2"))
    assert reader.seen == 1
    with pytest.raises(NotFoundError, match="Layer 7 does not exist"):
        HookManager(module("timm dinov2"), layers=[7])


def test_siglips_pooling_attention_is_not_a_layer() -> None:
    """It makes one more SDPA call, with one query: 13 for 12 layers."""
    reader = Count()
    with torch.inference_mode(), HookManager(fresh("timm siglip"), reader) as hooks:
        hooks.run(pixels("timm siglip"))
    assert reader.seen == LAYERS


@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "data parallel"])
def test_wrapped_models_are_looked_through(how: str) -> None:
    """Complaint 23: a compiled call ignores hooks that came after it."""
    model, x, reader = fresh("timm dinov2"), pixels("timm dinov2"), Count()
    with torch.inference_mode():
        plain = model(x)
        wrapped: nn.Module = model
        if how == "torch.compile":
            wrapped = torch.compile(model, backend="eager")
        elif how == "module.compile":
            model.compile(backend="eager")
        else:
            wrapped = nn.DataParallel(model)
        if how != "data parallel":
            wrapped(x)
        assert unwrap(wrapped) is model
        compiled = model._compiled_call_impl
        with HookManager(wrapped, reader) as hooks:
            attached = hooks.run(x)
        assert model._compiled_call_impl is compiled
    assert reader.seen == LAYERS
    torch.testing.assert_close(attached, plain)


def test_a_deep_copy_of_a_model_is_free_of_its_hooks_once_they_are_gone() -> None:
    model = fresh("openclip")
    with torch.inference_mode(), HookManager(model, Count()) as hooks:
        hooks.run(pixels("openclip"))
    assert traces(copy.deepcopy(model)) == traces(model)


def test_dropout_in_training_is_refused() -> None:
    model = timm_vit(drop_rate=0.1).train()
    with pytest.raises(InputError, match="training mode with dropout"), HookManager(model, Count()):
        pass


def test_training_without_dropout_is_read_and_checkpointing_counts_the_forward_once() -> None:
    reader, model = Count(), timm_vit().train()
    model.set_grad_checkpointing(True)
    with HookManager(model, reader) as hooks:
        hooks.run(pixels("timm dinov2"))
    assert reader.seen == LAYERS and all(count == 1 for count in hooks.fired.values())


def test_eager_attention_is_refused_with_what_to_do() -> None:
    """Complaints 2, 3: look at what runs, not at what the configuration says."""
    model = fresh("hf dinov2")
    model.set_attn_implementation("eager")
    with pytest.raises(NotFoundError, match="attn_implementation='sdpa'"), HookManager(model, Count()) as hooks:
        hooks.run(pixels("hf dinov2"))


def test_timm_without_fused_attention_is_refused_with_what_to_do() -> None:
    """Complaints 1, 4."""
    model = fresh("timm dinov2")
    model.blocks[1].attn.fused_attn = False
    with (
        torch.inference_mode(),
        pytest.raises(NotFoundError, match=r"blocks\.1\.attn.*fused_attn"),
        HookManager(model, Count()) as hooks,
    ):
        hooks.run(pixels("timm dinov2"))


def test_differential_attention_is_refused() -> None:
    model = timm_vit(attn_layer="diff").eval()
    with pytest.raises((InputError, NotFoundError)), torch.inference_mode():
        prove(model, pixels("timm dinov2", batch=1))


def test_a_block_that_never_runs_the_model_is_an_error() -> None:
    """Complaint 16: a recorder that recorded nothing is an error."""
    with pytest.raises(NotFoundError, match="Nothing was read"), HookManager(module("timm dinov2"), Count()):
        pass


def test_a_scripted_model_is_refused() -> None:
    with pytest.raises(InputError, match="TorchScript"):
        find_sites(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)))


@pytest.mark.parametrize("what", ["ResPostBlock", "ParallelScalingBlock"])
def test_blocks_that_cannot_be_decomposed_by_head_are_refused(what: str) -> None:
    from timm.models import vision_transformer

    model = timm_vit(block_fn=getattr(vision_transformer, what)).eval()
    with pytest.raises((InputError, NotFoundError), match=r"post-norm|No attention layer"), torch.inference_mode():
        prove(model, pixels("timm dinov2", batch=1))


def test_scaled_cosine_attention_is_refused() -> None:
    with pytest.raises(InputError, match="cosine"):
        find_sites(openclip_tower(custom={"scale_cosine_attn": True}))


def test_averaged_weights_are_refused() -> None:
    """Complaint 7: need_weights=True would hand out the mean over heads."""
    model = fresh("openclip")

    def attention(self: Any, q_x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.attn(q_x, q_x, q_x, need_weights=True)[0]

    block = model.transformer.resblocks[0]
    block.attention = types.MethodType(attention, block)
    with pytest.raises(InputError, match="need_weights"), torch.inference_mode(), HookManager(model, Count()) as hooks:
        hooks.run(pixels("openclip"))


def test_wrongly_declared_heads_are_refused() -> None:
    """Complaint 14."""
    model = fresh("timm dinov2")
    model.blocks[0].attn.qkv = nn.Linear(32, 96)
    attention = model.blocks[0].attn
    attention.num_heads = 2
    sites = find_sites(model)
    attention.num_heads, attention.head_dim = 4, 8
    handle = types.SimpleNamespace(module=model, sites=sites)
    manager = HookManager(handle, Count())
    with pytest.raises(InputError, match="declares 2 heads"), torch.inference_mode(), manager:
        model(pixels("timm dinov2"))
