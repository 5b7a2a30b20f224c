"""Figures of a language model training: bits a byte over the steps and over the learning rate, and what ablations cost.

Every function takes tables that the training saved and a width in inches, and returns a matplotlib Figure. A line or a
bar is the median over seeds; where there are several, each seed stands thin or as a dot beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sinklab.reports import drawing
from sinklab.reports.palette import INK, KIND_COLOUR, PAPER, blend
from sinklab.reports.sections import records
from sinklab.reports.training_figures import SWEEP_RAMP

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOUR = {"phase": KIND_COLOUR["register"], "transformer": KIND_COLOUR["cls"]}
DASHES: tuple[Any, ...] = ((0, (1, 1.5)), (0, (3, 2)), (0, (6, 2)), (0, (6, 2, 1, 2)))
"""Of learning rates that were not chosen, from the smallest."""
CURVES = {"train_bpc": "Training batch, bits a byte", "validation_bpc": "Validation, bits a byte"}
HEADROOM = 1.75
"""A panel reaches so many times the lowest value up: the first steps, far above, would leave the rest no room."""


def family(config: str) -> str:
    """ "phase" or "transformer"."""
    return config.partition("-")[0]


def line_styles(points: pd.DataFrame) -> dict[tuple[str, float], dict[str, Any]]:
    """(model, learning rate) → colour, dashes, width. points: tables/points.csv.

    The colour tells the model; a solid line is the chosen rate.
    """
    colours = config_colours(list(dict.fromkeys(points["config"].astype(str))))
    styles: dict[tuple[str, float], dict[str, Any]] = {}
    for config, mine in points.groupby("config", sort=False):
        others = sorted(mine.loc[~mine["chosen"], "lr"])
        for row in records(mine):
            dashes = "-" if row["chosen"] else DASHES[others.index(row["lr"]) % len(DASHES)]
            styles[str(config), row["lr"]] = {
                "color": colours[str(config)], "linestyle": dashes, "linewidth": 1.7 if row["chosen"] else 1.0,
            }  # fmt: skip
    return styles


def config_colours(configs: Sequence[str]) -> dict[str, str]:
    """Each model's colour: its family's for the first of a family, and along the ramp for its ablations."""
    ablated = [name for name in configs if "+" in name]
    found = {
        name: blend(SWEEP_RAMP, place / max(len(ablated) - 1, 1)) if len(ablated) > 1 else INK
        for place, name in enumerate(ablated)
    }
    seen: set[str] = set()
    for name in configs:
        if name not in found:
            found[name] = INK if family(name) in seen else COLOUR.get(family(name), INK)
            seen.add(family(name))
    return found


def line_name(config: str, lr: float, points: pd.DataFrame) -> str:
    """What the legend calls a line: the model, and its learning rate where it had several."""
    return config if (points["config"] == config).sum() == 1 else f"{config}, lr {lr:g}"


def median_curve(curves: pd.DataFrame, config: str, lr: float, column: str) -> pd.DataFrame:
    """[step, column]: the median over seeds, at every step with a number."""
    mine = curves[(curves["config"] == config) & (curves["lr"] == lr)].dropna(subset=[column])
    return mine.groupby("step")[column].median().reset_index()


def draw_curves(curves: pd.DataFrame, points: pd.DataFrame, width: float = drawing.WIDE) -> Figure:
    """Bits a byte of the training batch and of the validation split, over the steps."""
    from matplotlib.lines import Line2D

    styles, narrow = line_styles(points), drawing.is_narrow(width)
    rows = -(-len(styles) // (2 if narrow else 4))
    with drawing.paper(width, (5.4 if narrow else 3.4) + 0.2 * rows) as figure:
        grid = figure.subplots(len(CURVES), 1) if narrow else figure.subplots(1, len(CURVES))
        for (column, title), axes in zip(CURVES.items(), grid, strict=True):
            for (config, lr), style in styles.items():
                _line(axes, curves, config, lr, column, style)
            axes.set(title=title, xlabel="step", xlim=(0, float(curves["step"].max())))
            _limit(axes, curves[column].dropna(), [median_curve(curves, *key, column)[column] for key in styles])
            axes.grid(axis="y", which="major")
        handles = [Line2D([], [], label=line_name(*key, points), **style) for key, style in styles.items()]
        figure.legend(handles=handles, loc="outside upper left", ncols=2 if narrow else 4)
    return figure


def _line(axes: Axes, curves: pd.DataFrame, config: str, lr: float, column: str, style: Mapping[str, Any]) -> None:
    mine = curves[(curves["config"] == config) & (curves["lr"] == lr)].dropna(subset=[column])
    if mine["seed"].nunique() > 1:
        for _, rows in mine.groupby("seed"):
            axes.plot(rows["step"], rows[column], **{**style, "linewidth": 0.6}, alpha=0.35)
    middle = median_curve(curves, config, lr, column)
    few: dict[str, Any] = {"marker": "o", "markersize": 2.5} if len(middle) < 16 else {}
    axes.plot(middle["step"], middle[column], **style, **few)


def _limit(axes: Axes, values: pd.Series[float], lines: Sequence[pd.Series[float]]) -> None:
    known = [line for line in lines if len(line)]
    if known:
        low, first = float(values.min()), max(float(line.max()) for line in known)
        axes.set_ylim(0.97 * low, min(first * 1.03, low * HEADROOM))


def draw_sweep(training: pd.DataFrame, points: pd.DataFrame, width: float = drawing.WIDE) -> Figure:
    """Validation bits a byte over the peak learning rate, the chosen point ringed; a cross for a rate that diverged."""
    from matplotlib.lines import Line2D

    colours, narrow = config_colours(list(dict.fromkeys(points["config"].astype(str)))), drawing.is_narrow(width)
    rates, low = sorted(points["lr"].unique()), float(training["validation_bpc"].min())
    with drawing.paper(width, 3.4) as figure:
        axes = figure.subplots()
        top = 1.04 * float(training["validation_bpc"].max())
        for config, mine in points.sort_values("lr").groupby("config", sort=False):
            colour, named = colours[str(config)], str(config)
            seeds = training[(training["config"] == named)]
            axes.plot(mine["lr"], mine["validation_bpc_median"], color=colour, linewidth=1.5, marker="o", markersize=4)
            axes.plot(seeds["lr"], seeds["validation_bpc"], color=colour, linestyle="none", marker=".", markersize=4)
            best = mine[mine["chosen"]]
            axes.plot(best["lr"], best["validation_bpc_median"], linestyle="none", marker="o", markersize=11,
                      markerfacecolor="none", markeredgecolor=INK, markeredgewidth=1.2)  # fmt: skip
            lost = mine[mine["diverged"] > 0]
            axes.plot(lost["lr"], [top] * len(lost), linestyle="none", marker="x", markersize=7, color=colour)
        axes.set(title="Validation, bits a byte", xlabel="peak learning rate", xscale="log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.set_ylim(0.96 * low, 1.02 * top)
        axes.grid(axis="y", which="major")
        handles = [Line2D([], [], color=colour, linewidth=2, label=name) for name, colour in colours.items()]
        ring = {"linestyle": "none", "markeredgecolor": INK, "markerfacecolor": "none"}
        handles += [Line2D([], [], marker="o", markersize=8, label="chosen", **ring)]  # type: ignore[arg-type]
        if int(points["diverged"].sum()):
            handles += [Line2D([], [], marker="x", label="diverged", **{**ring, "markeredgecolor": INK})]  # type: ignore[arg-type]
        figure.legend(handles=handles, loc="outside upper left", ncols=2 if narrow else 5)
    return figure


def ablation_rows(differences: pd.DataFrame) -> pd.DataFrame:
    """[config, against, seed, difference] in validation bits a byte of ablations, the dearest by its median first."""
    ablated = [
        row["measure"] == "validation_bpc" and str(row["config"]).startswith(f"{row['against']}+")
        for row in records(differences)
    ]
    rows = differences.iloc[[place for place, own in enumerate(ablated) if own]]
    order = rows.groupby("config")["difference"].median().sort_values(ascending=False, kind="stable").index
    place = rows["config"].map({name: place for place, name in enumerate(order)})
    return rows.loc[place.sort_values(kind="stable").index, ["config", "against", "seed", "difference"]]


def draw_ablations(rows: pd.DataFrame, width: float = drawing.WIDE) -> Figure:
    """What each ablation costs against the whole model of the same seed. rows: `ablation_rows`."""
    names = list(dict.fromkeys(rows["config"].astype(str)))
    with drawing.paper(width, 0.9 + 0.3 * len(names)) as figure:
        axes = figure.subplots()
        for place, name in enumerate(names):
            own = rows.loc[rows["config"] == name, "difference"]
            axes.barh(place, float(own.median()), height=0.62, color=COLOUR["phase"])
            if len(own) > 1:
                axes.plot(own, [place] * len(own), linestyle="none", marker="o", markersize=3.5, color=INK,
                          markerfacecolor=PAPER, markeredgewidth=0.7)  # fmt: skip
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(names)), [name.partition("+")[2].replace("-", " ") for name in names])
        axes.invert_yaxis()
        axes.set(title="Validation, bits a byte more")
        axes.grid(axis="x", which="major")
    return figure
