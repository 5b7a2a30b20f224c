"""The answer in a few lines: how many heads sink, which of them as what, on which token; heads by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from sinklab.reports.nouns import A_KIND, IMAGES, Words
from sinklab.reports.palette import CLASS_NAME, CLASSES, KINDS
from sinklab.reports.tables import each_row
from sinklab.reports.wording import head_name, joined, layers_phrase, number, percent, plural, some

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.sinks.classify import SinkDefinition
    from sinklab.sinks.rule import SinkRule

LIKENED = {"nop": ("a NOP", "NOPs"), "broadcast": ("a broadcast", "broadcasts"), "intermediate": ("neither", "neither")}
MEANS = {"nop": "its sink hands over next to nothing", "broadcast": "every token receives much the same from its sink"}
NAMED = 8
"""Of more heads than this a line names the first ones and adds their layers."""
RULE_COLUMN = {"relaxed": "routed_fraction", "strict": "min_attention", "mass": "inflow"}
RULE_WORDS = {
    "relaxed": "{share} of the queries gave their dominant key at least {attention:g} of their attention",
    "strict": "the least attentive query gave {value} of its attention to the dominant key",
    "mass": "the dominant key received {value} of the attention",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer in a few lines, its headline and the numbers in them."""

    headline: str
    lines: list[Markup]
    """How many heads sink; which are NOPs; which are broadcasts; what another definition says."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """images, pairs, sinking, steady, not_finite, and for every class: heads, steady, events, per_image (layers ≥ 1),
    per_image_layer_0 (None where that layer was not measured), layers, kinds (share of the class's events)."""


def give_verdict(
    heads: pd.DataFrame,
    table: pd.DataFrame,
    counts: pd.DataFrame,
    rule: SinkRule,
    definition: SinkDefinition,
    words: Words = IMAGES,
) -> Verdict:
    """The verdict from the head table, `head_table`, and `counts_per_image` under the run's own rule."""
    own = counts[counts["definition"] == definition.name]
    images = int(heads["image_index"].nunique())
    half = (table["events"] > 0) & (2 * table["events"] >= table["images"])
    numbers: dict[str, Any] = {
        "images": images,
        "pairs": len(table),
        "sinking": int((table["events"] > 0).sum()),
        "steady": int(half.sum()),
        "not_finite": int((table["not_finite"] > 0).sum()),
        **_amounts(own, "all"),
    }
    for name in CLASSES:
        mine = table[table[f"class_{definition.name}"] == name]
        numbers[name] = {
            "heads": len(mine),
            "steady": int(half[mine.index].sum()),
            "layers": sorted(int(layer) for layer in mine["layer"].unique()),
            **_amounts(own, name),
        }
    if not numbers["sinking"]:
        return _no_sinks(heads, rule, numbers, words)
    sunk = table[table["events"] > 0].sort_values(["events", "layer", "head"], ascending=[False, True, True])
    lines = [_how_many(numbers, sunk, definition, words)]
    lines += [_class_line(name, numbers[name], _names(sunk, definition, name)) for name in ("nop", "broadcast")]
    by = Markup("By the definition “{}”, ").format(definition.name)
    lines[1] = by + Markup(str(lines[1]).replace(">No head", ">no head", 1))  # Markup's own would escape the bracket
    others = [name for name in dict.fromkeys(counts["definition"]) if name != definition.name]
    lines += [_other(sunk, definition.name, other) for other in others]
    return Verdict(headline=_headline(numbers), lines=lines, numbers=numbers)


def _names(sunk: pd.DataFrame, definition: SinkDefinition, name: str) -> list[str]:
    """The heads of a class, those with the most events first."""
    mine = sunk[sunk[f"class_{definition.name}"] == name]
    return [head_name(row.layer, row.head) for row in each_row(mine)]


def _amounts(own: pd.DataFrame, name: str) -> dict[str, Any]:
    """Events of a class: all, per image in the layers ≥ 1 and in layer 0, and the share of each kind of sink token."""
    rows = own[own["class"] == name].set_index(["blocks", "kind"])
    events = int(rows["events"].get(("0", "all"), 0) + rows["events"].get(("1+", "all"), 0))
    kinds = {kind: int(rows["events"].get(("0", kind), 0) + rows["events"].get(("1+", kind), 0)) for kind in KINDS}
    means = {blocks: float(rows["per_image"].get((blocks, "all"), float("nan"))) for blocks in ("1+", "0")}
    return {
        "events": events,
        "per_image": None if means["1+"] != means["1+"] else means["1+"],
        "per_image_layer_0": None if means["0"] != means["0"] else means["0"],
        "kinds": {kind: count / events for kind, count in kinds.items()} if events else {},
    }


def _headline(numbers: dict[str, Any]) -> str:
    parts = [f"{numbers[name]['heads']} {CLASS_NAME[name]}" for name in CLASSES if numbers[name]["heads"]]
    return f"{numbers['sinking']} of {plural(numbers['pairs'], 'head')} sink: {joined(parts)}"


def _how_many(numbers: dict[str, Any], sunk: pd.DataFrame, definition: SinkDefinition, words: Words) -> Markup:
    sinking, steady = numbers["sinking"], sunk[2 * sunk["events"] >= sunk["images"]]
    start = Markup("<strong>{} of {}</strong> {}").format(
        sinking, plural(numbers["pairs"], "head"), "sinks" if sinking == 1 else "sink"
    )
    if numbers["images"] == 1:
        line = start + Markup(" in the one {} measured.").format(words.noun)
    else:
        often = (
            some([head_name(row.layer, row.head) for row in each_row(steady)]) if 0 < len(steady) < sinking
            else "none of them" if not len(steady) else "and does so" if sinking == 1 else "all of them"
        )  # fmt: skip
        comma = "" if often.startswith("and") else ","
        line = Markup("{} in at least one of {}{} {} in half of the {} or more.").format(
            start, words.count(numbers["images"]), comma, often, words.nouns
        )
    between = _names(sunk, definition, "intermediate")
    if between:
        many = f"{len(between)} {'is' if len(between) == 1 else 'are'} intermediate"
        line += Markup(' <strong class="intermediate-text">{}</strong>, neither NOP nor broadcast: {}.').format(
            many, some(between)
        )
    return line


def _class_line(name: str, mine: dict[str, Any], heads: list[str]) -> Markup:
    """ "2 are NOPs (…): L0H3 and L0H2; the sink is [CLS]."."""
    strong = Markup('<strong class="{}-text">{}</strong>')
    if not heads:
        others = f", though {plural(mine['events'], 'event')} of other heads {'is' if mine['events'] == 1 else 'are'}"
        return Markup("{}{}.").format(
            strong.format(name, f"No head is {LIKENED[name][0]}"), others if mine["events"] else ""
        )
    several = len(heads) > 1
    means = MEANS[name].replace("its sink", "their sinks").replace("hands", "hand") if several else MEANS[name]
    words = f"{len(heads)} {'are' if several else 'is'} {LIKENED[name][several]}"
    where = f", in {layers_phrase(mine['layers'])}" if len(heads) > NAMED else ""
    kinds = sorted(mine["kinds"].items(), key=lambda pair: (-pair[1], KINDS.index(pair[0])))
    counted = [(A_KIND[kind], round(share * mine["events"])) for kind, share in kinds if share > 0]
    on = counted[0][0] if len(counted) == 1 else joined(
        [f"{kind} in {plural(count, 'event') if not place else count}" for place, (kind, count) in enumerate(counted)]
    )  # fmt: skip
    return Markup("{} ({}): {}{}; the sink is {}.").format(strong.format(name, words), means, some(heads), where, on)


def _other(sunk: pd.DataFrame, own: str, other: str) -> Markup:
    """Which heads another definition puts into another class."""
    start = Markup("By the other definition, “{}”, {}.")
    moved: dict[tuple[str, str], list[str]] = {}
    for row in each_row(sunk):
        before, after = getattr(row, f"class_{own}"), getattr(row, f"class_{other}")
        if before != after:
            moved.setdefault((before, after), []).append(head_name(row.layer, row.head))
    if not moved:
        same = "the head keeps its class" if len(sunk) == 1 else f"all {len(sunk)} heads keep their class"
        return start.format(other, same)
    parts = [f"{some(heads)} {'turns' if len(heads) == 1 else 'turn'} from {CLASS_NAME[before]} to {CLASS_NAME[after]}"
             for (before, after), heads in moved.items()]  # fmt: skip
    rest = len(sunk) - sum(len(heads) for heads in moved.values())
    keep = f"; the other {plural(rest, 'head')} {'keeps its' if rest == 1 else 'keep their'} class" if rest else ""
    return start.format(other, joined(parts) + keep.replace("other 1 head", "other head"))


def _no_sinks(heads: pd.DataFrame, rule: SinkRule, numbers: dict[str, Any], words: Words) -> Verdict:
    column = RULE_COLUMN[rule.name]
    where = f"In none of {words.count(numbers['images'])} did any of" if numbers["images"] > 1 else (
        f"In the one {words.noun} measured, none of"
    )  # fmt: skip
    meet = "meet" if numbers["images"] > 1 else "met"
    none = "No head sinks" if numbers["not_finite"] < numbers["pairs"] else "Nothing could be measured"
    sentence = "<strong>{}.</strong> {} {} {} the rule: "
    sentence += " there is no NOP and no broadcast to tell apart."
    lines = [Markup(sentence).format(none, where, plural(numbers["pairs"], "head"), meet)]
    finite = heads[heads["finite"].astype(bool)]
    if len(finite):
        ordered = finite.astype({column: "float64"}).sort_values(["image_index", "layer", "head"])
        means = ordered.groupby(["layer", "head"])[column].mean().rename("mean").reset_index()
        best = next(each_row(means.sort_values("mean", ascending=False, kind="stable")))
        near = RULE_WORDS[rule.name].format(value=number(best.mean), share=percent(best.mean), attention=rule.attention)
        lines.append(
            Markup("Nearest to it came layer {}, head {}, where on average {}.").format(best.layer, best.head, near)
        )
    return Verdict(headline=none, lines=lines, numbers=numbers)
