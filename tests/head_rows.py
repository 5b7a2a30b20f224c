"""Head tables to count by hand: rows built one by one, with the types that a run writes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from sinklab.sinks.table import head_schema


def head_row(image: int, layer: int, head: int, **columns: Any) -> dict[str, Any]:
    """One row: not an event, on a patch, unless `columns` say otherwise."""
    row = {"image": f"{image}.jpg", "image_index": image, "layer": layer, "head": head, "tokens": 11, "queries": 10}
    row |= {"sink_index": 4, "sink_kind": "patch", "sink_row": 0, "sink_column": 1, "routed_count": 0}
    row |= dict.fromkeys(
        (name for name, kind in zip(head_schema().names, head_schema().types, strict=True) if kind == pa.float32()), 0.1
    )
    return row | {"stable_rank": 1.0, "finite": True} | columns


def head_table(*rows: dict[str, Any]) -> pd.DataFrame:
    """A head table with the types a run writes."""
    names = head_schema().names
    return pa.Table.from_pylist([{name: row[name] for name in names} for row in rows], head_schema()).to_pandas()


def event(kind: str, head: float, output: float, rank: float = 1.0, **columns: Any) -> dict[str, Any]:
    """What makes a row an event under every rule, on a token of `kind`, with its two value ratios."""
    strong = {"routed_count": 10, "routed_fraction": 1.0, "min_attention": 0.95, "inflow": 0.97}
    ratios = {"value_ratio_head": head, "value_ratio_out": output, "stable_rank": rank}
    return strong | {"sink_kind": kind} | ratios | columns


def not_finite(image: int, layer: int, head: int) -> dict[str, Any]:
    row = head_row(image, layer, head)
    row = {name: math.nan if isinstance(value, float) else value for name, value in row.items()}
    return row | {"finite": False, "sink_index": -1, "sink_kind": "none", "routed_count": 0, "queries": 0}


def small_table() -> pd.DataFrame:
    """Three images, two layers, two heads; image 2 has no event, head (1, 1) is not finite in image 1.

    (0, 0): on CLS in images 0 and 1, a NOP by both definitions.
    (0, 1): never.
    (1, 0): on a register in image 0, a patch in image 1; broadcast by counting, by causal broadcast, then intermediate
            (its update is of rank 2 in image 1).
    (1, 1): in image 0 a NOP by counting and a broadcast by causal, on a patch.
    """
    rows = {(i, layer, h): head_row(i, layer, h) for i in range(3) for layer in range(2) for h in range(2)}
    for image in (0, 1):
        rows[image, 0, 0] |= event("cls", 0.1, 0.05)
    rows[0, 1, 0] |= event("register", 1.0, 0.9)
    rows[1, 1, 0] |= event("patch", 1.0, 0.9, rank=2.0)
    rows[0, 1, 1] |= event("patch", 0.15, 0.8)
    rows[1, 1, 1] = not_finite(1, 1, 1)
    return head_table(*rows.values())


def random_table(seed: int, images: int = 12, layers: int = 3, heads: int = 4) -> pd.DataFrame:
    generator, rows = np.random.default_rng(seed), []
    for image, layer, head in np.ndindex(images, layers, heads):
        ratio, other, rank = generator.uniform(0, 1, 2).tolist() + [generator.uniform(1, 3)]
        kind = str(generator.choice(["cls", "register", "patch"]))
        row = event(kind, ratio, other, rank, inflow=generator.uniform(0.2, 1))
        row |= {"routed_count": int(generator.integers(6, 11)), "min_attention": generator.uniform(0.3, 1)}
        rows.append(head_row(image, layer, head, **row))
        if generator.random() < 0.1:
            rows[-1] = not_finite(image, layer, head)
    return head_table(*rows)
