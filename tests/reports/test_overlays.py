"""Photographs under their attention columns."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image, ImageDraw
from synthetic_run import NOP, Plant, SavedRun, synthetic_run

from sinklab.reports import overlays, tables
from sinklab.reports.overlay_sheet import SIDE, fitting, overlay_png
from sinklab.reports.palette import HEAT_RAMP, blend, rgb
from sinklab.sinks.classify import both_definitions
from sinklab.sinks.rule import SinkRule


def opened(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1])))


def shown(run: SavedRun) -> tuple[list[overlays.HeadExamples], list[overlays.Photograph]]:
    table = tables.head_table(run.heads, run.sinks, SinkRule.relaxed(), both_definitions())
    saved = overlays.read_overlays(run.path)
    assert saved is not None
    return overlays.examples_by_head(run.path, *saved, table, run.config)


def test_a_patchs_colour_is_the_attention_it_gives(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, images=("a.png",), plants=(NOP,))
    example = shown(run)[0][0].examples[0]
    columns = pd.read_parquet(tmp_path / "overlays/columns.parquet").set_index("query")["attention"].astype("float64")
    heat = np.asarray(opened(example.heat_uri))
    assert heat.shape == (4, 4, 4)
    for query, attention in columns.iloc[2:].items():  # after [CLS] and one register
        row, column = divmod(int(query) - 2, 4)  # type: ignore[call-overload]
        assert tuple(heat[row, column, :3]) == rgb(blend(HEAT_RAMP, attention))
    assert (example.low, example.high) == (columns.iloc[2:].min(), columns.iloc[2:].max())
    assert [name for name, _, _ in example.prefix] == ["[CLS]", "register 1"]


def test_a_patch_sink_is_framed_where_the_head_table_puts_it(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, plants=(Plant(layer=1, head=2, kind="patch", ratio_head=0.9, ratio_out=1.0),))
    sinks = run.sinks.set_index("image")
    for example in shown(run)[0][0].examples:
        row, column = (int(sinks.loc[example.photograph.image, name]) for name in ("sink_row", "sink_column"))
        assert example.box == (14 * column, 14 * row, 14, 14)  # 56 pixels over 4 patches
        assert example.sink == f"patch at row {row}, column {column}" and example.sink in example.alt


@pytest.mark.parametrize(("kind", "name"), [("cls", "[CLS]"), ("register", "register 1")])
def test_a_prefix_sink_has_no_frame_and_is_named(tmp_path: Path, kind: str, name: str) -> None:
    run = synthetic_run(tmp_path, plants=(Plant(layer=0, head=0, kind=kind),))
    example = shown(run)[0][0].examples[0]
    assert example.box is None and example.sink == name


def test_heads_come_nop_first_and_the_most_frequent_first(tmp_path: Path) -> None:
    broadcast: dict[str, Any] = {"ratio_head": 0.9, "ratio_out": 0.9}
    plants = (
        Plant(layer=0, head=0, frequency=0.5, **broadcast),
        Plant(layer=0, head=1, frequency=1.0, **broadcast),
        Plant(layer=1, head=0, frequency=0.25),
        Plant(layer=1, head=2, frequency=0.75),
    )
    found = shown(synthetic_run(tmp_path, plants=plants))[0]
    assert [(each.label, each.layer, each.head) for each in found] == [
        ("nop", 1, 2),
        ("nop", 1, 0),
        ("broadcast", 0, 1),
        ("broadcast", 0, 0),
    ]
    assert found[0].events == 3 and found[0].images == 4


def test_the_grid_covers_only_the_whole_patches_of_a_crop(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, images=("a.png",), plants=(NOP,))
    run.config["images"]["size"] = [60, 70]  # 4 whole patches of 14 each way, 4 and 14 pixels lost
    assert shown(run)[0][0].examples[0].extent == pytest.approx((56 * 56 / 70, 56 * 56 / 60))


def test_a_large_photograph_is_made_small(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (900, 700, 3), dtype="uint8"))
    _, photographs = shown(synthetic_run(tmp_path, images=("a.png",), plants=(NOP,), photographs=[noise]))
    assert (photographs[0].width, photographs[0].height) == (348, 448)
    assert opened(photographs[0].uri).size == (348, 448)


def test_a_photograph_that_is_gone_is_left_out(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, images=("a.png", "b.png"), plants=(NOP,))
    (tmp_path / "overlays/picture-0.jpg").unlink()
    found, photographs = shown(run)
    assert [each.image for each in photographs] == ["b.png"] and len(found[0].examples) == 1


def test_an_image_may_be_called_like_a_key_of_the_list(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, images=("grid", "pictures", "prefix_tokens"), plants=(NOP,))
    assert {each.image for each in shown(run)[1]} == {"grid", "pictures", "prefix_tokens"}


def test_a_run_without_columns_has_no_overlays(tmp_path: Path) -> None:
    assert overlays.read_overlays(tmp_path) is None
    run = synthetic_run(tmp_path, images=("a.png",), plants=(NOP,))
    run.write_table("overlays/columns.parquet", pd.read_parquet(tmp_path / "overlays/columns.parquet").head(0))
    assert overlays.read_overlays(tmp_path) is None


def test_the_heat_covers_the_more_the_more_attention_is_given(tmp_path: Path) -> None:
    covers = [overlays.opacity(each) for each in (0, 0.2, 0.7, 1)]
    assert covers[0] == 0 and covers == sorted(covers) and covers[-1] < 0.7  # the picture is seen through it
    run = synthetic_run(tmp_path, images=("a.png",), plants=(NOP,))
    columns = pd.read_parquet(tmp_path / "overlays/columns.parquet").sort_values("query")["attention"].iloc[2:]
    alpha = np.asarray(opened(shown(run)[0][0].examples[0].heat_uri))[..., 3].ravel()
    assert np.corrcoef(alpha, columns)[0, 1] > 0.99


def test_attention_that_would_round_to_one_is_said_as_a_bound(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, images=("a.png",), plants=(NOP,))
    example = shown(run)[0][0].examples[0]
    assert example.spread.startswith("patches give it 0.")
    nearly = replace(example, low=0.9971, median=0.9999, high=1.0)
    assert nearly.spread == "all patches give it at least 0.995 of their attention" and "1.00" not in nearly.alt


def test_the_sheet_of_a_head_holds_all_its_photographs_twice(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, images=("a.png", "b.png"), plants=(NOP,))
    head = shown(run)[0][0]
    sheet = Image.open(io.BytesIO(overlay_png(head)))
    assert sheet.width > 2 * SIDE and sheet.height > 2 * SIDE and overlay_png(head) == overlay_png(head)
    assert json.loads((tmp_path / "overlays/pictures.json").read_text())["prefix_tokens"] == 2


@pytest.mark.parametrize("kind", ["cls", "patch"])
def test_the_sheet_marks_the_sink_wherever_it_is(tmp_path: Path, kind: str) -> None:
    run = synthetic_run(tmp_path, images=("a.png",), plants=(Plant(layer=0, head=0, kind=kind),))
    sheet = np.asarray(Image.open(io.BytesIO(overlay_png(shown(run)[0][0]))).convert("RGB"))
    cyan = np.argwhere((sheet == (0, 184, 212)).all(axis=2) | (sheet == (0, 229, 255)).all(axis=2))
    below = sheet.shape[0] - 60
    assert len(cyan) > 50 and bool((cyan[:, 0] > below).all()) == (kind == "cls")


def test_a_long_name_keeps_its_end_within_its_width() -> None:
    pen = ImageDraw.Draw(Image.new("RGB", (10, 10)))
    words = fitting(pen, "holidays/" * 20 + "cat-0017.png", 200, 13)
    assert words.startswith("…") and words.endswith("cat-0017.png") and pen.textlength(words, font_size=13) <= 200
