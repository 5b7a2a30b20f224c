"""timm's vision transformers: built for any size, filled whole, their tokens counted."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from sinklab.errors import InputError, NotFoundError
from sinklab.models.from_timm import load_timm
from sinklab.models.load import load
from sinklab.models.loaded import Loaded
from sinklab.models.request import Request

TINY = {"embed_dim": 48, "depth": 2, "num_heads": 3}


def random_model(name: str, **kwargs: Any) -> Loaded:
    return load_timm(name, Request(name=f"timm:{name}", random_weights=True, kwargs={**TINY, **kwargs}))


def from_file(name: str, path: Path, state: dict[str, Tensor], **kwargs: Any) -> Loaded:
    save_file({key: value.contiguous() for key, value in state.items()}, path)
    request = Request(name=f"timm:{name}", weights=path, offline=True, kwargs={**TINY, **kwargs})
    return load_timm(name, request)


def own(name: str, **kwargs: Any) -> nn.Module:
    """timm's own model with weights that differ everywhere from another seed's."""
    torch.manual_seed(5)
    model = timm.create_model(name, **{**TINY, **kwargs})
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.05)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "prefix", "dynamic"),
    [
        ("vit_tiny_patch16_224", ("cls",), True),
        ("vit_small_patch14_dinov2", ("cls",), True),
        ("vit_small_patch14_reg4_dinov2", ("cls",) + ("register",) * 4, True),
        ("vit_small_patch16_dinov3", ("cls",) + ("register",) * 4, True),
        ("vit_betwixt_patch16_reg4_gap_256", ("register",) * 4, True),
        ("vit_base_patch16_clip_224", ("cls",), True),
        ("vit_base_patch16_siglip_224", (), True),
        ("deit_tiny_distilled_patch16_224", ("cls", "cls"), True),
        ("deit3_small_patch16_224", ("cls",), True),
        ("eva02_tiny_patch14_224", ("cls",), True),
        ("vit_relpos_small_patch16_224", (), False),
        ("beit_base_patch16_224", ("cls",), False),
    ],
)
def test_the_token_map_counts_what_the_blocks_see(name: str, prefix: tuple[str, ...], dynamic: bool) -> None:
    loaded = random_model(name)
    assert loaded.tokens.prefix == prefix
    assert (loaded.fixed_size is None) == dynamic
    height, width = loaded.fixed_size or (3 * loaded.tokens.patch_size[0], 5 * loaded.tokens.patch_size[1])
    seen: list[int] = []
    blocks: Any = loaded.module.blocks
    handle = blocks[0].attn.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
    tokens = loaded.forward(loaded.module, torch.randn(2, 3, height, width))
    handle.remove()
    assert seen == [tokens.shape[1]] == [loaded.tokens.tokens(height, width)]
    assert tokens.shape == (2, loaded.tokens.tokens(height, width), 48)


def test_a_loaded_model_is_frozen_in_eval_and_float32() -> None:
    loaded = random_model("vit_tiny_patch16_224")
    assert not loaded.module.training
    assert {(value.requires_grad, value.dtype) for value in loaded.module.parameters()} == {(False, torch.float32)}
    assert pickle.loads(pickle.dumps(loaded.forward)) is loaded.forward


def test_the_seed_decides_random_weights_and_the_callers_state_is_kept() -> None:
    torch.manual_seed(9)
    expected = torch.rand(1)
    torch.manual_seed(9)
    first, again = (load("timm:test_vit", random_weights=True, seed=3) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    other = load("timm:test_vit", random_weights=True, seed=4)
    pixels = torch.randn(1, 3, 64, 64)
    outputs = [model.forward(model.module, pixels) for model in (first, again, other)]
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    assert first.provenance.source == "random weights (seed 3)"
    assert first.provenance.sha256 is None


@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_small_patch16_dinov3", "deit3_small_patch16_224"],
)
def test_a_file_of_timms_own_gives_timms_own_output(tmp_path: Path, name: str) -> None:
    model = own(name)
    loaded = from_file(name, tmp_path / "w.safetensors", model.state_dict())
    size: Any = model.patch_embed.img_size
    pixels = torch.randn(1, 3, *size)
    assert torch.equal(loaded.forward(loaded.module, pixels), model.forward_features(pixels))
    counts = loaded.extra["weights"]
    assert counts["matched"] == len(model.state_dict()) and not counts["missing"] and not counts["renamed"]


def test_pixels_beyond_the_last_patch_are_left_out() -> None:
    loaded = random_model("vit_tiny_patch16_224")
    pixels = torch.randn(1, 3, 60, 45)
    expected = loaded.forward(loaded.module, pixels[..., :48, :32])
    assert torch.equal(loaded.forward(loaded.module, pixels), expected)


def test_the_table_of_another_size_is_kept_as_it_is(tmp_path: Path) -> None:
    model = own("vit_tiny_patch16_224", img_size=96)
    loaded = from_file("vit_tiny_patch16_224", tmp_path / "w.safetensors", model.state_dict())
    assert torch.equal(loaded.module.get_parameter("pos_embed"), model.get_parameter("pos_embed"))
    assert loaded.extra["position_table"]["grid"] == [6, 6]
    pixels = torch.randn(1, 3, 96, 96)
    assert torch.equal(loaded.forward(loaded.module, pixels), model.forward_features(pixels))


def test_a_table_that_is_not_square_needs_its_size_said(tmp_path: Path) -> None:
    state = own("vit_tiny_patch16_224", img_size=(96, 48)).state_dict()
    with pytest.raises(InputError, match="img_size"):
        from_file("vit_tiny_patch16_224", tmp_path / "w.safetensors", state)
    loaded = from_file("vit_tiny_patch16_224", tmp_path / "w.safetensors", state, img_size=(96, 48))
    assert loaded.extra["position_table"]["grid"] == [6, 3]


def test_the_classifier_follows_the_file(tmp_path: Path) -> None:
    ten = own("vit_tiny_patch16_224", num_classes=10)
    assert from_file("vit_tiny_patch16_224", tmp_path / "a.safetensors", ten.state_dict()).module.num_classes == 10
    bare = {name: value for name, value in ten.state_dict().items() if not name.startswith("head.")}
    loaded = from_file("vit_tiny_patch16_224", tmp_path / "b.safetensors", bare)
    assert isinstance(loaded.module.head, nn.Identity)
    odd = {**bare, "head.weight": torch.zeros(3, 48)}  # no bias: some other head
    assert from_file("vit_tiny_patch16_224", tmp_path / "c.safetensors", odd).extra["weights"]["ignored"] == 1


def test_the_final_norm_stands_where_the_file_has_it(tmp_path: Path) -> None:
    pooled = own("vit_tiny_patch16_224", global_pool="avg", num_classes=0)
    assert "fc_norm.weight" in pooled.state_dict()
    loaded = from_file("vit_tiny_patch16_224", tmp_path / "w.safetensors", pooled.state_dict())
    pixels = torch.randn(1, 3, 224, 224)
    assert torch.equal(loaded.forward(loaded.module, pixels), pooled.forward_features(pixels))


def test_a_backbone_without_its_pool_loads(tmp_path: Path) -> None:
    model = own("vit_base_patch16_siglip_224")
    bare = {name: value for name, value in model.state_dict().items() if not name.startswith("attn_pool.")}
    loaded = from_file("vit_base_patch16_siglip_224", tmp_path / "w.safetensors", bare)
    pixels = torch.randn(1, 3, 224, 224)
    assert torch.equal(loaded.forward(loaded.module, pixels), model.forward_features(pixels))
    assert any("attn_pool" in note for note in loaded.provenance.notes)


def test_a_hugging_face_file_loads_into_timms_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 56, "patch_size": 14}
    model = transformers.Dinov2Model(transformers.Dinov2Config(**sizes)).eval()
    loaded = from_file("vit_small_patch14_dinov2", tmp_path / "w.safetensors", model.state_dict())
    pixels = torch.randn(1, 3, 56, 56)
    assert torch.allclose(loaded.forward(loaded.module, pixels), model(pixels).last_hidden_state, atol=1e-4)
    counts = loaded.extra["weights"]
    assert counts["renamed"] == len(loaded.module.state_dict()) and counts["ignored"] == 1  # the mask token


def test_metas_dinov3_names_load_through_timms_converter(tmp_path: Path) -> None:
    model = own("vit_small_patch16_dinov3")
    state = {}
    for name, value in model.state_dict().items():
        name = (
            name.replace("reg_token", "storage_tokens").replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma")
        )
        state[name] = value
    state["mask_token"] = torch.zeros(1, 48)
    state["rope_embed.periods"] = torch.zeros(4)
    loaded = from_file("vit_small_patch16_dinov3", tmp_path / "w.safetensors", state)
    pixels = torch.randn(1, 3, 64, 64)
    expected = load_timm_state("vit_small_patch16_dinov3", model.state_dict()).forward_features(pixels)
    assert torch.equal(loaded.forward(loaded.module, pixels), expected)


def load_timm_state(name: str, state: dict[str, Tensor]) -> Any:
    model = timm.create_model(name, dynamic_img_size=True, **TINY).eval()
    model.load_state_dict(state)
    return model


def test_an_openclip_file_loads_through_timms_converter_at_its_own_grid(tmp_path: Path) -> None:
    import open_clip.transformer

    torch.manual_seed(0)
    tower = open_clip.transformer.VisionTransformer(64, 16, 48, 2, 3, 4.0, output_dim=24).eval()
    state = {f"visual.{name}": value for name, value in tower.state_dict().items()}
    state["logit_scale"] = torch.ones(1)
    loaded = from_file("vit_base_patch16_clip_224", tmp_path / "w.safetensors", state)
    assert loaded.extra["position_table"]["grid"] == [4, 4]
    pixels = torch.randn(1, 3, 64, 64)
    expected = tower.ln_post(tower.transformer(tower._embeds(pixels)))
    assert torch.allclose(loaded.forward(loaded.module, pixels), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"embed_dim": 96}, "other shape"),
        ({"depth": 3}, r"missing +12"),
        ({"patch_size": 8}, r"patch_embed\.proj\.weight: model \[48, 3, 8, 8\], file \[48, 3, 16, 16\]"),
    ],
)
def test_the_wrong_checkpoint_is_reported_and_not_loaded(tmp_path: Path, change: dict[str, int], said: str) -> None:
    state = own("vit_tiny_patch16_224", num_classes=0).state_dict()
    with pytest.raises(InputError, match=said) as caught:
        from_file("vit_tiny_patch16_224", tmp_path / "w.safetensors", state, **change)
    assert "nothing was loaded" in str(caught.value)


def test_a_bfloat16_file_is_kept_and_runs_on_float32_pixels(tmp_path: Path) -> None:
    state = {name: value.bfloat16() for name, value in own("vit_tiny_patch16_224").state_dict().items()}
    loaded = from_file("vit_tiny_patch16_224", tmp_path / "w.safetensors", state)
    assert {value.dtype for value in loaded.module.parameters()} == {torch.bfloat16}
    assert loaded.forward(loaded.module, torch.randn(1, 3, 64, 64)).dtype == torch.bfloat16
    assert any("bfloat16" in note for note in loaded.provenance.notes)


def test_preprocessing_is_the_models_own_and_assumptions_are_noted(tmp_path: Path) -> None:
    loaded = random_model("vit_base_patch16_siglip_224")
    assert loaded.preprocessing.mean == (0.5, 0.5, 0.5)
    assert (loaded.preprocessing.size, loaded.preprocessing.interpolation) == ((224, 224), "bicubic")
    state = own("vit_tiny_patch16_224").state_dict()
    local = from_file("vit_tiny_patch16_224", tmp_path / "w.safetensors", state)
    assert any("preprocessing assumed" in note for note in local.provenance.notes)
    tagged = from_file("vit_tiny_patch16_224.augreg_in21k", tmp_path / "w.safetensors", state)
    assert not any("preprocessing assumed" in note for note in tagged.provenance.notes)


@pytest.mark.parametrize(
    "name",
    [
        "swin_tiny_patch4_window7_224",
        "resnet18",
        "cait_xxs24_224",
        "xcit_nano_12_p16_224",
        "vit_small_patch16_18x2_224",
        "vit_dwee_patch16_reg1_gap_256",
        "naflexvit_base_patch16_gap",
    ],
)
def test_a_network_without_plain_blocks_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="no plain ViT blocks"):
        load(f"timm:{name}", random_weights=True)


def test_an_unknown_name_or_tag_lists_close_ones() -> None:
    with pytest.raises(NotFoundError, match="vit_small_patch14_dinov2"):
        load("timm:vit_smal_patch14_dinov2")
    with pytest.raises(NotFoundError, match="its tags: lvd142m"):
        load("timm:vit_small_patch14_dinov2.lvd")


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InputError, match="cannot be built with the options"):
        random_model("vit_tiny_patch16_224", colour="red")


def test_image_size_sets_the_table_of_random_weights_only(tmp_path: Path) -> None:
    loaded = load("timm:test_vit", random_weights=True, image_size=(64, 32))
    assert loaded.extra["position_table"]["grid"] == [4, 2]
    save_file({"a": torch.ones(1)}, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match="does not rewrite weights"):
        load("timm:test_vit", weights=tmp_path / "w.safetensors", image_size=64)
