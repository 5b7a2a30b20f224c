"""How sure the verdict is: events near a limit, heads of mixed class, heads that rest on few events, other limits.

"Near" means within `sinklab.sinks.table.NEAR` of a limit, as in summary.json's `nearness`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinklab.reports.nouns import IMAGES, Words
from sinklab.reports.palette import CLASS_NAME, CLASSES
from sinklab.reports.tables import each_row, sensitivity_grid
from sinklab.reports.verdict import LIKENED, RULE_COLUMN
from sinklab.reports.wording import THIN, head_name, joined, plural, some
from sinklab.sinks.table import NEAR

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.sinks.classify import SinkDefinition
    from sinklab.sinks.rule import SinkRule

FEW_EVENTS = 3
"""A head with no more events than this rests on few."""
MIXED_NAMED = 4
WITHIN = f"{NEAR * 100:.0f}{THIN}%"


def near_limits(events: pd.DataFrame, definition: SinkDefinition) -> dict[str, pd.Series[bool]]:
    """For every limit of the definition, in words, which events lie near it."""
    limits = [
        ("NOP limit", definition.axis, definition.nop),
        ("broadcast limit", definition.axis, definition.broadcast),
    ]
    if definition.stable_rank is not None:
        limits.append(("stable-rank limit", "stable_rank", definition.stable_rank))
    return {
        f"{words} ({limit:g})": events[column].astype("float64").between((1 - NEAR) * limit, (1 + NEAR) * limit)
        for words, column, limit in limits
    }


def near_any(events: pd.DataFrame, definition: SinkDefinition) -> int:
    """How many events lie near at least one limit of the definition."""
    near = list(near_limits(events, definition).values())
    return int(sum(near[1:], near[0].astype(int)).gt(0).sum())


def near_misses(heads: pd.DataFrame, rule: SinkRule) -> int:
    """How many (image, layer, head) lie just below the rule's threshold."""
    column = RULE_COLUMN[rule.name]
    threshold = {"relaxed": rule.fraction, "strict": 1 - rule.epsilon, "mass": rule.threshold}[rule.name]
    inside = heads[column].astype("float64").between((1 - NEAR) * threshold, (1 + NEAR) * threshold)
    return int((inside & heads["finite"].astype(bool) & ~rule.events(heads)).sum())


def how_sure(
    heads: pd.DataFrame,
    table: pd.DataFrame,
    grid: pd.DataFrame,
    rule: SinkRule,
    definition: SinkDefinition,
    words: Words = IMAGES,
) -> list[str]:
    """One sentence for each thing that the verdict hangs on; empty if no head sinks.

    heads: the run's head table; table: `head_table`; grid: `sensitivity` of the run.
    """
    events = heads[rule.events(heads)]
    if not len(events):
        return []
    sunk = table[table["events"] > 0].sort_values(["events", "layer", "head"], ascending=[False, True, True])
    lines = [_near_words(events, definition), _miss_words(near_misses(heads, rule), words)]
    lines += [_mixed_words(sunk, definition), _other_limits(grid, definition), _few_words(sunk)]
    return [line for line in lines if line]


def _near_words(events: pd.DataFrame, definition: SinkDefinition) -> str:
    near = {words: int(mask.sum()) for words, mask in near_limits(events, definition).items()}
    stated = joined([f"{count} near the {words}" for words, count in near.items() if count])
    total = near_any(events, definition)
    lie = "lies" if total == 1 else "lie"
    stated += " (some near two of them)" if sum(near.values()) > total else ""
    if not total:
        return f"Of {plural(len(events), 'event')} none lies within {WITHIN} of a limit of the definition."
    return f"{total} of {plural(len(events), 'event')} {lie} within {WITHIN} of a limit of the definition: {stated}."


def _miss_words(misses: int, words: Words) -> str:
    if not misses:
        return f"No head misses the rule by less than {WITHIN} in any {words.noun}."
    times = "Once a head misses" if misses == 1 else f"{misses:,} times a head misses"
    return f"{times} the rule by less than {WITHIN} in {words.a_noun}; such near misses are not events."


def _mixed_words(sunk: pd.DataFrame, definition: SinkDefinition) -> str:
    """ "L0H3 is a NOP in 3 of its 5 events"."""
    parts = []
    for row in each_row(sunk):
        name = getattr(row, f"class_{definition.name}")
        own = int(getattr(row, f"{name}_{definition.name}")) if name in CLASSES else row.events
        if own < row.events:
            word = LIKENED[name][0].replace("neither", "intermediate")
            parts.append(f"{head_name(row.layer, row.head)} is {word} in {own} of its {row.events} events")
    if not parts:
        return "Every head has one class in all its events."
    if len(parts) > MIXED_NAMED:
        return f"{len(parts)} heads are of mixed class: {some(parts, MIXED_NAMED)}."
    return joined(parts) + "."


def _other_limits(grid: pd.DataFrame, definition: SinkDefinition) -> str:
    """What the classes' events would be with each limit moved a step; from the sensitivity table."""
    cells = sensitivity_grid(grid, definition)
    parts = []
    for name in ("nop", "broadcast"):
        mine = cells[cells["class"] == name]
        own = mine[mine["published"]]
        if not len(own) or not mine["events"].any():
            continue
        if own["stable_rank_threshold"].notna().any():
            mine = mine[mine["stable_rank_threshold"] == own["stable_rank_threshold"].iloc[0]]
        parts.append(_moved(name, mine.sort_values("threshold").reset_index(drop=True)))
    return f"{parts[0][0].upper()}{'; '.join(parts)[1:]}." if parts else ""


def _moved(name: str, cells: pd.DataFrame) -> str:
    place = int(cells.index[cells["published"]][0])
    counts, limits = [int(count) for count in cells["events"]], [float(limit) for limit in cells["threshold"]]
    low = high = place
    while low and counts[low - 1] == counts[place]:
        low -= 1
    while high + 1 < len(counts) and counts[high + 1] == counts[place]:
        high += 1
    said = f"the {plural(counts[place], f'{CLASS_NAME[name]} event')}" if counts[place] else (
        f"no event is {LIKENED[name][0]}; there"
    )  # fmt: skip
    words = []
    if low < high:
        stay = "stays" if counts[place] == 1 else "stay" if counts[place] else "is"
        kept = counts[place] or "none"
        words.append(f"{stay} {kept} with the limit at {limits[low]:g} to {limits[high]:g}")
    beyond = [
        f"{counts[each]} at a limit of {limits[each]:g}" for each in (low - 1, high + 1) if 0 <= each < len(counts)
    ]
    if beyond:
        words.append(f"would be {joined(beyond)}")
    return f"{said} {' and '.join(words)}"


def _few_words(sunk: pd.DataFrame) -> str:
    few = sunk[(sunk["events"] <= FEW_EVENTS) & (sunk["events"] < sunk["images"])]
    if not len(few):
        return ""
    names = some([head_name(row.layer, row.head) for row in each_row(few)])
    if len(few) == 1:
        return f"{names} rests on {plural(int(few['events'].iloc[0]), 'event')} alone."
    total, layers = int(few["events"].sum()), few["layer"].nunique()
    where = f" of layer {int(few['layer'].iloc[0])}" if layers == 1 else ""
    return f"{names} rest on {plural(total, 'event')}{where} together, none on more than {int(few['events'].max())}."
