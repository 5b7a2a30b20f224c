"""Bring the tensor names of one checkpoint to the names an architecture knows.

Three spellings of a DINOv2-style ViT are in use: Meta's (the *hub* spelling: `blocks.3.attn.qkv.weight`), timm's
(nearly the same, but positions and registers are kept differently) and Hugging Face's, old and new
(`encoder.layer.3.attention.attention.query.weight`, `…attention.q_proj.weight`). On top of that, training scripts put
prefixes before the names and split the blocks into chunks. No tensor's values are changed here: they are renamed,
concatenated (q, k, v), split, or, for registers in timm, added where both models add them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sinklab.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]

_ANCHORS = (
    "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.weight",
    "embeddings.patch_embeddings.weight",
    "embeddings.patch_embedding.weight",
)
"""The patch embedding under its spellings: what stands before it in a file is the file's prefix."""

# Hugging Face's names inside one layer of Dinov2, Dinov2WithRegisters and ViT, old and new, beside the hub's.
_HF_LAYER = (
    (r"layernorm_before\.", "norm1."),
    (r"layernorm_after\.", "norm2."),
    (r"attention\.attention\.query\.|attention\.q_proj\.", "attn.q."),
    (r"attention\.attention\.key\.|attention\.k_proj\.", "attn.k."),
    (r"attention\.attention\.value\.|attention\.v_proj\.", "attn.v."),
    (r"attention\.output\.dense\.|attention\.o_proj\.", "attn.proj."),
    (r"layer_scale([12])\.lambda1", r"ls\1.gamma"),
    (r"intermediate\.dense\.", "mlp.fc1."),
    (r"output\.dense\.", "mlp.fc2."),
    (r"mlp\.weights_in\.", "mlp.w12."),
    (r"mlp\.(weights_out|down_proj)\.", "mlp.w3."),
    (r"mlp\.gate_proj\.", "mlp.w1."),
    (r"mlp\.up_proj\.", "mlp.w2."),
)
_HF_STEM = {
    "embeddings.cls_token": "cls_token",
    "embeddings.mask_token": "mask_token",
    "embeddings.register_tokens": "register_tokens",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.weight": "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.bias": "patch_embed.proj.bias",
    "layernorm.weight": "norm.weight",
    "layernorm.bias": "norm.bias",
}


def without_prefix(state: Mapping[str, Tensor], file: str) -> tuple[State, tuple[str, ...], str]:
    """The tensors of one network with the file's prefix taken off; the names outside it; the prefix.

    Among several networks in one file the DINO teacher or the averaged ("ema") one is taken; raises InputError if
    that does not decide.
    """
    prefixes = sorted({name.removesuffix(anchor) for name in state for anchor in _ANCHORS if _ends(name, anchor)})
    if len(prefixes) > 1:
        preferred = [prefix for prefix in prefixes if "teacher" in prefix or "ema" in prefix.split(".")]
        prefixes = preferred or [prefix for prefix in prefixes if not prefix] or prefixes
    if len(prefixes) > 1:
        shown = ", ".join(repr(prefix) for prefix in prefixes)
        raise InputError(f"{file} holds several networks, under {shown}: save the one you mean alone.")
    prefix = prefixes[0] if prefixes else ""
    held = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    outside = tuple(name for name in state if not name.startswith(prefix))
    return held, outside, prefix


def _ends(name: str, anchor: str) -> bool:
    return name == anchor or name.endswith("." + anchor)


def joined_chunks(state: Mapping[str, Tensor]) -> State:
    """`blocks.0.3.…` → `blocks.3.…`: Meta's training code keeps blocks in chunks, numbered through or anew."""
    found = {name: re.match(r"blocks\.(\d+)\.(\d+)\.(.+)", name) for name in state if name.startswith("blocks.")}
    if not found or not all(found.values()):
        return dict(state)
    places = sorted({(int(match[1]), int(match[2])) for match in found.values() if match})
    through = len({index for _, index in places}) == len(places)
    number = {place: place[1] if through else order for order, place in enumerate(places)}
    renamed = {
        name: f"blocks.{number[int(match[1]), int(match[2])]}.{match[3]}" for name, match in found.items() if match
    }
    return {renamed.get(name, name): value for name, value in state.items()}


def is_huggingface(state: Mapping[str, Tensor]) -> bool:
    """Whether names are Hugging Face's for a Dinov2 or ViT encoder (old or new)."""
    return "embeddings.patch_embeddings.projection.weight" in state


def hub_from_huggingface(state: Mapping[str, Tensor]) -> State:
    """Hugging Face's names, old or new, to the hub's: q, k, v become one `qkv`, gate and up one `w12`."""
    import torch

    renamed: State = {}
    for name, value in state.items():
        match = re.match(r"(?:encoder\.layer|layers?)\.(\d+)\.(.+)", name)
        if not match:
            renamed[_HF_STEM.get(name, name)] = value
            continue
        rest = match[2]
        for pattern, replacement in _HF_LAYER:
            changed = re.sub(rf"^(?:{pattern})", replacement, rest)
            if changed != rest:
                rest = changed
                break
        renamed[f"blocks.{match[1]}.{rest}"] = value
    for parts, whole in (((".attn.q.", ".attn.k.", ".attn.v."), ".attn.qkv."), ((".mlp.w1.", ".mlp.w2."), ".mlp.w12.")):
        for name in [name for name in renamed if parts[0] in name]:
            names = [name.replace(parts[0], part) for part in parts]
            if all(part in renamed for part in names):
                renamed[name.replace(parts[0], whole)] = torch.cat([renamed.pop(part) for part in names])
    return renamed


def huggingface_from_hub(state: Mapping[str, Tensor]) -> State:
    """The hub's (or timm's) names to Hugging Face's old ones, which transformers itself brings up to date."""
    import torch

    state = dict(state)
    if "reg_token" in state:  # timm's register models: the class token already holds its position
        state["register_tokens"] = state.pop("reg_token")
        positions = state["pos_embed"]
        state["pos_embed"] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
    stem = {hub: name for name, hub in _HF_STEM.items()}
    layer = {
        "attn.proj.": "attention.output.dense.",
        "ls1.gamma": "layer_scale1.lambda1",
        "ls2.gamma": "layer_scale2.lambda1",
        "mlp.w12.": "mlp.weights_in.",
        "mlp.w3.": "mlp.weights_out.",
    }
    renamed: State = {}
    for name, value in state.items():
        match = re.match(r"blocks\.(\d+)\.(.+)", name)
        if not match:
            renamed[stem.get(name, name)] = value
            continue
        start, rest = f"encoder.layer.{match[1]}.", match[2]
        if rest.startswith("attn.qkv."):
            for part, third in zip(("query", "key", "value"), value.chunk(3), strict=True):
                renamed[f"{start}attention.attention.{part}.{rest.removeprefix('attn.qkv.')}"] = third
            continue
        old = next((old for old in layer if rest.startswith(old)), None)
        renamed[start + (rest.replace(old, layer[old]) if old else rest)] = value
    return renamed


def timm_from_hub(state: Mapping[str, Tensor]) -> tuple[State, tuple[str, ...]]:
    """The hub's names to timm's `VisionTransformer`; also the names left aside (the training mask token).

    timm keeps positions for patches only once there are registers; the class token's position, which Meta adds in
    the forward pass, is added to the token itself: the same sum of the same two numbers.
    """
    state = dict(state)
    aside = tuple(name for name in ("mask_token",) if state.pop(name, None) is not None)
    if "register_tokens" in state:
        positions = state["pos_embed"]
        state["reg_token"] = state.pop("register_tokens")
        state["cls_token"] = state["cls_token"] + positions[:, :1]
        state["pos_embed"] = positions[:, 1:]
    gated = {".mlp.w12.": ".mlp.fc1.", ".mlp.w3.": ".mlp.fc2."}
    renamed = {}
    for name, value in state.items():
        old = next((old for old in gated if old in name), None)
        renamed[name.replace(old, gated[old]) if old else name] = value
    return renamed, aside
