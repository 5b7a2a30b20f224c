"""What a trained controlled model does, and what its edits change: the numbers behind Tables 2 and 3 and Fig. 7B.

Every number is a mean over batches of fresh sequences with its standard error. Delta RMS is the root mean square of
the change of the model's output over a group of tokens. Letters: B batch, N tokens, C model dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.data.toy import Batch, BroadcastTask, NopBranchTask, NopTask, ToyTask, task_loss
from sinklab.models.pathway import common_mode
from sinklab.models.toy import ToyModel
from sinklab.training.loop import Diverged
from sinklab.training.toy_edits import (
    LayerEdit,
    LayerRecord,
    inflow,
    layers_of,
    pathway_of,
    picked,
    replaced,
    run_model,
    value_norms,
)

Key = tuple[int, str, str]
"""(layer, or -1 for the model as a whole; edit; metric)."""
WHOLE = -1


def evaluate(model: ToyModel, task: ToyTask, *, batches: int, size: int, device: Any = "cpu") -> list[dict[str, Any]]:
    """One row a (layer, edit, metric) with mean and sem over `batches` batches of `size` sequences.

    The metrics are those of the task: see `nop_numbers`, `branch_numbers`, `broadcast_numbers`. Raises Diverged for a
    model whose outputs are no numbers.
    """
    measure: Callable[..., dict[Key, float]] = broadcast_numbers
    if not isinstance(task, BroadcastTask):
        measure = nop_numbers if isinstance(task, NopTask) else branch_numbers
    seen: dict[Key, list[float]] = {}
    with torch.no_grad():
        for number in range(batches):
            own, donor = (
                task.batch(number, size, purpose=purpose, device=device) for purpose in ("evaluation", "donors")
            )
            _require_numbers(model, own)
            for key, value in measure(model, task, own, donor).items():
                seen.setdefault(key, []).append(value)
    return [
        {"layer": layer, "edit": edit, "metric": metric, "mean": fmean(values), "sem": _sem(values)}
        for (layer, edit, metric), values in seen.items()
    ]


def _require_numbers(model: ToyModel, batch: Batch) -> None:
    """Raise Diverged for weights with which nothing can be computed, though each of them may be a number: those that
    the last step left are looked at by no loss."""
    if not bool(torch.isfinite(model(batch.x).square().mean())):
        raise Diverged(
            "What the trained model computes is no longer a number: the training has diverged. Try a smaller learning "
            "rate."
        )


def _sem(values: list[float]) -> float:
    if any(math.isnan(value) for value in values):  # a group without tokens, such as the flagged ones at λ = 10
        return math.nan
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def look_up(rows: list[dict[str, Any]], layer: int, edit: str, metric: str) -> float:
    """The mean of one row of `evaluate`; KeyError without it."""
    found = [row["mean"] for row in rows if (row["layer"], row["edit"], row["metric"]) == (layer, edit, metric)]
    if len(found) != 1:
        raise KeyError((layer, edit, metric))
    return float(found[0])


def rms(change: Tensor, group: Tensor) -> float:
    """Root mean square of a change [B N C] over the tokens in group [B N]."""
    return float(change[group].square().mean().sqrt()) if group.any() else math.nan


def nop_numbers(model: ToyModel, task: NopTask, own: Batch, donor: Batch) -> dict[Key, float]:
    """Table 2: task_mse, delta_rms_nop and delta_rms_active of every edit at token 0, and how attention gets there.

    `route` masks the sink's logit. `route_clamped` divides the other weights by their sum, or by 1e-12 where that is
    larger: so saturated is the sink that many rows then come out near zero, and the edit looks half as strong as it is.
    """
    (block,) = layers_of(model)
    plain, (record,) = run_model(model, own.x)
    _, (other,) = run_model(model, donor.x)
    sink = torch.zeros(len(own.x), dtype=torch.long, device=own.x.device)
    counted = (own.weight > 0).expand_as(own.flags)
    groups = {"nop": own.flags & counted, "active": ~own.flags & counted}
    numbers: dict[Key, float] = {}
    outputs = {
        edit: run_model(model, own.x, {0: change})[0]
        for edit, change in {
            "baseline": LayerEdit(),
            "zero": LayerEdit(value=replaced(sink, 0.0)),
            "donor": LayerEdit(value=replaced(sink, other.value[:, 0])),
            "ordinary": LayerEdit(value=replaced(sink, other.value[:, 1])),
            "route": LayerEdit(without=sink),
        }.items()
    }
    rest = record.pattern * (torch.arange(task.tokens, device=own.x.device) != 0)
    clamped = rest / rest.sum(-1, keepdim=True).clamp_min(1e-12)
    outputs["route_clamped"] = own.x + block.attention.out_proj(clamped @ record.value)
    for edit, produced in outputs.items():
        numbers[0, edit, "task_mse"] = float(task_loss(produced, own.target, own.weight))
        for group, tokens in groups.items():
            numbers[0, edit, f"delta_rms_{group}"] = rms(produced - plain, tokens)
    norms = value_norms(block, record)
    numbers |= {
        (0, "baseline", "attention_nop"): float(record.pattern[..., 0][groups["nop"]].mean()),
        (0, "baseline", "attention_active"): float(record.pattern[..., 0][groups["active"]].mean()),
        (0, "baseline", "value_norm_sink"): float(norms[:, 0].mean()),
        (0, "baseline", "value_norm_other"): float(norms[:, 1:].mean()),
        (0, "baseline", "value_ratio"): float((norms[:, 0] / norms[:, 1:].mean(-1)).mean()),
        (0, "baseline", "inflow"): float(inflow(record.pattern)[:, 0].mean()),
    }
    return numbers


def branch_numbers(model: ToyModel, task: NopBranchTask, own: Batch, donor: Batch) -> dict[Key, float]:
    """Of the branch-supervised form: branch_mse, the sink score, and the sink's attention, value and spectrum."""
    (block,) = layers_of(model)
    _, (record,) = run_model(model, own.x)
    received = inflow(record.pattern).mean(0)  # [N]: the sink stands at one place in all sequences
    sink = int(received.argmax())
    others = torch.arange(task.tokens, device=own.x.device) != sink
    to_sink, norms = record.pattern[..., sink], value_norms(block, record)
    sigma = torch.linalg.svdvals(interaction(model, 0))
    numbers: dict[Key, float] = {
        (0, "baseline", "branch_mse"): float(task_loss(record.update, own.target, own.weight)),
        (0, "baseline", "sink_score"): float(received[sink]),
        (0, "baseline", "value_ratio"): float((norms[:, sink] / norms[:, others].mean(-1)).mean()),
        (0, "baseline", "sigma_1"): float(sigma[0]),
        (0, "baseline", "sigma_2"): float(sigma[1]),
        (0, "baseline", "sigma1_share"): float(sigma[0].square() / sigma.square().sum()),
    }
    counted = others & (own.weight > 0)
    for group, tokens in {"flagged": own.flags & counted, "other": ~own.flags & counted}.items():
        numbers[0, "baseline", f"attention_{group}"] = float(to_sink[tokens].mean())  # NaN where no token is flagged
    return numbers


def interaction(model: ToyModel, layer: int) -> Tensor:
    """Θ = W_Q W_Kᵀ [C C] in float64, in the row-vector convention q = x W_Q (Eq. 24)."""
    head = layers_of(model)[layer].attention
    return head.q_proj.weight.detach().cpu().double().T @ head.k_proj.weight.detach().cpu().double()


def broadcast_numbers(model: ToyModel, task: BroadcastTask, own: Batch, donor: Batch) -> dict[Key, float]:
    """Table 3 and, where there is a pathway, Fig. 7B: every layer's edits, one layer at a time, and its diagnostics.

    Recipients are all tokens but j*. An edit has task_mse (against x + p), donor_target_mse (x + the donor's p),
    no_payload_mse (x), local_rms and delta_rms (over recipients), shared_energy and, for donors, donor_cosine,
    donor_improvement and, for attention's, closed_form_error (Eq. 14, relative).
    """
    plain, records = run_model(model, own.x)
    _, others = run_model(model, donor.x)
    source, source_donor = task.sources(own.x), task.sources(donor.x)
    seen = _Seen(task=task, own=own, donor=donor, plain=plain)
    numbers: dict[Key, float] = {
        (WHOLE, "baseline", name): value for name, value in seen.errors(plain, with_donor=True).items()
    }
    for layer, (block, record, other) in enumerate(zip(layers_of(model), records, others, strict=True)):
        numbers |= {
            (layer, "baseline", name): value for name, value in layer_diagnostics(block, record, source).items()
        }
        ordinary, ordinary_donor = (source + 1) % task.tokens, (source_donor + 1) % task.tokens
        edits = {
            "zero": LayerEdit(value=replaced(source, 0.0)),
            "donor": LayerEdit(value=replaced(source, picked(other.value, source_donor))),
            "ordinary": LayerEdit(value=replaced(source, picked(other.value, ordinary_donor))),
            "zero_ordinary": LayerEdit(value=replaced(ordinary, 0.0)),
            "route": LayerEdit(without=source),
            "attention_off": LayerEdit(attention=False),
        }
        if block.pathway is not None:
            edits["pathway_off"] = LayerEdit(pathway=False)
            edits["donor_state"] = LayerEdit(state=block.pathway.state(other.h))
        for edit, change in edits.items():
            produced, (after, *_) = run_model(model, record.x, {layer: change}, start=layer)
            found = seen.effect(produced, after, record, with_donor=edit in ("donor", "ordinary", "donor_state"))
            if edit == "donor":
                found["closed_form_error"] = closed_form_error(block, record, after, source)
            numbers |= {(layer, edit, name): value for name, value in found.items()}
    return numbers


class _Seen:
    """One batch with its donors, and what an edited output is compared with."""

    def __init__(self, *, task: BroadcastTask, own: Batch, donor: Batch, plain: Tensor) -> None:
        self.own, self.plain, self.recipients = own, plain, ~own.flags
        self.payload, self.donated = task.payload(own.x), task.payload(donor.x)  # [B C]

    def errors(self, produced: Tensor, *, with_donor: bool) -> dict[str, float]:
        targets = {"task_mse": self.own.target, "no_payload_mse": self.own.x}
        if with_donor:
            targets["donor_target_mse"] = self.own.x + self.donated[:, None]
        return {name: float(task_loss(produced, target, self.own.weight)) for name, target in targets.items()}

    def effect(
        self, produced: Tensor, after: LayerRecord, before: LayerRecord, *, with_donor: bool
    ) -> dict[str, float]:
        """Of one edited run; `after` and `before` are the edited layer's records."""
        found = self.errors(produced, with_donor=with_donor)
        change, counts = produced - self.plain, self.recipients.sum(-1, keepdim=True)
        shared = (change * self.recipients[..., None]).sum(-2) / counts  # mean over recipients [B C]
        energy = change[self.recipients].square().sum()
        local = after.update - before.update
        if after.shared is not None and before.shared is not None:
            local = local + after.shared - before.shared
        found |= {
            "local_rms": rms(local, self.recipients),
            "delta_rms": rms(change, self.recipients),
            "shared_energy": float((counts * shared.square()).sum() / energy) if energy > 0 else math.nan,
        }
        if with_donor:
            wanted = self.donated - self.payload
            found["donor_cosine"] = float(F.cosine_similarity(shared, wanted).mean())
            unedited = self.errors(self.plain, with_donor=True)["donor_target_mse"]
            found["donor_improvement"] = unedited - found["donor_target_mse"]
        return found


def closed_form_error(block: Any, before: LayerRecord, after: LayerRecord, source: Tensor) -> float:
    """Largest gap between the update's change and A_{ij*} W_O ΔV (Eq. 14), over the change's largest entry."""
    difference = block.attention.out_proj(picked(after.value, source) - picked(before.value, source))  # [B C]
    predicted = picked(before.pattern.mT, source)[..., None] * difference[:, None]
    change = after.update - before.update
    return float((change - predicted).abs().max() / change.abs().max().clamp_min(1e-30))


def layer_diagnostics(block: Any, record: LayerRecord, source: Tensor) -> dict[str, float]:
    """Of one unedited layer: where attention goes, what it finds there, and what both branches write."""
    received, norms = inflow(record.pattern), value_norms(block, record)
    elsewhere = ~F.one_hot(source, received.shape[-1]).bool()
    others = (norms * elsewhere).sum(-1) / elsewhere.sum(-1)
    update = record.update.cpu().double()  # not every device knows float64
    energies = torch.linalg.eigvalsh(update @ update.mT)  # [B N], σ² rising
    found = {
        "inflow": received.max(-1).values.mean(),
        "sink_match": (received.argmax(-1) == source).float().mean(),
        "attention_on_source": picked(received[..., None], source).mean(),
        "value_norm_source": picked(norms[..., None], source).mean(),
        "value_norm_other": others.mean(),
        "value_ratio": (picked(norms[..., None], source)[:, 0] / others).mean(),
        "stable_rank": (energies.sum(-1) / energies[:, -1].clamp_min(1e-30)).mean(),
        "update_rms": record.update.square().mean().sqrt(),
        "common_mode": common_mode(record.update),
    }
    if record.shared is not None:
        pathway = pathway_of(block)
        weights = pathway.weights(record.h)
        found |= {
            "pathway_rms": record.shared.square().mean().sqrt(),
            "pathway_common_mode": common_mode(record.shared),
            "pool_max": weights.max(-1).values.mean(),
            "pool_match": (weights.argmax(-1) == source).float().mean(),
            "pool_on_source": picked(weights[..., None], source).mean(),
            "gate": pathway.gate(record.h).mean(),
        }
    return {name: float(value) for name, value in found.items()}
