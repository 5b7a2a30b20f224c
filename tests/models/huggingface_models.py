"""Tiny random Hugging Face models of every family that is read, for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_WIDE = {**_SMALL, "intermediate_size": 64}
_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
_ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


@dataclass(frozen=True)
class Kind:
    """A model class, its configuration, and the tokens before the patches."""

    model: str
    config: str
    options: dict[str, Any]
    prefix: tuple[str, ...] = ("cls",)


_BOTH = {"vision_config": _WIDE, "text_config": {**_TEXT, **_ENDS}}
KINDS = {
    "dinov2": Kind("Dinov2Model", "Dinov2Config", _SMALL),
    "dinov2 swiglu": Kind("Dinov2Model", "Dinov2Config", {**_SMALL, "use_swiglu_ffn": True}),
    "dinov2 classifier": Kind("Dinov2ForImageClassification", "Dinov2Config", _SMALL),
    "registers": Kind("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", _SMALL, ("cls",) + ("register",) * 4),
    "dinov3": Kind(
        "DINOv3ViTModel", "DINOv3ViTConfig", {**_WIDE, "num_register_tokens": 3}, ("cls",) + ("register",) * 3
    ),
    "vit": Kind("ViTModel", "ViTConfig", _WIDE),
    "vit classifier": Kind("ViTForImageClassification", "ViTConfig", _WIDE),
    "clip vision": Kind("CLIPVisionModel", "CLIPVisionConfig", _WIDE),
    "clip": Kind("CLIPModel", "CLIPConfig", _BOTH),
    "siglip vision": Kind("SiglipVisionModel", "SiglipVisionConfig", _WIDE, ()),
    "siglip": Kind("SiglipModel", "SiglipConfig", _BOTH, ()),
}


def build(kind: str) -> Any:
    """The whole model of that kind, in eval mode, its weights moved away from what another seed would give."""
    torch.manual_seed(7)
    known = KINDS[kind]
    model = getattr(transformers, known.model)(getattr(transformers, known.config)(**known.options)).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.02)
    return model


def vision_part(model: Any) -> Any:
    """The network whose `last_hidden_state` is meant: the vision tower, or a classifier's backbone."""
    if type(model).__name__.startswith(("CLIPModel", "SiglipModel")):
        return model.vision_model
    return model.base_model if "Classification" in type(model).__name__ else model


def save(kind: str, folder: Path) -> Any:
    """Write the whole model as Hugging Face does; the vision part in memory comes back."""
    model = build(kind)
    model.save_pretrained(folder)
    return vision_part(model)


def final_tokens(tower: Any, pixels: Any) -> Any:
    """All tokens after the final norm: CLIP alone leaves them as they are, and norms its CLS token for the pooler."""
    found = tower(pixel_values=pixels)
    if type(tower).__name__ == "CLIPVisionModel":
        tokens = tower.post_layernorm(found.last_hidden_state)
        assert (tokens[:, 0] - found.pooler_output).abs().max() < 1e-5
        return tokens
    return found.last_hidden_state
