"""The figures of a language model training with their words: how to read each, its counts, its numbers as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinklab.reports import lm_figures as figures
from sinklab.reports.captions import Drawn, drawn_twice
from sinklab.reports.sections import records
from sinklab.reports.wording import fixed, plural

if TYPE_CHECKING:
    import pandas as pd


def draw_all(saved: dict[str, pd.DataFrame], sweep: str | None) -> list[Drawn]:
    """The figures of a page. saved: name → table of the run's tables/."""
    drawn = [_sweep(saved["training"], saved["points"])] if sweep else []
    ablated = figures.ablation_rows(saved["differences"])
    drawn += [_ablations(ablated)] if len(ablated) else []
    return [*drawn, _curves(saved["curves"], saved["points"])] if len(saved["curves"]) else drawn


def _curves(curves: pd.DataFrame, points: pd.DataFrame) -> Drawn:
    several = bool((points.groupby("config").size() > 1).any())
    said = []
    for row in records(points):
        line = figures.median_curve(curves, row["config"], row["lr"], "validation_bpc")
        if len(line):
            name = figures.line_name(row["config"], row["lr"], points)
            said.append(f"{name} {fixed(float(line['validation_bpc'].iloc[-1]), 3)}")
    solid = " A solid line is the learning rate that was chosen." if several else ""
    return drawn_twice(
        "lm-curves",
        lambda width: figures.draw_curves(curves, points, width),
        title="Bits a byte while training",
        reading="Left, or above, of the batch of the step; right, or below, of windows spread over the validation "
        "split, each read from its own beginning, so that they differ from the table’s sliding window. The first steps "
        f"may lie above the panel.{solid}",
        counts=_counts(curves, "lines are medians over seeds, thin ones the seeds"),
        alt=f"Validation bits a byte at the end of training: {'; '.join(said) or 'none'}.",
        table=curves,
    )


def _sweep(training: pd.DataFrame, points: pd.DataFrame) -> Drawn:
    said = [
        f"{row['config']} at {row['lr']:g} {fixed(row['validation_bpc_median'], 3)}"
        + (" (chosen)" if row["chosen"] else "")
        + (f" ({row['diverged']} diverged)" if row["diverged"] else "")
        for row in records(points)
    ]
    return drawn_twice(
        "lm-learning-rate",
        lambda width: figures.draw_sweep(training, points, width),
        title="The learning rate, swept alike for every model",
        reading="Bits a byte on the whole validation split. The ring is the rate with the lowest median over seeds; a "
        "cross is a rate at which a seed’s loss was no longer a number.",
        counts=_counts(training, "lines are medians over seeds, dots the seeds"),
        alt=f"Validation bits a byte by learning rate: {'; '.join(said)}.",
        table=training[["config", "lr", "seed", "validation_bpc"]].merge(points[["config", "lr", "chosen"]]),
    )


def _ablations(rows: pd.DataFrame) -> Drawn:
    medians = rows.groupby("config", sort=False)["difference"].median()
    said = [f"{name} {float(value):+.3f}" for name, value in medians.items()]
    return drawn_twice(
        "lm-ablations",
        lambda width: figures.draw_ablations(rows, width),
        title="What each part is worth",
        reading="One part of the phase model taken out, or changed, at a time: how many bits a byte more the "
        "validation split then costs than with the whole model of the same seed. Right of the line the part helps.",
        counts=_counts(rows, "bars are medians over seeds, dots the seeds"),
        alt=f"Validation bits a byte more than the whole model: {'; '.join(said)}.",
        table=rows,
    )


def _counts(table: pd.DataFrame, means: str) -> str:
    seeds = int(table["seed"].nunique())
    return f"n = {plural(seeds, 'seed')}{f'; {means}' if seeds > 1 else ''}."
