"""What the sinks of a training run's models are: one row a model that was diagnosed into RUN/diagnosed/MEMBER.

Read from the diagnosed runs' own tables, counted as their reports count: a head is of the class and of the token kind
of most of its events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.models.tokens import SEQUENCE_KINDS
from sinklab.reports import causal
from sinklab.reports.effects import CAUSAL_CLASSES, head_rows, read_causal
from sinklab.reports.lm_figures import family
from sinklab.reports.nouns import A_KIND, Words
from sinklab.reports.palette import CLASS_NAME, CLASSES, KIND_NAME
from sinklab.reports.phase import phase_words, read_phases
from sinklab.reports.saved import reading
from sinklab.reports.sections import records
from sinklab.reports.wording import fixed, joined, percent, plural
from sinklab.run import Run
from sinklab.sinks.classify import SinkDefinition
from sinklab.sinks.rule import SinkRule
from sinklab.sinks.table import head_summary

if TYPE_CHECKING:
    import pandas as pd

DIAGNOSED = "diagnosed"
WRITER = "sinklab diagnose RUN --overwrite"
AGREEMENT = {"True": "agree", "False": "do not agree", "": "undecided"}


def read_sinks(folder: Path, members: Mapping[str, tuple[str, int]]) -> pd.DataFrame:
    """One row a finished diagnosis below `folder`, in the order of `members` (member → model and seed).

    Columns: member, config, seed, rule, definition, sequences, heads, sinking, a count of heads for each class and for
    each token kind, events, median_ratio and median_stable_rank over the events, and of each class that was patched
    CLASS_agree, CLASS_disagree, CLASS_undecided (heads; missing where nothing was edited). Raises InputError for a
    diagnosis that is damaged.
    """
    import pandas as pd

    found = []
    for member, (config, seed) in members.items():
        path = folder / DIAGNOSED / member
        if not (path / "run.json").is_file():
            continue
        with reading(path, WRITER):
            run = Run.open(path)
            if run.config.get("status") == "complete":
                found.append({"member": member, "config": config, "seed": seed, **sink_facts(run)})
    return pd.DataFrame(found)


def sink_facts(run: Run) -> dict[str, Any]:
    """The numbers of one diagnosed run."""
    rule = SinkRule.from_dict(run.config["rule"])
    definition = SinkDefinition.from_saved(run.config["definition"])
    heads = run.heads
    table, events = head_summary(heads, rule, [definition]), heads[rule.events(heads)]
    sunk = table[table["events"] > 0]
    classes, kinds = sunk[f"class_{definition.name}"].value_counts(), sunk["kind"].value_counts()
    return {
        "rule": rule.label,
        "definition": definition.name,
        "sequences": int(heads["image_index"].nunique()),
        "heads": len(table),
        "sinking": len(sunk),
        **{name: int(classes.get(name, 0)) for name in CLASSES},
        **{kind: int(kinds.get(kind, 0)) for kind in SEQUENCE_KINDS if kind != "token"},
        "events": len(events),
        "median_ratio": float(events[definition.axis].astype("float64").median()),
        "median_stable_rank": float(events["stable_rank"].astype("float64").median()),
        **_patched(run),
    }


def _patched(run: Run) -> dict[str, Any]:
    """How many edited heads of each class the interventions agree on; nothing where there were none."""
    found = None if causal.judged_otherwise(run.config) else read_causal(run.path, run.config)
    if found is None or not len(found.verdicts):
        return {}
    rows = head_rows(found)
    told: dict[str, Any] = {}
    for name in CAUSAL_CLASSES:
        said = [str(row["agrees"]) for row in rows if row["class"] == name]
        told |= {f"{name}_agree": said.count("True"), f"{name}_disagree": said.count("False")}
        told |= {f"{name}_undecided": len(said) - said.count("True") - said.count("False")}
    return told


def sink_rows(sinks: pd.DataFrame, folder: Path) -> list[dict[str, str]]:
    """The table's cells in words; `report` is the way from the page to the diagnosis' own, "" where it wrote none."""
    return [
        {
            "member": str(row["member"]),
            "report": page if (folder / page).is_file() else "",
            "heads": f"{row['sinking']} of {row['heads']}",
            **{name: str(row[name]) for name in CLASSES},
            "kinds": ", ".join(f"{KIND_NAME[kind]} {row[kind]}" for kind in _kinds(row)) or "–",
            "ratio": fixed(row["median_ratio"]),
            "rank": fixed(row["median_stable_rank"]),
            "patched": _patch_words(row),
            "rule": f"{row['rule']}, {row['definition']}",
        }
        for row in records(sinks)
        for page in [f"{DIAGNOSED}/{row['member']}/report.html"]
    ]


def _kinds(row: Mapping[str, Any]) -> list[str]:
    return [kind for kind in SEQUENCE_KINDS if row.get(kind)]


def _patch_words(row: Mapping[str, Any]) -> str:
    """ "NOP: 2 agree, 1 undecided; broadcast: 3 agree"."""
    if not row["sinking"]:
        return "no head to edit"
    parts, known = [], False
    for name in CAUSAL_CLASSES:
        counts = {words: row.get(f"{name}_{words}", float("nan")) for words in ("agree", "disagree", "undecided")}
        known |= counts["agree"] == counts["agree"]  # not NaN: this model was patched
        said = [f"{int(count)} {words}" for words, count in counts.items() if count == count and count]
        parts += [f"{CLASS_NAME[name]}: {', '.join(said)}"] if said else []
    return "; ".join(parts) or ("no head to edit" if known else "not patched")


def phase_sentences(folder: Path, sinks: pd.DataFrame) -> list[tuple[str, str]]:
    """(member, what its sinks are and what its attention does to tokens) of each phase model, as its report says it."""
    said = []
    for member in sinks["member"]:
        with reading(folder / DIAGNOSED / member, WRITER):
            run = Run.open(folder / DIAGNOSED / member)
            table = read_phases(run.path / "tables/phase.csv")
            if table is not None:
                rule = SinkRule.from_dict(run.config["rule"])
                definition = SinkDefinition.from_saved(run.config["definition"])
                words = phase_words(table, run.heads, rule, definition, Words.of(run.config))
                said.append((str(member), f"{words['sinks']} {words['moves']}"))
    return said


def families_sentence(sinks: pd.DataFrame) -> str:
    """One sentence that sets the phase models against the transformers, or describes the one family there is."""
    sides = [(name, sinks[sinks["config"].map(family) == name]) for name in ("phase", "transformer")]
    said = [_family_words(name, mine) for name, mine in sides if len(mine)]
    joint = "; ".join(said)
    return f"{joint[:1].upper()}{joint[1:]}." if joint else ""


def _family_words(name: str, mine: pd.DataFrame) -> str:
    """ "in 3 phase models 4 of 12 heads sink (3 NOP and 1 broadcast), to the first token (4), where ..."."""
    sinking, heads = int(mine["sinking"].sum()), int(mine["heads"].sum())
    models = plural(len(mine), f"{name} model")
    if not sinking:
        return f"in {models} none of {plural(heads, 'head')} sinks"
    classes = joined([f"{int(mine[each].sum())} {CLASS_NAME[each]}" for each in CLASSES if mine[each].sum()])
    counts = {kind: int(mine[kind].sum()) for kind in SEQUENCE_KINDS if kind in mine and mine[kind].sum()}
    kinds = joined([f"{A_KIND[kind]} ({count})" for kind, count in counts.items()])
    ratio = "contribution" if name == "phase" else "value"
    return (
        f"in {models} {sinking} of {plural(heads, 'head')} ({percent(sinking / heads)}) "
        f"{'sinks' if sinking == 1 else 'sink'}, {classes}, to {kinds}, where the {ratio} is "
        f"{fixed(float(mine['median_ratio'].median()))} times the others’ and the update’s stable rank "
        f"{fixed(float(mine['median_stable_rank'].median()))} (medians)"
    )


def judged_by(sinks: pd.DataFrame) -> str:
    """By which rule and definition, on how many sequences."""
    rules: Sequence[str] = list(dict.fromkeys(sinks["rule"]))
    names: Sequence[str] = list(dict.fromkeys(sinks["definition"]))
    counts = sorted({int(number) for number in sinks["sequences"]})
    many = plural(counts[0], "sequence") if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} sequences"
    differ = len(rules) > 1 or len(names) > 1
    return f"{joined(rules)} rule, definition {joined([f'“{name}”' for name in names])}, {many} a model" + (
        ": what was judged differently does not compare" if differ else ""
    )
