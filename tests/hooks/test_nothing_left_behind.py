"""Attaching changes nothing for good, whatever is wrapped round the model and whatever goes wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import LAYERS, fresh, module, pixels, timm_vit
from torch import nn
from torch.utils.checkpoint import checkpoint

from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.proof import prove
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


class Checkpointed(nn.Module):
    """The tiny ViT with every block checkpointed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.vit: Any = timm_vit().train()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.vit.patch_embed(x)
        for block in self.vit.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward", ["tensor", "function"])
def test_checkpointing_runs_each_block_twice_and_the_forward_alone_is_read(reentrant: bool, backward: str) -> None:
    """The second run, in backward, is neither read nor counted nor an error; gradients are the plain ones."""
    model, reader, x = Checkpointed(reentrant), Count(), pixels("timm dinov2")
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.vit.blocks.parameters()]
    model.zero_grad()
    with HookManager(model, reader) as hooks:
        loss = hooks.run(x).sum()
        loss.backward() if backward == "tensor" else torch.autograd.backward(loss)
    assert reader.seen == LAYERS and all(count == 1 for count in hooks.fired.values())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.vit.blocks.parameters(), plain, strict=True))


def test_an_edit_is_refused_where_checkpointing_would_lose_it() -> None:
    model = Checkpointed(False)
    with (
        pytest.raises(InputError, match="gradient checkpointing"),
        HookManager(model, attend=lambda site, call: call.run() * 2) as hooks,
    ):
        hooks.run(pixels("timm dinov2")).sum().backward()
    assert traces(model) == traces(Checkpointed(False))


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_transformer_encoder_cannot_skip_the_stand_in(batch_first: bool) -> None:
    """Complaint 6: nn.TransformerEncoder's fast path would pass by even a replaced attention."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=True, batch_first=batch_first)
    model, x, reader = (
        nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval(),
        torch.randn(2, 7, 32),
        Count(),
    )
    with torch.inference_mode():
        plain = model(x)
        with HookManager(model, reader) as hooks:
            attached = hooks.run(x)
        assert all(proof.update is not None and proof.update < 1e-5 for proof in prove(model, x))
    assert reader.seen == LAYERS
    torch.testing.assert_close(attached, plain)


def test_distributed_data_parallel_is_looked_through(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, reader = fresh("timm dinov2").requires_grad_(True), Count()
        wrapped = nn.parallel.DistributedDataParallel(model)
        with torch.inference_mode(), HookManager(wrapped, reader) as hooks:
            hooks.run(pixels("timm dinov2"))
            wrapped(pixels("timm dinov2"))  # the wrapper's own forward is seen as well
        assert reader.seen == 2 * LAYERS and unwrap(wrapped) is model
    finally:
        torch.distributed.destroy_process_group()
