"""What a run patched by a plan of one's own shows: the plan's edits in words and what they did; there is no class."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from sinklab.reports.effects import MAIN, MEASURES, Causal, Cell, plan_cells, plan_of
from sinklab.reports.nouns import IMAGES, Words
from sinklab.reports.wording import head_name, number, plural

KEYS = {
    "sink": "the sink (the {noun}’s most attended key)",
    "cls": "[CLS]",
    "register": "every register",
    "patch": "{every}",
    "bos": "the first token",
    "special": "every special token",
    "text": "{every}",
    "token": "{every}",
}


def edit_words(edit: dict[str, Any], words: Words = IMAGES) -> str:
    """ "L0H5: the value of [CLS] is multiplied by 0.5", from an edit as it was written down."""
    at = edit.get("at", "sink")
    where = words.say(KEYS.get(at, f"token {at}")) if isinstance(at, str) else f"token {at}".replace("-", "−")
    value, factor = edit.get("value"), edit.get("factor")
    given = f" of {plural(len(value), 'number')}" if isinstance(value, list) else ""
    factor_words = f"{factor:g}" if isinstance(factor, int | float) else str(factor)
    done = {
        "zero": f"the value of {where} is set to zero",
        "value": f"the value of {where} becomes the plan’s own vector{given}",
        "scale": f"the value of {where} is multiplied by {factor_words.replace('-', '−')}",
        "route": f"no query attends to {where}; each query’s other attention is scaled up to sum to 1",
    }
    kind = str(edit.get("edit"))
    return f"{head_name(edit['layer'], edit['head'])}: {done.get(kind, f'{kind} at {where}')}"


def plan_sentence(causal: Causal) -> Markup:
    """The plan's effect in one sentence, for the verdict at the top of the page."""
    edits = plan_of(causal.patch)
    begun = Markup('<a href="#causal">Edited</a> by a plan of {}').format(plural(len(edits), "edit"))
    begun += "" if causal.patch.get("status", "complete") == "complete" else " (not finished yet)"
    cell = plan_cells(causal).get(MAIN)
    if cell is None:
        return Markup("{}; how far the {} move was not saved.").format(begun, causal.words.moved)
    within = f"95 %: {number(cell.low)} to {number(cell.high)}, " if cell.low == cell.low else ""
    return Markup("{}: the relative change of the {} is {} on average ({}{}).").format(
        begun, causal.words.moved, number(cell.mean), within, causal.words.count(cell.images)
    )


def plan_shown(causal: Causal) -> dict[str, Any] | None:
    """`edits` in words and `rows` (measure, its unit, its cell) for the section; None for a run without a plan."""
    edits = plan_of(causal.patch)
    if not edits:
        return None
    cells = plan_cells(causal)
    rows: list[tuple[str, str, Cell]] = [(*causal.headings(name), cells[name]) for name in MEASURES if name in cells]
    return {"edits": [edit_words(edit, causal.words) for edit in edits], "rows": rows}
