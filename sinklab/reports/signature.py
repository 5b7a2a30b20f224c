"""Which edits a class's signature expects to change little or much, and whether broadcasts here carry content."""

from __future__ import annotations

from sinklab.interventions.verdict import CARRYING
from sinklab.reports.effects import Causal, class_cells, head_rows, shown_blocks
from sinklab.reports.sections import records
from sinklab.reports.wording import joined, number

SMALL = {"nop": ("zero", "mean", "donor"), "broadcast": ("mean", "donor")}
LARGE = {"nop": ("ordinary", "route"), "broadcast": ("zero", "route")}
"""The signature of a class: which edits should change little, and which much in comparison."""
CARRIED = (("zero_ordinary",), ("zero",))
"""The same of a broadcast that carries something of its input: its donor's value changes much, but all tokens alike."""
CONTENT = (("shared_energy", "shared energy"), ("donor_cosine", "donor cosine"))


def expected(name: str, carried: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(edits that should change little, edits that should change much)."""
    return CARRIED if carried and name == "broadcast" else (SMALL[name], LARGE[name])


def carries(causal: Causal) -> bool:
    """Whether the broadcast heads here were found to carry content: by the class's verdict, else by all its heads'."""
    rows = causal.verdicts[(causal.verdicts["level"] == "class") & (causal.verdicts["class"] == "broadcast")]
    by_class = {str(row["blocks"]): row for row in records(rows)}
    verdict = by_class.get(shown_blocks(causal, "broadcast")) or next(iter(by_class.values()), None)
    if verdict is not None and verdict["verdict"] != "undecided":
        return str(verdict["reason"]).startswith(CARRYING)
    heads = [row for row in head_rows(causal) if row["class"] == "broadcast" and row["verdict"] != "undecided"]
    return bool(heads) and all(str(row["reason"]).startswith(CARRYING) for row in heads)


def donor_words(causal: Causal, blocks: str) -> str:
    """ "the donor's value moves all tokens alike and towards the donor (shared energy 0.98, donor cosine 0.94)"."""
    cells = [(words, class_cells(causal, "broadcast", blocks, measure).get("donor")) for measure, words in CONTENT]
    known = [f"{words} {number(cell.mean)}" for words, cell in cells if cell is not None]
    measured = f" ({', '.join(known)})" if known else ""
    return f"the donor’s value moves all tokens alike and towards the donor{measured}"


def kinds_words(causal: Causal, carried: bool) -> str:
    """How to read the bars of each class, for the figure's caption."""
    words = causal.words
    nop = "A NOP does not mind losing its value but minds getting a real one or losing its place; "
    if not carried:
        return f"{nop}a broadcast minds losing its value, not trading it for another {words.noun}’s."
    said = donor_words(causal, shown_blocks(causal, "broadcast"))
    return (
        f"{nop}the broadcast here carries something of its {words.noun}: {said}, so that mean and donor may change "
        "much and have no triangle; what should change little beside zero is the control."
    )


def means_words(causal: Causal, name: str, blocks: str, carried: bool) -> list[str]:
    """The class means behind the verdict, grouped as the signature groups them."""
    cells = class_cells(causal, name, blocks)
    parts = []
    for edits in expected(name, carried):
        known = [edit for edit in edits if edit in cells]
        if known:
            means = joined([number(cells[edit].mean) for edit in known])
            named = joined([edit.replace("zero_ordinary", "control") for edit in known])
            parts.append(f"{named} {'changes' if len(known) == 1 else 'change'} the {causal.words.moved} by {means}")
    return parts
