"""Text from a language model, one token a step: keys and values of what was read are kept, not computed again.

Letters: B batch, H heads, Q new tokens, N tokens in all, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class KeyValues:
    """Keys and values [B H N D] of one layer's tokens so far; with `longest`, of the latest ones only."""

    def __init__(self, longest: int | None = None) -> None:
        self.seen = 0
        """Tokens that were ever added: the next one's position."""
        self.longest = longest
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens; returns all that a query may look at."""
        self.seen += key.shape[2]
        if self.key is not None and self.value is not None:
            # of the tokens before, as many as leave the new ones within reach of `longest`
            room = self.key.shape[2] if self.longest is None else max(0, self.longest - key.shape[2])
            first = max(0, self.key.shape[2] - room)
            key, value = torch.cat([self.key[:, :, first:], key], 2), torch.cat([self.value[:, :, first:], value], 2)
        self.key, self.value = key, value
        return key, value


def causality(queries: int, keys: int, device: torch.device) -> dict[str, Any]:
    """Arguments of scaled_dot_product_attention by which the last `queries` of `keys` tokens see none after them."""
    if queries == keys:
        return {"is_causal": True}
    if queries == 1:
        return {}
    return {"attn_mask": torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)}


@torch.no_grad()
def generate(
    model: Any,
    tokens: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    longest: int | None = None,
) -> Tensor:
    """The tokens [B N] and `count` more behind them [B N + count].

    Args:
        model: a `Kuramoto` or `Transformer`.
        temperature: of the draw; 0 takes the likeliest token.
        longest: how many tokens back a new one may look, such as the context that was trained on; None for all.
    """
    past: Sequence[KeyValues] = [KeyValues(longest) for _ in model.blocks]
    fresh = tokens
    for _ in range(count):
        logits = model.readout(model.final(fresh, past)[:, -1])  # [B V]
        if temperature == 0:
            fresh = logits.argmax(-1, keepdim=True)
        else:
            share = torch.softmax(logits.float() / temperature, -1)
            fresh = torch.multinomial(share, 1, generator=generator)
        tokens = torch.cat([tokens, fresh], 1)
    return tokens
