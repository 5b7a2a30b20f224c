"""Where language models attend: locators for GPT-2, BERT and its relatives, and TransformerLens's bridges.

Llama, Mistral, Qwen and Gemma need none: their q_proj … o_proj are found as those of vision models are. What is read
there is what the attention call receives: after the norms of queries and keys, and after the rotary embedding.

Letters: C model dim, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.hooks.eager import EagerParts
from sinklab.hooks.site import AttentionParts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def _linear(module: Any) -> Callable[[], Tensor]:
    """() → the weight as [outputs, inputs]; transformers' Conv1D keeps the transpose of it."""
    return lambda: module.weight.T if hasattr(module, "nf") else module.weight


def gpt2(module: Any) -> AttentionParts | None:
    """GPT-2: queries, keys and values in one `c_attn`, W_O in `c_proj`, both Conv1D."""
    joint: Any
    projection: Any
    joint, projection, heads = (getattr(module, name, None) for name in ("c_attn", "c_proj", "num_heads"))
    if heads is None or getattr(joint, "weight", None) is None or getattr(projection, "weight", None) is None:
        return None
    weight, width = _linear(joint), projection.weight.shape[0]  # H·D
    if weight().shape[0] != 3 * width:  # cross-attention has its queries elsewhere
        return None
    return AttentionParts(
        heads=heads,
        projection=projection,
        output=_linear(projection),
        query_weight=lambda: weight()[:width],
        key_weight=lambda: weight()[width : 2 * width],
    )


def bert(module: Any) -> AttentionParts | None:
    """BERT and RoBERTa: `self` attends, `output.dense` projects, and the norm comes after the update has been added.

    That norm's input is the residual stream plus the heads' updates and bias, which is what can be checked; what the
    block goes on with is the norm of it.
    """
    inner: Any = getattr(module, "self", None)
    end = getattr(module, "output", None)
    dense, norm = getattr(end, "dense", None), getattr(end, "LayerNorm", None)
    if dense is None or norm is None or getattr(getattr(inner, "query", None), "weight", None) is None:
        return None
    return AttentionParts(
        heads=inner.num_attention_heads,
        projection=dense,
        query_weight=lambda: inner.query.weight,
        key_weight=lambda: inner.key.weight,
        caller="self",
        second_norm=norm,
    )


def distilbert(module: Any) -> AttentionParts | None:
    """DistilBERT: q_lin, k_lin and out_lin; its block has the norm after the update, as BERT's."""
    query, key, projection = (getattr(module, name, None) for name in ("q_lin", "k_lin", "out_lin"))
    heads = getattr(module, "n_heads", None) or getattr(module, "num_attention_heads", None)
    if heads is None or query is None or key is None or projection is None:
        return None
    return AttentionParts(
        heads=heads,
        projection=projection,
        query_weight=lambda: query.weight,
        key_weight=lambda: key.weight,
    )


def lens(module: Any) -> AttentionParts | None:
    """TransformerLens's bridge to an attention that it computes itself, eagerly, between its hook points.

    Raises InputError for one that hands the computation to the library's own code: its pattern could be read, and
    nothing that goes into it.
    """
    points = getattr(module, "_modules", {})
    if "hook_pattern" not in points or "hook_attn_scores" not in points:
        return None
    parts: list[Any] = [getattr(module, name, None) for name in "qkvo"]
    q, k, v, o = parts
    within = getattr(getattr(o, "original_component", None), "weight", None)
    if q is None or k is None or v is None or within is None or _hands_over(module):
        raise InputError(
            f"{type(module).__name__} leaves its attention to the library beneath, where TransformerLens's hook points "
            "do not show what goes into it. Load the same model as hf:REPO_OR_DIR instead."
        )
    config, original = module.config, module.original_component
    rotated = "hook_rot_q" in points
    heads = int(config.n_heads)
    dim = _linear(o.original_component)().shape[1] // heads
    return AttentionParts(
        heads=heads,
        kv_heads=int(getattr(config, "n_key_value_heads", None) or heads),
        projection=o.original_component,
        output=_linear(o.original_component),
        query_weight=lambda: _linear(q.original_component)(),
        key_weight=lambda: _linear(k.original_component)(),
        eager=EagerParts(
            q=module.hook_rot_q if rotated else q.hook_out,
            k=module.hook_rot_k if rotated else k.hook_out,
            v=v.hook_out,
            scores=module.hook_attn_scores,
            z=o.hook_in,
            scale=float(getattr(original, "scaling", dim**-0.5)),
        ),
    )


def _hands_over(module: Any) -> bool:
    from transformer_lens.model_bridge.generalized_components import AttentionBridge

    return type(module).forward is AttentionBridge.forward


LOCATORS = (lens, gpt2, bert, distilbert)
"""In this order: a bridge answers for the names of what it wraps."""
