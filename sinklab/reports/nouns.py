"""What a run's inputs and tokens are called: images of patches, or sequences of tokens. Every other file asks here.

Sentences stand where they are said, with these names in braces: `words.say("in half of the {nouns} or more")`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from sinklab.models import tokens
from sinklab.reports.palette import KIND_NAME
from sinklab.reports.wording import joined, plural

A_KIND = {
    "cls": "[CLS]",
    "register": "a register",
    "patch": "a patch",
    "bos": "the first token",
    "special": "a special token",
    "text": "a text token",
    "token": "an ordinary token",
}
"""Each kind of token with its article."""
KIND_MEANING = {
    "bos": "which every sequence begins with",
    "special": "which marks something and is no text",
    "text": "a symbol of the text itself",
    "token": "which carries the sequence’s own numbers",
}


@dataclass(frozen=True, kw_only=True)
class Words:
    """The names and phrases that differ between runs; as they stand, those of a run of images."""

    noun: str = "image"
    nouns: str = "images"
    title: str = "Images"
    a_noun: str = "an image"
    moved: str = "patch tokens"
    """Whose change is the effect of an edit."""
    moved_title: str = "Patch tokens"
    moved_axis: str = "patch tokens"
    """The same where room is short."""
    output: str = "after the model’s final norm"
    over: str = "patches"
    an_ordinary: str = "an ordinary patch"
    drawn_from: str = "an ordinary patch’s value"
    left_out: str = "and so is the sink where it is a patch"
    first: str = "cls"
    """The kind of the first prefix token; "" for a model that has none."""
    first_title: str = "[CLS]"
    first_name: str = "[CLS]"
    every: str = "every patch"
    """What a plan's edit of all ordinary tokens changes."""
    kinds: tuple[str, ...] = tokens.KINDS
    """Kinds of token that the model has, in the report's order."""
    kinds_title: str = "[CLS], register, patch"
    kinds_meaning: str = (
        "The kinds of token: the class token, extra learned tokens without a place in the image, and the image’s own "
        "patches."
    )
    a_kind: str = "[CLS], a register or a patch"
    """What a dominant key may be."""
    examples: str = "Photographs"
    """The section that shows some inputs, its anchor and its template."""
    anchor: str = "photographs"
    template: str = "photographs.html.j2"
    axis: str = "value"
    """What a sink's size is measured by, `Site.axis`: its "value", or its "contribution" where values are phases."""
    ratio: str = "value ratio"
    ratio_title: str = "Value ratio"
    within: str = "in the head"
    beyond: str = "after the output projection"
    taken: str = "Value norms are taken {where}"
    update: str = "update"
    """Whose stable rank tells whether all receive the same."""

    @classmethod
    def of(cls, config: dict[str, Any]) -> Words:
        """The words of a run, from its run.json; one that does not say what it measured measured images."""
        images, model = config.get("images"), config.get("model")
        noun = images.get("noun", "image") if isinstance(images, dict) else "image"
        if noun == "image":
            return IMAGES
        described = model if isinstance(model, dict) else {}
        words = sequences(str(noun), described.get("prefix") or (), str(described.get("ordinary") or "token"))
        return replace(words, **CONTRIBUTION) if measured_by(config) == "contribution" else words

    def where(self, axis: str) -> str:
        """Where the ratio of a column of the head table is taken, "value_ratio_out" or "value_ratio_head"."""
        return self.beyond if axis == "value_ratio_out" else self.within

    @property
    def pictures(self) -> bool:
        """Whether the inputs can be looked at."""
        return self.noun == "image"

    def say(self, sentence: str, **more: object) -> str:
        """The sentence with the names in braces filled in."""
        return sentence.format(**(asdict(self) | more))

    def count(self, number: int) -> str:
        """ "1 image", "12 images"."""
        return plural(number, self.noun, self.nouns)


def measured_by(config: dict[str, Any]) -> str:
    """The axis of a run's layers, from its run.json: "value" unless every layer says "contribution"."""
    model = config.get("model")
    sites = model.get("sites") if isinstance(model, dict) else None
    named = [site.get("axis") for site in sites if isinstance(site, dict)] if isinstance(sites, list) else []
    return "contribution" if named and set(named) == {"contribution"} else "value"


CONTRIBUTION: dict[str, Any] = {
    "axis": "contribution",
    "ratio": "contribution ratio",
    "ratio_title": "Contribution ratio",
    "within": "of values in the head (1 by construction)",
    "beyond": "of the sink’s phases to its readers",
    "taken": "Contributions, the norms of v ⊙ sin(θ_s − θ_i), are means over readers, before the bound",
    "update": "resultant G",
}
"""The words of `Words` where values are phases: they all have one norm, and what counts is where the reader stands."""
IMAGES = Words()


def _meaning(kinds: tuple[str, ...]) -> str:
    if len(kinds) == 1:
        return f"Every token of this model is {A_KIND[kinds[0]]}, {KIND_MEANING[kinds[0]]}."
    return f"The kinds of token: {'; '.join(f'{A_KIND[kind]}, {KIND_MEANING[kind]}' for kind in kinds)}."


def sequences(noun: str, prefix: Iterable[str], ordinary: str) -> Words:
    """The words of a run of sequences whose model has these prefix tokens, and then tokens of the kind `ordinary`."""
    had = {*prefix, ordinary}
    kinds = tuple(kind for kind in tokens.SEQUENCE_KINDS if kind in had)
    named = [KIND_NAME[kind] for kind in kinds]
    one_of = [A_KIND[kind] for kind in kinds]
    return replace(
        IMAGES,
        noun=noun,
        nouns=f"{noun}s",
        title=f"{noun}s".capitalize(),
        a_noun=f"a {noun}",
        moved="tokens other than the sink",
        moved_title="Other tokens",
        moved_axis="other tokens",
        output="in the model’s output",
        over="tokens",
        an_ordinary="an ordinary token",
        drawn_from="an ordinary token’s value",
        left_out="and so is the sink, wherever it stands",
        first="bos" if "bos" in kinds else "",
        first_title="First token",
        first_name="the first token",
        every="every ordinary token",
        kinds=kinds,
        kinds_title=", ".join(named).capitalize(),
        kinds_meaning=_meaning(kinds),
        a_kind=f"{', '.join(one_of[:-1])} or {one_of[-1]}" if len(one_of) > 1 else f"{joined(one_of)}, as all are here",
        examples=f"Along the {noun}",
        anchor="along",
        template="strips.html.j2",
    )
