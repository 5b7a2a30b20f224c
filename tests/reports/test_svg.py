"""SVG for the disk and for the page: deterministic, well formed, in the theme's colours, with unique ids."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from synthetic_run import synthetic_heads

from sinklab.reports.figures import draw_kinds
from sinklab.reports.palette import CSS_VARIABLE, HEAT_RAMP, LAYER_RAMP, blend, layer_colours, rgb
from sinklab.reports.svg import inline_svg, png_bytes, svg_markup
from sinklab.sinks.table import kind_by_layer


def figure() -> object:
    return draw_kinds(kind_by_layer(synthetic_heads(images=("a", "b"))))


def test_the_same_figure_gives_the_same_bytes() -> None:
    assert svg_markup(figure(), "x") == svg_markup(figure(), "x")  # type: ignore[arg-type]
    assert png_bytes(figure()) == png_bytes(figure())  # type: ignore[arg-type]


def test_an_inlined_figure_is_well_formed_and_says_what_it_shows() -> None:
    alt = 'Bars of "kinds" <by layer> & more'
    tree = ElementTree.fromstring(inline_svg(svg_markup(figure(), "x"), "x-wide", alt))  # type: ignore[arg-type]
    assert tree.get("aria-label") == alt and tree.get("role") == "img" and tree.get("viewBox")
    assert tree.get("width") is None  # its box decides


def test_an_inlined_figure_has_no_colour_of_one_theme_left() -> None:
    inline = inline_svg(svg_markup(figure(), "x"), "x", "alt")  # type: ignore[arg-type]
    assert not [colour for colour in CSS_VARIABLE if colour in inline]
    assert "var(--ink)" in inline and "var(--cls)" in inline


def test_two_inlined_figures_share_no_id_and_point_at_their_own() -> None:
    markup = svg_markup(figure(), "x")  # type: ignore[arg-type]
    one, other = inline_svg(markup, "one", ""), inline_svg(markup, "other", "")
    ids = [set(re.findall(r'\bid="([^"]+)"', each)) for each in (one, other)]
    assert ids[0] and not ids[0] & ids[1]
    pointed = re.findall(r'(?:url\(|href=")#([^)"]+)', one)
    assert pointed and set(pointed) <= ids[0]


def luminance(colour: str) -> float:
    red, green, blue = rgb(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_heat_grows_lighter_from_0_to_1() -> None:
    steps = [luminance(blend(HEAT_RAMP, step / 20)) for step in range(21)]
    assert steps == sorted(steps)


@pytest.mark.parametrize("layers", [1, 2, 40])
def test_every_layer_has_a_colour_of_its_own(layers: int) -> None:
    assert len(set(layer_colours(layers))) == layers and layer_colours(layers)[0] == LAYER_RAMP[0]


def test_no_two_meanings_share_a_colour() -> None:
    assert len(set(CSS_VARIABLE.values())) == len(CSS_VARIABLE)
