"""What the figures draw: every head once, at its place, for any number of layers and heads."""

from __future__ import annotations

import colorsys
import sys
from collections.abc import Callable
from itertools import combinations
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from synthetic_run import BROADCAST, NOP, PLANTS, Plant, synthetic_heads, synthetic_spectrum

from sinklab.reports import drawing, figures, tables
from sinklab.reports.palette import layer_colours, rgb
from sinklab.sinks.classify import SinkDefinition, both_definitions
from sinklab.sinks.rule import SinkRule
from sinklab.sinks.table import kind_by_layer, sink_table

RULE = SinkRule.relaxed()
WIDTHS = pytest.mark.parametrize("width", [drawing.WIDE, drawing.NARROW], ids=["wide", "narrow"])
SIZES = pytest.mark.parametrize(("layers", "heads"), [(40, 24), (2, 3), (1, 1)], ids=["ViT-G", "tiny", "one head"])


def table_of(heads: pd.DataFrame) -> pd.DataFrame:
    return tables.head_table(heads, sink_table(heads, RULE), RULE, both_definitions())


def marks(figure: Figure) -> int:
    return sum(
        len(np.atleast_2d(drawn.get_offsets())) for drawn in figure.axes[0].collections if len(drawn.get_offsets())
    )


def cells(figure: Figure) -> list[Rectangle]:
    return [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]


@SIZES
@WIDTHS
def test_the_map_has_one_cell_a_head(layers: int, heads: int, width: float) -> None:
    table = table_of(synthetic_heads(images=("a",), layers=layers, heads=heads, plants=()))
    assert len(cells(figures.draw_frequency(table, "causal", width))) == layers * heads


def test_a_cells_fullness_grows_with_frequency_and_a_rare_event_is_seen() -> None:
    shares = [0.001, 0.1, 0.5, 1.0]
    drawn = [figures.fullness(share) for share in shares]
    assert drawn == sorted(drawn) and drawn[0] > 0.1 and drawn[-1] == 1.0
    assert figures.percent_digits(0.001) == "<1"


def test_the_map_says_a_heads_percentage_and_crosses_one_that_is_not_finite() -> None:
    heads = synthetic_heads(images=tuple("abcd"), plants=(BROADCAST,), broken=((0, 0),))
    axes = figures.draw_frequency(table_of(heads), "causal").axes[0]
    assert [text.get_text() for text in axes.texts] == ["50"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines] == [(0, 0)]  # type: ignore[index]


@WIDTHS
@pytest.mark.parametrize("definition", both_definitions(), ids=lambda each: each.name)
def test_the_plane_has_one_mark_a_sunk_head_inside_its_axes(definition: SinkDefinition, width: float) -> None:
    extremes = (NOP, BROADCAST, Plant(layer=0, head=0, ratio_head=0, ratio_out=0), Plant(layer=0, head=2, ratio_out=30))
    figure = figures.draw_plane(table_of(synthetic_heads(images=("a", "b"), plants=extremes)), definition, width)
    (left, right), (low, high) = figure.axes[0].get_xlim(), figure.axes[0].get_ylim()
    points = np.concatenate([drawn.get_offsets() for drawn in figure.axes[0].collections if len(drawn.get_offsets())])
    assert len(points) == 4
    assert ((points[:, 0] >= left) & (points[:, 0] <= right) & (points[:, 1] >= low) & (points[:, 1] <= high)).all()


def test_the_plane_draws_the_definitions_own_lines() -> None:
    table = table_of(synthetic_heads(images=("a", "b")))
    for definition in both_definitions():
        lines = figures.draw_plane(table, definition).axes[0].lines
        upright = sorted({line.get_xdata()[0] for line in lines} - {0})  # type: ignore[index]
        assert upright == [0.2, 0.5]
        level = [line.get_ydata()[0] for line in lines if line.get_ydata()[0] == line.get_ydata()[1] != 0]  # type: ignore[index]
        assert level == ([] if definition.stable_rank is None else [1.5])


@WIDTHS
def test_the_routes_figure_has_one_mark_a_head(width: float) -> None:
    table = table_of(synthetic_heads(images=("a", "b"), layers=6, heads=4))
    routes = tables.route_table(table, synthetic_spectrum(6, 4))
    assert marks(figures.draw_routes(routes, "causal", width)) == 24


@SIZES
def test_the_bars_of_a_layer_sum_to_one(layers: int, heads: int) -> None:
    kinds = kind_by_layer(synthetic_heads(images=("a", "b", "c"), layers=layers, heads=heads, plants=()))
    bars = cells(figures.draw_kinds(kinds))
    tops = pd.Series([bar.get_height() for bar in bars]).groupby([round(bar.get_x(), 3) for bar in bars]).sum()
    assert len(tops) == layers and np.allclose(tops, 1)


def test_a_layer_without_finite_heads_leaves_a_gap_and_no_error() -> None:
    heads = synthetic_heads(images=("a",), plants=(), broken=((0, 0), (0, 1), (0, 2)))
    assert {round(bar.get_x() + 0.41) for bar in cells(figures.draw_kinds(kind_by_layer(heads)))} == {1}


@WIDTHS
def test_names_of_points_never_lie_on_each_other(width: float) -> None:
    crowd = [Plant(layer=layer, head=head, ratio_out=0.11, ratio_head=0.1) for layer in range(4) for head in range(4)]
    table = table_of(synthetic_heads(images=("a", "b"), layers=4, heads=4, plants=crowd))
    figure = figures.draw_plane(table, SinkDefinition.causal(), width)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    named = [text for text in figure.axes[0].texts if text.get_text().startswith("L")]
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in named]
    assert named and not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize(
    "draw",
    [
        lambda table, routes: figures.draw_frequency(table, "causal"),
        lambda table, routes: figures.draw_plane(table, SinkDefinition.causal()),
        lambda table, routes: figures.draw_routes(routes, "causal"),
    ],
    ids=["frequency", "plane", "routes"],
)
def test_drawing_leaves_matplotlib_as_it_was(draw: Callable[[Any, Any], Figure]) -> None:
    before = dict(matplotlib.rcParams)
    open_before = sys.modules["matplotlib.pyplot"].get_fignums() if "matplotlib.pyplot" in sys.modules else []
    table = table_of(synthetic_heads(images=("a", "b"), plants=PLANTS))
    draw(table, tables.route_table(table, synthetic_spectrum(2, 3)))
    assert dict(matplotlib.rcParams) == before
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == open_before


@WIDTHS
def test_no_name_is_lost_and_none_is_crossed_by_a_limit(width: float) -> None:
    """Heads close to each other and to the limits, as in the demo."""
    ratios = {(0, 0): 0.26, (0, 1): 0.195, (0, 2): 0.155, (1, 0): 0.75, (1, 1): 0.95, (1, 2): 2.6}
    plants = [Plant(layer=layer, head=head, ratio_out=ratio, ratio_head=ratio, stable_rank=1.01)
              for (layer, head), ratio in ratios.items()]  # fmt: skip
    figure = figures.draw_plane(table_of(synthetic_heads(images=("a",), plants=plants)), SinkDefinition.causal(), width)
    canvas, axes = FigureCanvasAgg(figure), figure.axes[0]
    canvas.draw()
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in axes.texts if text.get_text().startswith("L")]
    limits = [axes.transData.transform((limit, 1))[0] for limit in (0.2, 0.5)]
    assert len(boxes) == 6 and not [box for box in boxes for limit in limits if box.x0 < limit < box.x1]


def test_the_layers_colours_are_no_classs_colour_and_grow_darker() -> None:
    ramp = layer_colours(24)
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(rgb, ramp)]
    assert light == sorted(light, reverse=True)
    for colour in ramp:  # green all along: hue 60 to 170 degrees, where orange is at 25 and blue at 200
        hue, _, _ = colorsys.rgb_to_hsv(*(channel / 255 for channel in rgb(colour)))
        assert 60 <= hue * 360 <= 170
