"""Fig. 6: how far each edit moves the other tokens, NOP heads beside broadcast heads, with a dot for every head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sinklab.reports import captions, drawing
from sinklab.reports.effects import (
    CAUSAL_CLASSES,
    Causal,
    effects_table,
    joint_table,
    shown_blocks,
)
from sinklab.reports.nouns import IMAGES, Words
from sinklab.reports.palette import CLASS_COLOUR, CLASS_NAME, INK, MUTED, PAPER
from sinklab.reports.sections import records
from sinklab.reports.signature import carries, expected, kinds_words
from sinklab.reports.wording import joined, number, plural

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHORT = {"zero_ordinary": "control"}
MARKERS = ("o", "s", "D", "^", "v", "x", "P")
"""One an edit, so that lines of one class stand apart without a colour of their own."""
BLOCK_WORDS = {"1+": "layers ≥ 1", "0": "layer 0", "all": "all layers"}
LIVELY = 12
"""A linear axis serves as long as the panel with the smaller bars fills at least this fraction, 1/12, of it."""


def effects_figure(causal: Causal) -> captions.Drawn | None:
    """Fig. 6 with its words; None if no head was edited."""
    table = effects_table(causal)
    if not table["mean"].notna().any():
        return None
    said = [_panel_words(causal, table, name) for name in CAUSAL_CLASSES]
    seen = " ".join(_alt_words(table, name) for name in CAUSAL_CLASSES)
    blocks = {name: shown_blocks(causal, name) for name in CAUSAL_CLASSES}
    scale = "logarithmic above its first mark, so that small and large bars both show; 0 is at the bottom"
    scale = f" The axis is {scale}." if threshold(table) else ""
    over, words = _interval_over(table, causal.words), causal.words
    carried = carries(causal)
    hollow = bool(((table["drawn"] == "dot") & (table["blocks"] == "0")).any())
    return captions.drawn_twice(
        "fig6-causal-effects",
        lambda width: draw_effects(table, causal.edits, blocks, width, words, carried),
        title="What follows when a sink is edited",
        reading=f"Bars are class means of the relative change of the {words.moved}, with 95 % intervals "
        f"{over}; each dot is one head{', a hollow one a head of layer 0' if hollow else ''}. "
        "Under each bar stand the edit and its "
        "mean. A triangle says what the class’s signature expects: ▽ little change, ▲ much change. "
        f"{kinds_words(causal, carried)} “Control” zeroes {words.drawn_from} instead of the sink’s.{scale}",
        counts=f"n = {'; '.join(said)}; classes by the definition “{causal.patch.get('definition', 'causal')}”.",
        alt=f"Bars of the relative change of the {words.moved} by edit. {seen}",
        table=table,
    )


def _interval_over(table: pd.DataFrame, words: Words) -> str:
    """What the bars' intervals were drawn from: a bar of one head has only that head's inputs."""
    bars = table[table["drawn"] == "bar"]
    single = bars.loc[bars["heads"] == 1, "class"].drop_duplicates()
    if not len(single):
        return "over heads"
    if (bars["heads"] == 1).all():
        return f"over {words.nouns}, as each is of one head"
    named = joined([CLASS_NAME[each] for each in single])
    return f"over heads, and over {words.nouns} where a bar is of one head ({named})"


def _panel_words(causal: Causal, table: pd.DataFrame, name: str) -> str:
    """ "5 NOP heads, bars over 3 of them (layers ≥ 1, 24 images)"."""
    mine, words = table[table["class"] == name], causal.words
    bars, dots = mine[mine["drawn"] == "bar"], mine[mine["drawn"] == "dot"]
    heads = len(dots[["layer", "head"]].drop_duplicates())
    stated = f"{heads or 'no'} {CLASS_NAME[name]} {'head' if heads == 1 else 'heads'}"
    if not len(bars):
        most = words.count(int(dots["images"].max())) if len(dots) else ""
        return f"{stated} ({most}; no bars, for no head has enough {words.nouns} for a class mean)" if most else stated
    blocks = shown_blocks(causal, name)
    only = ", paler, for no head of a later layer has a mean" if blocks == "0" else ""
    over = f"{int(bars['heads'].max())} of them ({BLOCK_WORDS[blocks]}{only}"
    return f"{stated}, bars over {over}, {words.count(int(bars['images'].max()))})"


def _alt_words(table: pd.DataFrame, name: str) -> str:
    bars = records(table[(table["class"] == name) & (table["drawn"] == "bar")])
    dots = table[(table["class"] == name) & (table["drawn"] == "dot")]
    heads = plural(len(dots[["layer", "head"]].drop_duplicates()), f"{CLASS_NAME[name]} head")
    means = joined([f"{SHORT.get(row['name'], row['name'])} {number(row['mean'])}" for row in bars])
    return f"{heads}{': ' if means else ''}{means}."


def draw_effects(
    table: pd.DataFrame,
    edits: Sequence[str],
    blocks: dict[str, str],
    width: float = drawing.WIDE,
    words: Words = IMAGES,
    carried: bool = False,
) -> Figure:
    """Fig. 6: table as `effects_table` gives it; blocks says whose mean the bars of each class are.

    carried: whether the broadcasts are of the kind that carries content, which has other triangles.
    """
    narrow = drawing.is_narrow(width)
    with drawing.paper(width, 5.6 if narrow else 3.5) as figure:
        panels = figure.subplots(2, 1, sharey=True) if narrow else figure.subplots(1, 2, sharey=True)
        start = threshold(table)
        for name, axes in zip(CAUSAL_CLASSES, panels, strict=True):
            if start:
                axes.set_yscale("symlog", linthresh=start, linscale=0.5)
            _panel(axes, table[table["class"] == name], name, edits, blocks.get(name, ""), carried)
        top = _highest(table)
        panels[0].set_ylim(0, top * (1.6 if start else 1.06) if top > 0 else 1)
        _plain_numbers(panels[0], start, top)
        for axes in panels if narrow else panels[:1]:
            axes.set_ylabel("relative change" if narrow else f"relative change of {words.moved_axis}")
        figure.legend(handles=_handles(table), loc="outside upper left", ncols=2 if narrow else 4)
    return figure


def _panel(axes: Axes, mine: pd.DataFrame, name: str, edits: Sequence[str], blocks: str, carried: bool) -> None:
    colour = CLASS_COLOUR[name]
    means: dict[str, float] = {}
    for row in records(mine[mine["drawn"] == "bar"]):
        at, mean = edits.index(row["name"]), row["mean"]
        means[row["name"]] = mean
        control = row["name"] == "zero_ordinary"
        axes.bar(at, mean, 0.72, facecolor="none" if control else colour, edgecolor=colour, linewidth=1,
                 linestyle=(0, (3, 2)) if control else "-", alpha=None if control else 0.28 if blocks == "0" else 0.6,
                 zorder=2)  # fmt: skip
    for place, edit in enumerate(edits):
        dots = mine[(mine["drawn"] == "dot") & (mine["name"] == edit)].sort_values(["layer", "head"])
        shifts = _shifts(len(dots))
        for shift, row in zip(shifts, records(dots), strict=True):
            axes.plot(place + shift, row["mean"], marker="o", markersize=4.2 if len(dots) <= 12 else 3.2,
                      color=PAPER if row["blocks"] == "0" else colour, markeredgecolor=INK, markeredgewidth=0.7,
                      linestyle="none", zorder=4, label=f"_dot-{name}", clip_on=False)  # fmt: skip
    for row in records(mine[(mine["drawn"] == "bar") & mine["low"].notna()]):
        at = edits.index(row["name"])
        axes.vlines(at, row["low"], row["high"], color=INK, linewidth=1.4, zorder=5)
        for end in (row["low"], row["high"]):
            axes.hlines(end, at - 0.09, at + 0.09, color=INK, linewidth=1.4, zorder=5)
    labels = [_tick_label(expected(name, carried), edit, means) for edit in edits]
    axes.set_xticks(range(len(edits)), labels, fontsize=7.5)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, len(edits) - 0.4)
    axes.set_title(f"{CLASS_NAME[name]} heads", color=colour)
    axes.grid(axis="y")
    if not len(mine):
        axes.text(0.5, 0.5, "no head was edited", transform=axes.transAxes, ha="center", color=MUTED)


def _tick_label(signature: tuple[tuple[str, ...], tuple[str, ...]], edit: str, means: dict[str, float]) -> str:
    small, large = signature
    sign = "▽ " if edit in small else "▲ " if edit in large else ""
    short = SHORT.get(edit, edit)[:12].replace("$", r"\$")
    return f"{short}\n{sign}{number(means[edit])}" if edit in means else f"{short}\n "


def _shifts(count: int) -> list[float]:
    """Places of `count` dots beside each other within a bar, the same for every edit."""
    if count < 2:
        return [0.0] * count
    reach = min(0.27, 0.07 * (count - 1))
    return [reach * (2 * place / (count - 1) - 1) for place in range(count)]


def _highest(table: pd.DataFrame) -> float:
    return float(max(table["mean"].max(), table["high"].fillna(0)[table["drawn"] == "bar"].max() or 0))


def threshold(table: pd.DataFrame) -> float:
    """Where a symmetric logarithmic axis turns linear, or 0 if a linear axis shows both panels well.

    Linear is easier to read; only where one panel's bars would all be slivers is the axis logarithmic.
    """
    from math import floor, log10

    bars = table[table["drawn"] == "bar"]
    bars = bars if len(bars) else table
    tallest = bars.groupby("class")["mean"].max()
    positive = bars.loc[bars["mean"] > 0, "mean"]
    if not len(positive) or not tallest.min() > 0 or _highest(table) <= LIVELY * tallest.min():
        return 0.0
    return float(10.0 ** max(floor(log10(positive.min())), floor(log10(positive.max())) - 5))


def _plain_numbers(axes: Axes, start: float, top: float) -> None:
    from matplotlib.ticker import FixedLocator

    if start:
        ticks, tick = [0.0], start
        while tick <= top * 1.6:
            ticks.append(tick)
            tick *= 10
        axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _handles(table: pd.DataFrame) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    dots = table[table["drawn"] == "dot"]
    point: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 4.5, "markeredgecolor": INK,
                             "markeredgewidth": 0.7}  # fmt: skip
    handles: list[Any] = []
    if (table["drawn"] == "bar").any():
        handles.append(Patch(facecolor=MUTED, alpha=0.6, label="class mean"))
    if (table["low"].notna() & (table["drawn"] == "bar")).any():
        handles.append(Line2D([], [], color=INK, linewidth=1.4, label="95 % interval"))
    if (dots["blocks"] != "0").any():
        handles.append(Line2D([], [], **point, color=MUTED, label="one head"))
    if (dots["blocks"] == "0").any():
        handles.append(Line2D([], [], **point, color=PAPER, label="one head of layer 0"))
    return handles


def joint_figure(causal: Causal) -> captions.Drawn | None:
    """Heads of a class edited together, with its words; None unless a class has more than one number of heads."""
    table = joint_table(causal)
    if not len(table) or table.groupby("class")["joint"].nunique().max() < 2:
        return None
    parts, seen, words = [], [], causal.words
    for name in CAUSAL_CLASSES:
        mine = table[table["class"] == name]
        if not len(mine):
            parts.append(f"no {CLASS_NAME[name]} heads")
            continue
        last = mine[mine["joint"] == mine["joint"].max()]
        heads = plural(int(last["joint"].max()), f"{CLASS_NAME[name]} head")
        parts.append(f"up to {heads}, {words.count(int(mine['images'].max()))}")
        means = joined([f"{SHORT.get(row['name'], row['name'])} {number(row['mean'])}" for row in records(last)])
        seen.append(f"{heads} together: {means}.")
    return captions.drawn_twice(
        "fig6-joint-effects",
        lambda width: draw_joint(table, causal.edits, width, words, carries(causal)),
        title="What follows when several heads are edited at once",
        reading=f"Relative change of the {words.moved} when the first k chosen heads of a class are edited together, "
        "one line an edit; the band is the 95 % interval. Full lines are edits that the class’s signature expects to "
        "change much, dashed ones those that it expects to change little, dotted ones neither.",
        counts=f"n = {'; '.join(parts)}; classes by the definition “{causal.patch.get('definition', 'causal')}”.",
        alt=f"Lines of the relative change of the {words.moved} by the number of heads edited. {' '.join(seen)}",
        table=table,
    )


def draw_joint(
    table: pd.DataFrame,
    edits: Sequence[str],
    width: float = drawing.WIDE,
    words: Words = IMAGES,
    carried: bool = False,
) -> Figure:
    """Effect against the number of heads edited together: table as `joint_table` gives it."""
    from matplotlib.lines import Line2D

    narrow = drawing.is_narrow(width)
    with drawing.paper(width, 5.2 if narrow else 3.1) as figure:
        panels = figure.subplots(2, 1, sharey=True) if narrow else figure.subplots(1, 2, sharey=True)
        for name, axes in zip(CAUSAL_CLASSES, panels, strict=True):
            mine = table[table["class"] == name]
            small, large = expected(name, carried)
            for place, edit in enumerate(edits):
                rows = mine[mine["name"] == edit].sort_values("joint")
                style = "-" if edit in large else (0, (5, 2)) if edit in small else (0, (1, 2))
                axes.plot(rows["joint"], rows["mean"], color=CLASS_COLOUR[name], linewidth=1.2, linestyle=style,
                          marker=MARKERS[place % len(MARKERS)], markersize=4.5, markerfacecolor=PAPER)  # fmt: skip
                axes.fill_between(rows["joint"], rows["low"], rows["high"], color=CLASS_COLOUR[name], alpha=0.12,
                                  linewidth=0)  # fmt: skip
            ticks = sorted(int(count) for count in mine["joint"].unique())
            axes.set_xticks(drawing.layer_ticks(ticks, 10) if ticks else [])
            axes.set_title(f"{CLASS_NAME[name]} heads", color=CLASS_COLOUR[name])
            axes.set_xlabel("heads edited together, k")
            axes.grid(axis="y")
        panels[0].set_ylim(bottom=0)
        for axes in panels if narrow else panels[:1]:
            axes.set_ylabel("relative change" if narrow else f"relative change of {words.moved_axis}")
        handles = [Line2D([], [], color=MUTED, linestyle="none", marker=MARKERS[place % len(MARKERS)], markersize=5,
                          markerfacecolor=PAPER, label=SHORT.get(edit, edit)[:12].replace("$", r"\$"))
                   for place, edit in enumerate(edits)]  # fmt: skip
        figure.legend(handles=handles, loc="outside upper left", ncols=3 if narrow else 6)
    return figure
