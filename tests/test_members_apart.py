"""The models of a training run, diagnosed and patched together from the command line: each stands for itself."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import pytest
from command_line import in_process

import sinklab
from sinklab.errors import InputError

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


def test_models_that_are_not_finished_are_named_and_those_that_are_diagnosed(trained: Path, tmp_path: Path) -> None:
    run = copytree(trained, tmp_path / "run")
    for name in ("model.safetensors", "model.json", "evaluation.json"):
        (run / "training/seed-1/nop" / name).unlink()
    done = in_process("diagnose", run, *MASS)
    assert done.returncode == 0, done.stderr
    assert "not finished, and so left out: seed-1/nop. The training's own command with --resume" in done.stderr
    assert in_process("patch", run, *ANY).stderr.count("not diagnosed, and so not patched: seed-1/nop.") == 1
    with pytest.raises(InputError, match=r"trains 2 models, 1 so far: name the folder"):
        sinklab.load(str(run))
    done = in_process("diagnose", run / "training/seed-1/nop", *MASS)
    assert done.returncode == 2 and "a training that is not finished, it has no model.safetensors yet" in done.stderr


def test_models_without_a_diagnosis_are_diagnosed_beside_those_that_have_one(trained: Path, tmp_path: Path) -> None:
    run = copytree(trained, tmp_path / "run")
    member = run / "training/seed-1/nop"
    member.rename(tmp_path / "away")
    assert in_process("diagnose", run, *MASS).returncode == 0
    (tmp_path / "away").rename(member)
    before = (run / "diagnosed/seed-0/nop/run.json").read_bytes()
    done = in_process("diagnose", run, *MASS)
    assert done.returncode == 0, done.stderr
    assert f"diagnosed already, and left as they are: {run}/diagnosed/seed-0/nop; --resume" in done.stderr
    assert (run / "diagnosed/seed-1/nop/summary.json").is_file()
    assert (run / "diagnosed/seed-0/nop/run.json").read_bytes() == before
    done = in_process("diagnose", run, *MASS)  # now there is nothing left to do
    assert done.returncode == 2 and "holds a run already: --resume goes on with it" in done.stderr


def test_each_of_several_models_is_named_before_its_progress_and_its_notes(trained: Path, tmp_path: Path) -> None:
    run = copytree(trained, tmp_path / "run")
    for command in (("diagnose", run, *MASS), ("patch", run, *ANY)):
        lines = in_process(*command).stderr.splitlines()
        heads = [place for place, line in enumerate(lines) if line.startswith("sinklab: model ")]
        assert [lines[place].split(": ")[1] for place in heads] == ["model 1 of 2", "model 2 of 2"]
        assert heads[0] == 0 and all(f"seed-{seed}/nop" in lines[place] for seed, place in enumerate(heads))
        assert any(line.startswith(("sequences", "passes")) for line in lines[heads[0] : heads[1]])


def test_a_member_without_its_json_says_what_is_missing_and_what_makes_it_again(trained: Path, tmp_path: Path) -> None:
    run = copytree(trained, tmp_path / "run")
    member = run / "training/seed-0/nop"
    (member / "model.json").unlink()
    for named in (run, member, member / "model.safetensors"):
        done = in_process("diagnose", named, *MASS, "--overwrite")
        assert "model.json, which says what they are of, is missing" in done.stderr and "--resume" in done.stderr
        assert "Images come after" not in done.stderr and "put a file" not in done.stderr


def test_the_state_of_a_training_points_to_the_model_beside_it(trained: Path) -> None:
    member = trained / "training/seed-0/nop"
    done = in_process("diagnose", member / "checkpoint.safetensors")
    assert done.returncode == 2 and "sidecar" not in done.stderr
    assert f"not a model: name {member / 'model.safetensors'}, or {member}." in done.stderr
