"""What cannot be read faithfully is refused with a sentence that says what to do, and leaves the model as it was."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import HEADS, LAYERS, PATCH, WIDTH, OwnAttention, Patches, fresh, openclip_tower, pixels, timm_vit
from torch import Tensor, nn

from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.proof import prove
from sinklab.hooks.site import AttentionParts, find_sites, register


class Count(Reader):
    def __init__(self) -> None:
        self.seen = 0

    def attention(self, site: Any, call: Any) -> None:
        self.seen += 1


def attempt(model: nn.Module, name: str = "timm dinov2") -> int:
    """How many calls of attention are seen in one forward."""
    reader = Count()
    with torch.inference_mode(), HookManager(model, reader) as hooks:
        hooks.run(pixels(name))
    return reader.seen


def hooks_on(model: nn.Module) -> int:
    return sum(len(child._forward_hooks) + len(child._forward_pre_hooks) for child in model.modules())


@pytest.fixture
def fusing_switched_off() -> Iterator[None]:
    """What TIMM_FUSED_ATTN=0 in the environment does when timm is imported."""
    import timm.layers

    timm.layers.set_fused_attn(False)
    yield
    timm.layers.set_fused_attn(True)


@pytest.mark.usefixtures("fusing_switched_off")
def test_a_timm_model_built_with_fusing_off_is_refused_and_told_how_to_switch_it_on() -> None:
    """Complaints 1, 4: setting the flag on a model that exists changes nothing, so the message says what does."""
    import timm.layers

    model = timm_vit().eval()
    timm.layers.set_fused_attn(True)  # too late for this model
    with pytest.raises(NotFoundError, match="module.fused_attn = True on each attention"):
        attempt(model)
    for block in model.blocks:
        block.attn.fused_attn = True
    assert attempt(model) == len(model.blocks)


def test_a_configuration_that_says_eager_over_fused_modules_does_not_matter() -> None:
    """Complaint 3: what counts is the call that is made."""
    model = fresh("timm dinov2")
    model.config = types.SimpleNamespace(_attn_implementation="eager")
    assert attempt(model) == len(model.blocks)


def test_a_site_that_never_fires_is_named() -> None:
    """Complaint 16."""
    model = fresh("timm dinov2")
    model.blocks = nn.Sequential(model.blocks[0], nn.Identity())
    model.unused = fresh("timm dinov2").blocks[1]
    with pytest.raises(NotFoundError, match=r"'unused\.attn' fired 0 times.*1 of 2"):
        attempt(model)
    with (
        pytest.raises(NotFoundError, match=r"1 of 2 attention sites never fired.*'unused\.attn'"),
        torch.inference_mode(),
        HookManager(model, Count()),
    ):
        model(pixels("timm dinov2"))
    assert hooks_on(model) == 0


def test_an_attention_that_runs_twice_in_a_forward_is_an_error_and_not_an_average() -> None:
    """Weights shared between layers: one module, two layers, so the layers cannot be told apart."""
    model = fresh("timm dinov2")
    model.blocks[1].attn = model.blocks[0].attn
    with pytest.raises(NotFoundError, match=r"'blocks\.0\.attn' fired 2 times in one forward"):
        attempt(model)


def test_two_softmaxes_in_one_attention_are_refused() -> None:
    """Differential attention."""
    model = timm_vit(attn_layer="diff").eval()
    with pytest.raises(NotFoundError, match=r"2 times|No attention layer"):
        attempt(model)


def test_dropout_inside_the_attention_call_is_refused_even_in_eval_mode() -> None:
    class Noisy(OwnAttention):
        def forward(self, x: Tensor) -> Tensor:
            heads = self.into(x).unflatten(-1, (3, *self.shape)).permute(2, 0, 3, 1, 4)
            return self.back(F.scaled_dot_product_attention(*heads, dropout_p=0.1).transpose(1, 2).flatten(2))

    with pytest.raises(InputError, match="Attention dropout is on"):
        attempt(_stack_of(Noisy))


def test_stochastic_depth_in_training_is_refused_and_in_eval_is_not() -> None:
    model = timm_vit(drop_path_rate=0.2)
    with pytest.raises(InputError, match=r"training mode with dropout 0\.2"):
        attempt(model.train())
    attempt(model.eval())


def test_an_attention_that_is_not_batched_by_head_is_refused_with_its_shape() -> None:
    class Flat(OwnAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.into(x).chunk(3, dim=-1)
            return self.back(F.scaled_dot_product_attention(q, k, v))

    with pytest.raises(InputError, match=r"arrived with shape \(2, 16, 24\)"):
        attempt(_stack_of(Flat))


class _OwnBlock(nn.Module):
    def __init__(self, attention: type[OwnAttention]) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), attention()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.norm2(x)


def _stack_of(attention: type[OwnAttention]) -> nn.Module:
    torch.manual_seed(0)
    return Patches(lambda: _OwnBlock(attention)).eval()


@pytest.mark.parametrize("heads", [2, 8])
def test_a_registered_class_with_wrong_heads_is_refused(heads: int) -> None:
    """Complaint 14: what is declared is checked against what runs, and never the other way round."""

    class Misdescribed(OwnAttention):
        pass

    register(Misdescribed, lambda module: AttentionParts(heads=heads, projection=module.back))
    with pytest.raises(InputError, match=rf"declares {heads} heads of dim {24 // heads}.*4 heads of dim 6"):
        attempt(_stack_of(Misdescribed))


def test_heads_that_are_written_back_in_another_order_are_refused_by_the_proof() -> None:
    """Complaint 13: the right shapes, the wrong head: only the sum of the heads' updates shows it."""

    class Shuffled(OwnAttention):
        def forward(self, x: Tensor) -> Tensor:
            heads = self.into(x).unflatten(-1, (3, *self.shape)).permute(2, 0, 3, 1, 4)
            return self.back(F.scaled_dot_product_attention(*heads).flip(1).transpose(1, 2).flatten(2))

    model = _stack_of(Shuffled)
    with pytest.raises(InputError, match="do not add up to what the block adds"), torch.inference_mode():
        prove(model, pixels("timm dinov2"))


def test_values_multiplied_onto_the_output_are_not_taken_for_attention() -> None:
    """Complaint 8: a module whose output is not A v W_O, though it does call attention once, fails its proof."""

    class Decorated(OwnAttention):
        def forward(self, x: Tensor) -> Tensor:
            heads = self.into(x).unflatten(-1, (3, *self.shape)).permute(2, 0, 3, 1, 4)
            z = F.scaled_dot_product_attention(*heads)
            return self.back((z @ heads[2].transpose(-1, -2) @ heads[2]).transpose(1, 2).flatten(2))

    with pytest.raises(InputError, match="not faithful"), torch.inference_mode():
        prove(_stack_of(Decorated), pixels("timm dinov2"))


def test_an_output_that_depends_on_being_watched_is_refused() -> None:
    model = fresh("timm dinov2")
    block = model.blocks[0]
    block.register_forward_hook(lambda module, args, result: result + 0.1 * len(module.attn._forward_hooks))
    with pytest.raises(InputError, match="Attached, the model's output changes"), torch.inference_mode():
        prove(model, pixels("timm dinov2"))


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_multihead_attention_that_appends_keys_is_refused(option: str) -> None:
    model = openclip_tower().eval()
    model.transformer.resblocks[1].attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **{option: True})
    with pytest.raises(InputError, match="appends keys"):
        attempt(model)
    assert hooks_on(model) == 0
    assert all("forward" not in block.attn.__dict__ for block in model.transformer.resblocks)


def test_attaching_one_manager_twice_is_refused_and_the_first_stays_attached() -> None:
    model, reader = fresh("timm dinov2"), Count()
    with torch.inference_mode(), HookManager(model, reader) as hooks:
        with pytest.raises(InputError, match="already attached"):
            hooks.__enter__()
        hooks.run(pixels("timm dinov2"))
    assert reader.seen == LAYERS
    with pytest.raises(InputError, match="inside its with-block"):
        hooks.run(pixels("timm dinov2"))


def test_an_attention_that_raises_leaves_nothing_behind() -> None:
    """Complaint 15: the failure is inside an attention module, after its hooks have begun."""
    model = fresh("timm dinov2")

    def fail(*_: Any) -> None:
        raise RuntimeError("the projection failed")

    theirs = model.blocks[1].attn.proj.register_forward_hook(fail)
    reader = Count()
    with torch.inference_mode(), HookManager(model, reader) as hooks:
        with pytest.raises(RuntimeError, match="the projection failed"):
            hooks.run(pixels("timm dinov2"))
        theirs.remove()
        hooks.run(pixels("timm dinov2"))  # the same manager goes on, and is not confused about who runs
    assert reader.seen == 2 * LAYERS and hooks_on(model) == 0


def test_a_model_without_blocks_is_told_what_is_looked_for() -> None:
    with pytest.raises(NotFoundError, match=r"No attention layer.*sinklab\.sites\.register"):
        find_sites(nn.Sequential(nn.Conv2d(3, WIDTH, PATCH, PATCH), nn.ReLU()))
