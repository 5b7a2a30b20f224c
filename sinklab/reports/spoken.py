"""The verdict in a line or two, for the terminal: the report's own words and counts, from the run's tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sinklab.reports.causal import class_lines, judged_otherwise
from sinklab.reports.effects import read_causal
from sinklab.reports.palette import CLASS_NAME, CLASSES
from sinklab.reports.sureness import near_any
from sinklab.reports.wording import plural
from sinklab.sinks.classify import SinkDefinition
from sinklab.sinks.rule import SinkRule
from sinklab.sinks.table import head_summary

if TYPE_CHECKING:
    import pandas as pd


class FinishedRun(Protocol):
    """What is needed of a run: its folder, run.json and the head table."""

    path: Path

    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def heads(self) -> pd.DataFrame: ...


def verdict_lines(run: FinishedRun) -> list[str]:
    """ "6 of 72 heads sink: 2 NOP, 3 broadcast, 1 intermediate (…)." and how many events are near a limit."""
    rule = SinkRule.from_dict(run.config["rule"])
    definition = SinkDefinition.from_saved(run.config["definition"])
    heads = run.heads
    events = heads[rule.events(heads)]
    table = head_summary(heads, rule, [definition])
    broken = int((table["not_finite"] > 0).sum())
    lines = [f"{plural(broken, 'head')} {'is' if broken == 1 else 'are'} not finite."] if broken else []
    judged = f"(rule {rule.label}, definition {definition.name})"
    if not len(events):
        return [f"None of {plural(len(table), 'head')} sinks {judged}.", *lines]
    classes = table.loc[table["events"] > 0, f"class_{definition.name}"].value_counts()
    named = ", ".join(f"{classes[name]} {CLASS_NAME[name]}" for name in CLASSES if name in classes)
    sinking, near = int(classes.sum()), near_any(events, definition)
    return [
        f"{sinking} of {plural(len(table), 'head')} {'sinks' if sinking == 1 else 'sink'}: {named} {judged}.",
        f"{near} of {plural(len(events), 'event')} {'lies' if near == 1 else 'lie'} near a limit of the definition.",
        *lines,
    ]


def causal_lines(run: FinishedRun) -> list[str]:
    """What the interventions say of each class, a line a class; none where they left no verdict on this rule."""
    causal = None if judged_otherwise(run.config) else read_causal(run.path, run.config)
    return class_lines(causal) if causal is not None and len(causal.verdicts) else []
