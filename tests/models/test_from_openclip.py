"""open_clip's vision towers: its own blocks, custom blocks, timm trunks; full and vision-only checkpoints."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor, nn

from sinklab.errors import InputError, NotFoundError
from sinklab.models.from_openclip import forward_openclip, load_openclip
from sinklab.models.load import load
from sinklab.models.loaded import Loaded
from sinklab.models.request import Request

SMALL = {"width": 32, "layers": 2, "head_width": 16, "patch_size": 16, "image_size": 64}
TEXT = {"width": 32, "layers": 1, "heads": 2, "vocab_size": 50, "context_length": 8}
TINY: dict[str, Any] = {"embed_dim": 24, "vision_cfg": SMALL}


def random_tower(name: str = "ViT-B-16", **vision: Any) -> Loaded:
    kwargs = {"embed_dim": 24, "vision_cfg": {**SMALL, **vision}}
    return load_openclip(name, Request(name=f"openclip:{name}", random_weights=True, kwargs=kwargs))


def whole_clip(**vision: Any) -> open_clip.CLIP:
    torch.manual_seed(1)
    return open_clip.CLIP(24, {**SMALL, **vision}, TEXT).eval()


def tokens_by_definition(tower: Any, pixels: Tensor) -> Tensor:
    """The class token and patches, positions, pre-norm, blocks in the order the stack wants, post-norm."""
    patches = tower.conv1(pixels).flatten(2).transpose(1, 2)  # [B rows·columns C]
    first = tower.class_embedding.expand(len(pixels), 1, -1)
    x = tower.ln_pre(torch.cat([first, patches], dim=1) + tower.positional_embedding)
    x = x if tower.transformer.batch_first else x.transpose(0, 1)
    for block in tower.transformer.resblocks:
        x = block(x)
    x = x if tower.transformer.batch_first else x.transpose(0, 1)
    return tower.ln_post(x)


@pytest.mark.parametrize(
    "vision", [{}, {"block_type": "custom"}, {"qk_norm": True, "scale_heads": True}, {"ls_init_value": 0.3}]
)
def test_every_kind_of_block_gives_all_tokens_after_the_last_norm(vision: dict[str, Any]) -> None:
    loaded = random_tower(**vision)
    pixels = torch.randn(2, 3, 64, 64)
    tokens = loaded.forward(loaded.module, pixels)
    assert torch.allclose(tokens, tokens_by_definition(loaded.module, pixels), atol=1e-5)
    assert tokens.shape == (2, loaded.tokens.tokens(64, 64), 32) == (2, 17, 32)
    assert loaded.tokens.prefix == ("cls",) and loaded.fixed_size == (64, 64)
    scale = loaded.provenance.layer_scale
    assert (
        scale is None if "ls_init_value" not in vision else scale is not None and scale["median"] == pytest.approx(0.3)
    )


def test_the_pooled_class_token_is_the_towers_own_output() -> None:
    loaded = random_tower()
    tower: Any = loaded.module
    pixels = torch.randn(1, 3, 64, 64)
    expected = tower(pixels)
    assert torch.allclose(loaded.forward(tower, pixels)[:, 0] @ tower.proj, expected, atol=1e-5)


def test_a_stack_that_wants_tokens_first_is_served() -> None:
    pixels = torch.randn(2, 3, 64, 64)
    torch.manual_seed(0)
    tower = open_clip.transformer.VisionTransformer(64, 16, 32, 2, 2, 4.0, output_dim=24).eval()
    expected = forward_openclip(tower, pixels)
    torch.manual_seed(0)
    old = open_clip.transformer.VisionTransformer(64, 16, 32, 2, 2, 4.0, output_dim=24).eval()
    old.transformer.batch_first = False
    for block in old.transformer.resblocks:
        block.attn.batch_first = False
    assert torch.allclose(forward_openclip(old, pixels), expected, atol=1e-5)


def test_a_tower_that_pools_first_gives_its_last_blocks_tokens() -> None:
    loaded = random_tower(attentional_pool=True, attn_pooler_heads=2)
    tower: Any = loaded.module
    tokens = loaded.forward(tower, torch.randn(1, 3, 64, 64))
    assert tokens.shape == (1, 17, 32)


def test_a_timm_trunk_is_read_as_timms() -> None:
    loaded = load("openclip:ViT-B-16-SigLIP", random_weights=True)
    trunk: Any = loaded.module.trunk
    assert loaded.tokens.prefix == () and loaded.fixed_size == (224, 224)
    assert (loaded.preprocessing.crop_mode, loaded.preprocessing.mean) == ("squash", (0.5, 0.5, 0.5))
    pixels = torch.randn(1, 3, 224, 224)
    tokens = loaded.forward(loaded.module, pixels)
    assert torch.equal(tokens, trunk.forward_features(pixels))
    assert tokens.shape[1] == loaded.tokens.tokens(224, 224)


def test_a_registered_architecture_builds_its_vision_tower_only() -> None:
    loaded = load("openclip:ViT-B/32", random_weights=True)
    assert loaded.provenance.architecture == "ViT-B-32"
    assert loaded.provenance.parameters == 87_849_216  # the published ViT-B/32 tower
    assert loaded.tokens.tokens(224, 224) == 50
    assert pickle.loads(pickle.dumps(loaded.forward)) is loaded.forward


def saved(path: Path, state: dict[str, Tensor], *, model: str = "openclip:ViT-B-16", **kwargs: Any) -> Loaded:
    torch.save(state, path)
    path.with_suffix(".json").write_text(json.dumps({"model": model, "kwargs": {**TINY, **kwargs}}))
    return load(str(path), offline=True)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_vision_half_of_a_full_checkpoint_is_taken(tmp_path: Path, prefix: str) -> None:
    model = whole_clip()
    loaded = saved(tmp_path / "w.pt", {prefix + name: value for name, value in model.state_dict().items()})
    pixels = torch.randn(1, 3, 64, 64)
    expected = tokens_by_definition(model.visual, pixels)
    assert torch.allclose(loaded.forward(loaded.module, pixels), expected, atol=1e-5)
    counts = loaded.extra["weights"]
    assert counts["renamed"] == len(model.visual.state_dict())
    assert counts["ignored"] == len(model.state_dict()) - len(model.visual.state_dict())


def test_a_vision_only_checkpoint_loads(tmp_path: Path) -> None:
    tower: Any = whole_clip().visual
    loaded = saved(tmp_path / "w.pt", tower.state_dict())
    pixels = torch.randn(1, 3, 64, 64)
    assert torch.allclose(loaded.forward(loaded.module, pixels), tokens_by_definition(tower, pixels), atol=1e-5)
    assert loaded.extra["weights"]["matched"] == len(tower.state_dict())


def test_the_tower_is_built_at_the_files_grid(tmp_path: Path) -> None:
    tower: Any = whole_clip(image_size=96).visual
    loaded = saved(tmp_path / "w.pt", tower.state_dict())
    assert loaded.fixed_size == loaded.preprocessing.size == (96, 96)
    assert torch.equal(loaded.module.get_parameter("positional_embedding"), tower.positional_embedding)


def test_a_text_only_or_foreign_checkpoint_is_reported(tmp_path: Path) -> None:
    state = {name: value for name, value in whole_clip().state_dict().items() if not name.startswith("visual.")}
    with pytest.raises(InputError, match="nothing was loaded"):
        saved(tmp_path / "w.pt", state)
    with pytest.raises(InputError, match="other shape"):
        saved(tmp_path / "w.pt", whole_clip(width=48).state_dict())


def test_a_file_may_stand_in_the_name_and_its_own_name_warns_of_quickgelu(tmp_path: Path) -> None:
    config = open_clip.get_model_config("ViT-S-32-alt")
    tower: Any = open_clip.model._build_vision_tower(config["embed_dim"], config["vision_cfg"])
    torch.save(tower.state_dict(), tmp_path / "openai-like.pt")
    with pytest.warns(UserWarning, match="QuickGELU") as caught:
        loaded = load(f"openclip:ViT-S-32-alt/{tmp_path}/openai-like.pt", offline=True)
    assert caught[0].filename == __file__  # it points at the user's own line
    assert any("QuickGELU" in note for note in loaded.provenance.notes)
    assert loaded.provenance.request["name"] == "openclip:ViT-S-32-alt"
    assert loaded.provenance.request["weights"] == str(tmp_path / "openai-like.pt")
    with pytest.warns(UserWarning, match="QuickGELU"):
        again = load(**loaded.provenance.request, offline=True)
    assert again.provenance.sha256 == loaded.provenance.sha256


def test_quickgelu_is_taken_from_the_architecture() -> None:
    assert random_tower("ViT-B-16-quickgelu").provenance.activation == "QuickGELU"
    assert random_tower("ViT-B-16").provenance.activation == "GELU"


def test_names_that_do_not_exist_get_sentences(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="Close: .*ViT-B-32"):
        load("openclip:ViT-B32")
    with pytest.raises(NotFoundError, match="its tags: .*laion2b_s34b_b79k"):
        load("openclip:ViT-B-32/laion3b")
    with pytest.raises(InputError, match="needs weights"):
        load("openclip:ViT-B-32")
    with pytest.raises(InputError, match="not a transformer"):
        load("openclip:RN50", random_weights=True)
    with pytest.raises(InputError, match="no plain ViT blocks"):
        load("openclip:convnext_base", random_weights=True)
    with pytest.raises(InputError, match="choose one"):
        load("openclip:ViT-B-32/openai", random_weights=True)


def test_random_weights_take_an_image_size() -> None:
    request = Request(name="x", random_weights=True, image_size=(32, 96), kwargs=TINY)
    loaded = load_openclip("ViT-B-16", request)
    assert loaded.fixed_size == (32, 96)
    assert loaded.forward(loaded.module, torch.randn(1, 3, 32, 96)).shape == (1, 13, 32)


def test_the_module_is_a_plain_one() -> None:
    module = random_tower().module
    assert isinstance(module.transformer.resblocks[0].attn, nn.MultiheadAttention)
    assert not module.training and not any(value.requires_grad for value in module.parameters())
