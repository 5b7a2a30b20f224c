"""What every figure shares: paper size, type, axes, legends, and labels that do not lie on each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sinklab.reports.palette import GRID, INK, KIND_MARKER, KIND_NAME, KINDS, MUTED, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = 8.4
"""Inches: the page's column on a desktop and on paper."""
NARROW = 3.6
"""Inches: a phone held upright. A figure is drawn twice rather than shrunk until its labels cannot be read."""

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.minor.width": 0.5,
    "ytick.minor.width": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
    "legend.borderaxespad": 0.3,
    "legend.borderpad": 0.0,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.05,
}


@contextmanager
def paper(width: float, height: float) -> Iterator[Figure]:
    """A figure of that size in inches, in the report's style; matplotlib's own settings are left as they were."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def is_narrow(width: float) -> bool:
    """Whether a figure of that width is the one for a phone."""
    return width < (WIDE + NARROW) / 2


def panel_rows(count: int, width: float, across: int) -> int:
    """Rows of so many panels, at most `across` beside each other: more would leave no room to their axes and titles."""
    return count if is_narrow(width) else -(-count // across)


def panels(figure: Figure, count: int, rows: int) -> list[Axes]:
    """So many panels in rows that are as even as can be; what is left of the last row stays empty."""
    drawn = figure.subplots(rows, -(-count // rows), squeeze=False)
    for spare in drawn.flat[count:]:
        spare.remove()
    return list(drawn.flat[:count])


def layer_ticks(layers: Sequence[int], most: int) -> list[int]:
    """Block numbers to print along an axis: all of them, or every second, fifth, … so that at most `most` stand."""
    for step in (1, 2, 4, 5, 10, 20, 50):
        ticks = [layer for layer in layers if layer % step == 0]
        if len(ticks) <= most:
            return ticks
    return [layers[0], layers[-1]]


def kind_handles(kinds: Sequence[str], colour: str = PAPER) -> list[Any]:
    """Legend entries for token kinds by marker."""
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], linestyle="none", marker=KIND_MARKER[kind], markersize=5.5, markerfacecolor=colour,
               markeredgecolor=INK, markeredgewidth=0.8, label=f"sink is {KIND_NAME[kind]}")
        for kind in KINDS if kind in kinds
    ]  # fmt: skip


SPOTS = ((1, 0, 0), (-1, 0, 0), (1, 1, 0), (-1, 1, 0), (1, -1, 0), (-1, -1, 0))
FARTHER = tuple((side, rise, away) for away in (1, 2, 3) for rise in (2, 1, 3, -2, 0) for side in (1, -1))
"""Where a label may stand: side of its point, lines above it, and steps away; from afar a thin line leads to it."""


def label_points(
    axes: Axes,
    points: Sequence[tuple[float, float, str]],
    most: int = 14,
    size: float = 7.5,
    *,
    upright: Sequence[float] = (),
    level: Sequence[float] = (),
) -> None:
    """Print the first `most` points' names beside them where that covers nothing; a name without room is left out.

    points: (x, y, name) in data units, all that are drawn, the most important first. upright, level: x and y of lines
    that no name may lie on. Boxes are judged from an average letter, which is enough for names of a few letters and
    needs no renderer.
    """
    figure = axes.get_figure()
    if figure is None:
        return
    figure.canvas.draw()  # settles the layout, without which data units have no place on the paper
    inch = figure.dpi
    frame = axes.get_window_extent()
    spots = [axes.transData.transform((x, y)) for x, y, _ in points]
    dot = 0.055 * inch
    taken = [(x - dot, y - dot, x + dot, y + dot) for x, y in spots]
    taken += _lines(axes, upright, level)
    for (x, y), (_, _, name) in list(zip(spots, points, strict=True))[:most]:
        wide, high = len(name) * size * 0.6 * inch / 72, size * 1.15 * inch / 72
        for side, rise, away in (*SPOTS, *FARTHER):
            step = dot * 1.3 + away * 0.12 * inch
            left = x + step if side > 0 else x - step - wide
            low = y - high / 2 + rise * high * 0.8
            box = (left, low, left + wide, low + high)
            if _inside(box, frame.extents) and not any(_meet(box, other) for other in taken):
                taken.append(box)
                if away:
                    _lead(axes, (x, y), (left if side > 0 else left + wide, low + high / 2))
                at = axes.transData.inverted().transform((left, low + high * 0.22))
                axes.text(at[0], at[1], name, fontsize=size, color=INK, ha="left", va="baseline")
                break


def _lines(axes: Axes, upright: Sequence[float], level: Sequence[float]) -> list[tuple[float, float, float, float]]:
    """The lines as thin boxes on the paper."""
    frame, width = axes.get_window_extent(), 1.5
    across = [float(axes.transData.transform((x, axes.get_ylim()[0]))[0]) for x in upright]
    up = [float(axes.transData.transform((axes.get_xlim()[0], y))[1]) for y in level]
    return [(x - width, frame.y0, x + width, frame.y1) for x in across] + [
        (frame.x0, y - width, frame.x1, y + width) for y in up
    ]


def _lead(axes: Axes, start: Sequence[float], end: Sequence[float]) -> None:
    (x, y), (to_x, to_y) = (axes.transData.inverted().transform(each) for each in (start, end))
    axes.annotate("", xy=(x, y), xytext=(to_x, to_y), zorder=1,
                  arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkB": 3})  # fmt: skip


def _meet(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _inside(box: Sequence[float], frame: Sequence[float]) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]
