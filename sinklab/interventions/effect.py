"""What an edit does to the final representation (sinks.md section 6), and to a classifier's answer.

Letters: R rows of edits of one image, N tokens, C model dim, n counted patch tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

EFFECTS = ("patch_change", "cls_change", "shared_energy", "donor_cosine")
ROUNDING = 16
"""Units in the last place of the tokens: what rounding alone leaves of an edit that does nothing, about."""
ANSWERS = ("kl", "top1_same", "ce_change")


def exact(x: Tensor) -> Tensor:
    """float64, on the CPU where the device has none."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def effects(
    before: Tensor, after: Tensor, counted: Tensor, *, cls: int | None, toward_donor: Tensor | None
) -> dict[str, Tensor]:
    """Name → [R] in float64 on the CPU.

    Args:
        before: final tokens of the unedited image, [N C], or of every row's own, [R N C]. after: of the edits, [R N C].
        counted: the patch tokens P that count, [R N] bool; prefix tokens and the edited sink are not among them.
        cls: index of the CLS token, or None.
        toward_donor: mean P_donor − mean P_own, [C] or [R C].

    `patch_change` = √(mean_i ‖P'_i − P_i‖²) / max(√(mean_i ‖P_i‖²), 1e-12) · `cls_change` the same of the CLS token ·
    `shared_energy` = n ‖mean_i Δ_i‖² / Σ_i ‖Δ_i‖² · `donor_cosine` = cos(mean_i Δ_i, mean P_donor − mean P_own).
    What is not defined (no CLS, no change, no patch) is NaN; a change no larger than rounding has a size, but no shape:
    `shared_energy` and `donor_cosine` of less than ROUNDING of the tokens' type are NaN.
    """
    least = ROUNDING * torch.finfo(after.dtype).eps
    before, after = exact(before), exact(after)
    counted = counted.to(after.device)
    delta = (after - before) * counted[..., None]
    number = counted.sum(-1).double()  # n [R]
    moved, size = delta.square().sum((-2, -1)), (before.square().sum(-1) * counted).sum(-1)  # [R]
    mean = delta.sum(1) / number[:, None]  # [R C]
    nothing = torch.full_like(number, torch.nan)
    found = {
        "patch_change": (moved / number).sqrt() / (size / number).sqrt().clamp_min(1e-12),
        "cls_change": nothing,
        "shared_energy": number * mean.square().sum(-1) / moved,
        "donor_cosine": nothing,
    }
    if cls is not None:
        own = torch.linalg.vector_norm(before[..., cls, :], dim=-1).clamp_min(1e-12)
        found["cls_change"] = torch.linalg.vector_norm(after[:, cls] - before[..., cls, :], dim=-1) / own
    if toward_donor is not None:
        toward = exact(toward_donor).to(mean).expand_as(mean)
        lengths = torch.linalg.vector_norm(mean, dim=-1) * torch.linalg.vector_norm(toward, dim=-1)
        found["donor_cosine"] = (mean * toward).sum(-1) / torch.where(lengths > 0, lengths, torch.nan)
    for name in ("shared_energy", "donor_cosine"):
        found[name] = torch.where(found["patch_change"] > least, found[name], torch.nan)
    return {name: values.cpu() for name, values in found.items()}


def answers(before: Tensor, after: Tensor, labels: Sequence[int | None]) -> dict[str, Tensor]:
    """Of a classifier's logits, [K] or [R K] before and [R K] after, each row with its label or None:
    KL(base‖edited), whether the top answer stays, change of −log p(label).

    KL and the change are in nats; an answer that stays is 1, one that goes is 0; without a label there is no change.
    """
    q = exact(after).log_softmax(-1)
    p = exact(before).log_softmax(-1).expand_as(q)
    kl = torch.where(p.exp() > 0, p.exp() * (p - q), 0.0).sum(-1)
    same = (q.argmax(-1) == p.argmax(-1)).double()
    change = torch.full_like(kl, torch.nan)
    for row, label in enumerate(labels):
        if label is not None:
            change[row] = p[row, label] - q[row, label]
    return {name: values.cpu() for name, values in zip(ANSWERS, (kl, same, change), strict=True)}


def next_token_answers(before: Tensor, after: Tensor, ids: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Of a language model's logits before and after, [N V] each, and the tokens [N] that it read.

    ANSWERS as numbers: the mean over positions of KL(base‖edited), the share of positions whose likeliest next token
    stays, and the change of the loss, in nats a token; and the change of the loss at each position but the last [N−1].
    """
    p, q = exact(before).log_softmax(-1), exact(after).log_softmax(-1)
    kl = torch.where(p.exp() > 0, p.exp() * (p - q), 0.0).sum(-1).mean()
    same = (q.argmax(-1) == p.argmax(-1)).double().mean()
    change = (p - q)[:-1].gather(-1, ids[1:, None].to(p.device))[:, 0]
    return dict(zip(ANSWERS, (kl, same, change.mean()), strict=True)), change
