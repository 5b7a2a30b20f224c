"""What an eager attention's logits say of it: whether they are q kᵀ · scale, hidden keys apart, or something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sinklab.hooks.eager import eager_call
from sinklab.hooks.seam import AttentionCall

HEADS, TOKENS, DIM = 2, 256, 16
SCALE = DIM**-0.5


def call_of(dtype: torch.dtype, change: Any) -> tuple[AttentionCall, Tensor]:
    """The call that is put together of q, k, v and logits, q kᵀ · scale changed by `change`, and those logits."""
    drawing = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, TOKENS, DIM, generator=drawing).to(dtype) * 2 for _ in range(3))
    scores = change((q @ k.transpose(-1, -2)) * SCALE)
    site: Any = SimpleNamespace(heads=HEADS, kv_heads=HEADS, parts=SimpleNamespace(eager=SimpleNamespace(scale=SCALE)))
    return eager_call(site, {"q": q, "k": k, "v": v, "scores": scores, "z": v}), scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_logits_need_no_mask_in_any_precision(dtype: torch.dtype) -> None:
    call, _ = call_of(dtype, lambda scores: scores)
    assert call.mask is None and not call.is_causal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_soft_cap_is_not_taken_for_rounding_in_any_precision(dtype: torch.dtype) -> None:
    """20 tanh(s / 20), Gemma's way: the pattern follows the capped logits."""
    call, scores = call_of(dtype, lambda scores: 20 * torch.tanh(scores / 20))
    assert call.mask is not None and call.mask.is_floating_point()
    again = call.q.float() @ call.k.float().transpose(-1, -2) * SCALE + call.mask
    assert torch.allclose(again, scores.float(), atol=1e-4)
