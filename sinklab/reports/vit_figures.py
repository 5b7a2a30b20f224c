"""Figures of a vision transformer training: losses, validation, common mode, inflow and sink events as it goes on.

Every function takes tables of `sinklab.training.vit_tables` and a width in inches, and returns a matplotlib Figure. A
line is the mean over seeds, a mark at its end; where there are several seeds, each one's own line lies thin beneath it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sinklab.reports import drawing
from sinklab.reports.palette import CLASS_NAME, CLASSES, INK, KIND_COLOUR, MOVING, MUTED, PAPER, RESTING, blend
from sinklab.reports.training_figures import SWEEP_RAMP, loss_ticks
from sinklab.training.vit_tables import TERMS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOUR = {
    "baseline": INK,
    "gated-elementwise": KIND_COLOUR["register"],
    "gated-headwise": KIND_COLOUR["patch"],
    "global-penalty": KIND_COLOUR["cls"],
    "gated-global-penalty": MOVING,
}
"""By variant; with registers a line is dashed, and its marks are open."""
MARKER = {"baseline": "o", "gated-elementwise": "D", "gated-headwise": "s", "global-penalty": "^",
          "gated-global-penalty": "v"}  # fmt: skip
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
DOTTED = (0, (1, 1.5))
TERM_NAME = {
    "total": "Total",
    "sigreg": "SIGReg, before its weight",
    "invariance": "Invariance, before its weight",
    "probe": "Probe, cross-entropy (nats)",
    "penalty": "Penalty, before its weight",
}
LAYER_NAME = {"common_mode": "common-mode share", "max_inflow": "largest mean inflow of a head"}
MOST_POINTS = 160
"""Points of a line on paper: of more lines of metrics than that, neighbours are averaged."""
NAMED_LAYERS = 8
Styles = Mapping[str, dict[str, Any]]


def variant_styles(configs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, dashes and marker of each VARIANT-SIZE; what has registers, or a further size, has other dashes."""
    found, taken = {}, dict[str, int]()
    for name in configs:
        variant = name.rpartition("-")[0]
        plain = "baseline" if variant == "registers" else variant.removesuffix("-registers")
        place = max(taken.get(plain, 0), int(variant.endswith("registers")))
        taken[plain] = place + 1
        found[name] = {
            "color": COLOUR.get(plain, RESTING),
            "linestyle": DASHES[place % len(DASHES)],
            "marker": MARKER.get(plain, "P"),
            "markerfacecolor": PAPER if variant.endswith("registers") else COLOUR.get(plain, RESTING),
        }
    return found


def mean_line(table: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """[x, y]: the mean over seeds, where all that have any number have one; `table` is of one variant."""
    rows = table.dropna(subset=[y])
    groups = rows.groupby(x)[y]
    whole = groups.size() == rows["seed"].nunique()
    return groups.mean()[whole].reset_index()


def thinned(line: pd.DataFrame, most: int = MOST_POINTS) -> pd.DataFrame:
    """At most so many rows, each the mean of as many neighbours as the others, x among them."""
    if len(line) <= most:
        return line
    return line.groupby([place * most // len(line) for place in range(len(line))]).mean()


def draw_losses(curves: pd.DataFrame, styles: Styles, width: float = drawing.WIDE) -> Figure:
    """The loss and its terms over the steps."""
    names = [name for name in TERMS if curves[name].notna().any()]
    rows = drawing.panel_rows(len(names), width, 3)
    with drawing.paper(
        width, (2.1 if drawing.is_narrow(width) else 2.3) * rows + _legend_height(styles, width)
    ) as page:
        for name, axes in zip(names, drawing.panels(page, len(names), rows), strict=True):
            _lines(axes, curves, "step", name, styles)
            axes.set(title=TERM_NAME[name])
            _steps(axes, curves)
            values = curves[name].dropna()
            if float(values.min()) > 0 and float(values.max()) > 3 * float(values.min()):
                axes.set_yscale("log")
                loss_ticks(axes)
            axes.grid(axis="y", which="major")
        _legend(page, styles, width)
    return page


def draw_validation(
    validation: pd.DataFrame, styles: Styles, chance: float | None = None, width: float = drawing.WIDE
) -> Figure:
    """The online probe's accuracy and loss on the validation images, epoch by epoch; `chance` as a dashed line."""
    narrow = drawing.is_narrow(width)
    titles = {"probe_accuracy": "Accuracy of the probe", "probe_loss": "Cross-entropy of the probe (nats)"}
    with drawing.paper(width, (4.4 if narrow else 2.6) + _legend_height(styles, width)) as figure:
        for (name, title), axes in zip(titles.items(), drawing.panels(figure, 2, 2 if narrow else 1), strict=True):
            _lines(axes, validation, "epoch", name, styles)
            axes.set(title=title, xlabel="epoch")
            _whole_numbers(axes)
            axes.grid(axis="y", which="major")
            if name == "probe_accuracy":
                axes.set_ylim(bottom=0)
                if chance is not None:
                    _level(axes, chance, "chance")
        _legend(figure, styles, width)
    return figure


def draw_common_mode(ends: pd.DataFrame, curves: pd.DataFrame, styles: Styles, width: float = drawing.WIDE) -> Figure:
    """Each block's common-mode share at the end, attention's and (dotted) the pathway's; its mean over the steps.

    ends: `ends_table` with a column `pathway`, empty where it was not measured.
    """
    narrow, panels = drawing.is_narrow(width), int(len(ends) > 0) + 1
    with drawing.paper(width, (2.2 * panels if narrow else 2.7) + _legend_height(styles, width)) as figure:
        found = drawing.panels(figure, panels, panels if narrow else 1)
        if len(ends):
            axes = found[0]
            _lines(axes, ends, "layer", "common_mode", styles, every=True)
            dotted = {name: {"color": style["color"], "linestyle": DOTTED, "marker": "."}
                      for name, style in styles.items()}  # fmt: skip
            _lines(axes, ends, "layer", "pathway", dotted, every=True)
            axes.set(title="At the end, block by block", xlabel="block")
            layers = sorted(int(layer) for layer in ends["layer"].unique())
            axes.set_xticks(drawing.layer_ticks(layers, 8 if narrow else 12))
        axes = found[-1]
        _lines(axes, curves, "step", "common_mode", styles)
        axes.set(title="While training, mean of blocks ≥ 1")
        _steps(axes, curves)
        for axes in found:
            axes.set_ylim(0, 1.02)
            axes.grid(axis="y", which="major")
        pathway = len(ends) > 0 and ends["pathway"].notna().any()
        _legend(figure, styles, width, *([_dotted()] if pathway else []))
    return figure


def draw_layers(
    layers: pd.DataFrame, column: str, configs: Sequence[str], level: Mapping[str, float], width: float = drawing.WIDE
) -> Figure:
    """One panel a variant: a number of every block over the steps, means over seeds, blocks along a ramp.

    `level`: VARIANT-SIZE → where a dashed line stands, e.g. the inflow where all tokens get alike.
    """
    from matplotlib.lines import Line2D

    names = [name for name in configs if layers.loc[layers["config"] == name, column].notna().any()]
    numbers = sorted(int(layer) for layer in layers["layer"].unique())
    colours = {each: blend(SWEEP_RAMP, place / max(len(numbers) - 1, 1)) for place, each in enumerate(numbers)}
    narrow, rows = drawing.is_narrow(width), drawing.panel_rows(len(names), width, 3)
    shown = {
        (str(name), int(str(layer))): mean_line(mine, "step", column)
        for (name, layer), mine in layers.groupby(["config", "layer"], sort=False)
    }
    top = max((float(line[column].max()) for line in shown.values() if len(line)), default=1.0)
    with drawing.paper(width, 0.5 + (1.9 if narrow else 2.2) * rows) as figure:
        for name, axes in zip(names, drawing.panels(figure, len(names), rows), strict=True):
            for (owner, layer), line in shown.items():
                if owner == name and len(line):
                    thin = thinned(line)
                    few: dict[str, Any] = {"marker": "o", "markersize": 2.2} if len(thin) < 16 else {}
                    axes.plot(thin["step"], thin[column], color=colours[layer], linewidth=1.2, clip_on=False, **few)
            axes.set(title=name, ylim=(0, 1.06 * top))
            _steps(axes, layers)
            axes.title.set_fontsize(min(9.0, (310.0 if not narrow else 400.0) / max(len(name), 1)))
            axes.grid(axis="y", which="major")
            if name in level:
                _level(axes, level[name], "")
        named = drawing.layer_ticks(numbers, NAMED_LAYERS)
        handles = [Line2D([], [], color=colours[layer], linewidth=2, label=f"block {layer}") for layer in named]
        figure.legend(handles=handles, loc="outside upper left", ncols=3 if narrow else 8)
    return figure


def draw_events(curves: pd.DataFrame, styles: Styles, width: float = drawing.WIDE) -> Figure:
    """Sink events an image over the steps: a column a class, a row a rule."""
    narrow = drawing.is_narrow(width)
    names = [(rule, name) for rule in ("relaxed", "strict") for name in CLASSES]
    rows = 6 if narrow else 2
    with drawing.paper(width, (1.6 if narrow else 2.1) * rows + _legend_height(styles, width)) as figure:
        for (rule, name), axes in zip(names, drawing.panels(figure, 6, rows), strict=True):
            column = f"{rule}_{name}"
            _lines(axes, curves, "step", column, styles)
            axes.set(title=f"{CLASS_NAME[name].capitalize() if name != 'nop' else 'NOP'}, {rule} rule")
            _steps(axes, curves)
            axes.set_ylim(0, None if float(curves[column].max()) > 0 else 1)
            axes.grid(axis="y", which="major")
        _legend(figure, styles, width)
    return figure


def _lines(axes: Axes, table: pd.DataFrame, x: str, y: str, styles: Styles, *, every: bool = False) -> None:
    """Each variant's seeds thin, and their mean with a mark at its end, or with `every` at each point."""
    for name, style in styles.items():
        mine = table[table["config"] == name].dropna(subset=[y])
        if not len(mine):
            continue
        bare = {"color": style["color"], "linestyle": style["linestyle"]}
        if mine["seed"].nunique() > 1:
            for _, rows in mine.groupby("seed"):
                line = thinned(rows[[x, y]].sort_values(x))
                axes.plot(line[x], line[y], linewidth=0.6, alpha=0.35, **bare)
        mean = thinned(mean_line(mine, x, y))
        few = every or len(mean) < 9
        marks: dict[str, Any] = {"markevery": None if few else [len(mean) - 1], "markersize": 4 if few else 5}
        axes.plot(mean[x], mean[y], linewidth=1.5, clip_on=every, **marks, **style)


def _level(axes: Axes, height: float, name: str) -> None:
    axes.axhline(height, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    if name:
        axes.annotate(name, (1, height), (3, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="left", va="center", fontsize=7.5, color=MUTED)  # fmt: skip


def _steps(axes: Axes, table: pd.DataFrame) -> None:
    """An axis of steps from 0 to the table's last, thousands written as k."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="step", xlim=(0, float(table["step"].max())))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:g}k" if step >= 10_000 else f"{step:g}")


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _dotted() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=INK, linestyle=DOTTED, marker=".", markersize=5, label="the pathway’s own")


def _columns(styles: Styles, width: float) -> int:
    """Names beside each other in the legend: as many as fit, the longest deciding."""
    longest = max(map(len, styles)) * 0.068 + 0.65
    return max(1, min(5, int(width / longest)))


def _legend_height(styles: Styles, width: float) -> float:
    return 0.2 + 0.18 * -(-(len(styles) + 1) // _columns(styles, width))


def _legend(figure: Figure, styles: Styles, width: float, *more: Any) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linewidth=1.7, markersize=5, label=name, **style) for name, style in styles.items()]
    figure.legend(handles=[*handles, *more], loc="outside upper left", ncols=_columns(styles, width), handlelength=4)
