"""The report's figures, drawn from its tables: the paper's Figs. 4, 5 and 7 for this run, and Lemma 3's two routes.

Every function takes a table of `sinklab.reports.tables` and a width in inches, and returns a matplotlib Figure that no
global state knows of. Colours mean the same in all of them (`sinklab.reports.palette`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinklab.models.tokens import kinds_among
from sinklab.reports import drawing
from sinklab.reports.nouns import IMAGES, Words
from sinklab.reports.palette import (
    CLASS_COLOUR,
    CLASS_NAME,
    CLASSES,
    INK,
    KIND_COLOUR,
    KIND_MARKER,
    KIND_NAME,
    MUTED,
    ON_CLASS,
    PAPER,
    QUIET,
    layer_colours,
)
from sinklab.reports.tables import each_row

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALLEST_RATIO = 0.01
"""Left edge of a logarithmic value-ratio axis: smaller ratios (an exact null value is 0) are drawn on it."""

NO_LENGTH = 0.1
"""Where a sink token of length 0 stands on Lemma 3's logarithmic axis."""


def draw_kinds(kinds: pd.DataFrame, width: float = drawing.WIDE, words: Words = IMAGES) -> Figure:
    """Fig. 4: which kind of token is a head's dominant key, and how much attention flows into it, by layer.

    kinds: `kind_by_layer`, one row per (layer, kind) with `share` (of head × image pairs) and `inflow` (their mean).
    """
    layers = sorted(int(layer) for layer in kinds["layer"].unique())
    places = {layer: place for place, layer in enumerate(layers)}
    with drawing.paper(width, 3.6 if drawing.is_narrow(width) else 3.9) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.15, 1))
        floor = [0.0] * len(layers)
        for kind in kinds_among(kinds["kind"]):
            rows = kinds[(kinds["kind"] == kind) & (kinds["share"] > 0)]
            if rows.empty:
                continue
            at = [places[int(layer)] for layer in rows["layer"]]
            upper.bar(at, rows["share"], 0.82, [floor[place] for place in at], color=KIND_COLOUR[kind],
                      label=KIND_NAME[kind])  # fmt: skip
            for place, share in zip(at, rows["share"], strict=True):
                floor[place] += share
            lower.plot(at, rows["inflow"], color=KIND_COLOUR[kind], marker=KIND_MARKER[kind], markersize=4.5,
                       linewidth=1.1, markeredgecolor=PAPER, markeredgewidth=0.5)  # fmt: skip
        upper.set(ylim=(0, 1), title=f"Share of heads × {words.nouns}")
        upper.yaxis.set_major_formatter(_percent)
        figure.legend(*upper.get_legend_handles_labels(), loc="outside upper left", ncols=3)
        lower.set(ylim=(0, 1), title="Mean inflow of that key", xlabel="layer")
        lower.grid(axis="y")
        ticks = drawing.layer_ticks(layers, 12 if drawing.is_narrow(width) else 24)
        lower.set_xticks([places[layer] for layer in ticks], [str(layer) for layer in ticks])
        lower.set_xlim(-0.6, len(layers) - 0.4)
    return figure


def draw_frequency(heads: pd.DataFrame, definition: str, width: float = drawing.WIDE, words: Words = IMAGES) -> Figure:
    """Fig. 5: on what share of the images each head is sunk; hue is its class, fullness its frequency.

    heads: `head_table`, one row per (layer, head). The empty frames are heads that were never sunk.
    """
    layers = sorted(int(layer) for layer in heads["layer"].unique())
    places = {layer: place for place, layer in enumerate(layers)}
    columns = int(heads["head"].max()) + 1
    narrow = drawing.is_narrow(width)
    row = min(max((0.2 if narrow else 0.24) * 12 / max(len(layers), 12), 0.14), 0.3)
    with drawing.paper(width, 1.05 + row * len(layers)) as figure:
        axes = figure.subplots()
        room = (width - 0.6) / columns > 0.2 and row > 0.17
        for cell in each_row(heads):
            _frequency_cell(axes, cell, places[int(cell.layer)], f"class_{definition}", room)
        axes.set(xlim=(-0.5, columns - 0.5), ylim=(len(layers) - 0.5, -0.5), xlabel="head", ylabel="layer")
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0)
        axes.set_xticks(drawing.layer_ticks(range(columns), 12 if narrow else 24))
        ticks = drawing.layer_ticks(layers, 40)
        axes.set_yticks([places[layer] for layer in ticks], [str(layer) for layer in ticks])
        _frequency_legend(figure, narrow, words)
    return figure


def draw_plane(heads: pd.DataFrame, definition: Any, width: float = drawing.WIDE, words: Words = IMAGES) -> Figure:
    """Fig. 7: every sunk head by its median ratio and median stable rank, with the class boundaries.

    heads: rows of `head_table` with at least one event; definition: the SinkDefinition whose axis and lines are drawn.
    """
    from matplotlib.lines import Line2D

    axis = f"median_{definition.axis}"
    heads = heads[(heads["events"] > 0) & heads[axis].notna() & heads["median_stable_rank"].notna()]
    layers = sorted(int(layer) for layer in heads["layer"].unique())
    colours = dict(zip(layers, layer_colours(len(layers)), strict=True))
    narrow = drawing.is_narrow(width)
    with drawing.paper(width, 3.6 if narrow else 4.2) as figure:
        axes = figure.subplots()
        _plane_scales(axes, heads, definition)
        for kind in kinds_among(heads["kind"]):
            rows = heads[heads["kind"] == kind]
            axes.scatter(rows[axis].clip(lower=SMALLEST_RATIO), rows["median_stable_rank"], s=_dot_size(len(heads)),
                         c=[colours[int(layer)] for layer in rows["layer"]], marker=KIND_MARKER[kind],
                         edgecolors=INK, linewidths=0.7, zorder=3)  # fmt: skip
        axes.set(
            xlabel=f"median {words.ratio} {words.where(definition.axis)} (log)",
            ylabel=f"median stable rank of the {words.update} (log)",
        )
        shown = drawing.layer_ticks(layers, 6 if narrow else 10) if layers else []
        handles = [Line2D([], [], linestyle="none", marker="o", markersize=6, color=colours[layer],
                          markeredgecolor=INK, markeredgewidth=0.7, label=f"layer {layer}")
                   for layer in shown]  # fmt: skip
        handles += drawing.kind_handles(list(heads["kind"]))
        if handles:
            figure.legend(handles=handles, loc="outside upper left", ncols=3 if narrow else 7)
        ordered = heads.sort_values(["events", "layer", "head"], ascending=[False, True, True])
        points = [(max(getattr(row, axis), SMALLEST_RATIO), row.median_stable_rank, f"L{row.layer}H{row.head}")
                  for row in each_row(ordered)]  # fmt: skip
        rank = [] if definition.stable_rank is None else [definition.stable_rank]
        drawing.label_points(axes, points, size=6.5 if narrow else 7.5,
                             upright=[definition.nop, definition.broadcast], level=rank)  # fmt: skip
    return figure


def draw_routes(routes: pd.DataFrame, definition: str, width: float = drawing.WIDE) -> Figure:
    """Lemma 3: a head's spectral concentration against the outlier norm of its sink token.

    routes: `route_table`, one row per (layer, head); heads without events are small grey points for comparison.
    """
    from matplotlib.lines import Line2D

    routes = routes[routes["sigma1_share"].notna() & routes["token_norm_ratio"].notna()]
    routes = routes.assign(token_norm_ratio=routes["token_norm_ratio"].where(routes["token_norm_ratio"] > 0, NO_LENGTH))
    narrow = drawing.is_narrow(width)
    with drawing.paper(width, 3.5 if narrow else 3.9) as figure:
        axes = figure.subplots()
        quiet, sunk = routes[routes["events"] == 0], routes[routes["events"] > 0]
        axes.scatter(quiet["sigma1_share"], quiet["token_norm_ratio"], s=9, color=QUIET, linewidths=0, zorder=2)
        for name in CLASSES:
            for kind in kinds_among(sunk["kind"]):
                rows = sunk[(sunk[f"class_{definition}"] == name) & (sunk["kind"] == kind)]
                axes.scatter(rows["sigma1_share"], rows["token_norm_ratio"], s=_dot_size(len(sunk)),
                             color=CLASS_COLOUR[name], marker=KIND_MARKER[kind], edgecolors=INK, linewidths=0.7,
                             zorder=3)  # fmt: skip
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis, routes["token_norm_ratio"], (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500))
        axes.axhline(1, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        axes.set_xlim(left=0, right=min(1.0, max(0.1, 1.15 * float(routes["sigma1_share"].max() or 0))))
        axes.set(
            xlabel="share of the first singular value of Θ, σ₁² / Σσ²", ylabel="sink token's norm / median norm (log)"
        )
        axes.grid(axis="both", which="major")
        handles = [
            Line2D(
                [],
                [],
                linestyle="none",
                marker="o",
                markersize=6,
                color=CLASS_COLOUR[name],
                markeredgecolor=INK,
                markeredgewidth=0.7,
                label=CLASS_NAME[name],
            )
            for name in CLASSES
        ]
        handles.append(Line2D([], [], linestyle="none", marker="o", markersize=3.5, color=QUIET, label="no event"))
        figure.legend(handles=handles + drawing.kind_handles(list(sunk["kind"])), loc="outside upper left",
                      ncols=3 if narrow else 7)  # fmt: skip
        ordered = sunk.sort_values(["events", "layer", "head"], ascending=[False, True, True])
        drawing.label_points(axes, [(row.sigma1_share, row.token_norm_ratio, f"L{row.layer}H{row.head}")
                                    for row in each_row(ordered)], size=6.5 if narrow else 7.5, level=[1])  # fmt: skip
    return figure


def _frequency_cell(axes: Axes, cell: Any, place: int, column: str, room: bool) -> None:
    from matplotlib.patches import Rectangle

    share, name = float(cell.frequency), str(getattr(cell, column))
    corner, side = (cell.head - 0.46, place - 0.46), 0.92
    if not share > 0:
        axes.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=QUIET, linewidth=0.5, alpha=0.55))
    if cell.not_finite:
        axes.plot(cell.head, place, marker="x", markersize=5, color=INK, markeredgewidth=1)
    if not share > 0:
        return
    axes.add_patch(Rectangle(corner, side, side, facecolor=CLASS_COLOUR[name], linewidth=0, alpha=fullness(share)))
    if room:
        axes.text(cell.head, place, percent_digits(share), ha="center", va="center", fontsize=7,
                  color=ON_CLASS[name] if share >= 0.75 else INK)  # fmt: skip


def fullness(share: float) -> float:
    """Opacity of a cell: never so faint that a rare event looks like none."""
    return round(0.14 + 0.86 * share, 3)


def percent_digits(share: float) -> str:
    """A share as digits of a percentage that never rounds an event away: "<1" for what would print as 0."""
    return "<1" if 0 < share < 0.005 else f"{share * 100:.0f}"


def _frequency_legend(figure: Figure, narrow: bool, words: Words) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=CLASS_COLOUR[name], label=f"mostly {CLASS_NAME[name]}") for name in CLASSES]
    handles += [Patch(facecolor=INK, alpha=fullness(share), linewidth=0, label=f"{share:.0%} of {words.nouns}")
                for share in (0.1, 0.5, 1.0)]  # fmt: skip
    figure.legend(handles=handles, loc="outside upper left", ncols=2 if narrow else 6, handlelength=1.1)


def _plane_scales(axes: Axes, heads: pd.DataFrame, definition: Any) -> None:
    ratios = heads[f"median_{definition.axis}"].clip(lower=SMALLEST_RATIO)
    left = min(0.05, float(ratios.min()) / 1.4) if len(ratios) else 0.05
    right = max(2.0, float(ratios.max()) * 1.5) if len(ratios) else 2.0
    top = max(2.5, float(heads["median_stable_rank"].max()) * 1.3) if len(heads) else 2.5
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(0.93, top))
    _plain_ticks(axes.xaxis, None, (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20))
    _plain_ticks(axes.yaxis, None, (1, 1.5, 2, 3, 5, 10, 20, 50, 100))
    rank = definition.stable_rank
    axes.axvspan(left, definition.nop, color=CLASS_COLOUR["nop"], alpha=0.1, linewidth=0)
    ceiling = 1.0 if rank is None else _share_of_axis(rank, (0.93, top))
    axes.axvspan(definition.broadcast, right, 0, ceiling, color=CLASS_COLOUR["broadcast"], alpha=0.1, linewidth=0)
    dashes: dict[str, Any] = {"color": MUTED, "linewidth": 0.8, "linestyle": (0, (4, 3))}
    axes.axvline(definition.nop, **dashes)
    axes.axvline(definition.broadcast, **dashes)
    if rank is not None:
        axes.axhline(rank, **dashes)
    wanted = "" if rank is None else f", rank ≤ {rank:g}"
    for name, words, place, side in (
        ("nop", f"NOP ≤ {definition.nop:g}", 0.0, "left"),
        ("broadcast", f"broadcast ≥ {definition.broadcast:g}{wanted}", 1.0, "right"),
    ):
        axes.text(place, 1.02, words, transform=axes.transAxes, ha=side, va="bottom", fontweight="bold",
                  fontsize=7.5, color=CLASS_COLOUR[name])  # fmt: skip


def _dot_size(heads: int) -> float:
    """Area of a marker in points²: smaller where many heads have to stand apart."""
    return 36 if heads <= 60 else 22


def _share_of_axis(value: float, limits: tuple[float, float]) -> float:
    """Where `value` stands between the limits of a logarithmic axis, 0 to 1."""
    from math import log

    return min(max(log(value / limits[0]) / log(limits[1] / limits[0]), 0.0), 1.0)


def _plain_ticks(axis: Any, values: pd.Series | None, ticks: tuple[float, ...]) -> None:
    """Ticks of a logarithmic axis at round numbers, printed as such."""
    low, high = axis.get_view_interval()
    if values is not None and len(values):
        low, high = float(values.min()) / 1.25, float(values.max()) * 1.3
        low, high = min(low, 0.8), max(high, 1.3)
        axis.axes.set_ylim(low, high)
    kept = [tick for tick in ticks if low <= tick <= high]
    axis.set_major_locator(_fixed(kept))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(_fixed([]))


def _fixed(ticks: list[float]) -> Any:
    from matplotlib.ticker import FixedLocator

    return FixedLocator(ticks)


def _percent(value: float, _: int) -> str:
    return f"{value:.0%}"
