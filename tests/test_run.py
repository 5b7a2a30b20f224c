from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sinklab.atomic import WriteError
from sinklab.data.text import open_text
from sinklab.errors import InputError, NotFoundError
from sinklab.run import Run

SETTINGS: dict[str, Any] = {"model": {"name": "demo"}, "options": {"dtype": "float32", "batch_size": 8}}
OTHER: dict[str, Any] = {"model": {"name": "demo"}, "options": {"dtype": "bfloat16", "batch_size": 8}}


def rows(*indices: int) -> pd.DataFrame:
    return pd.DataFrame({"image": [f"{i}.png" for i in indices], "image_index": indices, "layer": 0, "head": 0})


def finished(path: Path) -> Path:
    with Run.create(path, settings=SETTINGS) as run:
        with run.part_writer() as parts:
            parts.add(0, rows(0, 1), [("2.png", "the file is empty")])
        run.write_table("sinks.parquet", rows(1))
        run.write_table("tables/spectrum.csv", rows(0))
        run.write_json("summary.json", {"events": 1})
        run.write_text("report.html", "<p>é</p>")
        run.update(status="complete", notes=["a note"])
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    run = Run.open(finished(tmp_path / "runs" / "mine"))
    pd.testing.assert_frame_equal(run.heads, rows(0, 1))
    pd.testing.assert_frame_equal(run.sinks, rows(1))
    pd.testing.assert_frame_equal(run.table("spectrum"), rows(0))
    assert run.summary == {"events": 1}
    assert run.done_batches() == {0}
    assert run.skipped() == [("2.png", "the file is empty")]
    assert (run.path / "report.html").read_text(encoding="utf-8") == "<p>é</p>"
    assert run.config["status"] == "complete"
    assert run.config["settings"] == SETTINGS
    assert run.config["schema_version"] == 1
    assert run.config["notes"] == ["a note"]


def test_the_head_table_follows_new_parts_and_may_be_changed_freely(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", settings=SETTINGS) as run, run.part_writer(every_batches=1) as parts:
        parts.add(0, rows(0))
        first = run.heads
        first["layer"] = 99
        assert list(run.heads["layer"]) == [0]
        parts.add(1, rows(1))
        assert list(run.heads["image_index"]) == [0, 1]


def test_skipped_images_stand_in_the_order_of_the_list(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", settings=SETTINGS) as run:
        for rank, batch, image in ((1, 3, "d"), (0, 2, "c"), (1, 1, "b"), (0, 0, "a")):
            with run.part_writer(rank) as parts:
                parts.add(batch, None, [(f"{image}1", "empty"), (f"{image}0", "cut")])
        assert [image for image, _ in run.skipped()] == ["a1", "a0", "b1", "b0", "c1", "c0", "d1", "d0"]


def test_json_is_strict_where_numbers_are_not(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", settings=SETTINGS) as run:
        path = run.write_json("summary.json", {"a": float("nan"), "b": np.float32("inf"), "c": np.int64(3)})
    assert json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word)) == {"a": None, "b": None, "c": 3}


def test_numbers_in_csv_come_back_exactly(tmp_path: Path) -> None:
    values = pd.DataFrame({"x": np.random.default_rng(0).normal(size=50), "y": [np.nan, *range(49)]})
    with Run.create(tmp_path / "r", settings=SETTINGS) as run:
        run.write_table("tables/x.csv", values)
        pd.testing.assert_frame_equal(run.table("x"), values, check_exact=True)
        with pytest.raises(InputError, match=r"\.parquet or \.csv, not as x\.xlsx"):
            run.write_table("x.xlsx", values)


def test_a_run_that_exists_is_refused_with_the_ways_on(tmp_path: Path) -> None:
    path = finished(tmp_path / "r")
    before = (path / "run.json").read_bytes()
    with pytest.raises(InputError, match=r"holds a run already: --resume goes on with it, --overwrite replaces it"):
        Run.create(path, settings=SETTINGS)
    assert (path / "run.json").read_bytes() == before


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_a_folder_of_other_things_is_never_touched(tmp_path: Path, flags: dict[str, bool]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="is not empty and holds no sinklab run"):
        Run.create(tmp_path, settings=SETTINGS, **flags)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("content", ["[]", '{"name": "another tool"}', "{broken"])
def test_another_tools_run_file_is_not_overwritten(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(InputError, match="run.json"):
        Run.create(tmp_path, settings=SETTINGS, overwrite=True)
    assert (tmp_path / "run.json").read_text() == content


def test_overwriting_replaces_results_and_keeps_the_users_own_files(tmp_path: Path) -> None:
    path = finished(tmp_path / "r")
    (path / "my notes.md").write_text("keep")
    with Run.create(path, settings=OTHER, overwrite=True) as run:
        assert run.done_batches() == set()
        assert run.config["settings"] == OTHER
        assert not run.resumed
    assert names(path) == ["my notes.md", "run.json"]


def test_overwriting_removes_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    path = finished(tmp_path / "r")
    (path / "figures").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.png").write_text("")
    Run.create(path, settings=SETTINGS, overwrite=True).close()
    assert (tmp_path / "elsewhere" / "x.png").exists()
    assert names(path) == ["run.json"]


def test_an_interrupted_overwrite_mixes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = finished(tmp_path / "r")

    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", interrupted)
        Run.create(path, settings=OTHER, overwrite=True)
    for attempt in (lambda: Run.open(path), lambda: Run.create(path, settings=OTHER, resume=True)):
        with pytest.raises(InputError, match="was being overwritten when that was interrupted"):
            attempt()
    with Run.create(path, settings=OTHER, overwrite=True) as run:
        assert run.done_batches() == set()


def test_resuming_goes_on_with_what_is_there(tmp_path: Path) -> None:
    path = finished(tmp_path / "r")
    (path / "heads" / ".part-000-00009.parquet.tmp-1").write_text("half")
    with Run.create(path, settings=SETTINGS, resume=True) as run:
        assert run.resumed
        assert run.done_batches() == {0}
        with run.part_writer() as parts:
            parts.add(1, rows(2))
    assert list(Run.open(path).heads["image_index"]) == [0, 1, 2]
    assert not list((path / "heads").glob(".*"))


def test_resuming_where_there_is_nothing_starts_afresh(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "new", tmp_path / "empty"):
        with Run.create(path, settings=SETTINGS, resume=True) as run:
            assert not run.resumed
            assert run.done_batches() == set()


def test_resuming_under_other_settings_names_what_differs(tmp_path: Path) -> None:
    path = finished(tmp_path / "r")
    with pytest.raises(InputError, match=r"cannot be resumed with these: --dtype float32 → bfloat16\. "):
        Run.create(path, settings=OTHER, resume=True)
    Run.create(path, settings=SETTINGS, resume=True).close()  # the refusal left no lock behind


def test_resuming_and_overwriting_at_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give one of them"):
        Run.create(tmp_path / "r", settings=SETTINGS, resume=True, overwrite=True)
    assert not (tmp_path / "r").exists()


def test_two_programs_do_not_write_into_one_run(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", settings=SETTINGS):
        for flags in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(InputError, match="Another process is writing into"):
                Run.create(tmp_path / "r", settings=SETTINGS, **flags)
        Run.open(tmp_path / "r")  # reading is free
    Run.create(tmp_path / "r", settings=SETTINGS, resume=True).close()


def test_ranks_join_the_run_of_rank_zero(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", settings=SETTINGS) as first:
        with Run.join(tmp_path / "r", settings=SETTINGS, rank=1) as second:
            with first.part_writer(0) as parts:
                parts.add(0, rows(0))
            with second.part_writer(1) as parts:
                parts.add(1, rows(1))
            with pytest.raises(InputError, match="Another process"):
                Run.join(tmp_path / "r", settings=SETTINGS, rank=1)
        with pytest.raises(InputError, match="--dtype float32 → bfloat16"):
            Run.join(tmp_path / "r", settings=OTHER, rank=2)
        assert first.done_batches() == second.done_batches() == {0, 1}


def test_what_is_no_run_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="There is no run folder"):
        Run.open(tmp_path / "none")
    with pytest.raises(NotFoundError, match=r"is not a sinklab run: it has no run\.json"):
        Run.open(tmp_path)
    (tmp_path / "run.json").write_text('{"half": ')
    with pytest.raises(InputError, match=r"run\.json cannot be read as JSON"):
        Run.open(tmp_path)
    (tmp_path / "run.json").write_text('{"schema_version": 99, "sinklab": "9.0"}')
    with pytest.raises(InputError, match=r"schema version 99; this sinklab reads 1. It was written by sinklab 9\.0"):
        Run.open(tmp_path)
    with pytest.raises(InputError, match="is a file; a run needs a folder"):
        Run.create(tmp_path / "run.json", settings=SETTINGS)


def test_what_a_run_does_not_have_is_named(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", settings=SETTINGS) as run:
        run.write_table("tables/one.csv", rows(0))
        with pytest.raises(NotFoundError, match="has no head table yet"):
            run.heads  # noqa: B018
        with pytest.raises(NotFoundError, match=r"has no sinks\.parquet \(its status: running\)"):
            run.sinks  # noqa: B018
        with pytest.raises(NotFoundError, match=r"has no summary\.json"):
            run.summary  # noqa: B018
        with pytest.raises(NotFoundError, match="has no table 'two'; it has: one"):
            run.table("two")


def test_a_place_that_cannot_hold_a_run_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot be written"):
        Run.create(tmp_path / "file" / "r", settings=SETTINGS)


WRITER = """
import random, sys
import numpy as np, pandas as pd
from sinklab.run import Run

def rows(batch):
    values = np.random.default_rng(batch).normal(size=40).astype(np.float32)
    index = np.repeat(np.arange(10 * batch, 10 * batch + 10), 4)
    image = [f"{i}.png" for i in index]
    return pd.DataFrame({"image": image, "image_index": index, "layer": np.tile([0, 0, 1, 1], 10).astype("int16"),
                         "head": np.tile([0, 1], 20).astype("int16"), "inflow": values})

with Run.create(sys.argv[1], settings={}, resume=True) as run:
    with run.part_writer(every_batches=int(sys.argv[2])) as parts:
        done = run.done_batches()
        for batch in range(60):
            if batch not in done:
                skipped = [(f"skipped-{batch}", "empty")] if batch % 7 == 0 else []
                parts.add(batch, None if batch % 10 == 9 else rows(batch), skipped)
                if len(sys.argv) > 3:
                    print(batch, flush=True)
    run.update(status="complete")
"""


def written(path: Path, every: int) -> None:
    subprocess.run([sys.executable, "-c", WRITER, str(path), str(every)], check=True, timeout=60)


def test_a_kill_at_any_moment_and_a_resume_give_the_same_table(tmp_path: Path) -> None:
    written(tmp_path / "undisturbed", 7)
    path, moments, before = tmp_path / "killed", random.Random(0), 0
    for _ in range(4):
        command = [sys.executable, "-c", WRITER, str(path), str(moments.choice([1, 2, 3])), "slowly"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(moments.choice([4, 6, 9])):  # batches that were added: more than one part holds
            process.stdout.readline()
        time.sleep(moments.uniform(0.0, 0.01))
        process.kill()
        process.wait()
        process.stdout.close()
        run = Run.open(path)
        done = run.done_batches()
        assert len(done) >= before
        before = len(done)
        if done:
            assert {int(index) // 10 for index in run.heads["image_index"]} == {b for b in done if b % 10 != 9}
            assert (run.heads.groupby("image_index").size() == 4).all()
        assert {int(image.split("-")[1]) for image, _ in run.skipped()} == {b for b in done if b % 7 == 0}
    written(path, 5)
    undisturbed, resumed = Run.open(tmp_path / "undisturbed"), Run.open(path)
    assert before > 0, "no kill came between two parts"
    assert resumed.done_batches() == set(range(60))
    assert resumed.skipped() == undisturbed.skipped()
    pd.testing.assert_frame_equal(resumed.heads, undisturbed.heads, check_exact=True)


def test_a_name_that_no_file_could_tell_of_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    strange = tmp_path / os.fsdecode(b"run\xff")
    with pytest.raises(InputError, match=r"run\\udcff has bytes in its name that are not UTF-8"):
        Run.create(strange, settings=SETTINGS)
    with pytest.raises(InputError, match="The text .* not UTF-8"):
        open_text(tmp_path / os.fsdecode(b"text\xff.txt"))
    assert list(tmp_path.iterdir()) == []
