"""However the work is shared out (ranks, workers, batches, order), the table is the same."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import PICTURE, environment, in_process, sinklab, tiny_state, write_checkpoint, write_pictures

from sinklab.run import Run

IMAGES = 11
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), tiny_state(depth=3), depth=3)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_pictures(tmp_path_factory.mktemp("pictures"), IMAGES)
    (folder / "004.png").write_bytes(b"not a picture")
    return folder


def words(model: Path, run: Path, *sources: Path, batch_size: int = 2) -> list[str]:
    options = ("--size", PICTURE, "--batch-size", batch_size, "--device", "cpu", "--no-report")
    return [str(word) for word in ("diagnose", model, *sources, "-o", run, *options)]


def on_two_ranks(command: list[str]) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", *TORCHRUN, "--master-port", str(port), "-m", "sinklab", *command]
    return subprocess.run(launch, env=environment(), capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def alone(model: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The table of one process; one thread, as each rank has."""
    run = tmp_path_factory.mktemp("alone") / "run"
    ended = sinklab(*words(model, run, pictures))
    assert ended.returncode == 0, ended.stderr
    return Run.open(run)


def test_two_ranks_write_the_table_of_one_row_for_row(model: Path, pictures: Path, alone: Run, tmp_path: Path) -> None:
    ended = on_two_ranks(words(model, tmp_path / "run", pictures))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{tmp_path / 'run' / 'summary.json'}\n"  # once, from rank 0
    run = Run.open(tmp_path / "run")
    assert {path.name[:8] for path in run.path.glob("heads/part-*")} == {"part-000", "part-001"}
    pd.testing.assert_frame_equal(run.heads, alone.heads, check_exact=True)
    pd.testing.assert_frame_equal(run.sinks, alone.sinks, check_exact=True)
    assert run.summary == alone.summary
    assert run.config["images"]["skipped"] == alone.config["images"]["skipped"] != []
    assert run.config["fingerprint"] == alone.config["fingerprint"]
    assert (run.config["ranks"], alone.config["ranks"]) == (2, 1)

    # what one process began, two finish, and a refusal of rank 0 ends both at once
    started = time.monotonic()
    refused = on_two_ranks(words(model, tmp_path / "run", pictures))
    assert refused.returncode != 0
    assert time.monotonic() - started < 60
    assert "--resume goes on with it" in refused.stderr
    assert "holds a run already" in refused.stderr


def test_two_ranks_finish_what_one_process_began(model: Path, pictures: Path, alone: Run, tmp_path: Path) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(alone.path, run)
    (part,) = Run.open(run).parts()
    for path in run.glob("heads/part-*"):
        path.unlink()
    with Run.create(run, settings=alone.config["settings"], resume=True) as begun:
        begun.update(status="running")
        heads = alone.heads
        with begun.part_writer() as parts:
            for batch in (0, 3):
                rows = heads[heads["image_index"] // 2 == batch]
                parts.add(batch, rows, [(image, why) for number, image, why in part.skipped if number == batch])
    ended = on_two_ranks([*words(model, run, pictures), "--resume"])
    assert ended.returncode == 0, ended.stderr
    pd.testing.assert_frame_equal(Run.open(run).heads, alone.heads, check_exact=True)


def compare(run: Run, alone: Run, *, exact: bool) -> None:
    mine, theirs = run.heads, alone.heads
    if exact:
        pd.testing.assert_frame_equal(mine, theirs, check_exact=True)
        return
    whole = theirs.select_dtypes(exclude="floating").columns
    pd.testing.assert_frame_equal(mine[whole], theirs[whole])
    for column in theirs.select_dtypes("floating"):
        np.testing.assert_allclose(mine[column], theirs[column], rtol=1e-4, atol=1e-7, err_msg=column)


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_the_table_does_not_hang_on_the_batch_size(
    batch_size: int, model: Path, pictures: Path, alone: Run, tmp_path: Path
) -> None:
    ended = in_process(*words(model, tmp_path / "run", pictures, batch_size=batch_size))
    assert ended.returncode == 0, ended.stderr
    compare(Run.open(tmp_path / "run"), alone, exact=False)


def test_the_table_does_not_hang_on_the_workers(model: Path, pictures: Path, alone: Run, tmp_path: Path) -> None:
    ended = sinklab(*words(model, tmp_path / "run", pictures), "--workers", "2")
    assert ended.returncode == 0, ended.stderr
    compare(Run.open(tmp_path / "run"), alone, exact=True)


def test_the_rows_of_an_image_do_not_hang_on_its_place_in_the_list(
    model: Path, pictures: Path, alone: Run, tmp_path: Path
) -> None:
    (tmp_path / "reversed.txt").write_text("\n".join(str(path) for path in sorted(pictures.iterdir(), reverse=True)))
    ended = in_process(*words(model, tmp_path / "run", f"@{tmp_path / 'reversed.txt'}"))  # type: ignore[arg-type]
    assert ended.returncode == 0, ended.stderr
    mine = Run.open(tmp_path / "run").heads
    assert mine["image"].map(lambda image: Path(image).name).iloc[0] == f"{IMAGES - 1:03d}.png"
    mine["image"] = mine["image"].map(lambda image: Path(image).name)
    mine = mine.sort_values(["image", "layer", "head"], ignore_index=True).drop(columns="image_index")
    theirs = alone.heads.drop(columns="image_index")
    whole = theirs.select_dtypes(exclude=["floating"]).columns.drop("image")
    assert mine["image"].tolist() == theirs["image"].tolist()
    pd.testing.assert_frame_equal(mine[whole], theirs[whole])
    for column in theirs.select_dtypes("floating"):
        np.testing.assert_allclose(mine[column], theirs[column], rtol=1e-4, atol=1e-7, err_msg=column)
