"""Who is averaged over, and how sure the average is: heads over their images, classes over their heads.

Letters: n images or heads, B bootstrap draws, K columns (edits and contrasts of one measure).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from sinklab.interventions.design import PHASE_EDITS
from sinklab.interventions.draw import number

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

CONTRASTS = (
    ("ordinary", "zero"),
    ("route", "zero"),
    ("donor", "ordinary"),
    ("zero", "donor"),
    ("zero", "mean"),
    ("route", "donor"),
    ("route", "mean"),
)
"""Differences that are claims: within an image first, then averaged, so pairs stay together."""


AT_ONCE = 100
"""Draws whose means are taken at once."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Who is averaged over."""

    level: str
    kind: str
    """The class."""
    blocks: str
    layer: int
    head: int
    joint: int


@dataclass(frozen=True, eq=False)
class Sample:
    """A table whose rows are resampled: images of one head, or head means. values [n K], drawn [B n] how often each."""

    columns: list[tuple[str, str, str]]
    """(kind, name, measure)."""
    values: np.ndarray
    drawn: np.ndarray
    seen: frozenset[int]
    """Positions of the images in the run's list."""
    pairs: int
    """(head, image) pairs: an image counts once for each head that was edited in it."""
    heads: int
    thin: bool = False
    """No head had the images that were asked for, so all heads were taken."""

    @property
    def images(self) -> int:
        """How many different images."""
        return len(self.seen)

    def has(self, name: str) -> bool:
        """Was this edit made?"""
        return ("edit", name, "patch_change") in self.columns

    def column(self, name: str, measure: str = "patch_change") -> np.ndarray:
        """The changes of the patch tokens [n] under one edit, or another measure of it."""
        values: np.ndarray = self.values[:, self.columns.index(("edit", name, measure))]
        return values

    def interval(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """2.5 and 97.5 % of the resampled means of values [n K], [K] each; NaN for a single row."""
        import numpy as np

        if len(values) < 2:
            return np.full(values.shape[1], np.nan), np.full(values.shape[1], np.nan)
        there = ~np.isnan(values)
        filled, means = np.where(there, values, 0.0), np.empty((len(self.drawn), values.shape[1]))  # [n K], [B K]
        with np.errstate(invalid="ignore", divide="ignore"):
            for start in range(0, len(self.drawn), AT_ONCE):
                weights = self.drawn[start : start + AT_ONCE].astype("float64")
                means[start : start + AT_ONCE] = (weights @ filled) / (weights @ there)
        low, high = _percentiles(means)
        return low, high


def _percentiles(means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import warnings

    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without any number
        low, high = np.nanpercentile(means, [2.5, 97.5], axis=0)
    return low, high


def _drawn(rows: int, draws: int, seed: int, *names: str | int) -> np.ndarray:
    """How often each row is drawn, [B n]: the same for all columns, so that pairs stay together."""
    import numpy as np

    generator = np.random.default_rng(number(seed, "bootstrap", *names) % 2**64)
    counts = np.empty((draws, rows), dtype="uint16" if rows < 2**16 else "uint32")
    for b in range(draws):  # a draw at a time: thousands of rows would fill the memory
        counts[b] = np.bincount(generator.integers(0, rows, rows), minlength=rows)
    return counts


def _wide(effects: pd.DataFrame, measures: Sequence[str]) -> tuple[list[tuple[str, str, str]], pd.DataFrame]:
    """One line an (image, head) with a column for every (edit or contrast, measure)."""
    import pandas as pd

    index = ["class", "layer", "head", "joint", "image_index"]
    pivot = effects.pivot(index=index, columns="edit", values=list(measures))
    there = [edit for edit in (*PHASE_EDITS, "plan") if edit in set(effects["edit"])]
    columns, series = [], []
    for measure in measures:
        for edit in there:
            columns.append(("edit", edit, measure))
            series.append(pivot[measure, edit])
        for first, second in CONTRASTS:
            if first in there and second in there:
                columns.append(("contrast", f"{first} - {second}", measure))
                series.append(pivot[measure, first] - pivot[measure, second])
    wide = pd.concat(series, axis=1)
    wide.columns = pd.Index(range(len(columns)))
    return columns, wide


def samples(
    effects: pd.DataFrame, *, min_images: int, draws: int, seed: int, measures: Sequence[str]
) -> dict[Group, Sample]:
    """Every group that is averaged over: heads (images are resampled), classes (heads are), joint rows (images)."""
    columns, wide = _wide(effects, measures)
    found: dict[Group, Sample] = {}
    for key, own in wide.groupby(level=["class", "layer", "head", "joint"]):
        kind, layer, head, joint = cast("tuple[str, int, int, int]", key)
        joined = layer < 0  # several heads together
        blocks = "all" if joined else ("0" if layer == 0 else "1+")
        group = Group(
            level="class" if joined else "head", kind=kind, blocks=blocks, layer=layer, head=head, joint=joint
        )
        values = own.to_numpy("float64")
        weights = _drawn(len(values), draws, seed, kind, int(layer), int(head), int(joint))
        seen = frozenset(int(index) for index in own.index.get_level_values("image_index"))
        found[group] = Sample(columns, values, weights, seen, len(values), 1)
    heads = {group: sample for group, sample in found.items() if group.level == "head"}
    for kind in dict.fromkeys(group.kind for group in heads):
        own_heads = {group: sample for group, sample in heads.items() if group.kind == kind}
        found |= _classes(kind, own_heads, min_images, draws, seed)
    return found


def mean_of(values: np.ndarray) -> np.ndarray:
    """Column means without NaN, [n K] → [K]."""
    import warnings

    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        mean: np.ndarray = np.nanmean(values, axis=0)
    return mean


def _classes(kind: str, heads: dict[Group, Sample], min_images: int, draws: int, seed: int) -> dict[Group, Sample]:
    """The class over its heads: those with enough images, or all where none has. One head alone: over its images."""
    import numpy as np

    enough = {group: sample for group, sample in heads.items() if sample.images >= min_images}
    found = {}
    for blocks in ("all", "1+", "0"):
        own = [sample for group, sample in (enough or heads).items() if blocks in ("all", group.blocks)]
        if not own:
            continue
        group = Group(level="class", kind=kind, blocks=blocks, layer=-1, head=-1, joint=0)
        if len(own) == 1:
            found[group] = replace(own[0], thin=not enough)
            continue
        values = np.stack([mean_of(sample.values) for sample in own])
        weights, pairs = _drawn(len(own), draws, seed, kind, blocks), sum(sample.pairs for sample in own)
        seen = frozenset[int]().union(*(sample.seen for sample in own))
        found[group] = Sample(own[0].columns, values, weights, seen, pairs, len(own), thin=not enough)
    return found
