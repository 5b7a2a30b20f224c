"""A run patched by a plan: its own edits in words, their effect as saved, and not a word about classes."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from synthetic_effects import write_effects
from synthetic_run import SavedRun, synthetic_run

from sinklab.errors import InputError
from sinklab.reports.causal_plan import edit_words
from sinklab.reports.page import write_report
from sinklab.reports.spoken import causal_lines

PLAN = [
    {"edit": "zero", "layer": 0, "head": 5, "at": "sink"},
    {"edit": "scale", "layer": 2, "head": 1, "at": "cls", "factor": 0.5},
]


def planned_run(path: Path, low: float = 0.0212, high: float = 0.0593, **patch: Any) -> SavedRun:
    run = synthetic_run(path, plants=(), overlays=False)
    patch = {"settings": {"options": {"heads": None, "plan": PLAN}}, "heads": []} | patch
    write_effects(run, **patch)
    place = {"level": "class", "class": "plan", "blocks": "all", "layer": -1, "head": -1, "joint": 0, "kind": "edit"}
    numbers = {"images": 12, "heads": 1, "mean": 0.0373, "sem": 0.01, "low": low, "high": high}
    rows = [place | {"name": "plan", "measure": measure} | numbers for measure in ("patch_change", "cls_change")]
    run.write_table("tables/effects.csv", pd.DataFrame(rows))
    (path / "tables/causal_verdicts.csv").write_text("\n")
    return run


def words(markup: str) -> str:
    page = re.sub(r"<(style|svg).*?</\1>", "", markup, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())


def test_the_page_lists_the_plans_edits_and_their_effects(tmp_path: Path) -> None:
    page = write_report(planned_run(tmp_path)).read_text(encoding="utf-8")
    text = words(page)
    assert "L0H5: the value of the sink (the image’s most attended key) is set to zero" in text
    assert "L2H1: the value of [CLS] is multiplied by 0.5" in text
    assert "Patch tokens relative change 0.037 0.021 to 0.059 12" in text
    assert "[CLS] relative change 0.037 0.021 to 0.059 12" in text
    top = "Edited by a plan of 2 edits: the relative change of the patch tokens is 0.037 on average"
    assert f"{top} (95 %: 0.021 to 0.059, 12 images)." in text


def test_nothing_is_said_of_classes_or_of_heads_that_were_chosen(tmp_path: Path) -> None:
    run = planned_run(tmp_path)
    page = write_report(run).read_text(encoding="utf-8")
    section = words(page[page.index('<h2 id="causal"') : page.index('id="counts"')])
    for untrue in (
        "No NOP head",
        "no evidence",
        "hosen",
        "Fig. 6",
        "over heads",
        "is sunk",
        "usual minimum",
        "donor is",
    ):
        assert untrue not in section, untrue
    assert not list((tmp_path / "figures").glob("fig6*")) and "causal_verdicts.csv" not in page
    assert causal_lines(run) == []


def test_one_image_alone_has_no_interval(tmp_path: Path) -> None:
    run = planned_run(tmp_path, low=float("nan"), high=float("nan"))
    text = words(write_report(run).read_text(encoding="utf-8"))
    assert "is 0.037 on average (12 images)." in text and " nan" not in text


def test_a_plan_without_its_effects_is_refused_and_an_unfinished_one_is_not(tmp_path: Path) -> None:
    run = planned_run(tmp_path)
    (tmp_path / "tables/effects.csv").unlink()
    with pytest.raises(InputError, match=r"effects.csv is missing"):
        write_report(run)
    run.config["patch"]["status"] = "running"
    assert "begun but have left no table" in write_report(run).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"edit": "route", "at": 3},
         "no query attends to token 3; each query’s other attention is scaled up to sum to 1"),
        ({"edit": "zero", "at": -1}, "the value of token −1 is set to zero"),
        ({"edit": "zero", "at": "register"}, "the value of every register is set to zero"),
        ({"edit": "value", "at": "patch", "value": [0.0, 1.0]},
         "the value of every patch becomes the plan’s own vector of 2 numbers"),
    ],
)  # fmt: skip
def test_an_edit_is_told_by_what_it_does_where(edit: dict[str, Any], said: str) -> None:
    assert edit_words(edit | {"layer": 1, "head": 2}) == f"L1H2: {said}"
