"""Reports of runs whose values are phases: they speak of contributions, and their numbers are those of the tables."""

from __future__ import annotations

import random
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from phase_models import handle, kuramoto

import sinklab
from sinklab.errors import InputError
from sinklab.reports.nouns import IMAGES, Words
from sinklab.reports.phase import phase_words, read_phases
from sinklab.sinks.classify import SinkDefinition
from sinklab.sinks.phase_measures import MEASURES, WAYS
from sinklab.sinks.rule import SinkRule

WORDS = Words.of({"images": {"noun": "sequence"}, "model": {"prefix": ["bos"], "ordinary": "text"}})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("phases")
    (folder / "letters.txt").write_text("".join(random.Random(0).choices("abcdefghijk", k=6000)))
    model, rule = handle(kuramoto(phase_std=1.5)), SinkRule.mass(threshold=0.05)
    return sinklab.diagnose(model, text=folder / "letters.txt", limit=6, output=folder / "run", rule=rule)


def read_aloud(run: Any) -> str:
    page = (run.path / "report.html").read_text(encoding="utf-8")
    page = re.sub(
        r"<style>.*?</style>|<code>.*?</code>|<cite>.*?</cite>|<a [^>]*>[^<]*\.csv</a>", " ", page, flags=re.DOTALL
    )
    said = re.findall(r'aria-label="([^"]*)"', page)
    return " ".join(unescape(" ".join([re.sub(r"<[^>]+>", " ", page), *said])).split())


def test_the_page_speaks_of_contributions_and_never_of_a_value_ratio(run: Any) -> None:
    text = read_aloud(run)
    assert "contribution ratio" in text and "Contribution ratio" in text
    assert re.findall(r"(?i)value ratios?|output projection|after W", text) == []
    assert "1 by construction" in text and "contribution ratio" in run.config["definition"]["sentence"]


def test_every_phase_figure_has_its_numbers_beside_it(run: Any) -> None:
    table = run.table("phase")
    for name, columns in {
        "phase-order": ("order", "order_reference", "global_order_before", "global_order_after"),
        "phase-repulsion": ("repulsion", "saturated"),
        "phase-at-rest": (*WAYS, "acts"),
    }.items():
        assert {path.suffix for path in (run.path / "figures").glob(f"{name}.*")} == {".svg", ".png", ".csv"}
        plotted = pd.read_csv(run.path / f"figures/{name}.csv")
        for column in columns:
            np.testing.assert_allclose(plotted[column], table[column])


def test_the_report_is_the_same_bytes_again(run: Any) -> None:
    before = (run.path / "report.html").read_bytes()
    run.report()
    assert (run.path / "report.html").read_bytes() == before


def test_a_damaged_table_is_named(run: Any, tmp_path: Path) -> None:
    table = pd.read_csv(run.path / "tables/phase.csv")
    table.drop(columns="acts").to_csv(tmp_path / "phase.csv", index=False)
    with pytest.raises(InputError, match=r"phase\.csv is damaged"):
        read_phases(tmp_path / "phase.csv")


def test_a_run_of_values_has_no_word_of_phases() -> None:
    assert Words.of({"model": {"sites": [{"layer": 0, "axis": "value"}]}}) == IMAGES
    assert SinkDefinition.causal().sentence() == SinkDefinition.causal().sentence("value")


def phases(**means: float) -> pd.DataFrame:
    row = {"layer": 0, "head": 0, "windows": 5} | dict.fromkeys((*MEASURES, *(f"{x}_sem" for x in MEASURES)), 0.0)
    return pd.DataFrame([row | {"acts": 1.0, "order": 0.9, "order_reference": 0.5} | means])


def heads(ratio: float, rank: float = 1.1, routed: float = 1.0, queries: int = 12) -> pd.DataFrame:
    row: dict[str, Any] = {"image_index": 0, "layer": 0, "head": 0, "queries": queries, "finite": True, "inflow": 0.9}
    row |= {"routed_count": round(routed * queries), "routed_fraction": routed, "min_attention": 0.6}
    return pd.DataFrame([row | {"value_ratio_out": ratio, "value_ratio_head": 1.0, "stable_rank": rank}] * 4)


@pytest.mark.parametrize(
    ("table", "means", "sentence"),
    [
        (heads(0.05), {}, "sinks are phase-locked (4 of 4 events)"),
        (
            heads(1.2),
            {"repulsion": 0.2},
            "broadcasts (4 of 4 events): one resultant for all, which mostly draws",
        ),
        (heads(1.2), {"repulsion": 0.8}, "which mostly pushes its readers away from it; v is negative in 80"),
        (heads(1.2, rank=2.5), {}, "neither locked nor broadcasts"),
        (heads(0.05, routed=0.1), {}, "This model has no sink"),
        (heads(0.0, queries=1), {}, "Most events of this run (4 of 4) are on a token that only itself sees"),
        (pd.concat([heads(0.05), heads(1.2)]), {}, "of no one kind: of 8 events 4 phase-locked, 4 broadcast"),
    ],
)
def test_a_sentence_says_what_the_sinks_are(table: pd.DataFrame, means: dict[str, float], sentence: str) -> None:
    said = phase_words(phases(**means), table, SinkRule.relaxed(), SinkDefinition.causal(), WORDS)
    assert sentence in said["sinks"]


def test_a_sentence_says_why_tokens_are_at_rest() -> None:
    table = phases(acts=0.25, at_rest_self=0.6, at_rest_locked=0.15)
    said = phase_words(table, heads(1.2), SinkRule.relaxed(), SinkDefinition.causal(), WORDS)["moves"]
    assert "25\u202f% of the tokens are moved" in said and "75\u202f% are at rest" in said
    assert "because they attend to themselves (60\u202f%)" in said and "more in step (order 0.90)" in said
