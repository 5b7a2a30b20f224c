"""What is written under and about each figure: title, how to read it, its counts, and an alt text with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from sinklab.reports import drawing, figures
from sinklab.reports.nouns import IMAGES, Words
from sinklab.reports.palette import CLASS_NAME, KIND_NAME, KINDS
from sinklab.reports.svg import inline_svg, png_bytes, svg_markup
from sinklab.reports.tables import each_row
from sinklab.reports.wording import fixed, joined, number, percent, plural

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from sinklab.sinks.classify import SinkDefinition


NEARLY_EVERY = 0.9
"""Share of the images from which on a head is said to sink on nearly every one."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A figure that is ready for the page and for the disk: `table` is what it plots, row by row."""

    name: str
    title: str
    reading: str | Markup
    """How to read it, in a sentence or two."""
    counts: str
    """Its n, the rule and the definition."""
    alt: str
    table: pd.DataFrame
    wide: Markup
    narrow: Markup
    svg: str
    png: bytes


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The n of a run as every caption states them."""

    images: int
    events: int
    rule: str
    words: Words = IMAGES

    def sentence(self, definition: SinkDefinition | None = None) -> str:
        """ "n = 12 images, 143 events (relaxed rule); classes by the definition “causal”."""
        stated = f"n = {self.words.count(self.images)}, {plural(self.events, 'event')} ({self.rule} rule)"
        return stated + (f"; classes by the definition “{definition.name}”." if definition else ".")


def drawn_twice(name: str, draw: Callable[[float], Figure], **words: Any) -> Drawn:
    """Draws for the desktop and for a phone; the files on disk are the desktop's."""
    wide, narrow = draw(drawing.WIDE), draw(drawing.NARROW)
    svg = svg_markup(wide, name)
    return Drawn(
        name=name,
        svg=svg,
        png=png_bytes(wide),
        wide=Markup(inline_svg(svg, f"{name}-wide", words["alt"])),
        narrow=Markup(inline_svg(svg_markup(narrow, name), f"{name}-narrow", words["alt"])),
        **words,
    )


def kinds_figure(kinds: pd.DataFrame, counted: Counted) -> Drawn:
    """Fig. 4 with its words; kinds: `kind_by_layer`."""
    layers, words = sorted(int(layer) for layer in kinds["layer"].unique()), counted.words
    parts = []
    for layer in dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1])):
        rows = kinds[(kinds["layer"] == layer) & (kinds["share"] > 0)].sort_values("share", ascending=False)
        shares = joined([f"{KIND_NAME[row.kind]} {percent(row.share)}" for row in each_row(rows)])
        parts.append(f"layer {layer}: {shares or 'nothing finite'}")
    known = kinds[kinds["inflow"].notna()]
    peak = ""
    if len(known):
        top = next(each_row(known.sort_values("inflow", ascending=False, kind="stable")))
        peak = f" The highest mean inflow is {fixed(top.inflow)}, on {KIND_NAME[top.kind]} in layer {top.layer}."
    return drawn_twice(
        "fig4-token-kinds",
        lambda width: figures.draw_kinds(kinds, width, words),
        title="Which token draws the most attention, layer by layer",
        reading=words.say(
            "Above: in what share of all head × {noun} pairs of a layer the dominant key – the one with the largest "
            "inflow – is {a_kind}. Below: how much attention, averaged over queries and pairs, flows "
            "into it. All heads count here, sunk or not: no rule is involved."
        ),
        counts=f"{counted.sentence()} {plural(int(kinds['pairs'].sum()), f'finite head × {words.noun} pair')}.",
        alt=f"Stacked bars of the dominant key's kind by layer. {'; '.join(parts)}.{peak}",
        table=kinds,
    )


def frequency_figure(table: pd.DataFrame, definition: SinkDefinition, counted: Counted) -> Drawn:
    """Fig. 5 with its words; table: `head_table`."""
    column, words = f"class_{definition.name}", counted.words
    sunk = table[table["events"] > 0].sort_values(["frequency", "layer", "head"], ascending=[False, True, True])
    fullest = [f"layer {row.layer} head {row.head} ({percent(row.frequency)}, {CLASS_NAME[getattr(row, column)]})"
               for row in each_row(sunk.head(4))]  # fmt: skip
    broken = int((table["not_finite"] > 0).sum())
    crossed = (
        f" A cross marks {plural(broken, 'head')} that {'is' if broken == 1 else 'are'} not finite." if broken else ""
    )
    seen = f" The fullest: {joined(fullest)}." if fullest else " Every cell is empty."
    kept = ["layer", "head", "images", "events", "frequency", column]
    return drawn_twice(
        "fig5-event-frequency",
        lambda width: figures.draw_frequency(table, definition.name, width, words),
        title="How often each head is sunk",
        reading="One cell a head. Its fullness, and the number in it where there is room, is the percentage of "
        f"{words.nouns} in which the head is sunk; its hue is the class of most of these events; an empty frame is a "
        f"head that was never sunk.{_how_often(sunk, words)}{crossed}",
        counts=counted.sentence(definition),
        alt=f"Map of {plural(table['layer'].nunique(), 'layer')} by {plural(int(table['head'].max()) + 1, 'head')}: "
        f"{len(sunk)} of {plural(len(table), 'cell')} are filled.{seen}{crossed}",
        table=table[kept],
    )


def _how_often(sunk: pd.DataFrame, words: Words) -> str:
    """Whether this run's sinks live in heads that sink on nearly every image, or come and go."""
    if not len(sunk):
        return ""
    most, often = float(sunk["frequency"].max()), int((sunk["frequency"] >= NEARLY_EVERY).sum())
    if not often:
        return f" No head sinks on nearly every {words.noun}; the most frequent one does so on {percent(most)}."
    heads = f"{often} of {plural(len(sunk), 'sunk head')}" if often < len(sunk) else "every head that sinks"
    return f" Here {heads} {'sinks' if often == 1 or often == len(sunk) else 'sink'} on at least " + (
        f"{percent(NEARLY_EVERY)} of the {words.nouns}."
    )


def plane_figure(table: pd.DataFrame, definition: SinkDefinition, counted: Counted, primary: bool) -> Drawn:
    """Fig. 7 with its words, for one definition; table: `head_table` with at least one event."""
    axis = f"median_{definition.axis}"
    sunk = table[table["events"] > 0]
    drawn = sunk[sunk[axis].notna() & sunk["median_stable_rank"].notna()]
    low = int((drawn[axis] <= definition.nop).sum())
    flat = drawn["median_stable_rank"] <= (definition.stable_rank or float("inf"))
    high = int(((drawn[axis] >= definition.broadcast) & flat).sum())
    rank = f" with a stable rank of at most {definition.stable_rank:g}" if definition.stable_rank else ""
    same = f", and{rank} everybody receives the same" if rank else ""
    words = counted.words
    place = words.where(definition.axis)
    where = "in the head's own space" if place == "in the head" else place
    missing = len(sunk) - len(drawn)
    left_out = (
        f" {plural(missing, 'head')} whose {words.update} is zero has no stable rank and is not drawn."
        if missing
        else ""
    )
    ranks = drawn["median_stable_rank"]
    spread = f" Stable ranks run from {number(ranks.min(), 3)} to {number(ranks.max(), 3)}." if len(drawn) else ""
    kept = ["layer", "head", "images", "events", "kind", axis, "median_stable_rank", f"class_{definition.name}"]
    return drawn_twice(
        "fig7-value-and-rank" + ("" if primary else f"-{definition.name}"),
        lambda width: figures.draw_plane(table, definition, width, words),
        title=f"NOP or broadcast: {words.ratio} and stable rank (definition “{definition.name}”)",
        reading=f"One mark a sunk head, at its medians over its events. Left of {definition.nop:g} the sink carries "
        f"almost nothing: a NOP. Right of {definition.broadcast:g} it carries as much as other tokens{same}: a "
        f"broadcast. {words.say(words.taken, where=where)}. Colour is the layer, shape the kind of the sink token; "
        f"L3H1 is layer 3, head 1.",
        counts=f"{counted.sentence(definition)} {plural(len(drawn), 'head')} drawn.{left_out}",
        alt=f"Scatter of {plural(len(drawn), 'sunk head')}: {low} at a median {words.ratio} of {definition.nop:g} or "
        f"less, {high} at {definition.broadcast:g} or more{rank}.{spread}",
        table=drawn[kept],
    )


def routes_figure(routes: pd.DataFrame, definition: SinkDefinition, counted: Counted) -> Drawn:
    """Lemma 3 with its words; routes: `route_table` with a spectrum."""
    sunk = routes[(routes["events"] > 0) & routes["sigma1_share"].notna()]
    quiet = routes[(routes["events"] == 0) & routes["sigma1_share"].notna()]
    tall, null = int((sunk["token_norm_ratio"] >= 2).sum()), bool((sunk["token_norm_ratio"] == 0).any())
    against = f" against {number(quiet['sigma1_share'].median())} over the heads without events" if len(quiet) else ""
    return drawn_twice(
        "lemma3-routes",
        lambda width: figures.draw_routes(routes, definition.name, width),
        title="Two routes to a sink: a spectral spike, or a massive activation",
        reading=Markup(
            "A sink needs a large logit. By Lemma 3 of the paper the head can get it from the weights, when one "
            "singular direction of Θ = W<sub>Q</sub> W<sub>K</sub>ᵀ outweighs the rest (to the right), or from the "
            "token, when the sink’s residual stream is far longer than a typical token’s (upwards; the dashed line is "
            "the median token). Grey points are heads without events. Neither sign alone makes a head a NOP.{}"
        ).format(f" A sink token without length stands at {figures.NO_LENGTH:g}." if null else ""),
        counts=f"{counted.sentence(definition)} {plural(len(sunk), 'sunk head')}, {plural(len(quiet), 'other')}.",
        alt=f"Scatter of {plural(len(sunk), 'sunk head')} by the share of the first singular value of Θ (median "
        f"{number(sunk['sigma1_share'].median())}{against}) and the norm of the sink token over the median token's; "
        f"{tall} of them at 2 or more, the largest {number(sunk['token_norm_ratio'].max())}.",
        table=routes,
    )


def kinds_present(table: pd.DataFrame) -> list[str]:
    """The kinds of token that any event's sink is of, in the report's order."""
    return [kind for kind in KINDS if (table["kind"] == kind).any()]
