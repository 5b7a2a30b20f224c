"""How the attention modules of vision libraries, of Hugging Face and of sinklab are recognised: by what hangs on them.

Each locator takes a module and returns its `AttentionParts`, or None. Language models have theirs in `language.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.hooks.phase import phase_of
from sinklab.hooks.site import AttentionParts, Locator

if TYPE_CHECKING:
    from torch import Tensor


def _rows(weight: Tensor, part: int, parts: int = 3) -> Callable[[], Tensor]:
    size = weight.shape[0] // parts
    return lambda: weight[part * size : (part + 1) * size]


def _separate(module: Any, query: Any, key: Any, projection: Any, heads: int, after: str | None) -> AttentionParts:
    head_dim = query.weight.shape[0] // heads
    return AttentionParts(
        heads=heads,
        kv_heads=key.weight.shape[0] // head_dim,
        projection=projection,
        query_weight=lambda: query.weight,
        key_weight=lambda: key.weight,
        after=after,
    )


def _after(module: Any) -> str | None:
    """What acts on z before W_O in timm's attention: `norm` (scale_norm) or `gate`; both are read before they act."""
    if getattr(module, "gate", None) is not None:
        return "gate"
    inner = getattr(module, "norm", None) or getattr(module, "ln_inner", None)
    return None if inner is None or type(inner).__name__ == "Identity" else "norm"


def _timm(module: Any) -> AttentionParts | None:
    projection: Any = getattr(module, "proj", None)
    heads = getattr(module, "num_heads", None)
    if heads is None or getattr(projection, "weight", None) is None:
        return None
    qkv: Any = getattr(module, "qkv", None)
    if getattr(qkv, "weight", None) is not None:
        return AttentionParts(
            heads=heads,
            projection=projection,
            query_weight=_rows(qkv.weight, 0),
            key_weight=_rows(qkv.weight, 1),
            after=_after(module),
            gate=module.gate if getattr(getattr(module, "gate", None), "multiplies_z", False) else None,
        )
    if getattr(module, "q_proj", None) is not None and getattr(module, "k_proj", None) is not None:
        return _separate(module, module.q_proj, module.k_proj, projection, heads, _after(module))
    return None


def _in_proj(module: Any) -> AttentionParts | None:
    """`nn.MultiheadAttention` and OpenCLIP's own Attention share these parameter names."""
    projection: Any = getattr(module, "out_proj", None)
    heads = getattr(module, "num_heads", None)
    if heads is None or getattr(projection, "weight", None) is None or not hasattr(module, "in_proj_weight"):
        return None
    from torch import nn

    if getattr(module, "logit_scale", None) is not None:
        raise InputError(
            "Scaled cosine attention never calls scaled_dot_product_attention: sinklab cannot read this model. "
            "Build the tower without scaled_cosine."
        )
    weight = module.in_proj_weight
    scale = getattr(module, "head_scale", None)
    return AttentionParts(
        heads=heads,
        projection=projection,
        query_weight=_rows(weight, 0) if weight is not None else lambda: module.q_proj_weight,
        key_weight=_rows(weight, 1) if weight is not None else lambda: module.k_proj_weight,
        head_scale=None if scale is None else lambda: module.head_scale,
        after=_after(module),
        stand_in=isinstance(module, nn.MultiheadAttention),
    )


def _hugging_face(module: Any) -> AttentionParts | None:
    projection = getattr(module, "o_proj", None) or getattr(module, "out_proj", None)
    query, key = getattr(module, "q_proj", None), getattr(module, "k_proj", None)
    if projection is None or query is None or key is None or getattr(query, "weight", None) is None:
        return None
    head_dim = getattr(module, "head_dim", None)
    heads = getattr(module, "num_heads", None) or getattr(module, "num_attention_heads", None)
    heads = heads or (query.weight.shape[0] // head_dim if head_dim else None)
    return None if heads is None else _separate(module, query, key, projection, heads, None)


def _hugging_face_old(module: Any) -> AttentionParts | None:
    """transformers before the flattening: `attention.attention.query`, `attention.output.dense`."""
    inner: Any = getattr(module, "attention", None)
    dense: Any = getattr(getattr(module, "output", None), "dense", None)
    if dense is None or getattr(inner, "query", None) is None:
        return None
    return _separate(module, inner.query, inner.key, dense, inner.num_attention_heads, None)


def _phases(module: Any) -> AttentionParts | None:
    """Kuramoto attention: no weight stands between z and G."""
    phase = phase_of(module)
    return None if phase is None else AttentionParts(heads=phase.heads, projection=phase.read, phase=phase)


LOCATORS: tuple[Locator, ...] = (_phases, _hugging_face_old, _in_proj, _timm, _hugging_face)
