"""One tiny model with random weights of every family that sinklab attaches to, built once a session.

Weights are drawn large enough that heads attend sharply, and every LayerScale lies between 0.5 and 1.5: with the 1e-5
that timm starts from, a broken attention would hardly move the output. Models are shared between tests, so a test
that changes one works on a copy (`fresh`).

Letters: B batch, N tokens, C model dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import language_models
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinklab.hooks.site import AttentionParts, register

IMAGE, PATCH, WIDTH, LAYERS, HEADS = 32, 8, 32, 2, 4


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family is built, and what its attention is known to be."""

    build: Callable[[], nn.Module]
    tokens: int
    """N of the input that `pixels` makes."""
    heads: int = HEADS
    kv_heads: int = HEADS
    stand_in: bool = False
    """True where nn.MultiheadAttention is replaced while attached: equal to rounding, not bit for bit."""
    causal: bool = False
    text: bool = False
    """True where the input is token numbers, not pixels."""


def pixels(name: str, batch: int = 2, seed: int = 1) -> Tensor:
    """An input of that family: [B 3 H W], or token numbers [B N]."""
    generator = torch.Generator().manual_seed(seed)
    if FAMILIES[name].text:
        return torch.randint(0, language_models.SYMBOLS, (batch, FAMILIES[name].tokens), generator=generator)
    return torch.randn(batch, 3, IMAGE, IMAGE, generator=generator)


@cache
def module(name: str) -> nn.Module:
    """The family's model in eval mode; shared, so leave it as it is."""
    torch.manual_seed(0)
    built = FAMILIES[name].build().eval()
    _draw_weights(built)
    return built.requires_grad_(False)


def fresh(name: str) -> nn.Module:
    """A copy of the family's model that a test may change."""
    return copy.deepcopy(module(name))


def _draw_weights(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in model.named_parameters():
            last = name.rpartition(".")[2]
            if last in ("gamma", "gamma_1", "gamma_2", "lambda1", "lambda_1"):
                value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
            elif value.dim() == 2 and (last.endswith("weight") or last == "in_proj_weight"):
                value.copy_(torch.randn(value.shape, generator=generator) * 1.4 / value.shape[1] ** 0.5)
            elif "bias" in last:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
            elif last in ("head_scale", "weight") and value.dim() < 4:
                value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
            else:
                value.add_(torch.randn(value.shape, generator=generator) * 0.3)


def timm_vit(**options: Any) -> nn.Module:
    """timm's VisionTransformer at the size of this file, with LayerScale unless it is switched off."""
    from timm.models.vision_transformer import VisionTransformer

    size: dict[str, Any] = {"img_size": IMAGE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": LAYERS}
    return VisionTransformer(**{**size, "num_heads": HEADS, "num_classes": 0, "init_values": 1.0, **options})


def timm_gated() -> nn.Module:
    """timm's Attention with its sigmoid gate on z, which VisionTransformer has no option for."""
    from timm.layers import Attention

    model: Any = timm_vit()
    for block in model.blocks:
        block.attn = Attention(WIDTH, HEADS, qkv_bias=True, gated=True, norm_layer=nn.LayerNorm)
    return model


def timm_eva(**options: Any) -> nn.Module:
    """timm's Eva: rotary positions, SwiGLU, separate or fused projections."""
    from timm.models.eva import Eva

    size: dict[str, Any] = {"img_size": IMAGE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": LAYERS}
    return Eva(**{**size, "num_heads": HEADS, "num_classes": 0, "init_values": 1.0, "use_rot_pos_emb": True, **options})


def timm_beit() -> nn.Module:
    from timm.models.beit import Beit

    size: dict[str, Any] = {"img_size": IMAGE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": LAYERS}
    return Beit(**size, num_heads=HEADS, num_classes=0, init_values=1.0, use_rel_pos_bias=True, use_abs_pos_emb=False)


class _Grouped(nn.Module):
    """timm's AttentionRope with two query heads for each key/value head, in a pre-norm block."""

    def __init__(self) -> None:
        super().__init__()
        from timm.layers import AttentionRope

        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = AttentionRope(WIDTH, HEADS, qkv_fused=False, num_kv_heads=HEADS // 2, norm_layer=nn.LayerNorm)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Patches(nn.Module):
    """Patch embedding and a stack of blocks: what is round a user's own attention."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.blocks = nn.Sequential(*(block() for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.embed(x).flatten(2).transpose(1, 2))


class OwnAttention(nn.Module):
    """A class that no library knows: heads whose dim times their number is not the model's width."""

    def __init__(self, heads: int = HEADS, dim: int = 6) -> None:
        super().__init__()
        self.shape = (heads, dim)
        self.into = nn.Linear(WIDTH, 3 * heads * dim)
        self.back = nn.Linear(heads * dim, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.into(x).unflatten(-1, (3, *self.shape)).permute(2, 0, 3, 1, 4)
        return self.back(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class OwnBlock(nn.Module):
    """A block with no second norm: its residual stream between attention and MLP cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.mixer = nn.LayerNorm(WIDTH), OwnAttention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.before(x))


def _describe_own(attention: OwnAttention) -> AttentionParts:
    heads, dim = attention.shape
    return AttentionParts(
        heads=heads,
        projection=attention.back,
        query_weight=lambda: attention.into.weight[: heads * dim],
        key_weight=lambda: attention.into.weight[heads * dim : 2 * heads * dim],
    )


register(OwnAttention, _describe_own)


def openclip_tower(**options: Any) -> nn.Module:
    """open_clip's VisionTransformer; `batch_first=False` and the custom blocks by option."""
    from open_clip.transformer import CustomTransformer, Transformer, VisionTransformer

    batch_first = options.pop("batch_first", True)
    custom = options.pop("custom", None)
    tower = VisionTransformer(
        image_size=IMAGE,
        patch_size=PATCH,
        width=WIDTH,
        layers=LAYERS,
        heads=HEADS,
        mlp_ratio=2.0,
        output_dim=16,
        **options,
    )
    if custom is not None:
        from open_clip.transformer import CustomResidualAttentionBlock

        tower.transformer = CustomTransformer(WIDTH, LAYERS, HEADS, mlp_ratio=2.0)
        tower.transformer.resblocks = nn.ModuleList(
            CustomResidualAttentionBlock(WIDTH, HEADS, mlp_ratio=2.0, **custom) for _ in range(LAYERS)
        )
    elif not batch_first:
        tower.transformer = Transformer(WIDTH, LAYERS, HEADS, mlp_ratio=2.0, ls_init_value=1.0, batch_first=False)
    return tower


def openclip_trunk() -> nn.Module:
    """A timm trunk inside open_clip's wrapper, with attention pooling in place of a CLS token, as SigLIP has."""
    from open_clip.timm_model import TimmModel

    model = TimmModel("vit_tiny_patch16_224", embed_dim=192, pool="map", proj="none", pretrained=False)
    model.trunk = timm_vit(class_token=False, global_pool="map", init_values=None)
    return model


def hugging_face(model: str, config: str, **options: Any) -> nn.Module:
    """A Hugging Face model with SDPA attention at the size of this file."""
    import transformers

    size: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    size |= {"intermediate_size": 2 * WIDTH} | (
        {} if options.get("vocab_size") else {"image_size": IMAGE, "patch_size": PATCH}
    )
    settings = getattr(transformers, config)(**{**size, **options}, attn_implementation="sdpa")
    return getattr(transformers, model)(settings)


def _language(kind: str, **facts: Any) -> Family:
    return Family(build=partial(language_models.core, kind), tokens=11, text=True, **facts)


_PATCHES = (IMAGE // PATCH) ** 2
_vit = partial(Family, tokens=_PATCHES + 1)
FAMILIES: dict[str, Family] = {
    "timm dinov2": _vit(build=timm_vit),
    "timm dinov2 registers": Family(build=partial(timm_vit, reg_tokens=4, no_embed_class=True), tokens=_PATCHES + 5),
    "timm clip": _vit(build=partial(timm_vit, pre_norm=True, init_values=None)),
    "timm siglip": Family(build=partial(timm_vit, class_token=False, global_pool="map"), tokens=_PATCHES),
    "timm deit distilled": Family(build=partial(timm_vit, reg_tokens=1, init_values=None), tokens=_PATCHES + 2),
    "timm plain, query-key norm": _vit(build=partial(timm_vit, qk_norm=True, init_values=None)),
    "timm gated": _vit(build=timm_gated),
    "timm scale norm": _vit(build=partial(timm_vit, scale_attn_norm=True)),
    "timm eva02": _vit(build=partial(timm_eva, qkv_fused=False, swiglu_mlp=True, scale_mlp=True)),
    "timm eva scale norm": _vit(build=partial(timm_eva, scale_attn_inner=True)),
    "timm dinov3": Family(
        build=partial(timm_eva, rope_type="dinov3", num_reg_tokens=4, use_abs_pos_emb=False),
        tokens=_PATCHES + 5,
    ),
    "timm beit": _vit(build=timm_beit),
    "timm grouped rope": Family(build=partial(Patches, _Grouped), tokens=_PATCHES, kv_heads=HEADS // 2),
    "a user's own": Family(build=partial(Patches, OwnBlock), tokens=_PATCHES),
    "openclip": _vit(build=partial(openclip_tower, ls_init_value=1.0), stand_in=True),
    "openclip tokens first": _vit(build=partial(openclip_tower, batch_first=False), stand_in=True),
    "openclip custom": _vit(build=partial(openclip_tower, custom={"ls_init_value": 1.0, "qk_norm": True})),
    "openclip scaled heads": _vit(build=partial(openclip_tower, custom={"scale_heads": True})),
    "openclip inner norm": _vit(build=partial(openclip_tower, custom={"scale_attn_inner": True, "scale_heads": True})),
    "openclip timm trunk": Family(build=openclip_trunk, tokens=_PATCHES),
    "hf dinov2": _vit(build=partial(hugging_face, "Dinov2Model", "Dinov2Config")),
    "hf dinov2 registers": Family(
        build=partial(hugging_face, "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"), tokens=_PATCHES + 5
    ),
    "hf dinov3": Family(
        build=partial(hugging_face, "DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=4), tokens=_PATCHES + 5
    ),
    "hf vit": _vit(build=partial(hugging_face, "ViTModel", "ViTConfig")),
    "hf clip": _vit(build=partial(hugging_face, "CLIPVisionModel", "CLIPVisionConfig")),
    "hf siglip": Family(build=partial(hugging_face, "SiglipVisionModel", "SiglipVisionConfig"), tokens=_PATCHES),
    "hf llama": Family(
        build=partial(
            hugging_face,
            "LlamaModel",
            "LlamaConfig",
            vocab_size=50,
            num_key_value_heads=2,
            use_cache=False,
            head_dim=12,
        ),
        tokens=11,
        kv_heads=2,
        causal=True,
        text=True,
    ),
    "hf gpt2": _language("gpt2", causal=True),
    "hf qwen3": _language("qwen3", kv_heads=2, causal=True),
    "hf bert": _language("bert"),
}
