"""A run that was killed goes on, and its table is exactly the table of a run that was not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from command_line import PICTURE, environment, in_process, write_checkpoint, write_pictures

from sinklab.run import Run

IMAGES = 40

# The command itself, but a part after every second batch and a pause after each: a kill then falls between parts,
# inside one, and before the first.
DRIVER = """
import sys, time
from sinklab import run
from sinklab.parts import PartWriter
whole, add = run.Run.part_writer, PartWriter.add
run.Run.part_writer = lambda self, rank=0, **options: whole(self, rank, **{**options, "every_batches": 2})
def slow(self, *batch):
    add(self, *batch)
    time.sleep(0.03)
PartWriter.add = slow
from sinklab.cli import main
main()
"""

# Processes that die at the n-th rename, n = 1, 2, … until one lives; each is followed by one that resumes its run.
# They are forked, so that the libraries are loaded once.
MORTAL = """
import os, signal, sys
import pandas, pyarrow.parquet, torchvision.transforms.v2
import sinklab, sinklab.diagnosis, sinklab.sinks.findings, sinklab.sinks.overlay
from sinklab import run
model, pictures, folder, size = sinklab.load(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
whole, rename = run.Run.part_writer, os.replace
run.Run.part_writer = lambda self, rank=0, **options: whole(self, rank, **{**options, "every_batches": 2})
def diagnose(number, dies_at):
    renames = 0
    def counted(*names):
        nonlocal renames
        renames += 1
        if renames == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*names)
    os.replace = counted
    sinklab.diagnose(model, pictures, output=f"{folder}/{number}", size=size, batch_size=1, report=False, resume=True)
def forked(*given):
    child = os.fork()
    if child == 0:
        try:
            diagnose(*given)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
number = 1
while (ended := forked(number, number)) == -signal.SIGKILL:
    assert forked(number, None) == 0
    number += 1
print(number - 1)
sys.exit(ended)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_pictures(tmp_path_factory.mktemp("pictures"), IMAGES)
    (folder / "005.png").write_bytes(b"not a picture")
    return folder


def words(checkpoint: Path, pictures: Path, run: Path) -> list[str]:
    options = ["--size", PICTURE, "--batch-size", 1, "--device", "cpu", "--no-report"]
    return [str(word) for word in ("diagnose", checkpoint, pictures, "-o", run, *options)]


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    ended = in_process(*words(checkpoint, pictures, tmp_path_factory.mktemp("whole") / "run"))
    assert ended.returncode == 0, ended.stderr
    return Run.open(Path(ended.stdout.strip()).parent)


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_parts(process: subprocess.Popen[str], run: Path, parts: int) -> None:
    """Until the run has so many parts (0: until it has a run.json)."""
    deadline = time.monotonic() + 60
    while len(list(run.glob("heads/part-*.parquet"))) < parts or not (run / "run.json").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.002)


def resumed(command: list[str]) -> Run:
    ended = in_process(*command, "--resume")
    assert ended.returncode == 0, ended.stderr
    return Run.open(Path(ended.stdout.strip()).parent)


def assert_same(run: Run, undisturbed: Run) -> None:
    assert run.config["status"] == "complete"
    pd.testing.assert_frame_equal(run.heads, undisturbed.heads, check_exact=True)
    pd.testing.assert_frame_equal(run.sinks, undisturbed.sinks, check_exact=True)
    assert run.summary == undisturbed.summary
    assert run.config["images"]["skipped"] == undisturbed.config["images"]["skipped"] != []


def test_a_run_killed_again_and_again_gives_the_table_of_an_undisturbed_one(
    checkpoint: Path, pictures: Path, undisturbed: Run, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = words(checkpoint, pictures, run)
    for parts, pause in ((0, 0.0), (2, 0.0), (7, 0.045)):
        process = start([*command, "--resume"])
        wait_for_parts(process, run, parts)
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert 0 < len(Run.open(run).done_batches()) < IMAGES

    told = in_process("report", run)
    assert told.returncode == 2 and "not complete" in told.stderr and "--resume" in told.stderr
    again = in_process(*command)
    assert again.returncode == 2 and "--resume goes on" in again.stderr
    assert json.loads((run / "run.json").read_text())["status"] == "running"

    whole = next((run / "heads").glob("part-*.parquet"))
    whole.with_name(f".{whole.name}.tmp-999999").write_bytes(whole.read_bytes()[:100])  # what a kill may leave
    assert_same(resumed(command), undisturbed)
    assert not [path for path in run.rglob("*") if ".tmp-" in path.name]


def test_ctrl_c_ends_a_run_with_130_says_how_to_go_on_and_is_right(
    checkpoint: Path, pictures: Path, undisturbed: Run, tmp_path: Path
) -> None:
    command = words(checkpoint, pictures, tmp_path / "run")
    process = start(command)
    wait_for_parts(process, tmp_path / "run", 3)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in said and str(tmp_path / "run") in said
    assert "Traceback" not in said
    assert 0 < len(Run.open(tmp_path / "run").done_batches()) < IMAGES
    assert_same(resumed(command), undisturbed)


def test_resuming_a_complete_run_changes_nothing(checkpoint: Path, pictures: Path, undisturbed: Run) -> None:
    before = undisturbed.heads
    parts = {path.name: path.read_bytes() for path in undisturbed.path.glob("heads/*")}
    assert_same(resumed(words(checkpoint, pictures, undisturbed.path)), undisturbed)
    assert {path.name: path.read_bytes() for path in undisturbed.path.glob("heads/*")} == parts
    pd.testing.assert_frame_equal(Run.open(undisturbed.path).heads, before, check_exact=True)


def test_resume_where_there_is_nothing_starts_afresh(
    checkpoint: Path, pictures: Path, undisturbed: Run, tmp_path: Path
) -> None:
    assert_same(resumed(words(checkpoint, pictures, tmp_path / "new")), undisturbed)


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process in which torch is loaded")
def test_a_run_killed_at_any_of_its_renames_goes_on_to_the_same_end(
    checkpoint: Path, pictures: Path, tmp_path: Path
) -> None:
    few = tmp_path / "pictures"
    few.mkdir()
    for name in ("000.png", "001.png", "003.png", "004.png", "005.png"):  # 005 is damaged
        (few / name).write_bytes((pictures / name).read_bytes())
    ended = in_process(*words(checkpoint, few, tmp_path / "whole"))
    assert ended.returncode == 0, ended.stderr
    undisturbed = Run.open(tmp_path / "whole")

    command = [sys.executable, "-c", MORTAL, str(checkpoint), str(few), str(tmp_path / "killed"), str(PICTURE)]
    mortal = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert mortal.returncode == 0, mortal.stderr
    moments = int(mortal.stdout)
    assert moments >= 9  # run.json twice and at the end, three parts, events, summary, spectrum, overlays
    for number in range(1, moments + 1):
        assert_same(Run.open(tmp_path / "killed" / str(number)), undisturbed)
    assert not [path for path in (tmp_path / "killed").rglob("*") if ".tmp-" in path.name]
