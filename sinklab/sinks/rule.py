"""When a head is sunk: the rules that make a row of the head table an event, each with its name.

The three rules, about the key s with the largest inflow and the queries that see it
("A Unifying View of Attention Sinks", Definition 1, Sec. 5 and Table 15; `mass` is the language-model literature's):

| name | an event, if | thresholds |
|---|---|---|
| `relaxed` | at least `fraction` of the queries give s at least `attention` | attention 0.5, fraction 0.9 |
| `strict` | every query gives s at least 1 − `epsilon` | epsilon 0.5 |
| `mass` | the inflow of s is at least `threshold` | threshold 0.3 |

All rules speak of the key with the LARGEST INFLOW, as the paper's counts do. That key need not be the one that most
queries prefer: nine queries may give .51 to t and .49 to u while the tenth gives all to u; then s = u, and `relaxed`
finds no event although t is routed to by 9 of 10. For `strict` the two cannot differ where every query sees every
key: a key that gets half of each query has the largest inflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError

if TYPE_CHECKING:
    import pandas as pd

RULES = ("relaxed", "strict", "mass")


@dataclass(frozen=True, kw_only=True)
class SinkRule:
    """One rule with its thresholds; only the thresholds of the rule's own name are used.

    Raises NotFoundError for an unknown name and InputError for a threshold outside its range.
    """

    name: str = "relaxed"
    """"relaxed", "strict" or "mass"."""
    attention: float = 0.5
    """relaxed: what a query must give s to be routed, in [0.5, 1]. `routed_count` was counted at this threshold when
    the table was made: a table answers for that one threshold only."""
    fraction: float = 0.9
    """relaxed: the share of queries that must be routed, in (0, 1]; taken as the decimal it is written as."""
    epsilon: float = 0.5
    """strict: every query gives s at least 1 − epsilon; in [0, 0.5], because only the column of the key with the
    largest inflow is kept and another key could meet a weaker rule."""
    threshold: float = 0.3
    """mass: the least inflow, in (0, 1]."""

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise NotFoundError(f"There is no sink rule {self.name!r}; the rules are {', '.join(RULES)}.")
        for name in ("attention", "fraction", "epsilon", "threshold"):
            object.__setattr__(self, name, plain_number(getattr(self, name), f"The {name} of a sink rule"))
        for number, low, high, label, wanted in (
            (self.attention, 0.5, 1.0, "attention threshold", "from 0.5 to 1"),
            (self.fraction, math.ulp(0.0), 1.0, "fraction of routed queries", "above 0 and at most 1"),
            (self.epsilon, 0.0, 0.5, "epsilon", "from 0 to 0.5 (beyond 0.5 another key could be the sink)"),
            (self.threshold, math.ulp(0.0), 1.0, "inflow threshold", "above 0 and at most 1"),
        ):
            if not low <= number <= high:  # also refuses NaN
                raise InputError(f"The {label} of a sink rule is {number}; it has to be {wanted}.")

    @classmethod
    def relaxed(cls, attention: float = 0.5, fraction: float = 0.9) -> SinkRule:
        """At least `fraction` of the queries give s at least `attention` (the paper's Tables 14 and 15; default)."""
        return cls(name="relaxed", attention=attention, fraction=fraction)

    @classmethod
    def strict(cls, epsilon: float = 0.5) -> SinkRule:
        """Every query gives s at least 1 − `epsilon` (the paper's Definition 1 and Table 15)."""
        return cls(name="strict", epsilon=epsilon)

    @classmethod
    def mass(cls, threshold: float = 0.3) -> SinkRule:
        """The mean attention on s is at least `threshold` (language models: Gu et al. 2025)."""
        return cls(name="mass", threshold=threshold)

    @classmethod
    def named(cls, rule: str | SinkRule) -> SinkRule:
        """The rule of that name with its default thresholds; a rule is handed back as it is."""
        if isinstance(rule, SinkRule):
            return rule
        if not isinstance(rule, str):
            raise InputError(f"A rule is a SinkRule or one of {', '.join(RULES)}, not {rule!r}.")
        return cls(name=rule)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> SinkRule:
        """The rule that `as_dict` wrote, e.g. run.json's "rule"."""
        return cls(**{name: saved[name] for name in cls.__dataclass_fields__ if name in saved})

    def as_dict(self, noun: str = "image") -> dict[str, Any]:
        """Name, thresholds and sentence, as run.json keeps them; `noun` is what an input is called."""
        return asdict(self) | {"sentence": self.sentence(f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}")}

    def events(self, heads: pd.DataFrame) -> pd.Series[bool]:
        """One boolean per row of the head table: is this (image, layer, head) an event?

        A row that is not finite never is. Counts are compared as exact fractions (18 of 20 is 0.9), the float columns
        as float64 with the threshold as it is given. Raises InputError if a column is missing.
        """
        if self.name == "relaxed":
            require_columns(heads, ("finite", "routed_count", "queries"), "the relaxed rule")
            needed = heads["queries"].map(self._needed(heads["queries"].unique())).astype("int64")
            holds = heads["routed_count"].astype("int64") >= needed
        elif self.name == "strict":
            require_columns(heads, ("finite", "min_attention"), "the strict rule")
            holds = heads["min_attention"].astype("float64") >= 1 - self.epsilon
        else:
            require_columns(heads, ("finite", "inflow"), "the mass rule")
            holds = heads["inflow"].astype("float64") >= self.threshold
        return (holds & heads["finite"].astype(bool)).rename("event")

    def sentence(self, a_noun: str = "an image") -> str:
        """The rule in words with its numbers, for reports; `a_noun` is what a head is sunk in."""
        if self.name == "relaxed":
            return (
                f"A head is sunk in {a_noun} if at least {self.fraction:.12g} of its queries give at least "
                f"{self.attention:.12g} of their attention to the key with the largest inflow."
            )
        if self.name == "strict":
            return (
                f"A head is sunk in {a_noun} if every query gives at least {1 - self.epsilon:.12g} of its attention "
                f"to the key with the largest inflow (epsilon = {self.epsilon:.12g})."
            )
        return (
            f"A head is sunk in {a_noun} if the key with the largest inflow receives at least {self.threshold:.12g} "
            "of the attention, averaged over queries."
        )

    @property
    def label(self) -> str:
        """Its name with what is chosen in it: "relaxed", "relaxed (0.8 of queries give 0.5)", "strict, ε = 0.3",
        "mass ≥ 0.3"."""
        if self.name == "strict":
            return f"strict, ε = {self.epsilon:.12g}"
        if self.name == "mass":
            return f"mass ≥ {self.threshold:.12g}"
        usual = (self.attention, self.fraction) == (0.5, 0.9)
        return "relaxed" if usual else f"relaxed ({self.fraction:.12g} of queries give {self.attention:.12g})"

    def _needed(self, queries: Iterable[int]) -> dict[int, int]:
        """The least number of routed queries, for each number of queries: the fraction's exact ceiling."""
        fraction = Fraction(str(self.fraction))
        return {count: math.ceil(fraction * int(count)) for count in queries}


def table_rules() -> list[SinkRule]:
    """The rules of the paper's Table 15: relaxed, then strict at ε = .5, .3, .2, .1."""
    return [SinkRule.relaxed(), *(SinkRule.strict(epsilon) for epsilon in (0.5, 0.3, 0.2, 0.1))]


def plain_number(value: Any, what: str) -> float:
    """A threshold as a float; raises InputError for what is no number. Of float32's .9 the 0.9 that it prints as."""
    if isinstance(value, bool) or not isinstance(value, (Real, Decimal)):
        raise InputError(f"{what} is a number, not {value!r}.")
    return float(value) if isinstance(value, (int, float, Fraction, Decimal)) else float(str(value))


def require_columns(heads: pd.DataFrame, columns: Iterable[str], reader: str) -> None:
    """Raise InputError, naming what is absent, unless the table has all the columns that `reader` needs."""
    missing = [name for name in columns if name not in heads.columns]
    if missing:
        raise InputError(
            f"The head table lacks {', '.join(missing)}, which {reader} needs; it has {', '.join(map(str, heads))}."
        )
