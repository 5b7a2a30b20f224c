"""Bits a byte of a language model on a split: a window that slides, every byte but the first counted once.

Letters: B batch, N context, V symbols.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.data.text import Text, Windows
from sinklab.errors import InputError
from sinklab.training.distributed import Ranks


@dataclass(frozen=True, kw_only=True)
class Bits:
    """What was measured, and how."""

    bpc: float
    """Bits a byte: nats / ln 2, the mean over the bytes that were predicted."""
    predicted: int
    """Bytes that were predicted."""
    context: int
    stride: int


def sliding(length: int, context: int, stride: int) -> list[tuple[int, int]]:
    """(first byte, predictions to skip) of each window over `length` bytes, so that each byte is predicted once.

    A window reads min(context, length − 1) bytes and predicts the byte after each; the first one counts all of them,
    the later ones those that none before has counted. All but the first have at least context − stride bytes to look
    back on.
    """
    if not 1 <= stride <= context:
        raise InputError(f"The stride lies between 1 and the context, {context}; {stride} was given.")
    if length < 2:
        raise InputError(f"There is nothing to predict in {length} bytes.")
    width = min(context, length - 1)
    windows, counted = [(0, 0)], width
    while counted < length - 1:
        end = min(counted + stride, length - 1)
        windows.append((end - width, width - (end - counted)))
        counted = end
    return windows


@torch.no_grad()
def bits_per_byte(
    model: Any,
    text: Text,
    split: str,
    *,
    context: int,
    stride: int,
    batch: int = 64,
    ranks: Ranks | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Bits:
    """Of one split, from its beginning to its end; neither batch size nor the number of processes matters."""
    ranks = ranks or Ranks()
    first, _ = text.splits[split] if text.length(split) else (0, 0)
    windows = sliding(text.length(split), context, stride)
    width = min(context, text.length(split) - 1)
    mine = windows[ranks.share]
    device = next(model.parameters()).device
    nats: list[float] = []
    for begin in range(0, len(mine), batch):
        chosen = mine[begin : begin + batch]
        tokens = text.rows([first + start for start, _ in chosen], width + 1).to(device)
        counts = torch.tensor([skip for _, skip in chosen], device=device)[:, None] <= torch.arange(
            width, device=device
        )
        # what no window counts is not read out
        earliest = min(skip for _, skip in chosen)
        losses = _losses(model, tokens, earliest)
        nats += (losses * counts[:, earliest:]).sum(-1, dtype=torch.float64).tolist()
        if progress is not None:
            progress(begin + len(chosen), len(mine))
    (total,) = ranks.total([math.fsum(nats)])
    predicted = text.length(split) - 1
    return Bits(bpc=total / predicted / math.log(2), predicted=predicted, context=width, stride=stride)


@torch.no_grad()
def quick_bits(model: Any, windows: Windows, *, batch: int = 64, ranks: Ranks | None = None) -> float:
    """Bits a byte over separate windows of N + 1, each from its own beginning, as `bits_per_byte`'s are not."""
    ranks = ranks or Ranks()
    starts = [start for _, start in windows.entries][ranks.share]
    device = next(model.parameters()).device
    nats: list[float] = []
    for begin in range(0, len(starts), batch):
        tokens = windows.text.rows(starts[begin : begin + batch], windows.length).to(device)
        nats += _losses(model, tokens, 0).mean(-1, dtype=torch.float64).tolist()
    (total,) = ranks.total([math.fsum(nats)])
    return total / len(windows) / math.log(2)


def _losses(model: Any, tokens: Tensor, earliest: int) -> Tensor:
    """Nats [B N − earliest] of the tokens [B N + 1] from position earliest + 1 on."""
    logits = model.readout(model.final(tokens[:, :-1])[:, earliest:])  # [B N V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, earliest + 1 :], reduction="none")
