"""Figures of a controlled task's training: loss and sink scores over the steps, Fig. 11's sweeps, Fig. 2B's spectra.

Every function takes a table that the training saved and a width in inches, and returns a matplotlib Figure. A line is
the mean over seeds; where there are several, each seed's own line lies thin beneath it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sinklab.reports import drawing
from sinklab.reports.palette import CLASS_COLOUR, INK, KIND_COLOUR, blend
from sinklab.reports.sections import records

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ARM_COLOUR = {
    "nop": CLASS_COLOUR["nop"],
    "nop-branch": CLASS_COLOUR["nop"],
    "nothing-flagged": CLASS_COLOUR["intermediate"],
    "broadcast": CLASS_COLOUR["broadcast"],
    "attention": CLASS_COLOUR["broadcast"],
    "global": KIND_COLOUR["register"],
    "global+penalty": KIND_COLOUR["cls"],
    "global-uniform": KIND_COLOUR["register"],
    "global-uniform+penalty": KIND_COLOUR["cls"],
}
ARM_NAME = {
    "nop": "NOP head",
    "nop-branch": "with NOP tokens",
    "nothing-flagged": "without NOP tokens",
    "broadcast": "broadcast",
    "attention": "attention alone",
    "global": "with the pathway",
    "global+penalty": "pathway and penalty",
    "global-uniform": "with the pathway, γ ≡ 1",
    "global-uniform+penalty": "pathway, γ ≡ 1, and penalty",
}
SWEEP_RAMP = ("#3f7fd0", "#7a6fc4", "#b561ad", "#d8607f", "#dd7548", "#c99322")
"""From a sweep's first point to its last, in middle tones that stand on light and on dark ground."""
SWEEP_SIGN = {"frequency": "p", "damping": "γ"}
LEGEND = 7
"""Points of a sweep that the legend names."""
FORMED = 2
"""A sink has so many times the attention that each token has where all are attended to alike."""
SMALLEST = 1e-4
"""Lower end of a logarithmic axis of singular values, as a share of the largest."""


def arm_styles(arms: Sequence[str], points: Mapping[str, float] | None = None) -> dict[str, dict[str, Any]]:
    """Colour and dashes of each arm's line: by name, or along the ramp for the points of a sweep."""
    if points:
        return {
            arm: {"color": blend(SWEEP_RAMP, place / max(len(arms) - 1, 1)), "linestyle": "-"}
            for place, arm in enumerate(arms)
        }
    return {
        arm: {"color": ARM_COLOUR.get(arm, INK), "linestyle": (0, (5, 2)) if "uniform" in arm else "-"} for arm in arms
    }


def arm_names(arms: Sequence[str], points: Mapping[str, float] | None, sign: str = "") -> dict[str, str]:
    """What the legend calls each arm; of many points only some are named."""
    if not points:
        return {arm: arm_name(arm) for arm in arms}
    step = -(-len(arms) // LEGEND)
    digits = 3
    while len({f"{points[arm]:.{digits}g}" for arm in arms}) < len(arms) and digits < 17:
        digits += 1  # neighbours that lie close together are told apart
    return {
        arm: f"{sign} = {points[arm]:.{digits}g}"
        for place, arm in enumerate(arms)
        if place % step == 0 or arm == arms[-1]
    }


def arm_name(arm: str) -> str:
    """An arm in words; of a sweep's, its point: "γ = 0.1"."""
    sign, _, value = arm.partition("=")
    return f"{'γ' if sign == 'gamma' else sign} = {float(value):.10g}" if value else ARM_NAME.get(arm, arm)


def sweep_points(curves: pd.DataFrame) -> dict[str, float]:
    """Arm → its point, of a run that was a sweep; else nothing."""
    points = curves.dropna(subset=["point"]).drop_duplicates("arm")
    return {str(arm): float(point) for arm, point in zip(points["arm"], points["point"], strict=True)}


def over_seeds(table: pd.DataFrame, keys: Sequence[str], value: str) -> pd.DataFrame:
    """One row per `keys`: the mean of `value` over seeds."""
    rows = table.dropna(subset=[value])
    return rows.groupby(list(keys), sort=False)[value].mean().reset_index()


def draw_curves(curves: pd.DataFrame, sweep: str | None = None, width: float = drawing.WIDE) -> Figure:
    """The task's loss, and each layer's sink score, over the steps. curves: tables/curves.csv."""
    scores = sorted(str(name) for name in curves if str(name).startswith("sink_"))
    arms, points = list(dict.fromkeys(curves["arm"].astype(str))), sweep_points(curves)
    styles = arm_styles(arms, points)
    panels = [("loss", "Loss of the task"), *((name, _score_title(name, len(scores))) for name in scores)]
    narrow = drawing.is_narrow(width)
    rows = drawing.panel_rows(len(panels), width, 4)
    with drawing.paper(width, 0.6 + (2.1 if narrow else 2.9) * rows) as figure:
        for (name, title), axes in zip(panels, drawing.panels(figure, len(panels), rows), strict=True):
            _lines(axes, curves, "step", name, arms, styles)
            axes.set(title=title, xlabel="step", xlim=(0, float(curves["step"].max())))
            if name == "loss":
                axes.set_yscale("log")
                loss_ticks(axes)
            else:
                axes.set_ylim(0, 1)
            axes.grid(axis="y", which="major")
        names = arm_names(arms, points, SWEEP_SIGN.get(sweep or "", ""))
        figure.legend(handles=_handles(names, styles), loc="outside upper left", ncols=2 if narrow else 7)
    return figure


def draw_sweep(curves: pd.DataFrame, sweep: str, tokens: int, width: float = drawing.WIDE) -> Figure:
    """Fig. 11: the sink score over the steps, one line a point of the sweep, and beside it what sets them apart.

    That is, along the frequency, the step at which half of the final score is reached, where a sink formed; along the
    damping, the score.
    """
    arms, points = list(dict.fromkeys(curves["arm"].astype(str))), sweep_points(curves)
    styles, narrow, sign = arm_styles(arms, points), drawing.is_narrow(width), SWEEP_SIGN[sweep]
    ends = sweep_ends(curves, tokens)
    column = "half_step" if sweep == "frequency" else "score"
    with drawing.paper(width, 5.4 if narrow else 3.5) as figure:
        left, right = (
            figure.subplots(2, 1, height_ratios=(1.5, 1)) if narrow else figure.subplots(1, 2, width_ratios=(1.7, 1))
        )
        _lines(left, curves, "step", "sink_0", arms, styles)
        left.set(title="Sink score while training", xlabel="step", xlim=(0, float(curves["step"].max())), ylim=(0, 1))
        places = {arm: points[arm] if sweep == "frequency" else place for place, arm in enumerate(arms)}
        for row in records(ends):
            right.plot(places[row["arm"]], row[column], marker="o", markersize=5, linestyle="none",
                       color=styles[row["arm"]]["color"], markeredgecolor=INK, markeredgewidth=0.6)  # fmt: skip
        means = ends.groupby("arm")[column].mean()
        right.plot(
            [places[arm] for arm in arms], [float(means[arm]) for arm in arms], color=INK, linewidth=0.8, zorder=1
        )
        right.set(title="Half of it is reached at step" if sweep == "frequency" else "Sink score at the end")
        right.set(xlabel=f"{sweep}, {sign}", ylim=(0, None if sweep == "frequency" else 1))
        if sweep == "damping":  # its points are spaced unevenly, and one is 0
            right.set_xticks(list(places.values()), [f"{points[arm]:g}" for arm in arms])
        for axes in (left, right):
            axes.grid(axis="y")
        names = arm_names(arms, points, sign)
        figure.legend(handles=_handles(names, styles), loc="outside upper left", ncols=3 if narrow else 7)
    return figure


def sweep_ends(curves: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """One row per (arm, seed): its last sink score, and the first step with half of that.

    `half_step` is NaN where no sink formed, which is to say where the last score is below FORMED / tokens.
    """
    import pandas as pd

    rows = []
    for arm in dict.fromkeys(curves["arm"]):
        for seed, mine in curves[curves["arm"] == arm].dropna(subset=["sink_0"]).groupby("seed"):
            scores = mine.sort_values("step")
            last = float(scores["sink_0"].iloc[-1])
            half = float(scores.loc[scores["sink_0"] >= last / 2, "step"].iloc[0])
            if last < FORMED / tokens:  # every score, the first one too, is then half of the last
                half = float("nan")
            rows.append({"arm": str(arm), "seed": seed, "score": last, "half_step": half})
    return pd.DataFrame(rows)


def draw_spectrum(
    spectrum: pd.DataFrame, points: Mapping[str, float] | None = None, sign: str = "", width: float = drawing.WIDE
) -> Figure:
    """Fig. 2B: singular values of Θ over the largest of all arms, by rank. spectrum: tables/spectrum_training.csv."""
    arms = list(dict.fromkeys(spectrum["arm"].astype(str)))
    layers = sorted(int(layer) for layer in spectrum["layer"].unique())
    styles, narrow = arm_styles(arms, points), drawing.is_narrow(width)
    rows = drawing.panel_rows(len(layers), width, 4)
    with drawing.paper(width, 0.6 + (2.3 if narrow else 2.7) * rows) as figure:
        for layer, axes in zip(layers, drawing.panels(figure, len(layers), rows), strict=True):
            own = spectrum[spectrum["layer"] == layer]
            _lines(axes, own, "rank", "sigma", arms, styles, marker="o")
            high, low = float(own["sigma"].max()), float(own["sigma"].min())
            axes.set_yscale("log")
            axes.set_ylim(max(low, high * SMALLEST) / 1.3, high * 1.4)
            axes.yaxis.set_major_formatter(_plain)
            title = "Singular values of Θ (log)"
            axes.set(title=f"{title}, layer {layer}" if len(layers) > 1 else title, xlabel="rank")
            axes.set_xlim(0, float(own["rank"].max()) + 1)
            axes.grid(axis="y", which="major")
        names = arm_names(arms, points, sign)
        figure.legend(handles=_handles(names, styles), loc="outside upper left", ncols=2 if narrow else 7)
    return figure


def _lines(
    axes: Axes,
    table: pd.DataFrame,
    x: str,
    y: str,
    arms: Sequence[str],
    styles: Mapping[str, dict[str, Any]],
    marker: str | None = None,
) -> None:
    for arm in arms:
        mine = table[table["arm"] == arm]
        seeds = [rows.dropna(subset=[y]).sort_values(x) for _, rows in mine.groupby("seed")]
        if len(seeds) > 1:
            for rows in seeds:
                axes.plot(rows[x], rows[y], linewidth=0.6, alpha=0.35, **styles[arm])
        mean = over_seeds(mine, [x], y).sort_values(x)
        small: dict[str, Any] = {} if marker is None else {"marker": marker, "markersize": 2.2}
        axes.plot(mean[x], mean[y], linewidth=1.5, **styles[arm], **small)


def _handles(names: Mapping[str, str], styles: Mapping[str, dict[str, Any]]) -> list[Any]:
    from matplotlib.lines import Line2D

    return [Line2D([], [], linewidth=2, label=words, **styles[arm]) for arm, words in names.items()]


def _score_title(name: str, layers: int) -> str:
    return "Sink score" if layers == 1 else f"Sink score, layer {name.removeprefix('sink_')}"


def _plain(value: float, _: float) -> str:
    return f"{value:g}"


def loss_ticks(axes: Axes) -> None:
    """1, 2 and 5 of every power of ten where fewer than two powers are seen, else the powers alone."""
    from matplotlib.ticker import FixedLocator

    low, high = axes.get_ylim()
    marks = (1.0, 2.0, 3.0, 5.0) if high < 10 * low else (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
    ticks = [mark * 10.0**power for power in range(-9, 4) for mark in marks]
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.yaxis.set_minor_locator(FixedLocator([]))
    axes.yaxis.set_major_formatter(_plain)
