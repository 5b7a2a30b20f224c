"""tables/phase.csv: how it is gathered, and that nothing about that shows in it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from phase_models import handle, kuramoto

import sinklab
from sinklab.diagnosis import Diagnosis
from sinklab.inputs import find_inputs
from sinklab.sinks.options import ScanOptions
from sinklab.sinks.phase import PARTS, gather_phase, phase_table
from sinklab.sinks.phase_measures import MEASURES, WAYS
from sinklab.sinks.ranks import Ranks


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text("".join(random.Random(0).choices("abcdefghijk", k=6000)))
    return path


def diagnose(text: Path, output: Path, **options: Any) -> Diagnosis:
    model = handle(kuramoto(phase_std=1.0))
    return sinklab.diagnose(model, text=text, output=output, limit=7, **({"batch_size": 3, "report": False} | options))


def test_the_table_has_means_over_windows_and_their_standard_errors(text: Path, tmp_path: Path) -> None:
    run = diagnose(text, tmp_path / "run")
    table = run.table("phase")
    assert list(table.columns) == ["layer", "head", "windows", *(x for n in MEASURES for x in (n, f"{n}_sem"))]
    assert table[["layer", "head"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert set(table["windows"]) == {7}
    np.testing.assert_allclose(table[[*WAYS, "acts"]].sum(axis=1), 1)
    rows = pd.concat(pd.read_parquet(path) for path in (run.path / PARTS).glob("part-*.parquet"))
    own = rows[(rows["layer"] == 1) & (rows["head"] == 0)]["order"]
    assert table["order"][2] == pytest.approx(own.mean())
    assert table["order_sem"][2] == pytest.approx(own.std(ddof=1) / 7**0.5)
    assert table["global_order_after"][:2].tolist() == pytest.approx(table["global_order_before"][2:].tolist())


def test_neither_the_batch_size_nor_the_ranks_show(text: Path, tmp_path: Path) -> None:
    whole = diagnose(text, tmp_path / "whole", batch_size=7).table("phase")
    run = diagnose(text, tmp_path / "run")
    pd.testing.assert_frame_equal(run.table("phase"), whole, rtol=1e-9, atol=1e-12)
    before = (run.path / "tables/phase.csv").read_bytes()
    for path in (run.path / PARTS).glob("*"):
        path.unlink()
    model = handle(kuramoto(phase_std=1.0))
    windows, options = find_inputs(model, text=text, limit=7), ScanOptions(batch_size=3)
    for rank in (1, 0):
        gather_phase(model, windows, options.transform(model), run, options, Ranks(rank, 2))
    assert len(list((run.path / PARTS).glob("*"))) == 2
    table = phase_table(run)
    assert table is not None and table.to_csv(index=False, lineterminator="\n").encode() == before


def test_a_resumed_run_does_what_was_left(text: Path, tmp_path: Path) -> None:
    run = diagnose(text, tmp_path / "run")
    before = (run.path / "tables/phase.csv").read_bytes()
    for path in (run.path / PARTS).glob("*"):
        path.unlink()
    (run.path / "tables/phase.csv").unlink()
    diagnose(text, run.path, resume=True)
    assert (run.path / "tables/phase.csv").read_bytes() == before


def test_a_run_of_some_layers_has_rows_of_those(text: Path, tmp_path: Path) -> None:
    assert set(diagnose(text, tmp_path / "run", layers=[1]).table("phase")["layer"]) == {1}
