"""Counts of events: per image by class and kind, and how much the thresholds decide.

Images without an event count in every mean: `images` is the number of images in the head table, not in the events.
Block 0 is counted apart from the others, because the paper ("A Unifying View of Attention Sinks", Tables 14 and 15)
leaves it out. The public names are those of `sinklab.sinks.table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from sinklab.models.tokens import kinds_among
from sinklab.sinks.classify import CLASSES, SinkDefinition, both_definitions, grid_of
from sinklab.sinks.rule import SinkRule, require_columns, table_rules

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

BLOCKS = ("0", "1+")
NOP_GRID = (0.1, 0.15, 0.2, 0.25, 0.3)
BROADCAST_GRID = (0.4, 0.5, 0.6, 0.75)
STABLE_RANK_GRID = (1.2, 1.5, 2.0)


def counts_per_image(
    heads: pd.DataFrame,
    rules: Sequence[SinkRule] | None = None,
    definitions: Sequence[SinkDefinition] | None = None,
) -> pd.DataFrame:
    """How many (layer, head) pairs are events in an image, on average (the paper's Tables 14 and 15).

    One row for every rule × definition × blocks ("0", "1+") × class (three and "all") × kind (three and "all"), also
    where nothing was counted. `rules`: by default those of Table 15; `definitions`: both. `epsilon` is NaN for
    rules that have none. `per_image` is events / images; NaN if no head of those blocks was measured.
    """
    import pandas as pd

    images = images_in(heads)
    measured = (bool((heads["layer"] == 0).any()), bool((heads["layer"] != 0).any()))
    rows: list[tuple[Any, ...]] = []
    names = kinds_among(heads["sink_kind"].unique())
    for rule in table_rules() if rules is None else rules:
        events = heads[rule.events(heads)]
        kinds = _codes(events["sink_kind"], names)
        epsilon = rule.epsilon if rule.name == "strict" else float("nan")
        for definition in both_definitions() if definitions is None else definitions:
            counts = _cube(events, definition, kinds, len(names))
            for (b, blocks), (c, label), (t, kind) in product(
                enumerate(BLOCKS), enumerate((*CLASSES, "all")), enumerate((*names, "all"))
            ):
                count = int(counts[b, c, t])
                per_image = count / images if images and measured[b] else float("nan")
                rows.append((rule.name, epsilon, definition.name, blocks, label, kind, count, images, per_image))
    columns = ["rule", "epsilon", "definition", "blocks", "class", "kind", "events", "images", "per_image"]
    return pd.DataFrame(rows, columns=columns)


def sensitivity(
    heads: pd.DataFrame, rule: SinkRule, definitions: Sequence[SinkDefinition] | None = None
) -> pd.DataFrame:
    """The classes' sizes under a grid of thresholds, for both definitions or those given.

    Columns definition, blocks, nop_threshold, broadcast_threshold, stable_rank_threshold (NaN for `counts`, which has
    none), nop, broadcast, intermediate, events (their sum, the same in every row of one `blocks`), images, published
    (True in the row of the definition's own thresholds, which are always on the grid).
    """
    import pandas as pd

    images, events = images_in(heads), heads[rule.events(heads)]
    kinds = _codes(events["sink_kind"], ())  # no kind is told apart
    rows: list[dict[str, Any]] = []
    for published in both_definitions() if definitions is None else definitions:
        ranks = [None] if published.stable_rank is None else grid_of(STABLE_RANK_GRID, published.stable_rank)
        grid = product(grid_of(NOP_GRID, published.nop), grid_of(BROADCAST_GRID, published.broadcast), ranks)
        for nop, broadcast, rank in grid:
            if nop >= broadcast:  # the classes would overlap
                continue
            tried = replace(published, name="tried", nop=nop, broadcast=broadcast, stable_rank=rank)
            counts = _cube(events, tried, kinds, 0)[:, :, -1]
            for b, blocks in enumerate(BLOCKS):
                row: dict[str, Any] = {"definition": published.name, "blocks": blocks, "nop_threshold": nop}
                row["broadcast_threshold"] = broadcast
                row["stable_rank_threshold"] = float("nan") if rank is None else rank
                row |= {label: int(counts[b, c]) for c, label in enumerate((*CLASSES, "events"))}
                rows.append(row | {"images": images, "published": tried == replace(published, name="tried")})
    return pd.DataFrame(rows)


def images_in(heads: pd.DataFrame) -> int:
    """How many images the table holds, with or without events."""
    require_columns(heads, ("image_index", "layer", "head"), "a count per image")
    return int(heads["image_index"].nunique())


def tally(events: pd.DataFrame, labels: pd.Series[str], names: Sequence[str], pairs: pd.Index) -> np.ndarray:
    """How often each of `names` stands in each (layer, head) of `pairs`, [pairs names]."""
    import numpy as np
    import pandas as pd

    row = pairs.get_indexer(pd.MultiIndex.from_frame(events[["layer", "head"]]))
    codes, width = _codes(labels, names), len(names) + 1
    counts = np.bincount(row * width + codes, minlength=len(pairs) * width)
    return counts.reshape(len(pairs), width)[:, : len(names)]


def most_common(counts: np.ndarray, names: Sequence[str]) -> list[str]:
    """The name with the largest count in each row, the earliest of equals; "none" for a row of zeros."""
    return [names[row.argmax()] if row.any() else "none" for row in counts]


def _codes(labels: pd.Series[str], names: Sequence[str]) -> np.ndarray:
    """The position of each label in `names`; len(names) for any other."""
    import numpy as np
    import pandas as pd

    known: pd.Index = pd.Index(list(names), dtype="object")
    codes = known.get_indexer(pd.Index(labels))
    return np.where(codes < 0, len(names), codes)


def _cube(events: pd.DataFrame, definition: SinkDefinition, kinds: np.ndarray, known: int) -> np.ndarray:
    """Events by blocks, class and kind (`known` of them, as codes), [2 4 K+1]; the last of each are the totals."""
    import numpy as np

    blocks = (events["layer"].to_numpy() != 0).astype(np.int64)
    codes = (blocks * 4 + definition.positions(events)) * (known + 1) + kinds
    counts = np.bincount(codes, minlength=8 * (known + 1)).reshape(2, 4, known + 1)
    counts[:, 3] = counts[:, :3].sum(axis=1)
    counts[:, :, known] += counts[:, :, :known].sum(axis=2)  # what is of no known kind is in the total alone
    return counts
