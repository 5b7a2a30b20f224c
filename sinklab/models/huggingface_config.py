"""What Hugging Face's config.json and preprocessor_config.json say: class, tokens, positions, preprocessing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.models.describe import CLIP, HALF, IMAGENET
from sinklab.models.from_huggingface_lm import KINDS
from sinklab.models.loaded import Preprocessing
from sinklab.models.request import Request, building, pair
from sinklab.models.tokens import TokenMap

if TYPE_CHECKING:
    from torch import nn


_CLASSES = {
    "dinov2": ("Dinov2Model", "Dinov2Config"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"),
    "dinov3_vit": ("DINOv3ViTModel", "DINOv3ViTConfig"),
    "vit": ("ViTModel", "ViTConfig"),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig"),
    "clip_vision_model": ("CLIPVisionModel", "CLIPVisionConfig"),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig"),
    "siglip_vision_model": ("SiglipVisionModel", "SiglipVisionConfig"),
}
"""config.json's model_type → the vision model and its configuration in transformers."""


def known_classes() -> set[str]:
    """Names of the vision model classes in transformers that can be read."""
    return {name for name, _ in _CLASSES.values()}


def config_from(settings: dict[str, Any], request: Request) -> tuple[Any, str]:
    """transformers' configuration of the vision model that config.json describes, and the model's class name."""
    import transformers

    kind = settings.get("model_type")
    if kind is None and "architecture" in settings:
        raise InputError(f"This is a timm model's folder: ask for timm:{settings['architecture']} instead.")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise InputError(
            f"config.json says model_type {kind!r}; sinklab reads {', '.join(sorted({*_CLASSES, *KINDS}))}. "
            "A model of another class can be attached from memory with its token map."
        )
    name, config_name = _CLASSES[kind]
    inside = settings.get("vision_config") if kind in ("clip", "siglip") else settings
    options = {
        key: value
        for key, value in (inside or {}).items()
        if key not in ("model_type", "dtype", "torch_dtype", "attn_implementation")
    }
    if name == "SiglipVisionModel":
        options["vision_use_head"] = False  # its pool attends with one query and is no layer; the tokens never meet it
    if request.image_size:
        height, width = request.image_size
        if height != width:
            raise InputError(f"Hugging Face's models keep square position tables, not {height}x{width}.")
        options["image_size"] = height
    with building(config_name, options):
        return getattr(transformers, config_name)(**options, attn_implementation="sdpa"), name


def token_map(module: nn.Module) -> TokenMap:
    """CLS, then registers, then patches, as the configuration says; SigLIP has patches only."""
    network: Any = module
    config = network.config
    classes = () if "siglip" in config.model_type else ("cls",)
    registers = ("register",) * getattr(config, "num_register_tokens", 0)
    return TokenMap(prefix=classes + registers, patch_size=pair(config.patch_size))


def position_table(module: nn.Module) -> dict[str, Any] | None:
    """Grid of the learned positions and how transformers resizes them; None for rotary positions."""
    network: Any = module
    if network.config.model_type == "dinov3_vit":
        return None
    patch = pair(network.config.patch_size)
    grid = [side // length for side, length in zip(pair(network.config.image_size), patch, strict=True)]
    antialias = "with antialias" if network.config.model_type == "dinov2_with_registers" else "without antialias"
    return {"grid": grid, "resize": f"bicubic {antialias} (transformers)"}


def preprocessing_of(processor: dict[str, Any] | None, config: Any) -> tuple[Preprocessing, tuple[str, ...]]:
    """From preprocessor_config.json; without one, what the family was trained with, and a note that says so."""
    kind = config.model_type
    mean, std = (
        CLIP if "clip" in kind and "siglip" not in kind else HALF if kind.startswith(("siglip", "vit")) else IMAGENET
    )
    if processor is None:
        return (
            Preprocessing(mean=mean, std=std, interpolation="bicubic", size=pair(config.image_size)),
            ("preprocessing assumed: no preprocessor_config.json came with the model",),
        )
    held = processor
    if held.get("do_normalize") is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    else:
        mean, std = (tuple(held.get("image_mean", mean)), tuple(held.get("image_std", std)))
    resized, crop = held.get("size", {}), held.get("crop_size", {})
    short = resized if isinstance(resized, int) else resized.get("shortest_edge")
    cropped = held.get("do_center_crop", bool(crop)) and bool(crop)
    target = crop if cropped else resized
    size = (target["height"], target["width"]) if isinstance(target, dict) and "height" in target else None
    size = size or (pair(target) if isinstance(target, int) else pair(short or config.image_size))
    preprocessing = Preprocessing(
        mean=mean,
        std=std,
        interpolation={0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}.get(held.get("resample", 3), "bicubic"),
        size=size,
        crop_fraction=size[0] / short if cropped and short else 1.0,
        crop_mode="center" if cropped or short else "squash",
    )
    return preprocessing, ()
