"""From rows of effects to what is claimed: means with intervals, paired contrasts, and what they say of each class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinklab.interventions.effect import ANSWERS, EFFECTS
from sinklab.interventions.samples import mean_of, samples
from sinklab.interventions.verdict import SIGNATURES, judge

if TYPE_CHECKING:
    import pandas as pd


def summarise_effects(
    effects: pd.DataFrame, *, min_images: int = 20, draws: int = 2000, seed: int = 0, noun: str = "image"
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(effects.csv, causal_verdicts.csv): means, SEM and 95 % intervals by head and class; and what they say.

    A head's mean is over its images, a class's the unweighted mean over heads with at least `min_images`. Intervals are
    percentiles of bootstrap means: over heads for a class, over images for a head. SEM likewise. `images` counts
    different images, `pairs` an image once for each head that was edited in it.
    """
    import numpy as np
    import pandas as pd

    answered = [name for name in ANSWERS if effects[name].notna().any()]
    measures = [*EFFECTS, *answered]
    found = samples(effects, min_images=min_images, draws=draws, seed=seed, measures=measures)
    rows: list[dict[str, Any]] = []
    verdicts: list[dict[str, Any]] = []
    for group, sample in found.items():
        keys: dict[str, Any] = {"level": group.level, "class": group.kind, "blocks": group.blocks}
        keys |= {"layer": group.layer, "head": group.head}
        low, high = sample.interval(sample.values)
        count = (~np.isnan(sample.values)).sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = mean_of(sample.values)
            spread = np.sqrt(np.nansum((sample.values - mean) ** 2, axis=0) / (count - 1)) / np.sqrt(count)
        for i, (kind, name, measure) in enumerate(sample.columns):
            if count[i]:
                several = sample.heads > 1
                numbers: dict[str, Any] = {"images": sample.images if several else int(count[i])}
                numbers |= {"pairs": sample.pairs if several else int(count[i]), "heads": sample.heads}
                numbers |= {"mean": mean[i], "sem": spread[i], "low": low[i], "high": high[i]}
                rows.append(keys | {"joint": group.joint, "kind": kind, "name": name, "measure": measure} | numbers)
        if group.joint == 0 and group.kind != "plan":
            verdict, reason = judge(sample, group, min_images, noun)
            judged = verdict != "undecided" and group.kind in SIGNATURES
            agrees = verdict == group.kind if judged else None
            about: dict[str, Any] = {
                "images": sample.images,
                "pairs": sample.pairs,
                "heads": sample.heads,
                "verdict": verdict,
                "agrees": agrees,
            }
            verdicts.append(keys | about | {"reason": reason})
    return pd.DataFrame(rows), pd.DataFrame(verdicts)
