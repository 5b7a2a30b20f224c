"""The page in a real browser: no complaint, no request, no sideways scrolling, both themes, print."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, chromium, open_browser
from synthetic_run import Plant, SavedRun, synthetic_run

from sinklab.reports.page import write_report

BINARY = chromium()
pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium on this machine")
PHONE, DESKTOP = 390, 1280


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    assert BINARY is not None
    with open_browser(BINARY) as page:
        yield page


@pytest.mark.parametrize("which", ["full_run", "quiet_run", "patched_run"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_page_opens_without_a_complaint_or_a_request(
    browser: Page, which: str, width: int, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(which).path / "report.html"
    browser.open(path, width=width)
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith("data:")] == [path.as_uri()]


def test_a_complaint_and_a_request_would_be_seen(browser: Page, tmp_path: Path) -> None:
    """What the test above would find if there were something to find."""
    page = tmp_path / "bad.html"
    page.write_text("<img src='missing.png'><script>console.error('so')</script>")
    browser.open(page, width=DESKTOP)
    assert len(browser.requests()) == 2 and browser.complaints()


@pytest.mark.parametrize("which", ["full_run", "quiet_run", "patched_run"])
@pytest.mark.parametrize("width", [320, PHONE, 700, DESKTOP])
def test_the_page_never_scrolls_sideways(browser: Page, which: str, width: int, request: pytest.FixtureRequest) -> None:
    browser.open(request.getfixturevalue(which).path / "report.html", width=width)
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    beyond = "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, svg, .hidden') && "
    beyond += "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    assert browser.evaluate(beyond) == []


def test_a_wide_table_scrolls_inside_its_own_box_on_a_phone(browser: Page, full_run: SavedRun) -> None:
    browser.open(full_run.path / "report.html", width=PHONE)
    wide = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
    assert browser.evaluate(wide) > 0


def test_a_box_that_scrolls_shows_a_shadow_where_more_is_hidden(browser: Page, full_run: SavedRun) -> None:
    browser.open(full_run.path / "report.html", width=PHONE)
    attached = (
        "[...new Set([...document.querySelectorAll('.scroll')].map(e => getComputedStyle(e).backgroundAttachment))]"
    )
    (found,) = browser.evaluate(attached)
    assert found.split(", ") == ["local", "local", "scroll", "scroll", "scroll"]  # covers move along, shadows stay


@pytest.mark.parametrize("width", [320, PHONE])
def test_a_definitions_own_thresholds_are_seen_first_on_a_phone(browser: Page, full_run: SavedRun, width: int) -> None:
    browser.open(full_run.path / "report.html", width=width)
    ends = "[...document.querySelectorAll('td.own')].map(e => e.closest('.scroll').getBoundingClientRect().right - "
    ends = browser.evaluate(ends + "e.getBoundingClientRect().right)")
    assert len(ends) == 4 and min(ends) >= -1


def test_a_layers_table_fits_a_small_desktop(browser: Page, tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, images=tuple("abcdefghijkl"), plants=(Plant(layer=0, head=0, ratio_out=0.3),))
    sunk = run.heads.index[run.heads["layer"] + run.heads["head"] == 0]
    run.heads.loc[sunk[:5], ["value_ratio_out", "value_ratio_head"]] = 0.1  # of mixed class: the widest cells
    browser.open(write_report(run), width=1200)
    wide = "[...document.querySelectorAll('#layer-0 .scroll')].map(e => e.scrollWidth - e.clientWidth)"
    assert browser.evaluate(wide) == [0]


@pytest.mark.parametrize(("width", "seen", "hidden"), [(PHONE, "narrow", "wide"), (DESKTOP, "wide", "narrow")])
def test_a_phone_gets_figures_drawn_for_it(
    browser: Page, full_run: SavedRun, width: int, seen: str, hidden: str
) -> None:
    browser.open(full_run.path / "report.html", width=width)
    boxes = "[...document.querySelectorAll('figure .{} svg')].map(e => e.getBoundingClientRect().width)"
    assert min(browser.evaluate(boxes.format(seen))) > 250 and max(browser.evaluate(boxes.format(hidden))) == 0
    heights = f"[...document.querySelectorAll('figure .{seen} text')].map(e => e.getBoundingClientRect().height)"
    assert min(browser.evaluate(heights)) > 8  # pixels: legible without zooming


CONTRAST = """(() => {
  const probe = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const light = colour => { probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => { v /= 255;
      return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
    return .2126 * r + .7152 * g + .0722 * b; };
  const ratio = (one, other) => { const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + .05) / (b + .05); };
  const card = getComputedStyle(document.querySelector('figure')).backgroundColor;
  const ground = getComputedStyle(document.body).backgroundColor;
  const texts = [...document.querySelectorAll('main p, main td, main dd, main dt, main small, figcaption')]
    .map(e => ratio(getComputedStyle(e).color, e.closest('figure, .card, .scroll, .tile') ? card : ground));
  const figures = [...document.querySelectorAll('#fig4-token-kinds .wide text')]
    .map(e => ratio(getComputedStyle(e).fill, card));
  return [Math.min(...texts), Math.min(...figures), light(card)];
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_reads_in_light_and_in_dark(browser: Page, full_run: SavedRun, dark: bool) -> None:
    browser.open(full_run.path / "report.html", width=DESKTOP, dark=dark)
    texts, figures, card = browser.evaluate(CONTRAST)
    assert texts >= 4.5 and figures >= 7  # WCAG AA for small print, AAA inside figures
    assert card < 0.05 if dark else card > 0.9


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_causal_section_reads_in_light_and_in_dark(browser: Page, patched_run: SavedRun, dark: bool) -> None:
    browser.open(patched_run.path / "report.html", width=DESKTOP, dark=dark)
    texts, figures, _ = browser.evaluate(CONTRAST.replace("#fig4-token-kinds", "#fig6-causal-effects"))
    assert texts >= 4.5 and figures >= 3  # the panels' titles are in their class's colour


NUMBER_CONTRAST = """(() => {
  const parse = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = rgb => { const [r, g, b] = rgb.map(v => v / 255).map(v =>
    v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const card = parse(getComputedStyle(document.querySelector('figure')).backgroundColor);
  const paths = [...document.querySelectorAll('#fig5-event-frequency .wide g[id*=patch] > path')];
  return [...document.querySelectorAll('#fig5-event-frequency .wide text')].map(text => {
    const at = text.getBoundingClientRect(), x = at.x + at.width / 2, y = at.y + at.height / 2;
    const cell = paths.find(path => { const box = path.getBoundingClientRect(), style = getComputedStyle(path);
      return box.x < x && x < box.right && box.y < y && y < box.bottom && box.height < 80 && style.fill !== 'none'; });
    if (!cell) return null;
    const style = getComputedStyle(cell), full = Number(style.opacity) * Number(style.fillOpacity);
    const under = parse(style.fill).map((v, i) => v * full + card[i] * (1 - full));
    const [a, b] = [light(under), light(parse(getComputedStyle(text).fill))].sort((p, q) => q - p);
    return (a + .05) / (b + .05); }).filter(ratio => ratio !== null);
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_numbers_read_on_the_cells_of_the_map(browser: Page, tmp_path: Path, dark: bool) -> None:
    axes = {
        "nop": {},
        "broadcast": {"ratio_head": 0.9, "ratio_out": 0.9},
        "between": {"ratio_head": 0.3, "ratio_out": 0.3},
    }
    plants = [
        Plant(layer=layer, head=head, frequency=frequency, **axis)
        for layer, axis in enumerate(axes.values())
        for head, frequency in enumerate((0.125, 0.5, 0.75, 1.0))
    ]
    run = synthetic_run(tmp_path, images=tuple("abcdefgh"), layers=3, heads=4, plants=plants, overlays=False)
    browser.open(write_report(run), width=DESKTOP, dark=dark)
    ratios = browser.evaluate(NUMBER_CONTRAST)
    assert len(ratios) == 12 and min(ratios) > 3.5


def test_the_photographs_and_their_heat_are_there(browser: Page, full_run: SavedRun) -> None:
    browser.open(full_run.path / "report.html", width=DESKTOP)
    sizes = "[...document.querySelectorAll('.picture svg')].map(e => [e.getBoundingClientRect().width, "
    sizes += "!!document.querySelector(e.querySelector('use').getAttribute('href'))])"
    found = browser.evaluate(sizes)
    assert found and all(width > 100 and there for width, there in found)


def test_it_prints_with_every_layer_open(browser: Page, full_run: SavedRun, tmp_path: Path) -> None:
    browser.open(full_run.path / "report.html", width=DESKTOP, media="print")
    closed = "[...document.querySelectorAll('details:not([open]) table')].map(e => e.getBoundingClientRect().height)"
    assert all(height > 0 for height in browser.evaluate(closed))
    browser.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
