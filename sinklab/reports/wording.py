"""Numbers and lists as a reader wants them: rounded to what they can carry, with the right plural."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, isfinite, log10

DASH = "–"
THIN = "\u202f"
"""A narrow space at which no line breaks."""


def number(value: float, digits: int = 2) -> str:
    """`value` to `digits` significant digits, never in exponents between 0.001 and a million; "–" if not finite."""
    if not isfinite(value):
        return DASH
    if value == 0:
        return "0"
    places = max(digits - 1 - floor(log10(abs(value))), 0)
    if abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{round(value, places):,.{places}f}"


ROUNDING = 2.0**-23
"""The spacing of float32 at 1."""


def settled(value: float) -> float:
    """`value`, or 0 where a difference is no larger than rounding leaves of equal numbers about 1."""
    return 0.0 if abs(value) <= ROUNDING else value


def fixed(value: float, places: int = 2) -> str:
    """`value` with that many decimals, "–" if not finite."""
    return f"{value:,.{places}f}" if isfinite(value) else DASH


def percent(share: float) -> str:
    """A share as a percentage that never rounds something to nothing, nor nearly all to all."""
    if not isfinite(share):
        return DASH
    if 0 < share < 0.005:
        return f"<1{THIN}%"
    if 0.995 <= share < 1:
        return f">99{THIN}%"
    return f"{share * 100:.0f}{THIN}%"


def plural(count: int, singular: str, many: str | None = None) -> str:
    """ "1 head", "0 heads", "2 heads"."""
    return f"{count:,} {singular if count == 1 else many or singular + 's'}"


def joined(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    parts = list(parts)
    if len(parts) < 2:
        return "".join(parts)
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def some(names: Sequence[str], most: int = 8) -> str:
    """ "a, b and c"; of more than `most` names the first ones and how many more there are."""
    names = list(names)
    return joined(names) if len(names) <= most else f"{', '.join(names[:most])} and {len(names) - most} more"


def head_name(layer: int, head: int) -> str:
    """ "L3H1"."""
    return f"L{int(layer)}H{int(head)}"


def ranges(numbers: Iterable[int]) -> str:
    """ "0, 3–5 and 9" for {0, 3, 4, 5, 9}; two neighbours are printed one by one."""
    ordered = sorted({int(each) for each in numbers})
    runs: list[list[int]] = []
    for each in ordered:
        if runs and each == runs[-1][-1] + 1:
            runs[-1].append(each)
        else:
            runs.append([each])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else [str(each) for each in run]
    return joined(parts)


def layers_phrase(layers: Iterable[int]) -> str:
    """ "layer 3", "layers 0 and 3–5"."""
    distinct = {int(layer) for layer in layers}
    return f"{'layer' if len(distinct) == 1 else 'layers'} {ranges(distinct)}"


NAMED = 5
"""Variants that a sentence tells one by one; of more it tells the least and the most."""


def each_or_ends(said: Sequence[str], values: Sequence[float]) -> str:
    """What is said of every variant, or, of many, of the one with the least value and the one with the most."""
    if len(said) <= NAMED:
        return joined(list(said))
    order = sorted(range(len(said)), key=lambda at: values[at])
    return f"from {said[order[0]]} to {said[order[-1]]} ({len(said)} variants)"
