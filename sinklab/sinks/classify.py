"""What a sunk head computes: NOP, broadcast, or neither.

"A Unifying View of Attention Sinks" uses one pair of names for two definitions; both are here, and every result
says which it used:

| definition | NOP | broadcast | where in the paper |
|---|---|---|---|
| `causal` (default) | value_ratio_out ≤ 0.2 | value_ratio_out ≥ 0.5 and stable_rank ≤ 1.5 | Fig. 6, head selection |
| `counts` | value_ratio_head ≤ 0.2 | value_ratio_head ≥ 0.5 | Sec. 5, Tables 14 and 15 |

What is neither is `intermediate` and counts in totals only. A zero update has no stable rank (NaN), so it is never a
broadcast under `causal`; with values of zero it is a NOP under both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError
from sinklab.sinks.rule import plain_number, require_columns

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

CLASSES = ("nop", "broadcast", "intermediate")
DEFINITIONS = ("causal", "counts")
RATIOS = ("value_ratio_out", "value_ratio_head")
"""Columns of the head table that a run's definition can go by."""


@dataclass(frozen=True, kw_only=True)
class SinkDefinition:
    """One meaning of the names NOP and broadcast: an axis of the head table and its thresholds.

    Raises InputError if the two classes would overlap or a threshold is not a positive number, for a name that cannot
    stand in a column's name, and for other thresholds under the name "causal" or "counts".
    """

    name: str
    """"causal", "counts", or a name of one's own: letters, digits and underscores, because tables have a column
    `class_<name>`."""
    axis: str
    """The column that says how large the sink's value is: "value_ratio_out" or "value_ratio_head" (or another
    measurement's own ratio, e.g. a contribution ratio where values have no norm to speak of)."""
    nop: float = 0.2
    """NOP: axis ≤ nop."""
    broadcast: float = 0.5
    """Broadcast: axis ≥ broadcast, and the stable rank as below."""
    stable_rank: float | None = None
    """Broadcast: stable_rank ≤ this; None asks nothing of the rank."""

    def __post_init__(self) -> None:
        for name in ("nop", "broadcast", "stable_rank"):
            if getattr(self, name) is not None or name != "stable_rank":
                number = plain_number(getattr(self, name), f"The threshold {name} of the definition {self.name!r}")
                object.__setattr__(self, name, number)
        if not 0 <= self.nop < self.broadcast:
            raise InputError(
                f"The definition {self.name!r} has NOP at or below {self.nop} and broadcast at or above "
                f"{self.broadcast}; the first has to be at least 0 and smaller than the second."
            )
        if self.stable_rank is not None and not self.stable_rank >= 1:
            raise InputError(
                f"The definition {self.name!r} asks for a stable rank of at most {self.stable_rank}; a stable rank "
                "is never below 1."
            )
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.name) or self.name == "rule":
            raise InputError(
                f"A definition cannot be named {self.name!r}: tables have a column class_<name>, so it takes letters, "
                "digits and underscores, the first no digit (and not the word rule)."
            )
        known = _PUBLISHED.get(self.name)
        if known is not None and asdict(self) != known:
            raise InputError(
                f"The name {self.name!r} belongs to the published definition ({_numbers(known)}), and this one has "
                f"{_numbers(asdict(self))}: give it a name of its own."
            )

    @classmethod
    def causal(cls) -> SinkDefinition:
        """Values after the output projection, and a broadcast's update is of rank one (the paper's Fig. 6)."""
        return cls(**_PUBLISHED["causal"])

    @classmethod
    def counts(cls) -> SinkDefinition:
        """Values in head space, nothing asked of the rank (the paper's Sec. 5, Tables 14 and 15)."""
        return cls(**_PUBLISHED["counts"])

    @classmethod
    def named(cls, name: str | SinkDefinition) -> SinkDefinition:
        """The definition of that name, NotFoundError if there is none; a definition is handed back as it is."""
        if isinstance(name, SinkDefinition):
            return name
        if not isinstance(name, str):
            raise InputError(f"A definition is a SinkDefinition or one of {', '.join(DEFINITIONS)}, not {name!r}.")
        if name in _PUBLISHED:
            return cls(**_PUBLISHED[name])
        raise NotFoundError(
            f"There is no definition {name!r} of NOP and broadcast; there are {', '.join(DEFINITIONS)}."
        )

    @classmethod
    def from_saved(cls, saved: str | Mapping[str, Any]) -> SinkDefinition:
        """The definition that `as_dict` wrote, e.g. run.json's "definition"; runs of old hold its name alone."""
        if isinstance(saved, str):
            return cls.named(saved)
        return cls(**{name: saved[name] for name in cls.__dataclass_fields__ if name in saved})

    def as_dict(self) -> dict[str, Any]:
        """Name, axis, thresholds and sentence, for saving."""
        return asdict(self) | {"sentence": self.sentence()}

    def classify(self, heads: pd.DataFrame) -> pd.Series[str]:
        """ "nop", "broadcast" or "intermediate" for each row, with the table's index.

        The names mean something for events only; a row whose axis is NaN is "intermediate". Columns are compared as
        float64. Raises InputError if a column is missing.
        """
        import numpy as np
        import pandas as pd

        labels = np.array(CLASSES)[self.positions(heads)]
        return pd.Series(labels, index=heads.index, name=f"class_{self.name}", dtype="str")

    def positions(self, heads: pd.DataFrame) -> np.ndarray:
        """The same as `classify`, as positions in CLASSES, [rows]: quicker to count."""
        import numpy as np

        rank_column = () if self.stable_rank is None else ("stable_rank",)
        require_columns(heads, (self.axis, *rank_column), f"the definition {self.name!r}")
        try:
            ratio = heads[self.axis].to_numpy("float64")
        except (TypeError, ValueError) as error:
            raise InputError(f"The definition {self.name!r} compares the column {self.axis!r}, not numbers.") from error
        shared = ratio >= self.broadcast
        if self.stable_rank is not None:
            shared &= heads["stable_rank"].to_numpy("float64") <= self.stable_rank  # NaN: not a broadcast
        return np.select([ratio <= self.nop, shared], [0, 1], 2)

    def sentence(self, measured_by: str = "value") -> str:
        """The definition in words with its numbers, for reports.

        measured_by: `Site.axis` of the run's layers. By "contribution" the columns hold what `sinks.contribution` says.
        """
        if measured_by == "contribution" and self.axis in RATIOS:
            return self._contributes()
        place = {
            "value_ratio_out": "the norm of the sink's output-projected value",
            "value_ratio_head": "the norm of the sink's value",
        }.get(self.axis, self.axis)
        against = ", over the mean of the head's other keys," if self.axis.startswith("value_ratio") else ""
        rank = "" if self.stable_rank is None else f" and its update has a stable rank of at most {self.stable_rank:g}"
        return (
            f"By the definition '{self.name}', a sunk head is a NOP if {place}{against} is at most {self.nop:g}, "
            f"and a broadcast if it is at least {self.broadcast:g}{rank}; between them it is intermediate."
        )

    def _contributes(self) -> str:
        """The sentence where values are phases."""
        if self.axis == "value_ratio_head":
            same = "a broadcast" if self.broadcast <= 1 else "a NOP" if self.nop >= 1 else "intermediate"
            return (
                f"By the definition '{self.name}', a sunk head is classed by the norm of the sink's value. Values are "
                f"phases here and all have the same norm: the ratio is 1 by construction, every sunk head is {same} by "
                "it, and it tells nothing apart."
            )
        rank = (
            ""
            if self.stable_rank is None
            else f" and the resultant G has a stable rank of at most {self.stable_rank:g}"
        )
        return (
            f"By the definition '{self.name}', a sunk head is a NOP if the contribution ratio – the mean norm of what "
            "the sink's phases would move its readers by, v ⊙ sin(θ_s − θ_i), over the mean of the head's other keys – "
            f"is at most {self.nop:g}, and a broadcast if it is at least {self.broadcast:g}{rank}; between them it is "
            "intermediate."
        )


_PUBLISHED: dict[str, dict[str, Any]] = {
    "causal": {"name": "causal", "axis": "value_ratio_out", "nop": 0.2, "broadcast": 0.5, "stable_rank": 1.5},
    "counts": {"name": "counts", "axis": "value_ratio_head", "nop": 0.2, "broadcast": 0.5, "stable_rank": None},
}


def _numbers(definition: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in definition.items() if name != "name")


def both_definitions() -> list[SinkDefinition]:
    """`causal`, then `counts`."""
    return [SinkDefinition.causal(), SinkDefinition.counts()]


def with_own(definition: SinkDefinition) -> list[SinkDefinition]:
    """`causal`, `counts`, and the given one if it is neither: what a run is classed by."""
    return list(dict.fromkeys((*both_definitions(), definition)))


def grid_of(published: Iterable[float], own: float | None) -> list[float]:
    """Thresholds to try, a definition's own among them, from small to large."""
    return sorted({*published} if own is None else {*published, own})
