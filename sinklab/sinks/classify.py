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

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError
from sinklab.sinks.rule import plain_number, require_columns

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

CLASSES = ("nop", "broadcast", "intermediate")
DEFINITIONS = ("causal", "counts")


@dataclass(frozen=True, kw_only=True)
class SinkDefinition:
    """One meaning of the names NOP and broadcast: an axis of the head table and its thresholds.

    Raises InputError if the two classes would overlap or a threshold is not a positive number.
    """

    name: str
    """"causal", "counts", or a name of one's own."""
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

    @classmethod
    def causal(cls) -> SinkDefinition:
        """Values after the output projection, and a broadcast's update is of rank one (the paper's Fig. 6)."""
        return cls(name="causal", axis="value_ratio_out", stable_rank=1.5)

    @classmethod
    def counts(cls) -> SinkDefinition:
        """Values in head space, nothing asked of the rank (the paper's Sec. 5, Tables 14 and 15)."""
        return cls(name="counts", axis="value_ratio_head")

    @classmethod
    def named(cls, name: str | SinkDefinition) -> SinkDefinition:
        """The definition of that name, NotFoundError if there is none; a definition is handed back as it is."""
        if isinstance(name, SinkDefinition):
            return name
        if name == "causal":
            return cls.causal()
        if name == "counts":
            return cls.counts()
        raise NotFoundError(
            f"There is no definition {name!r} of NOP and broadcast; there are {', '.join(DEFINITIONS)}."
        )

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

    def sentence(self) -> str:
        """The definition in words with its numbers, for reports."""
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


def both_definitions() -> list[SinkDefinition]:
    """`causal`, then `counts`."""
    return [SinkDefinition.causal(), SinkDefinition.counts()]
