"""What an edit does to one head: exactly what it says, on every family alike, and nothing to anything else."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, HEADS, fresh, module, pixels
from torch import Tensor

import sinklab
from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.seam import AttentionCall
from sinklab.interventions.edit import Edit
from sinklab.interventions.plan import plan_text, read_plan

LAYER, HEAD, KEY = 1, 2, 3


class Calls(Reader):
    """The attention calls of a forward, by layer."""

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}

    def attention(self, site: Any, call: AttentionCall) -> None:
        self.calls[site.layer] = call


def exact(name: str) -> torch.nn.Module:
    """The family's model in float64."""
    return fresh(name).double()


def inputs(name: str, model: torch.nn.Module) -> Tensor:
    x = pixels(name)
    return x.to(next(model.parameters()).dtype) if x.is_floating_point() else x


def run(model: torch.nn.Module, x: Tensor, *edits: Edit) -> tuple[Any, dict[int, AttentionCall]]:
    reader = Calls()
    with torch.inference_mode(), HookManager(model, reader) as hooks, hooks.edit(list(edits)):
        found = hooks.run(x)
    return found, reader.calls


def z_of(calls: dict[int, AttentionCall], layer: int = LAYER) -> Tensor:
    z = calls[layer].z
    assert z is not None
    return z


@pytest.mark.parametrize("name", FAMILIES)
def test_a_value_edit_moves_the_heads_update_by_the_attention_times_the_step(name: str) -> None:
    """U' − U = A_:p (u'_p − u_p), in float64."""
    model = exact(name)
    x = inputs(name, model)
    _, before = run(model, x)
    call = before[LAYER]
    value = torch.linspace(-1, 1, call.v.shape[-1], dtype=torch.float64)
    _, after = run(model, x, Edit.set_value(value, head=(LAYER, HEAD), at=KEY))
    paid = call.pattern()[:, HEAD, :, KEY]  # [B Q]
    step = value - call.v[:, call.kv_head[HEAD], KEY]  # [B D]
    expected = paid[..., None] * step[:, None]
    moved = z_of(after)[:, HEAD] - z_of(before)[:, HEAD]
    weight = next(s for s in sinklab.sites.find_sites(model) if s.layer == LAYER).output_weight()[HEAD]  # [C D]
    torch.testing.assert_close(moved @ weight.T, expected @ weight.T, rtol=1e-9, atol=1e-9)
    assert float(moved.abs().max()) > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_routing_removal_is_the_sequence_without_the_key(name: str) -> None:
    """A model that truly lacks the key, for that head: k and v without it, in float64."""
    model = exact(name)
    x = inputs(name, model)
    _, before = run(model, x)
    _, after = run(model, x, Edit.route(head=(LAYER, HEAD), at=KEY))
    call, kv = before[LAYER], before[LAYER].kv_head[HEAD]
    left = [key for key in range(call.k.shape[2]) if key != KEY]
    bias = call.bias(slice(None), slice(None), slice(None))
    if bias is not None:
        bias = bias.expand(len(call.q), call.q.shape[1], call.q.shape[2], call.k.shape[2])
        bias = bias[:, HEAD, :, left].to(torch.float64)
    k, v = call.k[:, kv, left], call.v[:, kv, left]
    expected = F.scaled_dot_product_attention(call.q[:, HEAD], k, v, attn_mask=bias, scale=call.scale)
    torch.testing.assert_close(z_of(after)[:, HEAD], expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(z_of(after)[:, HEAD], z_of(before)[:, HEAD], atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_heads_and_earlier_layers_keep_every_bit(name: str) -> None:
    _, before = run(module(name), pixels(name))
    for edit in (Edit.zero(head=(LAYER, HEAD), at=KEY), Edit.route(head=(LAYER, HEAD), at="sink")):
        _, after = run(module(name), pixels(name), edit)
        others = [head for head in range(HEADS) if head != HEAD]
        assert torch.equal(z_of(after)[:, others], z_of(before)[:, others])
        assert torch.equal(z_of(after, 0), z_of(before, 0))
        for part in ("q", "k", "v"):
            assert torch.equal(getattr(after[LAYER], part), getattr(before[LAYER], part))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["timm dinov2 registers", "openclip", "timm grouped rope", "hf llama"])
def test_the_value_already_there_leaves_every_bit(name: str, dtype: torch.dtype) -> None:
    model = fresh(name).to(dtype)
    x = inputs(name, model)
    plain, calls = run(model, x)
    call = calls[LAYER]
    edits = [Edit.scale(1.0, head=(LAYER, head), at="sink") for head in range(HEADS)]
    kv = call.kv_head[HEAD]
    edits += [Edit.set_value(call.v[0, kv, 4], head=(LAYER, HEAD), at=lambda c: torch.tensor([[4]] * len(c.q)))]
    one = x[:1]
    _, alone = run(model, one)
    edits[-1] = Edit.set_value(alone[LAYER].v[0, kv, 4], head=(LAYER, HEAD), at=4)
    same, _ = run(model, one, *edits)
    plain, _ = run(model, one)
    assert torch.equal(tensor(same), tensor(plain))


def tensor(found: Any) -> Tensor:
    found = getattr(found, "last_hidden_state", found)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("name", ["timm dinov2", "hf llama", "timm beit"])
def test_rows_of_the_pattern_sum_to_one_after_routing_removal(name: str) -> None:
    """With every value 1, z is the row's sum."""
    model = exact(name)
    tokens, width = FAMILIES[name].tokens, run(model, inputs(name, model))[1][LAYER].v.shape[-1]

    def everywhere(call: AttentionCall) -> Tensor:
        return torch.arange(tokens).expand(len(call.q), -1)

    edits = [
        Edit.set_value([1.0] * width, head=(LAYER, HEAD), at=everywhere),
        Edit.route(head=(LAYER, HEAD), at=KEY),
        Edit.route(head=(LAYER, HEAD), at=5),
    ]
    z = z_of(run(model, inputs(name, model), *edits)[1])[:, HEAD]
    torch.testing.assert_close(z, torch.ones_like(z), rtol=1e-12, atol=1e-12)


def test_a_query_that_loses_its_only_key_keeps_what_it_had() -> None:
    """In a causal model query 0 sees key 0 alone: there is no row left to normalise."""
    model = exact("hf llama")
    x = inputs("hf llama", model)
    _, before = run(model, x)
    _, after = run(model, x, Edit.route(head=(LAYER, HEAD), at=0))
    assert torch.equal(z_of(after)[:, HEAD, 0], z_of(before)[:, HEAD, 0])
    assert not torch.allclose(z_of(after)[:, HEAD, 1:], z_of(before)[:, HEAD, 1:])
    assert bool(torch.isfinite(z_of(after)).all())


def test_two_tokens_by_hand() -> None:
    """Logits 0 and log 3 give A = (1/4, 3/4); v = 8 and 4 give z = 5. Zeroing key 1 leaves 2, hiding it leaves 8."""
    from sinklab.hooks.change import Changes

    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 1.0985122886681098]).reshape(1, 1, 2, 1)
    v = torch.tensor([8.0, 4.0]).reshape(1, 1, 2, 1)
    call = AttentionCall(q=q, k=k, v=v, mask=None, is_causal=False, scale=1.0, grouped=False)
    first = torch.zeros(1, dtype=torch.int64)
    assert call.run().item() == pytest.approx(5.0, abs=1e-3)
    zeroed, hidden = Changes(call), Changes(call)
    zeroed.set_value(first, first, first + 1, torch.zeros(1, 1))
    hidden.hide(first, first, first + 1)
    assert zeroed.applied(call.run()).item() == pytest.approx(2.0, abs=1e-3)
    assert hidden.applied(call.run()).item() == pytest.approx(8.0, abs=1e-6)


def test_the_place_sink_is_the_key_with_the_largest_inflow() -> None:
    model, x = module("timm dinov2"), pixels("timm dinov2")
    _, before = run(model, x)
    sink = before[LAYER].pattern().mean(2).argmax(-1)[:, HEAD]  # [B]
    by_name = run(model, x, Edit.zero(head=(LAYER, HEAD), at="sink"))[0]
    by_number = run(model, x, Edit.zero(head=(LAYER, HEAD), at=lambda call: sink))[0]
    assert torch.equal(by_name, by_number)


def test_a_kind_names_all_its_tokens() -> None:
    handle = sinklab.attach(fresh("timm dinov2 registers"))
    x = pixels("timm dinov2 registers")
    reader = Calls()
    with torch.inference_mode(), HookManager(handle, reader) as hooks:
        with hooks.edit([Edit.zero(head=(LAYER, HEAD), at="register")]):
            by_kind = hooks.run(x)
        with hooks.edit([Edit.zero(head=(LAYER, HEAD), at=index) for index in (1, 2, 3, 4)]):
            one_by_one = hooks.run(x)
        plain = hooks.run(x)
    assert torch.equal(by_kind, one_by_one) and not torch.equal(by_kind, plain)


def test_later_edits_of_a_head_win_and_hidden_keys_add_up() -> None:
    model, x = exact("timm dinov2"), inputs("timm dinov2", exact("timm dinov2"))
    value = torch.ones(8, dtype=torch.float64)
    twice = run(model, x, Edit.zero(head=(1, 2), at=3), Edit.set_value(value, head=(1, 2), at=3))[0]
    once = run(model, x, Edit.set_value(value, head=(1, 2), at=3))[0]
    assert torch.equal(twice, once)


def test_factors_of_one_place_multiply_and_a_zero_stays_zero() -> None:
    """Each edit acts on what the one before left."""
    model = exact("timm dinov2")
    x = inputs("timm dinov2", model)
    twice = run(model, x, Edit.scale(2.0, head=(1, 2), at=3), Edit.scale(3.0, head=(1, 2), at=3))[0]
    assert torch.equal(twice, run(model, x, Edit.scale(6.0, head=(1, 2), at=3))[0])
    zeroed = run(model, x, Edit.zero(head=(1, 2), at=3), Edit.scale(2.0, head=(1, 2), at=3))[0]
    assert torch.equal(zeroed, run(model, x, Edit.zero(head=(1, 2), at=3))[0])


def test_two_managers_may_not_edit_one_head_and_may_edit_two() -> None:
    """Neither would see what the other did."""
    model, x = module("timm dinov2"), pixels("timm dinov2")
    one, other, third = Edit.zero(head=(0, 1), at=3), Edit.route(head=(0, 1), at=4), Edit.route(head=(0, 2), at=4)
    with torch.inference_mode(), HookManager(model) as first, HookManager(model) as second:
        with first.edit([one]):
            with pytest.raises(InputError, match="Another HookManager"), second.edit([other]):
                pass
            with second.edit([third]):
                both = first.run(x)
        with second.edit([other]):  # free again
            second.run(x)
    assert torch.equal(both, run(model, x, one, third)[0])
    with pytest.raises(InputError, match="attend="), HookManager(model, attend=lambda s, c: c.run()) as hooks:
        hooks.expect_nothing()
        with hooks.edit([one]):
            pass


def test_places_and_numbers_as_tables_hold_them_are_taken() -> None:
    import numpy as np

    assert Edit.zero(head=(np.int16(1), np.int64(2)), at=np.int32(3)) == Edit.zero(head=(1, 2), at=3)
    assert Edit.zero(head=(1, 2), at=torch.tensor(3)) == Edit.zero(head=(1, 2), at=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Edit.zero(head=3),  # type: ignore[arg-type]
        lambda: Edit.zero(head=(0, 1, 2)),  # type: ignore[arg-type]
        lambda: Edit.set_value(1.0, head=(0, 1)),  # type: ignore[arg-type]
        lambda: Edit.set_value("12345678", head=(0, 1)),  # type: ignore[arg-type]
        lambda: Edit.set_value(torch.zeros(2, 8), head=(0, 1)),
        lambda: Edit.set_value([float("nan")], head=(0, 1)),
        lambda: Edit.scale("abc", head=(0, 1)),  # type: ignore[arg-type]
        lambda: Edit.scale(float("inf"), head=(0, 1)),
        lambda: Edit.scale(True, head=(0, 1)),
        lambda: Edit.from_dict({"edit": "scale", "layer": 0, "head": 0, "factor": True}),
        lambda: Edit.from_dict({"edit": "value", "layer": 0, "head": 0, "value": "12"}),
    ],
)
def test_a_natural_mistake_is_a_sentence(wrong: Any) -> None:
    with pytest.raises(InputError):
        wrong()


def test_what_is_no_list_of_edits_is_refused() -> None:
    with HookManager(module("timm dinov2")) as hooks:
        hooks.expect_nothing()
        for wrong in (Edit.zero(head=(0, 0)), {"edit": "zero"}, "zero", [{"edit": "zero"}]):
            with pytest.raises(InputError), hooks.edit(wrong):  # type: ignore[arg-type]
                pass


def test_edits_nest_and_end_with_their_block() -> None:
    model, x = module("timm dinov2"), pixels("timm dinov2")
    first, second = Edit.zero(head=(0, 1), at=2), Edit.route(head=(1, 3), at=0)
    with torch.inference_mode(), HookManager(model) as hooks:
        with hooks.edit([first]):
            with hooks.edit([second]):
                both = hooks.run(x)
            only = hooks.run(x)
        plain = hooks.run(x)
    assert torch.equal(both, run(model, x, first, second)[0])
    assert torch.equal(only, run(model, x, first)[0])
    assert torch.equal(plain, run(model, x)[0])


def test_nothing_is_left_after_an_error_inside_an_edit() -> None:
    """Complaint 15."""
    model, x = fresh("openclip"), pixels("openclip")
    with torch.inference_mode():
        plain = model(x)
        before = {name: sorted(child.__dict__) for name, child in model.named_modules()}
        with (
            pytest.raises(RuntimeError, match="in the middle"),
            HookManager(model) as hooks,
            hooks.edit([Edit.zero(head=(0, 1), at=2)]),
        ):
            hooks.run(x)
            raise RuntimeError("in the middle")
        assert {name: sorted(child.__dict__) for name, child in model.named_modules()} == before
        assert not any(child._forward_hooks or child._forward_pre_hooks for child in model.modules())
        assert torch.equal(model(x), plain)
        with (
            HookManager(model) as hooks,
            pytest.raises(ZeroDivisionError),
            hooks.edit([Edit.zero(head=(0, 1), at=_fails)]),
        ):
            hooks.run(x)
        assert torch.equal(model(x), plain)


def _fails(call: AttentionCall) -> Tensor:
    raise ZeroDivisionError


def test_an_edit_that_never_fires_is_an_error() -> None:
    """Complaint 16."""
    model = module("timm dinov2")
    with torch.inference_mode(), HookManager(model) as hooks:
        with pytest.raises(NotFoundError, match="zero at 2 in head 1:0"), hooks.edit([Edit.zero(head=(1, 0), at=2)]):
            pass
        hooks.expect_nothing()


def test_what_does_not_exist_is_refused_by_name() -> None:
    model, x = module("timm dinov2"), pixels("timm dinov2")
    for edit, words in (
        (Edit.zero(head=(9, 0)), "Layer 9"),
        (Edit.zero(head=(0, 9)), "Head 9 does not exist"),
        (Edit.zero(head=(0, 0), at=99), "There are 17 tokens"),
        (Edit.zero(head=(0, 0), at="register"), "sinklab handle"),
        (Edit.set_value([1.0], head=(0, 0)), "has 8 numbers, not 1"),
        (Edit(kind="donor", layer=0, head=0), "sinklab patch"),
    ):
        with (
            torch.inference_mode(),
            pytest.raises((InputError, NotFoundError), match=words),
            HookManager(model) as hooks,
            hooks.edit([edit]),
        ):
            hooks.run(x)
    for wrong in ({"kind": "melt"}, {"head": -1}, {"layer": 0.5}, {"at": "nowhere"}, {"at": 1.5}, {"value": (1.0,)}):
        with pytest.raises(InputError):
            Edit(**({"kind": "zero", "layer": 0, "head": 0} | wrong))
    with pytest.raises(InputError, match="whole numbers"), torch.inference_mode():
        run(model, x, Edit.zero(head=(0, 0), at=lambda call: torch.tensor([0.5, 0.5])))


EDITS = [
    Edit.zero(head=(5, 3)),
    Edit.set_value([0.5, -1.25], head=(0, 2), at=-1),
    Edit.scale(0.1, head=(1, 1), at="patch"),
    Edit.route(head=(2, 0), at=7),
]


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan_text(EDITS))
    assert read_plan(tmp_path / "plan.json") == EDITS
    lines = [
        "[[edits]]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in edit.as_dict().items())
        for edit in EDITS
    ]
    (tmp_path / "plan.toml").write_text("\n\n".join(lines))
    assert read_plan(tmp_path / "plan.toml") == EDITS
    assert copy.deepcopy(EDITS) == EDITS and len({hash(edit) for edit in EDITS}) == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("{}", "no list of edits"),
        ('{"edits": []}', "no list of edits"),
        ('[{"edit": "zero"}]', "Edit 0"),
        ('[{"edit": "zero", "layer": 0, "head": 0, "when": 1}]', "no 'when'"),
        ('[{"edit": "zero", "layer": 0, "head": "x"}]', "whole number"),
        ('[{"edit": "value", "layer": 0, "head": 0, "value": ["a"]}]', "cannot be read"),
        ('[{"edit": "melt", "layer": 0, "head": 0}]', "not 'melt'"),
        ('["zero"]', "written with edit, layer and head"),
    ],
)
def test_a_wrong_plan_is_named_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InputError, match=words):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(NotFoundError, match="no plan"):
        read_plan(tmp_path / "absent.json")


def test_an_edit_at_a_functions_place_cannot_be_written_down() -> None:
    with pytest.raises(InputError, match="function"):
        Edit.zero(head=(0, 0), at=_fails).as_dict()
