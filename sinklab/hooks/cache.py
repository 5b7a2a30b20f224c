"""Tensors under TransformerLens names, as an ActivationCache, on models that TransformerLens does not load.

    output, cache = run_with_cache(model, pixels, names=["blocks.*.attn.hook_v"], limit="2GB")
    cache["v", 3]

| name | axes |
|---|---|
| `blocks.{l}.attn.hook_q`, `hook_z` | batch, pos, head, d_head |
| `blocks.{l}.attn.hook_k`, `hook_v` | batch, pos, key/value head, d_head (as many heads as the model has) |
| `blocks.{l}.attn.hook_pattern` | batch, head, query pos, key pos |
| `blocks.{l}.attn.hook_result` | batch, pos, head, d_model: the head's share of the update, LayerScale included |
| `blocks.{l}.hook_resid_pre`, `hook_resid_mid`, `hook_resid_post` | batch, pos, d_model |

q and k are what the attention call receives: after any query-key norm and rotary embedding. Summed over heads,
hook_result plus Γ b_O is hook_resid_mid − hook_resid_pre.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.manager import HookManager, Reader

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens import ActivationCache

    from sinklab.hooks.seam import AttentionCall
    from sinklab.hooks.site import Site

IN_ATTENTION = ("hook_q", "hook_k", "hook_v", "hook_pattern", "hook_z", "hook_result")
IN_BLOCK = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post")
UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def run_with_cache(
    model: Any, images: Any, names: str | Sequence[str] | None = None, *, limit: int | str = "2GB"
) -> tuple[Any, ActivationCache]:
    """Run a model once and keep the tensors that were named.

    Args:
        model: a sinklab handle, or an nn.Module that sinklab can attach to.
        images: the model's input, e.g. pixels [B 3 H W].
        names: glob patterns over the names of the module's table; None keeps everything but hook_result.
        limit: the most that may be kept, in bytes or as "500MB", "2GB".

    Returns the model's output and a `transformer_lens.ActivationCache`. `cache["v", 3]`, `stack_activation`,
    `apply_slice_to_batch_dim` and all that only reads tensors work; helpers that need TransformerLens's own weights
    (logit attribution, folding) do not.

    Raises NotFoundError for a pattern that matches no name, and InputError, before more than one tensor is kept
    beyond it, if the limit would be passed, with the size that is needed.
    """
    try:
        from transformer_lens import ActivationCache
    except ImportError as error:
        raise NotFoundError(
            'run_with_cache returns TransformerLens\'s ActivationCache: pip install "sinklab[lens]" first.'
        ) from error
    manager = HookManager(model)
    wanted = _match(names, len(manager.sites))
    reader = _CacheReader(wanted, _bytes(limit), len(manager.sites))
    with torch.no_grad(), HookManager(model, reader) as hooks:
        output = hooks.run(images)
    ordered = {name: reader.kept[name] for name in _names(len(manager.sites)) if name in reader.kept}
    missing = [name for name in wanted if name not in ordered]
    if missing:
        raise NotFoundError(f"{missing[0]!r} was asked for, but this model's blocks do not show it.")
    sites = manager.sites
    width = int(sites[0].output_weight().shape[1])
    shape = SimpleNamespace(
        n_layers=len(sites), n_heads=sites[0].heads, d_head=sites[0].head_dim, d_model=width, attn_only=False
    )
    return output, ActivationCache(ordered, SimpleNamespace(cfg=shape))


def _names(layers: int) -> list[str]:
    return [
        f"blocks.{layer}.{prefix}{hook}"
        for layer in range(layers)
        for prefix, hooks in (("", IN_BLOCK[:1]), ("attn.", IN_ATTENTION), ("", IN_BLOCK[1:]))
        for hook in hooks
    ]


def _match(patterns: str | Sequence[str] | None, layers: int) -> list[str]:
    every = _names(layers)
    if patterns is None:
        return [name for name in every if not name.endswith("hook_result")]
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = [name for name in every if fnmatchcase(name, pattern)]
        if not found:
            raise NotFoundError(
                f"No tensor is named {pattern!r}. The names are blocks.L.attn.HOOK with HOOK one of "
                f"{', '.join(IN_ATTENTION)}, and blocks.L.HOOK with HOOK one of {', '.join(IN_BLOCK)}; L is 0 to "
                f"{layers - 1}."
            )
        chosen.update(found)
    return [name for name in every if name in chosen]


def _bytes(limit: int | str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(limit).upper())
    unit = UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise InputError(f"A limit is a number of bytes, or like '500MB' or '2GB', not {limit!r}.")
    return int(float(match[1]) * unit)


class _CacheReader(Reader):
    def __init__(self, names: Sequence[str], limit: int, layers: int) -> None:
        self.names = set(names)
        self.limit = limit
        self.layers = layers
        self.kept: dict[str, Tensor] = {}
        self._size: dict[str, int] = {}

    def resid_pre(self, site: Site, x: Tensor) -> None:
        self._keep(site, "hook_resid_pre", x)

    def resid_mid(self, site: Site, x: Tensor) -> None:
        self._keep(site, "hook_resid_mid", x)

    def resid_post(self, site: Site, x: Tensor) -> None:
        self._keep(site, "hook_resid_post", x)

    def attention(self, site: Site, call: AttentionCall) -> None:
        z = call.z
        assert z is not None
        for hook, tensor in (("hook_q", call.q), ("hook_k", call.k), ("hook_v", call.v), ("hook_z", z)):
            self._keep(site, f"attn.{hook}", tensor.transpose(1, 2))
        batch, heads, queries, _ = z.shape
        if self._wants(site, "attn.hook_pattern"):
            self._check(site, "attn.hook_pattern", batch * heads * queries * call.k.shape[2] * z.element_size())
            self._keep(site, "attn.hook_pattern", call.pattern(dtype=torch.float32).to(z.dtype))
        if self._wants(site, "attn.hook_result"):
            weight = site.output_weight()  # [H C D]
            self._check(site, "attn.hook_result", batch * heads * queries * weight.shape[1] * z.element_size())
            weight = weight.to(torch.promote_types(z.dtype, torch.float32))
            result = torch.einsum("bhqd,hcd->bqhc", z.to(weight.dtype), weight)
            self._keep(site, "attn.hook_result", result.to(z.dtype))

    def _wants(self, site: Site, hook: str) -> bool:
        return f"blocks.{site.layer}.{hook}" in self.names

    def _check(self, site: Site, hook: str, size: int) -> None:
        """Stop before the first tensor that does not fit, with an estimate of what the whole request needs."""
        self._size[f"blocks.{site.layer}.{hook}"] = size
        if sum(self._size.values()) > self.limit:
            per_hook = {name.partition(".")[2].partition(".")[2]: own for name, own in self._size.items()}
            total = sum(per_hook.get(name.partition(".")[2].partition(".")[2], 0) for name in self.names)
            raise InputError(
                f"The tensors asked for need about {total / 1e6:,.0f} MB, more than the limit of "
                f"{self.limit / 1e6:,.0f} MB: name fewer, give fewer images, or raise limit=."
            )

    def _keep(self, site: Site, hook: str, tensor: Tensor) -> None:
        if self._wants(site, hook):
            self._check(site, hook, tensor.numel() * tensor.element_size())
            self.kept[f"blocks.{site.layer}.{hook}"] = tensor.detach().clone()
