"""The models of a training run, diagnosed and patched together from the command line: each stands for itself."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import pytest
from command_line import in_process

ANY = ("--bootstrap", 20, "--min-events", 2, "--class", "nop,broadcast,intermediate", "--no-report")
MASS = ("--limit", 64, "--rule", "mass", "--mass", "0.001", "--no-report")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("members") / "run"
    done = in_process("train", "nop", "-o", run, "--seeds", "0-1", "--set", "steps=20")
    assert done.returncode == 0, done.stderr
    return run


def spoil(run: Path, seed: int) -> None:
    about = run / f"training/seed-{seed}/nop/model.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"seed": None}))


def test_a_model_that_cannot_be_read_does_not_stop_the_others(trained: Path, tmp_path: Path) -> None:
    run = copytree(trained, tmp_path / "run")
    spoil(run, 0)
    done = in_process("diagnose", run, *MASS)
    assert done.returncode == 0 and "its seed is null" in done.stderr
    assert (run / "diagnosed/seed-1/nop/summary.json").is_file() and not (run / "diagnosed/seed-0").exists()
    spoil(run, 1)
    assert in_process("diagnose", run, *MASS, "--overwrite").returncode == 2  # none is left


def test_models_diagnosed_into_a_folder_of_their_own_are_patched_there(trained: Path, tmp_path: Path) -> None:
    done = in_process("diagnose", trained, "-o", tmp_path / "own", *MASS)
    assert done.returncode == 0, done.stderr
    done = in_process("patch", tmp_path / "own", *ANY)
    assert done.returncode == 0, done.stderr
    for seed in (0, 1):
        assert (tmp_path / f"own/seed-{seed}/nop/tables/effects.csv").is_file()
    lines = [line for line in done.stderr.splitlines() if line.startswith(("passes", "sequences"))]
    assert lines and all(line.startswith("passes") for line in lines)  # a sequence may be run twice
    refused = in_process("patch", tmp_path)  # runs of which no part of the path is a model's name
    assert refused.returncode == 2 and str(tmp_path) in refused.stderr
