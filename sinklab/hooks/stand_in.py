"""The stand-in for `nn.MultiheadAttention`, whose fast path no hook and no mode sees: it makes one visible SDPA call.

Letters: B batch, H heads, N keys, C model dim, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from sinklab.errors import InputError
from sinklab.hooks.held import held

if TYPE_CHECKING:
    from torch import Tensor, nn


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


def _without_fast_path() -> Callable[[], object]:
    """nn.TransformerEncoderLayer's fast path would skip even a replaced attention."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return partial(torch.backends.mha.set_fastpath_enabled, before)


def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], object]:
    own = module.__dict__.get("forward")

    def undo() -> None:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.__dict__["forward"] = own

    module.__dict__["forward"] = forward
    return undo


@contextmanager
def standing_in(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within, each `nn.MultiheadAttention` runs its stand-in; afterwards it is what it was, also after an error."""
    forwards = [stand_in(module) for module in modules]
    with ExitStack() as stack:
        if modules:
            stack.enter_context(held("fast path", _without_fast_path))
        for module, forward in zip(modules, forwards, strict=True):
            stack.enter_context(held(("forward", id(module)), partial(_replaced, module, forward)))
        yield
