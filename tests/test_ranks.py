"""One process or two, one batch size or another, workers or none: the same table, row for row."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from command_line import PICTURE, environment, in_process, sinklab, write_checkpoint, write_pictures

from sinklab.diagnosis import open_run

COUNTS = ["sink_index", "queries", "routed_count", "sink_kind", "finite"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_checkpoint(folder)
    write_pictures(folder / "pictures", 11)
    (folder / "pictures" / "005.png").write_bytes(b"not a picture")
    return folder


def words(place: Path, name: str, *more: str) -> list[str]:
    common = ["--size", str(PICTURE), "--no-report", "--device", "cpu"]
    return [
        "diagnose",
        str(place / "tiny.safetensors"),
        str(place / "pictures"),
        "-o",
        str(place / name),
        *common,
        *more,
    ]


def torchrun(*command: str) -> subprocess.CompletedProcess[str]:
    """Two real processes, joined by gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    return subprocess.run(
        [*start, "-m", "sinklab", *command], capture_output=True, text=True, timeout=180, env=environment()
    )


@pytest.fixture(scope="module")
def alone(place: Path) -> pd.DataFrame:
    assert sinklab(*words(place, "alone", "--batch-size", "2")).returncode == 0
    return open_run(place / "alone").heads


def test_two_processes_give_the_table_of_one(place: Path, alone: pd.DataFrame) -> None:
    done = torchrun(*words(place, "two", "--batch-size", "2"))
    assert done.returncode == 0, done.stderr
    run = open_run(place / "two")
    pd.testing.assert_frame_equal(run.heads, alone, check_exact=True)
    pd.testing.assert_frame_equal(run.sinks, open_run(place / "alone").sinks, check_exact=True)
    assert {path.name[:8] for path in (place / "two" / "heads").iterdir()} == {"part-000", "part-001"}
    assert [image for image, _ in run.skipped()] == ["005.png"]


def test_a_refusal_reaches_every_process(place: Path, alone: pd.DataFrame) -> None:
    done = torchrun(*words(place, "alone", "--batch-size", "2"))
    assert done.returncode != 0
    assert done.stderr.count("holds a run already") == 1


def test_what_is_wrong_on_every_process_is_said_once(place: Path) -> None:
    command = words(place, "none")
    command[1] = "nosuchmodel"
    done = torchrun(*command)
    assert done.returncode != 0
    assert done.stderr.count("sinklab: ") == 1 and "nosuchmodel" in done.stderr


def test_workers_change_nothing(place: Path, alone: pd.DataFrame) -> None:
    assert sinklab(*words(place, "workers", "--batch-size", "2", "--workers", "2")).returncode == 0
    pd.testing.assert_frame_equal(open_run(place / "workers").heads, alone, check_exact=True)


def test_the_batch_size_changes_rounding_only(place: Path, alone: pd.DataFrame) -> None:
    assert in_process(*words(place, "seven", "--batch-size", "7")).returncode == 0
    found = open_run(place / "seven").heads
    pd.testing.assert_frame_equal(found[COUNTS], alone[COUNTS])
    pd.testing.assert_frame_equal(found, alone, rtol=1e-4, atol=1e-6)


def test_the_order_of_images_changes_rounding_only(place: Path, alone: pd.DataFrame) -> None:
    listed = sorted((place / "pictures").iterdir(), reverse=True)
    (place / "backwards.txt").write_text("\n".join(f"pictures/{path.name}" for path in listed))
    command = words(place, "backwards", "--batch-size", "2")
    command[2] = f"@{place / 'backwards.txt'}"
    assert in_process(*command).returncode == 0
    found = open_run(place / "backwards").heads
    found["image"] = found["image"].str.removeprefix("pictures/")
    order = ["image", "layer", "head"]
    found, expected = (t.sort_values(order, ignore_index=True).drop(columns="image_index") for t in (found, alone))
    pd.testing.assert_frame_equal(found, expected, rtol=1e-4, atol=1e-6)
