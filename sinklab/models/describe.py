"""What can be read off a module in memory: its activation, LayerScale, parameter count, and the libraries' versions."""

from __future__ import annotations

import re
import sys
import warnings
from typing import TYPE_CHECKING, Any

from sinklab.models.loaded import Provenance

if TYPE_CHECKING:
    from torch import nn

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Channel means and standard deviations in use: ImageNet's own, CLIP's, and the plain [-1, 1]."""

_BLOCK = re.compile(r"mlp|ffn|blocks|layer|intermediate")
_ACTIVATION = ("act", "gelu", "activation_fn", "act_fn", "intermediate_act_fn")
# The attention branch's LayerScale: Meta and timm · timm's EVA · open_clip · Hugging Face.
_LAYER_SCALE = re.compile(r"(^|\.)(ls1\.gamma|gamma_1|ls_1\.gamma|layer_scale1\.lambda1)$")
# Weights trained with QuickGELU, by their names; fine-tuned descendants ("openai_ft_in1k") changed to GELU.
_QUICK = re.compile(r"(openai|metaclip|dfn\d)(?!\w*_ft)|quickgelu", re.IGNORECASE)


def inner(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's, DDP's and FSDP's wrappers; the module itself if there are none."""
    wrappers = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"}
    while True:
        wrapped = getattr(module, "_orig_mod", None)
        if wrapped is None and type(module).__name__ in wrappers:
            wrapped = module.module
        if wrapped is None:
            return module
        module = wrapped


def activation_of(module: nn.Module) -> str:
    """The MLP's activation as the module holds it: "GELU", "GELUTanh", "QuickGELU", "SwiGLU", … or "unknown"."""
    for name, child in module.named_modules():
        parent_name, _, last = name.rpartition(".")
        if last not in _ACTIVATION or not _BLOCK.search(parent_name) or "attn" in parent_name.split("."):
            continue
        kind = type(child).__name__
        kind = {"GELUActivation": "GELU", "QuickGELUActivation": "QuickGELU", "PytorchGELUTanh": "GELUTanh"}.get(
            kind, kind
        )
        if kind == "GELU" and getattr(child, "approximate", "none") == "tanh":
            kind = "GELUTanh"
        parent = module.get_submodule(parent_name)
        gated = re.search(r"glu|gated", type(parent).__name__, re.IGNORECASE) is not None
        if gated:
            return {"SiLU": "SwiGLU", "SiLUActivation": "SwiGLU", "GELU": "GEGLU"}.get(kind, f"gated {kind}")
        return kind
    return "unknown"


def layer_scale_of(module: nn.Module) -> dict[str, float] | None:
    """min, median and max of |γ| over all attention LayerScales, or None where there are none."""
    import torch

    found = [value.detach() for name, value in module.named_parameters() if _LAYER_SCALE.search(name)]
    if not found:
        return None
    size = torch.cat([value.abs().flatten().to("cpu", torch.float32) for value in found])
    return {"min": size.min().item(), "median": size.median().item(), "max": size.max().item()}


def activation_note(label: str, activation: str, quick: bool | None = None) -> tuple[str, ...]:
    """A warning, issued and returned, if the weights' name implies QuickGELU and the architecture has another.

    `quick` is the registry's own word on how the weights were trained, where there is one; else `label` (a tag, a
    repository or a file name) is searched for the names of weights known to be trained with QuickGELU.
    """
    implied = _QUICK.search(label) is not None if quick is None else quick
    if not (implied and activation in ("GELU", "GELUTanh")) and not (quick is False and activation == "QuickGELU"):
        return ()
    trained = "QuickGELU" if implied else "GELU"
    note = (
        f"Weights named {label!r} were trained with {trained}, but the architecture uses {activation}: "
        "the outputs are then slightly wrong everywhere. Choose the architecture whose name says "
        + ("quickgelu." if implied else "no quickgelu.")
    )
    warnings.warn(note, stacklevel=_callers_level())
    return (note,)


def _callers_level() -> int:
    """The `stacklevel` at which a warning from the calling function points at the first line outside the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "sinklab":
        frame, level = frame.f_back, level + 1
    return level


def versions_of(*packages: str) -> dict[str, str]:
    """Installed versions of torch and the packages named (as on the package index)."""
    from importlib.metadata import version

    return {package: version(package) for package in ("torch", *packages)}


def provenance(
    module: nn.Module,
    *,
    name: str,
    family: str,
    architecture: str,
    source: str,
    sha256: str | None = None,
    packages: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
    request: dict[str, Any] | None = None,
) -> Provenance:
    """A Provenance with everything that is read off the module filled in."""
    return Provenance(
        name=name,
        family=family,
        architecture=architecture,
        source=source,
        sha256=sha256,
        activation=activation_of(module),
        layer_scale=layer_scale_of(module),
        parameters=sum(value.numel() for value in module.parameters()),
        versions=versions_of(*packages),
        notes=notes,
        request=request or {},
    )
