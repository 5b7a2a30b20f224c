"""Where an input is a sequence: how much every token attends to the sink, along the sequence, with the sink marked.

Read from a run's `overlays/columns.parquet`, which holds A_is for every query i of some events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinklab.reports import captions, drawing
from sinklab.reports.nouns import A_KIND, Words
from sinklab.reports.overlays import HEADS_SHOWN, IMAGES_SHOWN
from sinklab.reports.palette import CLASS_COLOUR, CLASS_NAME, INK
from sinklab.reports.wording import fixed, plural

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sinklab.sinks.classify import SinkDefinition
    from sinklab.sinks.rule import SinkRule


def strip_figures(
    columns: pd.DataFrame, heads: pd.DataFrame, words: Words, rule: SinkRule, definition: SinkDefinition
) -> dict[str, captions.Drawn]:
    """A figure a head, the strongest of each class first, NOPs before broadcasts; heads is `head_table`."""
    merged = columns.merge(heads[["layer", "head", "events", "images", "event_inflow"]], "left", ["layer", "head"])
    merged = merged.assign(broadcast=merged["class"] == "broadcast")
    order = ["broadcast", "events", "event_inflow", "layer", "head", "image", "query"]
    merged = merged.sort_values(order, ascending=[True, False, False, True, True, True, True], kind="stable")
    drawn: dict[str, captions.Drawn] = {}
    for (label, layer, head), rows in merged.groupby(["class", "layer", "head"], sort=False):
        if sum(key.startswith(f"strip_{label}_") for key in drawn) < HEADS_SHOWN:
            drawn[f"strip_{label}_{layer}_{head}"] = _strip(rows, words, rule, definition)
    return drawn


def _strip(rows: pd.DataFrame, words: Words, rule: SinkRule, definition: SinkDefinition) -> captions.Drawn:
    first = rows.iloc[0]
    label, layer, head = str(first["class"]), int(first["layer"]), int(first["head"])
    shown = list(dict.fromkeys(rows["image"]))[:IMAGES_SHOWN]
    kept = rows[rows["image"].isin(shown)]
    said = " ".join(_spread(str(name), kept[kept["image"] == name], words) for name in shown)
    counted = f"{words.count(int(first['images']))}, {plural(int(first['events']), 'event')} of this head"
    return captions.drawn_twice(
        f"overlay-{label}-layer{layer}-head{head}",
        lambda width: draw_strips(kept, words, width),
        title=f"Layer {layer}, head {head}: {CLASS_NAME.get(label, label)}",
        reading=f"{words.title[:-1]} by {words.noun}, the attention that each token gives to the sink, 0 to 1, in the "
        "order of the tokens, counted from 0.",
        counts=f"n = {counted} ({rule.label} rule); class by the definition “{definition.name}”; {len(shown)} shown.",
        alt=f"Bars of the attention that each token gives to the sink. {said}",
        table=kept[["image", "layer", "head", "class", "sink_index", "query", "attention"]].reset_index(drop=True),
    )


def sink_name(sink: int, words: Words) -> str:
    """ "token 5", or "token 0, the first token"."""
    return f"token {sink}, {A_KIND['bos']}" if words.first and sink == 0 else f"token {sink}"


def _spread(name: str, rows: pd.DataFrame, words: Words) -> str:
    given = rows["attention"].dropna()
    spread = f"{fixed(given.min())} to {fixed(given.max())}, median {fixed(given.median())}"
    return f"{name}: the sink is {sink_name(int(rows['sink_index'].iloc[0]), words)}; tokens give it {spread}."


def draw_strips(rows: pd.DataFrame, words: Words, width: float = drawing.WIDE) -> Figure:
    """One strip a sequence, under each other; rows are those of one head, in the order of the queries."""
    names = list(dict.fromkeys(rows["image"]))
    with drawing.paper(width, 0.45 + 0.85 * len(names)) as figure:
        panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
        for name, axes in zip(names, panels, strict=True):
            _panel(axes, str(name), rows[rows["image"] == name], words)
        panels[-1].set_xlabel("token")
    return figure


def _panel(axes: Axes, name: str, rows: pd.DataFrame, words: Words) -> None:
    sink, colour = int(rows["sink_index"].iloc[0]), CLASS_COLOUR.get(str(rows["class"].iloc[0]), INK)
    queries = rows["query"].to_numpy()
    edges = [*(queries - 0.5), queries[-1] + 0.5]
    axes.stairs(rows["attention"].fillna(0).to_numpy(), edges, fill=True, color=colour, alpha=0.75, linewidth=0)
    axes.plot(sink, 1.0, marker="v", markersize=6, color=INK, clip_on=False, zorder=4, linestyle="none")
    shown = name.replace("$", r"\$")
    axes.set_title(f"{shown}: sink is {sink_name(sink, words)}", fontsize=8, fontweight="normal")
    axes.set(ylim=(0, 1), yticks=(0, 1), xlim=(edges[0], edges[-1]))
