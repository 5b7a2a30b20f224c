"""The terminal's verdict against the summary, which counts the same elsewhere."""

from __future__ import annotations

from pathlib import Path

from synthetic_effects import write_effects
from synthetic_run import synthetic_run

from sinklab.reports.spoken import causal_lines, verdict_lines
from sinklab.sinks.classify import SinkDefinition
from sinklab.sinks.rule import SinkRule
from sinklab.sinks.table import summarise


def test_the_lines_say_what_the_summary_counts(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, overlays=False)
    summary = summarise(run.heads, SinkRule.relaxed(), SinkDefinition.causal())
    first, second = verdict_lines(run)
    sinking = summary["heads_that_sink"]["in_any_image"]
    assert first == f"{sinking} of {summary['pairs']} heads sink: 1 NOP, 1 broadcast, 1 intermediate " + (
        "(rule relaxed, definition causal)."
    )
    assert second == f"0 of {summary['events']['total']} events lie near a limit of the definition."


def test_a_run_without_sinks_and_heads_that_are_not_finite_are_said(tmp_path: Path) -> None:
    quiet = synthetic_run(tmp_path / "quiet", plants=(), broken=((0, 1),), overlays=False)
    assert verdict_lines(quiet) == ["None of 6 heads sinks (rule relaxed, definition causal).", "1 head is not finite."]


def test_interventions_give_a_line_a_class_and_none_where_there_are_none(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, overlays=False)
    assert causal_lines(run) == []
    lines = causal_lines(write_effects(run))
    assert [line.split(" heads")[0] for line in lines] == ["The NOP", "The broadcast"]
