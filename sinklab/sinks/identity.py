"""Which model a table is of: what has to be equal for rows of two sessions to stand in one table.

A file's hash does not say it: a sidecar, the code round the weights, or a caller may change the model that is built
from one file, and one model may come from two files.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sinklab.handle import Model

AT_ONCE = 1 << 26
"""Elements that are brought to the CPU and hashed at once."""


def model_identity(model: Model) -> dict[str, Any]:
    """The facts that the numbers depend on, in words that a refusal can show."""
    return {
        "architecture": model.provenance.architecture,
        "parameters": model.provenance.parameters,
        "parameters_dtype": str(model.dtype).removeprefix("torch."),
        "activation": model.provenance.activation,
        "prefix_tokens": list(model.tokens.prefix),
        **({"suffix_tokens": list(model.tokens.suffix)} if model.tokens.suffix else {}),
        "patch_size": list(model.tokens.patch_size),
        "heads": [site.heads for site in model.sites],
        "key_value_heads": [site.kv_heads for site in model.sites],
        "head_dim": [site.head_dim for site in model.sites],
        "modules": modules_digest(model.module),
        "weights": weights_digest(model.module),
    }


def modules_digest(module: nn.Module) -> str:
    """A hash of the modules' names, classes and constants (an epsilon, a scale, a switch, a kind)."""
    digest = sha256()
    for name, child in module.named_modules():
        held = {key: value for key, value in vars(child).items() if isinstance(value, (bool, int, float, str, tuple))}
        public = sorted((key, value) for key, value in held.items() if not key.startswith("_") and key != "training")
        digest.update(f"{name} {type(child).__name__} {public!r}\n".encode())
    return digest.hexdigest()


def weights_digest(module: nn.Module) -> str:
    """A hash of every saved tensor: its name, type, shape and very bytes (two NaNs of other bits differ).

    It does not depend on the device. About a second for a GB.
    """
    digest = sha256()
    for name, value in module.state_dict().items():
        digest.update(f"{name} {getattr(value, 'dtype', None)} {tuple(getattr(value, 'shape', ()))}\n".encode())
        _update(digest, value)
    return digest.hexdigest()


def _update(digest: Any, value: Tensor | Any) -> None:
    import torch

    if not isinstance(value, torch.Tensor):  # what a module keeps beside its tensors
        digest.update(repr(value).encode())
        return
    value = value.detach()
    if value.layout is not torch.strided or value.is_quantized:
        value = value.dequantize() if value.is_quantized else value.to_dense()
    flat = value.contiguous().reshape(-1)
    for start in range(0, flat.numel(), AT_ONCE):
        piece = flat[start : start + AT_ONCE].cpu().resolve_conj().resolve_neg()
        digest.update(piece.view(torch.uint8).numpy())
