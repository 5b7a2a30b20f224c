"""What a finished patching leaves in a run folder, without a model: tables of effects and verdicts that are planted.

Every planted head says how it behaves; its effects on single images scatter around that behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from synthetic_run import SavedRun

EDITS = ("zero", "mean", "donor", "ordinary", "route", "zero_ordinary")
CONTRASTS = ("ordinary - zero", "route - zero", "donor - ordinary", "zero - donor", "zero - mean", "route - donor",
             "route - mean")  # fmt: skip
MEASURES = ("patch_change", "cls_change", "shared_energy", "donor_cosine")
CLASSIFIED = ("kl", "top1_same", "ce_change")
BEHAVIOUR = {
    "nop": {"zero": 0.004, "mean": 0.003, "donor": 0.005, "ordinary": 0.09, "route": 0.07, "zero_ordinary": 0.001},
    "broadcast": {"zero": 0.31, "mean": 0.02, "donor": 0.04, "ordinary": 0.28, "route": 0.33, "zero_ordinary": 0.003},
    "neither": {"zero": 0.11, "mean": 0.09, "donor": 0.1, "ordinary": 0.12, "route": 0.1, "zero_ordinary": 0.1},
}
ENOUGH = 20


@dataclass(frozen=True, kw_only=True)
class Edited:
    """One head that was edited: as what it was observed, how it behaves, on how many images, without which edits."""

    layer: int
    head: int
    named: str = "nop"
    behaves: str = "nop"
    images: int = 24
    without: tuple[str, ...] = ()
    reason: str = ""
    """Stands in place of the verdict's own reason."""


NOPS = (Edited(layer=1, head=0), Edited(layer=2, head=3), Edited(layer=3, head=1, behaves="broadcast"),
        Edited(layer=4, head=2, images=4, without=("mean",)), Edited(layer=0, head=1))  # fmt: skip
BROADCASTS = tuple(
    Edited(layer=layer, head=head, named="broadcast", behaves="broadcast") for layer, head in ((1, 2), (3, 0))
)
HEADS = (*NOPS, *BROADCASTS)


def write_effects(
    run: SavedRun, heads: Sequence[Edited] = HEADS, *, classifier: bool = False, joint: bool = True, **patch: Any
) -> SavedRun:
    """Write tables/effects.csv and tables/causal_verdicts.csv into the run and "patch" into its config."""
    run.write_table("tables/effects.csv", synthetic_effects(heads, classifier=classifier, joint=joint))
    run.write_table("tables/causal_verdicts.csv", synthetic_verdicts(heads))
    run.config["patch"] = synthetic_patch(heads) | patch
    return run


def synthetic_effects(
    heads: Sequence[Edited], *, classifier: bool = False, joint: bool = True, seed: int = 3
) -> pd.DataFrame:
    """tables/effects.csv of these heads."""
    draw = np.random.default_rng(seed)
    measures = (*MEASURES, *(CLASSIFIED if classifier else ()))
    drawn = {head: {measure: _drawn(draw, head, measure) for measure in measures} for head in heads}
    rows: list[dict[str, Any]] = []
    for head in heads:
        place = {"level": "head", "class": head.named, "blocks": _blocks(head), "layer": head.layer, "head": head.head}
        for measure in measures:
            rows += _rows({**place, "joint": 0}, measure, drawn[head][measure], head.images, 1)
    for named in dict.fromkeys(head.named for head in heads):
        mine = [head for head in heads if head.named == named and head.images >= ENOUGH]
        for blocks in ("1+", "0", "all"):
            group = [head for head in mine if blocks in ("all", _blocks(head))]
            place = {"level": "class", "class": named, "blocks": blocks, "layer": -1, "head": -1, "joint": 0}
            for measure in measures if group else ():
                means = _over_heads([drawn[head][measure] for head in group])
                rows += _rows(place, measure, means, max(head.images for head in group), len(group))
        for count in range(1, len(mine) + 1) if joint else ():
            place = {"level": "class", "class": named, "blocks": "all", "layer": -1, "head": -1, "joint": count}
            for measure in measures:
                values = {edit: seen * count**0.8 for edit, seen in drawn[mine[0]][measure].items()}
                rows += _rows(place, measure, values, mine[0].images, count)
    names = ["level", "class", "blocks", "layer", "head", "joint", "kind", "name", "measure", "images", "heads",
             "mean", "sem", "low", "high"]  # fmt: skip
    return pd.DataFrame(rows, columns=names)


def _drawn(draw: np.random.Generator, head: Edited, measure: str) -> dict[str, np.ndarray]:
    """One value an image for every edit of one head."""
    level = {"cls_change": 1.3, "shared_energy": 1.0, "donor_cosine": 1.0, "kl": 0.2, "ce_change": 0.1}
    values = {}
    for edit in EDITS:
        noise = draw.uniform(0.8, 1.2, head.images)
        size = BEHAVIOUR[head.behaves][edit] * level.get(measure, 1.0)
        size = 0.7 if measure in ("shared_energy", "donor_cosine") else 0.9 if measure == "top1_same" else size
        if edit not in head.without:
            values[edit] = noise * size
    return values


def _over_heads(heads: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One value a head, its mean over images, for every edit that any head had."""
    means = {edit: [head[edit].mean() for head in heads if edit in head] for edit in EDITS}
    return {edit: np.array(values) for edit, values in means.items() if values}


def _rows(
    place: dict[str, Any], measure: str, values: dict[str, np.ndarray], images: int, heads: int
) -> list[dict[str, Any]]:
    named = [("edit", edit, values[edit]) for edit in EDITS if edit in values]
    for contrast in CONTRASTS:
        one, other = contrast.split(" - ")
        if one in values and other in values:
            named.append(("contrast", contrast, values[one] - values[other]))
    rows = []
    for kind, name, seen in named:
        mean = float(seen.mean())
        sem = float(seen.std(ddof=1) / len(seen) ** 0.5) if len(seen) > 1 else float("nan")
        row = {"kind": kind, "name": name, "measure": measure, "images": images, "heads": heads, "mean": mean}
        low, high = _interval(seen)
        rows.append({**place, **row, "sem": sem, "low": low, "high": high})
    return rows


def _interval(seen: np.ndarray) -> tuple[float, float]:
    """A 95 % bootstrap interval of the mean; NaN for a single value."""
    if len(seen) < 2:
        return float("nan"), float("nan")
    again = np.random.default_rng(0).choice(seen, (200, len(seen))).mean(axis=1)
    low, high = np.percentile(again, [2.5, 97.5])
    return float(low), float(high)


def _blocks(head: Edited) -> str:
    return "0" if head.layer == 0 else "1+"


def synthetic_verdicts(heads: Sequence[Edited]) -> pd.DataFrame:
    """tables/causal_verdicts.csv: a head behaves as planted unless it was seen too seldom; a class as its heads."""
    rows: list[dict[str, Any]] = []
    for head in heads:
        place = {"level": "head", "class": head.named, "blocks": _blocks(head), "layer": head.layer, "head": head.head}
        thin = head.images < ENOUGH
        reason = f"{head.images} images, fewer than the {ENOUGH} that a verdict needs" if thin else "as planted"
        verdict = "undecided" if thin else head.behaves
        rows.append({**place, "images": head.images, "heads": 1, **_said(head.named, verdict, head.reason or reason)})
    for named in dict.fromkeys(head.named for head in heads):
        for blocks in ("1+", "0", "all"):
            group = [head for head in heads if head.named == named and blocks in ("all", _blocks(head))]
            if not group:
                continue
            decided = [head for head in group if head.images >= ENOUGH]
            place = {"level": "class", "class": named, "blocks": blocks, "layer": -1, "head": -1}
            place |= {"images": max(head.images for head in group), "heads": len(decided)}
            if len(decided) < 2:
                said = _said(named, "undecided", f"{len(decided)} head with enough images, fewer than 2")
            else:
                commonest = max(BEHAVIOUR, key=lambda each: sum(head.behaves == each for head in decided))
                said = _said(named, commonest, "as most of its heads")
            rows.append(place | said)
    return pd.DataFrame(rows, columns=["level", "class", "blocks", "layer", "head", "images", "heads", "verdict",
                                       "agrees", "reason"])  # fmt: skip


def _said(named: str, verdict: str, reason: str) -> dict[str, Any]:
    return {"verdict": verdict, "agrees": None if verdict == "undecided" else verdict == named, "reason": reason}


def synthetic_patch(heads: Sequence[Edited]) -> dict[str, Any]:
    """The key "patch" of run.json."""
    chosen = [
        {"class": head.named, "layer": head.layer, "head": head.head, "events": head.images + 6,
         "edited_images": head.images, "heldout_images": 0 if "mean" in head.without else 6}
        for head in heads
    ]  # fmt: skip
    return {
        "status": "complete",
        "created": "2026-01-02T03:04:05+00:00",
        "finished": "2026-01-02T03:05:35+00:00",
        "command": ["sinklab", "patch", "runs/demo"],
        "fingerprint": "beef" * 16,
        "settings": {"options": {"heads": None, "per_class": 16, "block0": 4, "seed": 0}},
        "edits": list(EDITS),
        "classes": ["nop", "broadcast"],
        "definition": "causal",
        "heads": chosen,
        "min_events": 50,
        "min_events_used": 10,
        "min_events_analysis": ENOUGH,
        "notes": ["The run has 30 images, so heads with 10 events were taken instead of 50."],
        "images": {"edited": 24, "heldout": 6, "donors": 24, "rows": 1008},
        "heldout": {"sentence": "6 of 30 images, drawn from seed 0, were held out for the means.", "images": ["a.png"]},
        "checks": {"null_edits": 168, "null_bit_identical": 168, "identity_error_max": 3.1e-8,
                   "identity_tolerance": 1e-6, "prefix_error_max": 2.4e-7, "kept_queries": 0},
        "bootstrap": 2000,
        "seed": 0,
        "device": "cpu",
        "dtype": "float32",
        "timings": {"seconds": 90.0, "suffix_rows": 1176, "blocks_run": 7600, "blocks_whole": 14112},
    }  # fmt: skip
