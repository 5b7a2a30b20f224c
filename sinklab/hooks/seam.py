"""The seam: the call of `scaled_dot_product_attention` made while one attention module runs.

Everything that softmax attention is can be read there (q, k, v, mask, scale, causality) and everything that an
edit needs can be changed there, while the model's own fused kernel does the work.

Letters: B batch, H query heads, K key/value heads, Q queries, N keys, D head dim.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from sinklab.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

SDPA = F.scaled_dot_product_attention


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AttentionCall:
    """One attention call as the model made it; the tensors are the model's own, not copies.

    They carry gradients where the model's do; a kept tensor keeps its memory.
    """

    q: Tensor
    """[B H Q D], after any query-key norm and rotary embedding."""
    k: Tensor
    """[B K N D]."""
    v: Tensor
    """[B K N D]; query head h reads key/value head `kv_head[h]`."""
    mask: Tensor | None
    """bool: True where a query may attend; float: added to the logits. It broadcasts to [B H Q N]."""
    is_causal: bool
    """Query i sees keys 0 to i only."""
    scale: float
    """What q kᵀ is multiplied by."""
    grouped: bool
    """Whether the model asked for grouped-query attention (K < H)."""
    z: Tensor | None = None
    """[B H Q D], what the model goes on with; None before the call has run."""

    def __repr__(self) -> str:
        """Shapes only."""
        shapes = {name: getattr(self, name) for name in ("q", "k", "v", "mask", "z")}
        told = [f"{name}={'None' if x is None else list(x.shape)}" for name, x in shapes.items()]
        kind = str(self.q.dtype).removeprefix("torch.")
        causal = ", is_causal" if self.is_causal else ""
        return f"AttentionCall({', '.join(told)}, scale={self.scale:.4g}{causal}, {kind} on {self.q.device})"

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

        For looking at, not for statistics: it is a whole map, computed in `dtype` whatever the model's, and not
        detached: it carries gradients where q and k do. A row in which every key is masked is zero, as in the kernels.
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


class _Thread(threading.local):
    """The seams that are open in this thread, and what the call that they caught is at."""

    def __init__(self) -> None:
        self.seams: list[Seam] = []
        self.stage = ""  # "computing", "plain", or nothing while no call is caught


_here = _Thread()


@contextmanager
def plain_kernel() -> Iterator[None]:
    """Within, SDPA calls of this thread run the kernel and nothing else, whatever seams are open."""
    before, _here.stage = _here.stage, "plain"
    try:
        yield
    finally:
        _here.stage = before


class Seam(TorchFunctionMode):
    """While open, catches every SDPA call of its thread; all other functions pass untouched.

    `compute(args, kwargs)` gives z; the SDPA that it calls in turn is the next seam's `compute`, in the end the kernel.
    Then every open seam's `tell(args, kwargs, z)` hears of the call as the model made it and of the z it goes on with.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Any], Mapping[str, Any]], Tensor],
        tell: Callable[[Sequence[Any], Mapping[str, Any], Tensor], None],
    ) -> None:
        super().__init__()
        self.compute = compute
        self.tell = tell

    def __enter__(self) -> Seam:
        super().__enter__()
        self._outside = (_here.stage, _here.seams)
        if _here.stage:  # a reader runs a model of its own: whatever is open outside has no part in it
            _here.stage, _here.seams = "", []
        _here.seams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        """Close this seam, also where others that were opened later are open still."""
        _here.seams.remove(self)
        if self._outside[0]:
            _here.stage, _here.seams = self._outside
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not SDPA or _here.stage == "plain" or self not in _here.seams:
            return func(*args, **(kwargs or {}))
        if _here.stage == "computing":
            return self.compute(args, kwargs or {})
        _here.stage = "computing"
        try:
            z = self.compute(args, kwargs or {})
            _here.stage = "plain"
            for seam in [*_here.seams]:
                seam.tell(args, kwargs or {}, z)
        finally:
            _here.stage = ""
        return z
