"""Models already in memory: recognised, looked through, left alone."""

from __future__ import annotations

from typing import Any

import huggingface_models
import open_clip
import pytest
import timm
import torch
from torch import Tensor, nn

from sinklab.errors import InputError
from sinklab.models.load import from_module
from sinklab.models.loaded import Preprocessing
from sinklab.models.tokens import TokenMap

TINY = {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2}


class DataParallel(nn.Module):
    """As torch's wrapper looks from outside, without its devices."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Tensor, **named: Any) -> Any:
        return self.module(*given, **named)


def test_a_timm_model_is_recognised_and_left_as_it_is() -> None:
    model = timm.create_model("vit_small_patch16_dinov3", **TINY).train()
    loaded = from_module(model)
    assert loaded.module is model and model.training and all(value.requires_grad for value in model.parameters())
    assert loaded.tokens.prefix == ("cls",) + ("register",) * 4
    assert loaded.fixed_size is None
    pixels = torch.randn(1, 3, 64, 64)
    model.eval()
    assert torch.equal(loaded.forward(model, pixels), model.forward_features(pixels))
    assert loaded.provenance.family == "attached" and loaded.provenance.sha256 is None


def test_a_model_that_was_not_built_for_other_sizes_has_one() -> None:
    loaded = from_module(timm.create_model("vit_tiny_patch16_224", **TINY))
    assert loaded.fixed_size == loaded.preprocessing.size == (64, 64)


@pytest.mark.parametrize("wrap", [DataParallel, torch.compile, lambda module: DataParallel(torch.compile(module))])
def test_wrappers_are_looked_through_but_kept(wrap: Any) -> None:
    model = timm.create_model("vit_tiny_patch16_224", **TINY).eval()
    loaded = from_module(wrap(model))
    assert loaded.module is not model
    pixels = torch.randn(1, 3, 64, 64)
    assert torch.equal(loaded.forward(loaded.module, pixels), model.forward_features(pixels))
    assert loaded.provenance.architecture == "VisionTransformer"


def test_of_a_whole_clip_the_visual_tower_is_taken() -> None:
    vision = {"width": 32, "layers": 2, "head_width": 16, "patch_size": 16, "image_size": 64}
    text = {"width": 32, "layers": 1, "heads": 2, "vocab_size": 50, "context_length": 8}
    model = open_clip.CLIP(24, vision, text).eval()
    for given in (model, model.visual):
        loaded = from_module(given)
        assert loaded.module is model.visual
        assert loaded.forward(loaded.module, torch.randn(1, 3, 64, 64)).shape[1] == loaded.tokens.tokens(64, 64)
        assert loaded.fixed_size == loaded.preprocessing.size == (64, 64)
        assert any("preprocessing assumed" in note for note in loaded.provenance.notes)
    open_clip.model.set_model_preprocess_cfg(model, {"mean": (0.0,) * 3, "std": (2.0,) * 3, "size": 64})
    assert from_module(model).preprocessing.std == (2.0, 2.0, 2.0)
    assert not from_module(model).provenance.notes


@pytest.mark.parametrize("kind", huggingface_models.KINDS)
def test_hugging_face_models_are_recognised_whole_or_inside_others(kind: str) -> None:
    model = huggingface_models.build(kind)
    tower = huggingface_models.vision_part(model)
    loaded = from_module(model)
    assert loaded.module is tower
    assert loaded.tokens.prefix == huggingface_models.KINDS[kind].prefix
    pixels = torch.randn(1, 3, 28, 28)
    assert torch.equal(loaded.forward(loaded.module, pixels), huggingface_models.final_tokens(tower, pixels))
    assert loaded.forward(loaded.module, torch.randn(1, 3, 56, 28)).shape[1] == loaded.tokens.tokens(56, 28)


def test_metas_own_class_is_recognised_by_its_parts() -> None:
    class DinoVisionTransformer(nn.Module):
        """The outside of Meta's class: its attributes, and the dictionary it returns."""

        patch_size, num_register_tokens = 14, 2

        def forward_features(self, pixels: Tensor) -> dict[str, Tensor]:
            patches = pixels.shape[-1] // 14 * (pixels.shape[-2] // 14)
            parts = torch.arange(1.0 + 2 + patches).view(1, -1, 1)
            return {
                "x_norm_clstoken": parts[:, 0],
                "x_norm_regtokens": parts[:, 1:3],
                "x_norm_patchtokens": parts[:, 3:],
            }

    loaded = from_module(DinoVisionTransformer())
    assert loaded.tokens.prefix == ("cls", "register", "register")
    tokens = loaded.forward(loaded.module, torch.zeros(1, 3, 28, 42))
    assert torch.equal(tokens.flatten(), torch.arange(1.0 + 2 + 6))


def test_an_unknown_class_needs_its_tokens() -> None:
    class Mine(nn.Module):
        def forward(self, pixels: Tensor) -> tuple[Tensor, None]:
            return pixels.flatten(2).transpose(1, 2), None

    with pytest.raises(InputError, match="Mine is not a class whose tokens sinklab knows.*tokens="):
        from_module(Mine())
    loaded = from_module(Mine(), tokens=TokenMap(prefix=(), patch_size=(1, 1)), name="mine")
    assert loaded.forward(loaded.module, torch.zeros(1, 3, 4, 5)).shape == (1, 20, 3)
    assert loaded.provenance.name == "mine"
    assert any("preprocessing assumed" in note for note in loaded.provenance.notes)


def test_what_is_given_comes_before_what_is_inferred() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **TINY)
    tokens = TokenMap(prefix=("register",), patch_size=(16, 16))
    given = Preprocessing(mean=(0, 0, 0), std=(1, 1, 1), interpolation="bilinear", size=(64, 64))
    loaded = from_module(model, tokens=tokens, preprocessing=given)
    assert loaded.tokens is tokens and loaded.preprocessing is given


def test_what_has_no_plain_blocks_is_refused() -> None:
    with pytest.raises(InputError, match="no plain ViT blocks"):
        from_module(timm.create_model("test_resnet"))
    with pytest.raises(InputError, match="a torch.nn.Module|torch.nn.Module can be attached"):
        from_module("demo")  # type: ignore[arg-type]
