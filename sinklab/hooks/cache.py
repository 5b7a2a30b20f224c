"""Tensors under TransformerLens names, as an ActivationCache, on models that TransformerLens does not load.

    output, cache = run_with_cache(model, pixels, names=["blocks.*.attn.hook_v"], limit="2GB")
    cache["v", 3]

| name | axes |
|---|---|
| `blocks.{l}.attn.hook_q`, `hook_z` | batch, pos, head, d_head |
| `blocks.{l}.attn.hook_k`, `hook_v` | batch, pos, key/value head, d_head (as many heads as the model has) |
| `blocks.{l}.attn.hook_pattern` | batch, head, query pos, key pos |
| `blocks.{l}.attn.hook_result` | batch, pos, head, d_model: U_h, the head's share of the update, LayerScale included |
| `blocks.{l}.hook_resid_pre`, `hook_resid_mid`, `hook_resid_post` | batch, pos, d_model |

q and k are what the attention call receives: after any query-key norm and rotary embedding. z is A v, before any gate
or norm; hook_result is what is really added, after it. Summed over heads, hook_result plus Γ b_O is hook_resid_mid −
hook_resid_pre. Pattern and result are computed here and are fp32 or better; all else has the model's own type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
ROWS = 128  # queries of the pattern that are computed at once


def run_with_cache(
    model: Any,
    images: Any,
    names: str | Sequence[str] | None = None,
    *,
    limit: int | str = "2GB",
    device: torch.device | str | None = None,
) -> tuple[Any, ActivationCache]:
    """Run a model once and keep the tensors that were named.

    Args:
        model: a sinklab handle, or an nn.Module that sinklab can attach to.
        images: the model's input, e.g. pixels [B 3 H W].
        names: glob patterns over the names of the module's table; None keeps everything but hook_result.
        limit: the most that may be kept, in bytes or as "500MB", "2GB".
        device: where the tensors are kept; None leaves them where they are.

    Returns the model's output and a `transformer_lens.ActivationCache` of detached copies. What only reads tensors
    works: `cache["v", 3]`, negative layers, `stack_activation`, `accumulated_resid`, `remove_batch_dim`, `to`,
    slices; and `compute_head_results`, `stack_head_results` from hook_z, with LayerScale. What needs a final norm, an
    unembedding or MLP tensors (`apply_ln`, `logit_attrs`, `decompose_resid`, …) is refused by TransformerLens or here.

    Raises NotFoundError for a pattern that matches no name, and InputError, before anything is kept, if the limit
    would be passed, with the size that is needed.
    """
    try:
        from transformer_lens import ActivationCache
    except ImportError as error:
        raise NotFoundError(
            'run_with_cache returns TransformerLens\'s ActivationCache: pip install "sinklab[lens]" first.'
        ) from error
    sites = HookManager(model).sites
    device = None if device is None else _device(device)
    every = _names(sites)
    wanted = _match(names, every)
    reader = _CacheReader(sites, wanted, _bytes(limit), device)
    layers = sorted({int(name.split(".")[1]) for name in wanted})
    with torch.no_grad(), HookManager(model, reader, layers=layers) as hooks:
        output = hooks.run(images)
    return output, ActivationCache({name: reader.kept[name] for name in every if name in wanted}, _LensModel(sites))


def _names(sites: Sequence[Site]) -> list[str]:
    """Every name that these sites can give, in the order of a forward pass."""
    return [
        f"blocks.{site.layer}.{prefix}{hook}"
        for site in sites
        for prefix, hooks in (("", IN_BLOCK[:1]), ("attn.", IN_ATTENTION), ("", IN_BLOCK[1:]))
        for hook in hooks
        if hook != "hook_resid_mid" or site.second_norm is not None
    ]


def _match(patterns: str | Sequence[str] | None, every: list[str]) -> set[str]:
    if patterns is None:
        return {name for name in every if not name.endswith("hook_result")}
    asked = (
        [patterns] if isinstance(patterns, str) else list(patterns) if isinstance(patterns, Iterable) else [patterns]
    )
    if not all(isinstance(pattern, str) for pattern in asked):
        raise InputError(f"names is a glob pattern or several, like ['blocks.*.attn.hook_v'], not {patterns!r}.")
    chosen: set[str] = set()
    for pattern in asked:
        found = [name for name in every if fnmatchcase(name, pattern)]
        if not found:
            hooks = sorted({name.split(".", 2)[2] for name in every})
            raise NotFoundError(
                f"No tensor is named {pattern!r}. This model has blocks.L.NAME with L from 0 to "
                f"{every[-1].split('.')[1]} and NAME one of {', '.join(hooks)}."
            )
        chosen.update(found)
    if not chosen:
        raise NotFoundError("No name was given to keep: names=None keeps everything but hook_result.")
    return chosen


def _device(name: torch.device | str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, TypeError, AssertionError) as error:
        raise InputError(f"Tensors cannot be kept on the device {name!r}: {str(error).splitlines()[0]}") from error


def _bytes(limit: int | str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(limit).upper())
    unit = UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise InputError(f"A limit is a number of bytes, or like '500MB' or '2GB', not {limit!r}.")
    return int(float(match[1]) * unit)


def _in_words(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} bytes"


def _expected_size(site: Site, hook: str, x: Tensor) -> int:
    """Bytes of one tensor for a residual stream x [B N C]."""
    (batch, tokens, width), own = x.shape, x.element_size()
    computed = max(own, 4)
    return {
        "hook_q": batch * tokens * site.heads * site.head_dim * own,
        "hook_k": batch * tokens * site.kv_heads * site.head_dim * own,
        "hook_v": batch * tokens * site.kv_heads * site.head_dim * own,
        "hook_z": batch * tokens * site.heads * site.head_dim * own,
        "hook_pattern": batch * site.heads * tokens * tokens * computed,
        "hook_result": batch * tokens * site.heads * width * computed,
    }.get(hook, batch * tokens * width * own)


class _CacheReader(Reader):
    def __init__(self, sites: Sequence[Site], names: set[str], limit: int, device: torch.device | str | None) -> None:
        self.sites = {site.layer: site for site in sites}
        self.names = names
        self.limit = limit
        self.device = device
        self.kept: dict[str, Tensor] = {}
        self._size = 0
        self._z: Tensor | None = None

    def resid_pre(self, site: Site, x: Tensor) -> None:
        if not self.kept and x.dim() == 3:
            self._expect(x)
        self._keep(site, "hook_resid_pre", x)

    def resid_mid(self, site: Site, x: Tensor) -> None:
        self._keep(site, "hook_resid_mid", x)

    def resid_post(self, site: Site, x: Tensor) -> None:
        self._keep(site, "hook_resid_post", x)

    def attention(self, site: Site, call: AttentionCall) -> None:
        z = call.z
        assert z is not None
        # some models repeat their key/value heads before the call
        repeated = call.k.shape[1] // site.kv_heads if call.k.shape[1] > site.kv_heads else 1
        k, v = call.k[:, ::repeated], call.v[:, ::repeated]
        for hook, tensor in (("hook_q", call.q), ("hook_k", k), ("hook_v", v), ("hook_z", z)):
            self._keep(site, f"attn.{hook}", tensor.transpose(1, 2))
        if self._wants(site, "attn.hook_pattern"):
            self._keep(site, "attn.hook_pattern", _pattern(call))
        self._z = z if self._wants(site, "attn.hook_result") else None

    def projected(self, site: Site, x: Tensor, update: Tensor) -> None:
        if self._z is None:
            return
        z, weight = self._z, site.output_weight()  # [B H Q D], [H C D]
        self._z = None
        if site.parts.after is not None:  # a gate or a norm has acted on z, and a factor a head with it
            x = x.transpose(0, 1) if site.tokens_first and x.shape[0] != z.shape[0] else x
            z = x.reshape(*x.shape[:2], site.heads, site.head_dim).transpose(1, 2)
            if site.parts.head_scale is not None:
                weight = weight / site.parts.head_scale().detach().double().reshape(-1, 1, 1)
        kind = torch.promote_types(z.dtype, torch.float32)
        with torch.autocast(z.device.type, enabled=False):
            self._keep(site, "attn.hook_result", torch.einsum("bhqd,hcd->bqhc", z.to(kind), weight.to(kind)))

    def _wants(self, site: Site, hook: str) -> bool:
        return f"blocks.{site.layer}.{hook}" in self.names

    def _expect(self, x: Tensor) -> None:
        """Stop before the first block runs if what was asked for does not fit."""
        sizes = [_expected_size(self.sites[int(name.split(".")[1])], name.rpartition(".")[2], x) for name in self.names]
        if sum(sizes) > self.limit:
            raise InputError(
                f"The {len(sizes)} tensors asked for need about {_in_words(sum(sizes))} for this input of "
                f"{x.shape[0]} x {x.shape[1]} tokens, more than the limit of {_in_words(self.limit)}: name fewer, "
                "give fewer inputs, or raise limit=."
            )

    def _keep(self, site: Site, hook: str, tensor: Tensor) -> None:
        if not self._wants(site, hook):
            return
        self._size += tensor.numel() * tensor.element_size()
        if self._size > self.limit:  # where the number of tokens changes on the way
            raise InputError(f"What was asked for passes the limit of {_in_words(self.limit)} at block {site.layer}.")
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device or tensor.device)
        self.kept[f"blocks.{site.layer}.{hook}"] = kept.copy_(tensor.detach())


def _pattern(call: AttentionCall) -> Tensor:
    """A [B H Q N], computed some rows at a time so that little more than A itself is needed."""
    kind = torch.promote_types(call.q.dtype, torch.float32)
    pattern = torch.empty(*call.q.shape[:3], call.k.shape[2], dtype=kind, device=call.q.device)
    with torch.autocast(call.q.device.type, enabled=False):
        for start in range(0, call.q.shape[2], ROWS):
            rows = slice(start, start + ROWS)
            pattern[:, :, rows] = call.pattern(rows, dtype=kind)
    return pattern


@dataclass(frozen=True, eq=False)
class _LensAttention:
    """What ActivationCache asks of `model.blocks[l].attn`."""

    site: Site

    @property
    def W_O(self) -> Tensor:
        """[H, D, C], LayerScale and any factor a head included."""
        if self.site.parts.after is not None:
            raise InputError(
                f"Site {self.site.name!r} has a {self.site.parts.after} between z and its projection: head results do "
                "not follow from hook_z; ask run_with_cache for hook_result."
            )
        weight = self.site.output_weight()
        return weight.transpose(1, 2).to(torch.promote_types(self.site.projection_dtype, torch.float32))


@dataclass(frozen=True, kw_only=True)
class _LensShape:
    """`model.cfg`: the shapes that ActivationCache's methods ask for."""

    n_layers: int
    n_heads: int
    n_key_value_heads: int
    d_head: int
    d_model: int
    attn_only: bool = False

    @property
    def normalization_type(self) -> str:
        """Asked for by apply_ln alone, which would otherwise divide by scales that are not kept."""
        raise InputError(
            "apply_ln needs the scales of the model's norms, which run_with_cache does not keep: apply the model's own "
            "norm to the residual stream instead."
        )


class _LensModel:
    """What an ActivationCache knows of its model: the shapes, and W_O of each block."""

    def __init__(self, sites: Sequence[Site]) -> None:
        first = sites[0]
        self.cfg = _LensShape(
            n_layers=len(sites),
            n_heads=first.heads,
            n_key_value_heads=first.kv_heads,
            d_head=first.head_dim,
            d_model=int(first.output_weight().shape[1]),
        )
        self.blocks = [SimpleNamespace(attn=_LensAttention(site)) for site in sites]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"This ActivationCache comes from sinklab.run_with_cache, whose model has no {name!r}: TransformerLens's "
            "helpers that need a final norm, an unembedding or MLP weights do not work on it."
        )
