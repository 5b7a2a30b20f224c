"""The seam: the call of `scaled_dot_product_attention` made while one attention module runs.

Everything that softmax attention is can be read there (q, k, v, mask, scale, causality) and everything that an
edit needs can be changed there, while the model's own fused kernel does the work.

Letters: B batch, H query heads, K key/value heads, Q queries, N keys, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from sinklab.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

SDPA = F.scaled_dot_product_attention


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCall:
    """One attention call as the model made it; the tensors are the model's own, not copies.

    q [B H Q D], k [B K N D], v [B K N D], z [B H Q D] (None before the call). A boolean mask is True where a
    query may attend; a float mask is added to the logits; both broadcast to [B H Q N].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    grouped: bool
    z: Tensor | None = None

    @property
    def kv_head(self) -> list[int]:
        """Which key/value head each query head reads: h // (H / K). The one place where groups are mapped."""
        group = self.q.shape[1] // self.k.shape[1]
        return [head // group for head in range(self.q.shape[1])]

    def bias(self, batch: slice, heads: slice, rows: slice) -> Tensor | None:
        """What is added to the logits of some rows, [b h q N] or broadcastable; None if nothing is."""
        queries, keys = self.q.shape[-2], self.k.shape[-2]
        if self.is_causal:  # torch aligns the causal triangle at the top left
            first = torch.arange(queries, device=self.q.device)[rows, None]
            allowed = torch.arange(keys, device=self.q.device)[None, :] <= first
            return torch.zeros(allowed.shape, device=self.q.device).masked_fill_(~allowed, -math.inf)[None, None]
        if self.mask is None:
            return None
        mask = self.mask.reshape((1,) * (4 - self.mask.dim()) + tuple(self.mask.shape))
        picks = (batch, heads, rows)
        mask = mask[tuple(pick if size > 1 else slice(None) for pick, size in zip(picks, mask.shape[:3], strict=True))]
        if mask.dtype == torch.bool:
            return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -math.inf)
        return mask.float()

    def pattern(self, rows: slice = slice(None), *, dtype: torch.dtype = torch.float64) -> Tensor:
        """A = softmax(q kᵀ · scale + mask) for some queries, [B H q N] (sinks.md section 1).

        For looking at, not for statistics: it is a whole map. A row in which every key is masked is zero, as in
        the kernels.
        """
        k = self.k[:, self.kv_head].to(dtype)
        logits = self.q[:, :, rows].to(dtype) @ k.transpose(-1, -2) * self.scale
        bias = self.bias(slice(None), slice(None), rows)
        if bias is not None:
            logits = logits + bias.to(dtype)
        return torch.nan_to_num(logits.softmax(-1), nan=0.0) if bias is not None else logits.softmax(-1)

    def pairs(self, rows: Tensor, heads: Tensor) -> AttentionCall:
        """Some (image, head) pairs, [R] each, as a call of R images with one head: q [R 1 Q D], k, v [R 1 N D]."""
        kv = heads // (self.q.shape[1] // self.k.shape[1])
        mask = self.mask
        if mask is not None:
            mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
            if mask.shape[:2] != (1, 1):
                first, none = mask.shape[:2], torch.zeros_like(rows)
                mask = mask[rows if first[0] > 1 else none, heads if first[1] > 1 else none][:, None]
        q, k, v = self.q[rows, heads], self.k[rows, kv], self.v[rows, kv]
        return replace(self, q=q[:, None], k=k[:, None], v=v[:, None], mask=mask, grouped=False, z=None)

    def run(self) -> Tensor:
        """z by the model's own kernel."""
        return SDPA(
            self.q,
            self.k,
            self.v,
            attn_mask=self.mask,
            is_causal=self.is_causal,
            scale=self.scale,
            **({"enable_gqa": True} if self.grouped else {}),
        )

    def to(self, device: torch.device | str) -> AttentionCall:
        """The same call on another device."""
        mask, z = (None if x is None else x.to(device) for x in (self.mask, self.z))
        return replace(self, q=self.q.to(device), k=self.k.to(device), v=self.v.to(device), mask=mask, z=z)

    def with_z(self, z: Tensor) -> AttentionCall:
        """The same call after it ran."""
        return replace(self, z=z)


def read_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> AttentionCall:
    """The call that F.scaled_dot_product_attention would make; InputError for dropout and odd shapes."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    q, k, v = given["query"], given["key"], given["value"]
    if given.get("dropout_p", 0.0):
        raise InputError("Attention dropout is on: what is read would change from run to run. Call model.eval() first.")
    if q.dim() != 4 or k.dim() != 4:
        raise InputError(f"Attention arrived with shape {tuple(q.shape)}; sinklab reads [batch head token dim].")
    scale = given.get("scale")
    return AttentionCall(
        q=q,
        k=k,
        v=v,
        mask=given.get("attn_mask"),
        is_causal=bool(given.get("is_causal", False)),
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        grouped=bool(given.get("enable_gqa", False)),
    )


class Seam(TorchFunctionMode):
    """While active, hands every SDPA call to `intercept(args, kwargs)`; all other functions pass untouched.

    It holds no state of its own, so nothing in it can trip a guard of torch.compile.
    """

    def __init__(self, intercept: Callable[[Sequence[Any], Mapping[str, Any]], Tensor]) -> None:
        super().__init__()
        self.intercept = intercept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is SDPA:
            return self.intercept(args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2)  # [B N C] → [B H N D]


def _projected(mha: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if mha.in_proj_weight is None:
        weights = (mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight)
    elif query is key and key is value:
        return F.linear(query, mha.in_proj_weight, mha.in_proj_bias).chunk(3, dim=-1)  # type: ignore[return-value]
    else:
        weights = mha.in_proj_weight.chunk(3)
    biases = (None,) * 3 if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    return q, k, v


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """nn.MultiheadAttention's masks are True where attention is forbidden; SDPA's are True where it is allowed."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, -math.inf)


def stand_in(mha: Any) -> Callable[..., tuple[Tensor, None]]:
    """A forward for `nn.MultiheadAttention` with the same parameters that makes one visible SDPA call.

    In eval mode the original runs a C++ fast path that no hook and no mode can see (pytorch #78109). The result
    equals it to rounding, not bit for bit. Raises InputError for what it does not reproduce: bias_k/bias_v,
    add_zero_attn, averaged attention weights.
    """
    if mha.bias_k is not None or mha.bias_v is not None or mha.add_zero_attn:
        raise InputError("nn.MultiheadAttention with bias_k, bias_v or add_zero_attn appends keys: it cannot be read.")

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        if need_weights:
            raise InputError(
                "nn.MultiheadAttention was asked for its weights (need_weights=True) while sinklab is attached; "
                "read the pattern from sinklab instead and pass need_weights=False."
            )
        if not mha.batch_first:
            same = query is key and key is value
            query = query.transpose(0, 1)
            key, value = (query, query) if same else (key.transpose(0, 1), value.transpose(0, 1))
        q, k, v = (_split_heads(x, mha.num_heads) for x in _projected(mha, query, key, value))
        mask = _additive(attn_mask, q)
        if mask is not None and mask.dim() == 3:
            mask = mask.reshape(q.shape[0], -1, *mask.shape[1:])
        padding = _additive(key_padding_mask, q)
        if padding is not None:
            padding = padding[:, None, None, :]
            mask = padding if mask is None else mask + padding
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal and mask is None)
        update = mha.out_proj(z.transpose(1, 2).flatten(2))  # [B Q C]
        return (update if mha.batch_first else update.transpose(0, 1)), None

    return forward


@contextmanager
def standing_in(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within, each `nn.MultiheadAttention` runs its stand-in; afterwards it is what it was, also after an error."""
    before = [(module, module.__dict__.get("forward")) for module in modules]
    forwards = [stand_in(module) for module in modules]
    fastpath = torch.backends.mha.get_fastpath_enabled()
    try:
        if modules:  # nn.TransformerEncoderLayer would skip even a replaced attention
            torch.backends.mha.set_fastpath_enabled(False)
        for module, forward in zip(modules, forwards, strict=True):
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before:
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own
        if modules:
            torch.backends.mha.set_fastpath_enabled(fastpath)
