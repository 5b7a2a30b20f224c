"""What cannot be attached to, or was seen to go wrong while attached, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sinklab.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from sinklab.hooks.site import Site

NO_CALL = (
    "The attention of site {name!r} ran without calling scaled_dot_product_attention, so nothing could be read. "
    "{advice}"
)
ADVICE = {
    "eager": "It is a Hugging Face model in eager mode: load it with attn_implementation='sdpa', or call "
    "model.set_attn_implementation('sdpa').",
    "fused_attn": "timm built it with fused attention off: set module.fused_attn = True on each attention, or build "
    "the model without TIMM_FUSED_ATTN=0.",
    "lens": "This TransformerLens bridge did not show its steps, as one that keeps its heads' results apart does not: "
    "call model.set_use_attn_result(False), or load the model as hf:REPO_OR_DIR.",
    "kernel": "Its kernel is not softmax: weights need not sum to 1 over the keys, and no sink is defined for them. "
    "What rows sum to is recorded as it is trained (row_sum_LAYER in metrics.jsonl).",
    "": "xFormers kernels and eager formulas are not visible: load the model through timm, OpenCLIP or Hugging Face "
    "with SDPA attention.",
}


def refuse_meta(module: nn.Module) -> None:
    """Raise InputError for a module without memory: it has shapes and no numbers."""
    empty = next((name for name, value in module.named_parameters() if value.is_meta), None)
    if empty is not None:
        raise InputError(
            f"{type(module).__name__} is on the meta device: {empty!r} has a shape and no numbers. Load its weights, "
            "e.g. module.to_empty(device='cpu') and load_state_dict, before it is attached to."
        )


def refuse_dropout(module: nn.Module) -> None:
    """Raise InputError for a module in training mode with dropout of any kind."""
    for name, child in module.named_modules():
        rate = getattr(child, "p", None) if "Drop" in type(child).__name__ else None
        rate = getattr(child, "drop_prob", rate)
        rate = getattr(child, "dropout", rate) if type(child).__name__ == "MultiheadAttention" else rate
        if child.training and isinstance(rate, float) and rate > 0:
            raise InputError(
                f"{name!r} is in training mode with dropout {rate}: what is read would change from run to run. "
                "Call model.eval() first."
            )


def no_call(site: Site) -> str:
    """The site's attention ran, and no call was seen."""
    config = getattr(site.attention, "config", None)
    if site.parts.eager is not None:
        advice = "lens"
    elif hasattr(getattr(site.attention, "kernel", None), "pattern"):  # of sinklab's own attention
        advice = "kernel"
    elif getattr(config, "_attn_implementation", None) == "eager":
        advice = "eager"
    else:
        advice = "fused_attn" if getattr(site.attention, "fused_attn", True) is False else ""
    return NO_CALL.format(name=site.name, advice=ADVICE[advice])


def many_calls(site: Site, calls: Mapping[str, int]) -> str:
    """The site's attention ran once, and several calls were seen."""
    return (
        f"The attention of site {site.name!r} called scaled_dot_product_attention {calls[site.name]} times in one "
        "forward, where one softmax a layer is expected (differential attention makes two): it is not one pattern."
    )
