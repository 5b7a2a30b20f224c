"""Attention that is computed step by step, between modules that show each step: TransformerLens's hook points.

No attention call is made that the seam could catch, so the call is put together from what passes: q, k, v, and the
masked logits, from which the mask follows. What leaves as z may be replaced, so edits work as they do at the seam.

Letters: B batch, H query heads, K key/value heads, Q queries, N keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sinklab.hooks.reader import recomputing
from sinklab.hooks.seam import AttentionCall, plain_kernel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sinklab.hooks.site import Site

STEPS = ("q", "k", "v", "scores", "z")


@dataclass(frozen=True, kw_only=True, eq=False)
class EagerParts:
    """The modules that each step of an attention passes through unchanged."""

    q: nn.Module
    """[B H Q D], or [B Q H·D]; after any norm of queries and rotary embedding, as it meets the keys."""
    k: nn.Module
    v: nn.Module
    """[B N K·D]."""
    scores: nn.Module
    """[B H Q N], scaled and masked, before the softmax."""
    z: nn.Module
    """[B Q H·D], before W_O."""
    scale: float


def eager_call(site: Site, seen: dict[str, Tensor]) -> AttentionCall:
    """The attention call that these steps amount to, z included."""
    eager = site.parts.eager
    assert eager is not None
    scores = seen["scores"]
    q, z = (_by_head(seen[name], site.heads) for name in ("q", "z"))
    k, v = (_by_head(seen[name], site.kv_heads) for name in ("k", "v"))
    call = AttentionCall(
        q=q, k=k, v=v, mask=None, is_causal=False, scale=eager.scale, grouped=site.kv_heads != site.heads, z=z
    )
    mask, causal = _mask(call, scores)
    return AttentionCall(q=q, k=k, v=v, mask=mask, is_causal=causal, scale=eager.scale, grouped=call.grouped, z=z)


def _by_head(x: Tensor, heads: int) -> Tensor:
    if x.dim() == 4 and x.shape[1] == heads and x.shape[2] != heads:
        return x
    if x.dim() == 4:  # [B N H D] of split inputs; where N = H, what is meant shows from the layout
        return x if x.shape[1] == heads and x.stride(1) < x.stride(2) else x.transpose(1, 2)
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _mask(call: AttentionCall, scores: Tensor) -> tuple[Tensor | None, bool]:
    """The mask that makes these logits of q and k, [B H Q N] or broadcastable, and whether it is the causal triangle.

    Logits that are not q kᵀ · scale though not hidden (soft caps, biases by position) come out as an added mask.
    """
    hidden = scores <= torch.finfo(scores.dtype).min / 2
    plain = call.q.float() @ call.k[:, call.kv_head].float().transpose(-1, -2) * call.scale
    gap = (scores.float() - plain).masked_fill(hidden, 0.0)
    # the product is summed in float32 at least; it and its scaling are then rounded once each to the scores' own type
    summed = 16 * torch.finfo(torch.float32).eps * call.q.shape[-1]
    rounded = 2 * torch.finfo(scores.dtype).eps if scores.dtype != torch.float32 else 0.0
    if float(gap.abs().max()) > (summed + rounded) * (1 + float(plain.abs().max())):
        return gap.masked_fill(hidden, -torch.inf), False
    if not bool(hidden.any()):
        return None, False
    triangle = torch.ones(hidden.shape[-2:], dtype=torch.bool, device=hidden.device).triu(1)
    if hidden.shape[-1] == hidden.shape[-2] and bool((hidden == triangle).all()):
        return None, True
    return ~hidden, False


def listen(
    site: Site,
    running: Callable[[], bool],
    compute: Callable[[AttentionCall], Tensor],
    tell: Callable[[AttentionCall], None],
) -> list[Any]:
    """Hooks on an eager attention's steps; returns their handles.

    While `running()`, `compute` is given the call with its z, and the model goes on with the z that it returns; then
    `tell` hears of the call with the z that the model really goes on with.
    """
    eager = site.parts.eager
    assert eager is not None
    seen: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, result: Tensor) -> None:
            if running() and not recomputing():
                seen[name] = result

        return hook

    def at_z(module: Any, args: Any, result: Tensor) -> Tensor | None:
        if not running() or recomputing() or len(seen) < len(STEPS) - 1:
            return None
        call = eager_call(site, {**seen, "z": result})
        seen.clear()
        with plain_kernel():
            z = compute(call)
        seen["call"] = call
        if z is call.z:
            return None
        return z.transpose(1, 2).reshape(result.shape).to(result.dtype)

    def at_projection(module: Any, args: tuple[Tensor, ...]) -> None:
        call = seen.pop("call", None)
        if call is not None and running() and not recomputing():
            with plain_kernel():
                tell(call.with_z(_by_head(args[0], site.heads)))

    steps = [getattr(eager, name).register_forward_hook(keep(name)) for name in STEPS[:-1]]
    return [
        *steps,
        eager.z.register_forward_hook(at_z),
        site.parts.projection.register_forward_pre_hook(at_projection),
    ]
