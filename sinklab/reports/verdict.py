"""The answer in one paragraph: how many heads sink, as what, where, on which token, with the numbers of the tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from sinklab.reports.palette import CLASS_NAME, CLASSES, KINDS
from sinklab.reports.tables import each_row
from sinklab.reports.wording import fixed, joined, layers_phrase, percent, plural

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.sinks.classify import SinkDefinition
    from sinklab.sinks.rule import SinkRule

LIKENED = {"nop": ("a NOP", "NOPs"), "broadcast": ("a broadcast", "broadcasts"), "intermediate": ("neither", "neither")}
A_KIND = {"cls": "[CLS]", "register": "a register", "patch": "a patch"}
RULE_COLUMN = {"relaxed": "routed_fraction", "strict": "min_attention", "mass": "inflow"}
RULE_WORDS = {
    "relaxed": "{:.0%} of the queries gave their dominant key at least {attention:g} of their attention",
    "strict": "the least attentive query gave {:.2f} of its attention to the dominant key",
    "mass": "the dominant key received {:.2f} of the attention",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The paragraph, its headline and the numbers in it."""

    headline: str
    sentences: list[Markup]
    numbers: dict[str, Any] = field(default_factory=dict)
    """images, pairs, sinking, steady, not_finite, and for every class: heads, steady, events, per_image (layers ≥ 1),
    per_image_layer_0 (None where that layer was not measured), layers, kinds (share of the class's events)."""


def give_verdict(
    heads: pd.DataFrame, table: pd.DataFrame, counts: pd.DataFrame, rule: SinkRule, definition: SinkDefinition
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
        return _no_sinks(heads, rule, numbers)
    sentences = [_how_many(numbers, definition)]
    sentences += [_where(name, numbers[name]) for name in ("nop", "broadcast") if numbers[name]["events"]]
    sentences.append(_per_image(numbers, counts, definition))
    sentences.append(_strongest(table, definition))
    return Verdict(headline=_headline(numbers), sentences=sentences, numbers=numbers)


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


def _how_many(numbers: dict[str, Any], definition: SinkDefinition) -> Markup:
    sinking, images = numbers["sinking"], numbers["images"]
    verb = "sinks" if sinking == 1 else "sink"
    if images == 1:
        first = Markup("<strong>{} of {}</strong> {} in the one image measured").format(
            sinking, plural(numbers["pairs"], "head"), verb
        )
    else:
        first = Markup(
            "<strong>{} of {}</strong> {} in at least one of {}, {} of them in half of the images or more"
        ).format(sinking, plural(numbers["pairs"], "head"), verb, plural(images, "image"), numbers["steady"])
    parts = []
    for name in CLASSES:
        count = numbers[name]["heads"]
        if count or name != "intermediate":
            amount = f"{count or 'none'} {'are' if count > 1 else 'is'} {LIKENED[name][count > 1]}"
            parts.append(Markup('<strong class="{}-text">{}</strong>').format(name, amount))
    return Markup("{}. By the definition “{}”, {}.").format(
        first, definition.name, Markup(joined([str(part) for part in parts]))
    )


def _where(name: str, mine: dict[str, Any]) -> Markup:
    kinds = sorted(mine["kinds"].items(), key=lambda pair: (-pair[1], KINDS.index(pair[0])))
    where = f" in {layers_phrase(mine['layers'])}" if mine["layers"] else ", though no head is one most of the time"
    shares = joined([f"{A_KIND[kind]} in {percent(share)}" for kind, share in kinds if share > 0])
    subject = f"The {CLASS_NAME[name]} {'head lies' if mine['heads'] == 1 else 'heads lie'}" if mine["heads"] else (
        f"Some events are {CLASS_NAME[name]}"
    )  # fmt: skip
    return Markup("{}{}; the sink is {} of {}.").format(
        subject, where, shares, plural(mine["events"], f"{CLASS_NAME[name]} event")
    )


def _per_image(numbers: dict[str, Any], counts: pd.DataFrame, definition: SinkDefinition) -> Markup:
    later, first = numbers["per_image"] is not None, numbers["per_image_layer_0"] is not None
    key = "per_image" if later else "per_image_layer_0"
    sentence = Markup(
        "An image has on average <strong>{} NOP, {} broadcast and {} sinks of any kind</strong> {}"
    ).format(
        *(fixed(each[key]) for each in (numbers["nop"], numbers["broadcast"], numbers)),
        "in the layers after the first" if later else "in layer 0, the only one measured",
    )
    if later and first:
        sentence += Markup("; layer 0, counted apart, adds {}, {} and {}").format(
            *(fixed(each["per_image_layer_0"]) for each in (numbers["nop"], numbers["broadcast"], numbers))
        )
    other = next((name for name in dict.fromkeys(counts["definition"]) if name != definition.name), None)
    if other is None:
        return sentence + Markup(".")
    rows = counts[(counts["definition"] == other) & (counts["kind"] == "all")].groupby("class")["events"].sum()
    same = Markup(". By “{}” the same {} are {} NOP and {} broadcast (against {} and {}).").format(
        other, plural(numbers["events"], "event"),
        *(f"{int(each):,}" for each in (rows["nop"], rows["broadcast"], numbers["nop"]["events"],
                                        numbers["broadcast"]["events"])),
    )  # fmt: skip
    return sentence + same


def _strongest(table: pd.DataFrame, definition: SinkDefinition) -> Markup:
    order = ["frequency", "event_inflow", "layer", "head"]
    head = table[table["events"] > 0].sort_values(order, ascending=[False, False, True, True]).iloc[0]
    return Markup("The strongest is layer {}, head {} ({}): sunk in {} of {}, mean inflow {}, on {}.").format(
        int(head["layer"]), int(head["head"]), CLASS_NAME[head[f"class_{definition.name}"]], int(head["events"]),
        plural(int(head["images"]), "image"), fixed(float(head["event_inflow"])), A_KIND[str(head["kind"])],
    )  # fmt: skip


def _no_sinks(heads: pd.DataFrame, rule: SinkRule, numbers: dict[str, Any]) -> Verdict:
    column = RULE_COLUMN[rule.name]
    images = plural(numbers["images"], "image")
    none = "No head sinks" if numbers["not_finite"] < numbers["pairs"] else "Nothing could be measured"
    sentence = "<strong>{}.</strong> In none of {} did any of {} meet the rule: "
    sentence += " there is no NOP and no broadcast to tell apart."
    sentences = [Markup(sentence).format(none, images, plural(numbers["pairs"], "head"))]
    finite = heads[heads["finite"].astype(bool)]
    if len(finite):
        ordered = finite.astype({column: "float64"}).sort_values(["image_index", "layer", "head"])
        means = ordered.groupby(["layer", "head"])[column].mean().rename("mean").reset_index()
        best = next(each_row(means.sort_values("mean", ascending=False, kind="stable")))
        words = RULE_WORDS[rule.name].format(best.mean, attention=rule.attention)
        sentences.append(
            Markup("Nearest to it came layer {}, head {}, where on average {}.").format(best.layer, best.head, words)
        )
    return Verdict(headline=none, sentences=sentences, numbers=numbers)
