"""Which heads are edited, and on which images: the events of a diagnosed run, by class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sinklab.errors import InputError, NotFoundError, NothingToEdit

if TYPE_CHECKING:
    import pandas as pd


LEAST_SHARE = 40  # one event in so many images, where no head has the minimum: 50 of 2,000 images are that share


@dataclass(frozen=True, kw_only=True)
class ChosenHead:
    """A head of one class, with how often it sinks as that class in the whole run."""

    kind: str
    """The class of its events: "nop" or "broadcast"."""
    layer: int
    head: int
    events: int


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen, and what must be said about it."""

    heads: tuple[ChosenHead, ...]
    min_events: int
    """The least number of events that was used; lower than what was asked where the run has few images."""
    notes: tuple[str, ...]


def parse_heads(text: str) -> list[tuple[int, int]] | None:
    """ "5:3,0:2" as (layer, head) pairs; None for "auto". InputError for anything else."""
    if text.strip() == "auto":
        return None
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", part)
        if match is None:
            raise InputError(f"--heads is auto, or layer:head pairs like 5:3,0:2, not {text!r}.")
        found.append((int(match[1]), int(match[2])))
    return list(dict.fromkeys(found))


def choose_heads(
    sinks: pd.DataFrame,
    definition: str,
    classes: Sequence[str],
    *,
    images: int,
    heads: Sequence[tuple[int, int]] | None = None,
    per_class: int = 16,
    block0: int = 4,
    min_events: int = 50,
    noun: str = "image",
) -> Choice:
    """By class, the heads with the most events: `per_class` of layers ≥ 1 and `block0` of block 0.

    Ordered by (count, layer, head), the most frequent first. A class none of whose heads has `min_events` is taken from
    a fortieth of the images on, at least one event, and a note says so. Heads that are named are taken with every
    class they have an event of. Raises NotFoundError for a named head without any event, and where nothing is left.
    """
    column = f"class_{definition}"
    count = sinks[sinks[column].isin(list(classes))].groupby([column, "layer", "head"]).size().rename("events")
    table = count.reset_index().rename(columns={column: "kind"})
    notes: list[str] = []
    if not len(table):
        raise NothingToEdit(
            f"The run has no event of class {' or '.join(classes)} under the definition {definition}: there is nothing "
            "to edit. Diagnose under another rule, or name other classes with --class."
        )
    if heads is not None:
        wanted = set(heads)
        missing = wanted - set(zip(table["layer"], table["head"], strict=True))
        if missing:
            layer, head = min(missing)
            raise NotFoundError(
                f"Head {layer}:{head} has no event of class {' or '.join(classes)} ({definition}) in this run, so "
                "there is nothing to edit. sinks.parquet lists the events; classes are named with --class."
            )
        table = table[[pair in wanted for pair in zip(table["layer"], table["head"], strict=True)]]
        return Choice(heads=_ordered(table), min_events=1, notes=())
    kept, used = [], min_events
    for kind in classes:
        own = table[table["kind"] == kind]
        least = min_events
        if not (own["events"] >= min_events).any() and len(own):
            least = max(1, min(min_events, images // LEAST_SHARE))
            notes.append(
                f"No head has {min_events} events of class {kind} in {images} {noun}s, so its heads count from {least} "
                f"event{'s' * (least != 1)} on: read the intervals before the bars."
            )
        if not len(own):
            notes.append(f"The run has no event of class {kind}: that class is not edited.")
            continue
        own = own[own["events"] >= least]
        if not len(own):
            notes.append(f"No head has {least} or more events of class {kind}: that class is not edited.")
        used = min(used, least)
        own = own.sort_values(["events", "layer", "head"], ascending=[False, True, True], kind="stable")
        kept += [own[own["layer"] > 0].head(per_class), own[own["layer"] == 0].head(block0)]
    if not sum(map(len, kept)):
        raise NothingToEdit(
            f"No head has {used} or more events of class {' or '.join(classes)} under the definition {definition}: "
            "there is nothing to edit. Lower --min-events, name heads with --heads, or diagnose under another rule."
        )
    import pandas as pd

    return Choice(heads=_ordered(pd.concat(kept)), min_events=used, notes=tuple(notes))


def _ordered(table: pd.DataFrame) -> tuple[ChosenHead, ...]:
    table = table.sort_values(
        ["kind", "events", "layer", "head"], ascending=[False, False, True, True], kind="stable"
    )  # NOPs first
    rows = table[["kind", "layer", "head", "events"]].itertuples(index=False)
    return tuple(ChosenHead(kind=str(k), layer=int(la), head=int(h), events=int(n)) for k, la, h, n in rows)
