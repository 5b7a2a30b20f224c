"""Where values are phases: what attention does to them by layer, from tables/phase.csv, in figures and sentences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.reports import captions, drawing
from sinklab.reports.nouns import Words
from sinklab.reports.palette import INK, KIND_COLOUR, MOVING, MUTED, PAPER, RESTING
from sinklab.reports.saved import reading
from sinklab.reports.tables import each_row
from sinklab.reports.wording import fixed, joined, percent, plural
from sinklab.sinks.phase_measures import MEASURES, REST, SATURATED, WAYS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from sinklab.sinks.classify import SinkDefinition
    from sinklab.sinks.rule import SinkRule

WAY_NAME = {
    "at_rest_self": "attend to themselves",
    "at_rest_cancelled": "partners cancel",
    "at_rest_locked": "partners stand alike",
    "at_rest_velocity": "v is nearly 0",
    "acts": "are moved",
}
"""What a token does, in the order of the map's columns."""
HALF = 0.5
CELL = 0.27
"""Height of a row of the map, inches."""


def read_phases(path: Path) -> pd.DataFrame | None:
    """tables/phase.csv, by layer and head; None for a run without. Raises InputError for a damaged one."""
    import pandas as pd

    if not path.is_file():
        if (path.parents[1] / "heads/phase").is_dir():
            raise InputError(
                f"{path} is gone: sinklab diagnose with the options of the run and --resume writes it again."
            )
        return None
    with reading(path):
        table = pd.read_csv(path)
        names = [*MEASURES, *(f"{name}_sem" for name in MEASURES)]
        types = dict.fromkeys(("layer", "head", "windows"), "int64") | dict.fromkeys(names, "float64")
        table = table[[*types]].astype(types).sort_values(["layer", "head"], ignore_index=True)
        if table.duplicated(["layer", "head"]).any():
            raise ValueError("a head has two rows")
        return table if len(table) else None


def phase_figures(table: pd.DataFrame, words: Words) -> dict[str, captions.Drawn]:
    """Order over depth, repulsion over depth, and the map of the ways in which tokens are at rest."""
    return {"phase_order": _order(table, words), "phase_push": _push(table, words), "phase_rest": _rest(table, words)}


def phase_words(
    table: pd.DataFrame, heads: pd.DataFrame, rule: SinkRule, definition: SinkDefinition, words: Words
) -> dict[str, str]:
    """`sinks`: what this model's sinks are; `moves`: what its attention does to tokens. heads: the run's head table."""
    return {"sinks": _sinks(table, heads, rule, definition, words), "moves": _moves(table)}


def _sinks(table: pd.DataFrame, heads: pd.DataFrame, rule: SinkRule, definition: SinkDefinition, words: Words) -> str:
    """What the run's events are as a whole, by the run's own definition; a token that only itself sees is no sink."""
    found = heads[rule.events(heads)]
    if not len(found):
        return "This model has no sink: no key draws nearly all readers, so none locks or pulls them all."
    if definition.axis == "value_ratio_head":
        return "By this definition all sinks of this model are alike, for its values all have the same norm."
    read = found[found["queries"] > 1]
    if 2 * len(read) <= len(found):
        return words.say(
            "Most events of this run ({few:,} of {all:,}) are on a token that only itself sees, the last of a {noun}: "
            "that is attention to oneself, and no sink that others read.",
            few=len(found) - len(read),
            all=len(found),
        )
    named = definition.classify(read)
    events = {name: int((named == name).sum()) for name in ("nop", "broadcast", "intermediate")}
    total = len(read)
    most = max(events, key=lambda name: events[name])
    share = f"{events[most]:,} of {plural(total, 'event')}"
    if 2 * events[most] <= total:
        kinds = [f"{count:,} phase-locked" if name == "nop" else f"{count:,} {name}" for name, count in events.items()]
        return f"This model’s sinks are of no one kind: of {plural(total, 'event')} {joined(kinds)}."
    if most == "nop":
        return (
            f"This model’s sinks are phase-locked ({share}): the sink already stands where its readers stand, so that "
            "to attend to it moves nobody."
        )
    if most == "broadcast":
        sunk = read[named == "broadcast"][["layer", "head"]].drop_duplicates()
        push = float(table.merge(sunk, on=["layer", "head"])["repulsion"].mean())
        way = "pushes its readers away from" if push > HALF else "draws its readers towards"
        signs = f"; v is negative in {percent(push)} of their coordinates" if push == push else ""
        return f"This model’s sinks are broadcasts ({share}): one resultant for all, which mostly {way} it{signs}."
    return (
        f"This model’s sinks are neither locked nor broadcasts ({share}): they move their readers, but less than other "
        "keys would, or each by another resultant."
    )


def _moves(table: pd.DataFrame) -> str:
    """How many tokens are at rest, and which of the four ways is the commonest."""
    means = {name: float(table[name].mean()) for name in (*WAYS, "acts")}
    at_rest = sum(means[name] for name in WAYS)
    order, alike = float(table["order"].mean()), float(table["order_reference"].mean())
    more = "more" if order > alike else "no more"
    text = (
        f"Averaged over heads, {percent(means['acts'])} of the tokens are moved by more than {REST:g} radians and "
        f"{percent(at_rest)} are at rest"
    )
    if at_rest > 0:
        first = max(WAYS, key=lambda name: means[name])
        cause = {
            "at_rest_self": "they attend to themselves",
            "at_rest_cancelled": "what they attend to cancels",
            "at_rest_locked": "what they attend to stands where they stand",
            "at_rest_velocity": "their own v is nearly 0",
        }[first]
        text += f", most often because {cause} ({percent(means[first])})"
    return (
        f"{text}. What tokens attend to is {more} in step (order {fixed(order)}) than all that they see "
        f"({fixed(alike)})."
    )


def _windows(table: pd.DataFrame, words: Words) -> str:
    return f"n = {words.count(int(table['windows'].max()))}; bars are standard errors over {words.nouns}."


def _order(table: pd.DataFrame, words: Words) -> captions.Drawn:
    kept = ["layer", "head", "windows"]
    for name in ("order", "order_reference", "global_order_before", "global_order_after"):
        kept += [name, f"{name}_sem"]
    first, last = table[table["layer"] == table["layer"].min()], table[table["layer"] == table["layer"].max()]
    said = joined([f"layer {int(own['layer'].iloc[0])}: {fixed(own['order'].mean())} against "
                   f"{fixed(own['order_reference'].mean())}" for own in (first, last)])  # fmt: skip
    return captions.drawn_twice(
        "phase-order",
        lambda width: draw_order(table, width),
        title="Order over depth",
        reading="Filled: the order of what a token reads, the mean length of G. Open: what it would be if all that the "
        "token sees drew the same attention. Squares: the order of all tokens together, before every layer and after "
        "the last. 1 is in step, 0 is everywhere on the circle. Heads of one layer stand side by side.",
        counts=_windows(table, words),
        alt=f"Order by layer, attended against unweighted: {said}. Of all tokens together it goes from "
        f"{fixed(first['global_order_before'].mean())} to {fixed(last['global_order_after'].mean())}.",
        table=table[kept],
    )


def _push(table: pd.DataFrame, words: Words) -> captions.Drawn:
    kept = ["layer", "head", "windows", "repulsion", "repulsion_sem", "saturated", "saturated_sem"]
    top = table.sort_values("repulsion", ascending=False, kind="stable").iloc[0]
    return captions.drawn_twice(
        "phase-repulsion",
        lambda width: draw_push(table, width),
        title="Attraction, repulsion, and the bound",
        reading="Bars: the share of coordinates with negative v, which are pushed away from what they read; above one "
        f"half a layer repels. Diamonds: the share of increments at {percent(SATURATED)} of the bound’s radius or "
        "more. Heads of one layer stand side by side.",
        counts=_windows(table, words),
        alt=f"Bars of the share of negative v by layer, from {percent(table['repulsion'].min())} to "
        f"{percent(table['repulsion'].max())}, the most in layer {int(top['layer'])} head {int(top['head'])}. The "
        f"bound is reached by {percent(table['saturated'].mean())} of increments on average.",
        table=table[kept],
    )


def _rest(table: pd.DataFrame, words: Words) -> captions.Drawn:
    kept = ["layer", "head", "windows", *(x for name in (*WAYS, "acts") for x in (name, f"{name}_sem"))]
    said = joined([f"{WAY_NAME[name]} {percent(table[name].mean())}" for name in (*WAYS, "acts")])
    return captions.drawn_twice(
        "phase-at-rest",
        lambda width: draw_rest(table, width),
        title="The four ways of doing nothing",
        reading=f"One row a head, in percent of its tokens. A token is at rest where attention would move it by "
        f"{REST:g} radians or less (root mean square, before the bound). That update is a product of four sizes: the "
        "attention not paid to oneself, the length of the others’ resultant, the sine of the angle to it, and v; the "
        f"first that alone is {REST:g} or less, else the smallest, says why. Each token is in one column.",
        counts=_windows(table, words).replace("; bars are standard", "; the table has standard"),
        alt=f"Map of the shares of tokens that do nothing, by head and reason. On average: {said}.",
        table=table[kept],
    )


def _places(table: pd.DataFrame) -> tuple[list[float], list[int]]:
    """Where every head stands on the layers' axis, and the layers."""
    layers, heads = sorted(int(layer) for layer in table["layer"].unique()), int(table["head"].max()) + 1
    return [layers.index(int(row.layer)) + 0.7 * ((row.head + 0.5) / heads - 0.5) for row in each_row(table)], layers


def _layer_axis(axes: Any, layers: list[int], width: float) -> None:
    ticks = drawing.layer_ticks(layers, 12 if drawing.is_narrow(width) else 24)
    axes.set_xticks([layers.index(layer) for layer in ticks], [str(layer) for layer in ticks])
    axes.set(xlabel="layer", ylim=(0, 1.02))
    axes.grid(axis="y")


def draw_order(table: pd.DataFrame, width: float = drawing.WIDE) -> Figure:
    """Order of what is read, its unweighted reference, and of all tokens, by layer. table: `read_phases`."""
    at, layers = _places(table)
    with drawing.paper(width, 3.0) as figure:
        axes = figure.subplots()
        style: dict[str, Any] = {
            "linestyle": "none",
            "markersize": 5,
            "elinewidth": 0.8,
            "color": MOVING,
        }
        axes.errorbar(at, table["order"], table["order_sem"].fillna(0), marker="o", label="what is read, |G|", **style)
        axes.errorbar(at, table["order_reference"], table["order_reference_sem"].fillna(0), marker="o",
                      markerfacecolor=PAPER, label="all that is seen, alike", **style)  # fmt: skip
        before = table.groupby("layer")["global_order_before"].mean().tolist()
        after = table.groupby("layer")["global_order_after"].mean().tolist()
        edges = [place - 0.5 for place in range(len(layers) + 1)]
        axes.plot(edges, [*before, after[-1]], color=MUTED, marker="s", markersize=4, linewidth=1, label="all tokens")
        _layer_axis(axes, layers, width)
        axes.set_ylabel("order")
        axes.set_xlim(-0.7, len(layers) - 0.3)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=3 if width > 6 else 2)
    return figure


def draw_push(table: pd.DataFrame, width: float = drawing.WIDE) -> Figure:
    """Share of negative v, and of saturated increments, by layer and head. table: `read_phases`."""
    at, layers = _places(table)
    heads = int(table["head"].max()) + 1
    with drawing.paper(width, 2.7) as figure:
        axes = figure.subplots()
        axes.bar(at, table["repulsion"], 0.6 / heads, color=RESTING, label="negative v")
        axes.errorbar(
            at, table["repulsion"], table["repulsion_sem"].fillna(0), linestyle="none", color=INK, elinewidth=0.8
        )
        axes.plot(at, table["saturated"], linestyle="none", marker="D", markersize=5, color=KIND_COLOUR["register"],
                  markeredgecolor=INK, markeredgewidth=0.6, label="bound reached")  # fmt: skip
        axes.axhline(HALF, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
        _layer_axis(axes, layers, width)
        axes.set_ylabel("share")
        axes.set_xlim(-0.6, len(layers) - 0.4)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def draw_rest(table: pd.DataFrame, width: float = drawing.WIDE) -> Figure:
    """One row a head, one column a way: the share of tokens, as fullness and in percent. table: `read_phases`."""
    from matplotlib.patches import Rectangle

    columns, narrow = (*WAYS, "acts"), drawing.is_narrow(width)
    with drawing.paper(width, 0.9 + CELL * len(table)) as figure:
        axes = figure.subplots()
        for place, row in enumerate(each_row(table)):
            for column, name in enumerate(columns):
                share = float(getattr(row, name))
                colour = MOVING if name == "acts" else RESTING
                alpha = 0.6 * share if share == share else 0.0
                axes.add_patch(Rectangle((column - 0.48, place - 0.44), 0.96, 0.88, facecolor=colour, alpha=alpha))
                axes.text(column, place, percent(share), ha="center", va="center", fontsize=7.5, color=INK)
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(table) - 0.5, -0.5))
        names = [WAY_NAME[name].replace(" ", "\n", 1) if narrow else WAY_NAME[name] for name in columns]
        axes.set_xticks(range(len(columns)), names, fontsize=6 if narrow else 8)
        axes.xaxis.tick_top()
        axes.set_yticks(range(len(table)), [f"L{row.layer}H{row.head}" for row in each_row(table)])
        axes.tick_params(length=0)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
    return figure
