"""A way for what all tokens share that has no position, and the penalty that sends it there.

    π = softmax_j(w_P·h_j)    g = Σ_j π_j W_VG h_j    o_i = γ_i W_OG g,  γ_i = sigmoid(w_γ·h_i + b_γ)        (Eq. 4)
    penalty = mean_ℓ [ E(ō²) / (E(o²) + 1e-12) ],  ō the mean of layer ℓ's attention update over its tokens  (Eq. 5)

"Attention Sinks", Sec. 5. Letters: B batch, N tokens, C model dim, G dim of the global state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sinklab.errors import InputError

INIT_STD = 0.02
EPSILON = 1e-12
GATES = ("learned", "hier", "uniform")
DENOMINATORS = ("gradient", "stopgrad")
RATIOS = ("batch", "example")


class GlobalPathway(nn.Module):
    """Eq. 4 on a layer's normalised tokens: [B N C] → update [B N C]."""

    def __init__(self, dim: int, state_dim: int, *, gate: str = "learned") -> None:
        """`gate` is "learned"; "hier" for γ = sigmoid(a) · softmax(r)₁ with (a, r₀, r₁) = w_γ·h + b_γ, which row 4 of
        Table 1 was trained with; or "uniform" for γ ≡ 1 (App. E.1). Raises InputError for anything else.
        """
        super().__init__()
        if gate not in GATES:
            raise InputError(f"A pathway's gate is one of {', '.join(GATES)}, not {gate!r}.")
        self.pool = nn.Linear(dim, 1, bias=False)  # w_P
        self.value = nn.Linear(dim, state_dim, bias=False)  # W_VG
        self.out = nn.Linear(state_dim, dim, bias=False)  # W_OG
        rows = {"learned": 1, "hier": 3, "uniform": 0}[gate]
        self.recipient = nn.Linear(dim, rows) if rows else None  # w_γ, b_γ
        for part in (self.pool, self.value, self.out, self.recipient):
            if part is not None:
                nn.init.trunc_normal_(part.weight, std=INIT_STD)
        if self.recipient is not None:
            nn.init.zeros_(self.recipient.bias)  # γ = 0.5 at the start, or 0.25 where it is hier

    def weights(self, h: Tensor) -> Tensor:
        """π [B N]: how much each token gives to the state."""
        return torch.softmax(self.pool(h).squeeze(-1), dim=-1)

    def state(self, h: Tensor) -> Tensor:
        """g [B G]."""
        g: Tensor = self.value(torch.einsum("bn,bnc->bc", self.weights(h), h))  # Σ_j π_j W h_j = W Σ_j π_j h_j
        return g

    def gate(self, h: Tensor) -> Tensor:
        """γ [B N 1]: how much each token takes."""
        if self.recipient is None:
            return h.new_ones(*h.shape[:2], 1)
        openness, *routes = self.recipient(h).split(1, dim=-1)
        if not routes:
            return torch.sigmoid(openness)
        return torch.sigmoid(openness) * torch.softmax(torch.cat(routes, -1), dim=-1)[..., 1:]

    def forward(self, h: Tensor, state: Tensor | None = None) -> Tensor:
        """The update γ_i W_OG g; `state` [B G] stands in for the tokens' own g."""
        g = self.state(h) if state is None else state
        return self.gate(h) * self.out(g).unsqueeze(1)


def common_mode(update: Tensor, *, ratio: str = "batch", denominator: str = "gradient") -> Tensor:
    """The share of an update's energy [.. N C] that all its tokens have in common, in [0, 1] (Eq. 5, one layer).

    Args:
        ratio: "batch", a ratio of means over batch, tokens and channels; or "example", the mean of each example's own
            ratio (the form behind App. E.1).
        denominator: "gradient", which makes the ratio blind to the update's scale; or "stopgrad", which is there to
            show what goes wrong: the ratio can then be lowered by shrinking the whole attention branch (App. E.2).

    Raises InputError for any other choice.
    """
    if ratio not in RATIOS:
        raise InputError(f"A common-mode ratio is one of {', '.join(RATIOS)}, not {ratio!r}.")
    if denominator not in DENOMINATORS:
        raise InputError(f"A common-mode denominator is one of {', '.join(DENOMINATORS)}, not {denominator!r}.")
    shared, energy = update.mean(-2).square(), update.square()  # [.. C], [.. N C]
    over_shared, over_energy = ((-1,), (-2, -1)) if ratio == "example" else (None, None)
    total = energy.mean(over_energy)
    return (shared.mean(over_shared) / ((total.detach() if denominator == "stopgrad" else total) + EPSILON)).mean()


def broadcast_penalty(
    updates: Sequence[Tensor], *, reduce: str = "mean", ratio: str = "batch", denominator: str = "gradient"
) -> Tensor:
    """Eq. 5 without λ_B over the attention updates of the layers: their mean, or with reduce="sum" their sum."""
    if not updates:
        raise InputError("The broadcast penalty needs the attention update of one layer at least; it was given none.")
    if reduce not in ("mean", "sum"):
        raise InputError(f"The broadcast penalty's layers are reduced by mean or sum, not {reduce!r}.")
    shares = torch.stack([common_mode(update, ratio=ratio, denominator=denominator) for update in updates])
    return shares.mean() if reduce == "mean" else shares.sum()
