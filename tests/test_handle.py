"""The handle: one object that knows its module, tokens, sites and provenance, however it came to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from command_line import TINY, tiny_state, write_checkpoint
from torch import nn

import sinklab
from sinklab.errors import InputError, NotFoundError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> sinklab.Model:
    return sinklab.load(str(write_checkpoint(tmp_path_factory.mktemp("model"))), offline=True)


@pytest.fixture
def module() -> nn.Module:
    module = timm.create_model("vit_tiny_patch16_224", **TINY).eval()
    module.load_state_dict(tiny_state())
    return module


def pixels(side: int = 32) -> torch.Tensor:
    return torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))


def test_a_handle_gives_the_final_tokens_of_the_librarys_own_module(model: sinklab.Model, module: nn.Module) -> None:
    with torch.no_grad():
        assert torch.equal(model(pixels()), module.forward_features(pixels()))  # type: ignore[operator]


def test_sites_are_in_order_and_name_modules_that_exist(model: sinklab.Model) -> None:
    modules = dict(model.module.named_modules())
    assert [site.layer for site in model.sites] == [0, 1]
    assert all(modules[site.name] is site.attention for site in model.sites)
    assert [(site.heads, site.kv_heads, site.head_dim) for site in model.sites] == [(2, 2, 16)] * 2


def test_loading_changes_no_weight(model: sinklab.Model) -> None:
    held = model.module.state_dict()
    assert all(torch.equal(held[name], value) for name, value in tiny_state().items())


def test_device_and_dtype_are_the_parameters_own(module: nn.Module) -> None:
    assert sinklab.attach(module).dtype == torch.float32
    assert sinklab.attach(module.to(torch.bfloat16)).dtype == torch.bfloat16
    assert sinklab.attach(module).device.type == "cpu"


def test_an_attached_module_is_the_very_same_object(module: nn.Module) -> None:
    handle = sinklab.attach(module, name="mine")
    assert handle.module is module and handle.name == "mine"
    assert handle.tokens.prefix == ("cls",) and handle.tokens.patch_size == (16, 16)


def test_a_wrapped_module_is_looked_through(module: nn.Module) -> None:
    assert sinklab.attach(nn.DataParallel(module)).module is module


def test_a_module_without_attention_is_refused() -> None:
    tokens = sinklab.TokenMap(prefix=(), patch_size=(16, 16))
    with pytest.raises((InputError, NotFoundError), match="attention"):
        sinklab.attach(nn.Sequential(nn.Linear(4, 4)), tokens=tokens)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("xcit_nano_12_p16_224", "no plain ViT blocks"),
        ("cait_xxs24_224", "no plain ViT blocks"),
        ("naflexvit_base_patch16_gap", "sequences of patches"),
        ("volo_d1_224", "no plain ViT blocks"),
        ("maxvit_tiny_rw_224", "no plain ViT blocks"),
        ("swin_tiny_patch4_window7_224", "no plain ViT blocks"),
        ("convnext_atto", "no plain ViT blocks"),
    ],
)
def test_timms_other_networks_are_refused_with_a_sentence(name: str, said: str) -> None:
    with torch.device("meta"):
        module = timm.create_model(name).eval()
    with pytest.raises(InputError, match=said):
        sinklab.attach(module)


@pytest.mark.parametrize("given", ["demo", None, nn.Linear, nn.Linear(3, 3)], ids=["text", "None", "class", "Linear"])
def test_what_is_no_model_is_refused_with_a_sentence(given: object) -> None:
    with pytest.raises(InputError, match="nn.Module|tokens"):
        sinklab.attach(given)  # type: ignore[arg-type]


def test_attention_with_fusing_off_is_refused_with_the_way_to_switch_it_on(module: nn.Module) -> None:
    for block in module.blocks:  # type: ignore[union-attr]
        block.attn.fused_attn = False
    handle = sinklab.attach(module)
    with pytest.raises(NotFoundError, match="fused_attn = True"), torch.inference_mode():
        sinklab.prove(handle, torch.rand(1, 3, 32, 32))


def test_with_another_module_the_sites_are_found_in_that_one(model: sinklab.Model) -> None:
    import copy

    double = model.with_module(copy.deepcopy(model.module).double())
    assert double.dtype == torch.float64 and model.dtype == torch.float32
    assert {id(site.attention) for site in double.sites}.isdisjoint({id(site.attention) for site in model.sites})
    assert double.tokens == model.tokens


@pytest.mark.parametrize("side", [16, 32, 64])
def test_a_multiple_of_the_patch_loses_no_edge(side: int, model: sinklab.Model) -> None:
    assert model.check_size(side, side) is None


def test_the_edge_that_is_lost_is_told_in_pixels(model: sinklab.Model) -> None:
    said = model.check_size(33, 47)
    assert said is not None and "33x47" in said and "1 rows and 15 columns" in said


def test_an_input_smaller_than_a_patch_is_refused(model: sinklab.Model) -> None:
    with pytest.raises(InputError, match="smaller than one patch"):
        model.check_size(15, 32)


def test_a_position_table_that_cannot_grow_refuses_other_sizes() -> None:
    module = timm.create_model("vit_tiny_patch16_224", **TINY, dynamic_img_size=False).eval()
    handle = sinklab.attach(module)
    assert handle.check_size(32, 32) is None
    with pytest.raises(InputError, match="32x32 only"):
        handle.check_size(48, 48)


def test_the_description_is_json_and_names_the_sites(model: sinklab.Model, tmp_path: Path) -> None:
    from sinklab.run import plain

    told = json.loads(json.dumps(plain(model.describe())))
    assert (told["layers"], told["heads"], told["prefix"], told["patch_size"]) == (2, 2, ["cls"], [16, 16])
    assert len(told["sha256"]) == 64
    assert [site["name"] for site in told["sites"]] == ["blocks.0.attn", "blocks.1.attn"]
    assert told["update"] == "as added, LayerScale included"
    assert told["preprocessing"]["mean"] and told["versions"]


def test_a_name_that_nothing_answers_to_is_not_found() -> None:
    with pytest.raises(NotFoundError, match="no model named 'nothing'"):
        sinklab.load("nothing")


def test_a_handle_is_told_in_one_line(model: sinklab.Model) -> None:
    told = repr(model)
    assert "\n" not in told and len(told) < 250 and model.name in told
    assert "2 layers of 2 heads, tokens 1 cls + patches of 16x16, float32 on cpu" in told
