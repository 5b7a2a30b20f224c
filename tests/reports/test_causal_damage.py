"""Tables of interventions that are damaged or missing: a sentence for the user, and no page that keeps silent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from synthetic_effects import write_effects
from synthetic_run import SavedRun, synthetic_run

from sinklab.errors import InputError
from sinklab.reports.effects import read_causal
from sinklab.reports.page import write_report

NAMES = pytest.mark.parametrize("name", ["effects", "causal_verdicts"])


def edited_run(path: Path, status: str = "complete") -> SavedRun:
    return write_effects(synthetic_run(path, plants=(), overlays=False), status=status)


def refused(run: SavedRun, name: str, what: str) -> None:
    with pytest.raises(InputError, match=f"{name}.csv is {what}.*: sinklab patch RUN --resume"):
        write_report(run)


@NAMES
def test_digits_that_became_letters_are_named_as_damage(tmp_path: Path, name: str) -> None:
    run = edited_run(tmp_path)
    path = tmp_path / f"tables/{name}.csv"
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = re.sub("[0-9]", "x", lines[2])
    path.write_text("".join(lines))
    refused(run, name, "damaged")


@NAMES
@pytest.mark.parametrize("garbage", [b"\xff\x00\xfe", b"a,b\n1,2\n", b'level,"class\n'])
def test_a_file_of_anything_else_is_named_as_damage(tmp_path: Path, name: str, garbage: bytes) -> None:
    run = edited_run(tmp_path)
    (tmp_path / f"tables/{name}.csv").write_bytes(garbage)
    refused(run, name, "damaged")


@pytest.mark.parametrize(("name", "word"), [("effects", "edit"), ("causal_verdicts", "undecided")])
def test_a_word_that_no_patching_writes_is_damage(tmp_path: Path, name: str, word: str) -> None:
    run = edited_run(tmp_path)
    path = tmp_path / f"tables/{name}.csv"
    path.write_text(path.read_text().replace(f",{word},", ",#,", 1))
    refused(run, name, "damaged, .*'#' is no")


@NAMES
@pytest.mark.parametrize("kept", [None, 0, 1], ids=["no file", "empty", "header only"])
def test_a_complete_patching_without_a_table_is_refused(tmp_path: Path, name: str, kept: int | None) -> None:
    run = edited_run(tmp_path)
    path = tmp_path / f"tables/{name}.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.unlink() if kept is None else path.write_text("".join(lines[:kept]))
    refused(run, name, "missing or has no rows")


@NAMES
def test_an_unfinished_patching_without_a_table_still_has_a_page_that_says_so(tmp_path: Path, name: str) -> None:
    run = edited_run(tmp_path, status="running")
    (tmp_path / f"tables/{name}.csv").unlink()
    page = write_report(run).read_text(encoding="utf-8")
    assert "begun but have left no table of effects (status “running”)" in page and "RUN --resume" in page
    assert read_causal(tmp_path, run.config) is None
