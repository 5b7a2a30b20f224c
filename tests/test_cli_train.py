"""`sinklab train` as it is typed: what it writes, how it goes on, and how it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from command_line import environment, in_process

from sinklab.training.loop import read_metrics
from sinklab.training.toy import load_toy

SETTINGS = ("tokens=6", "dim=8", "steps=4", "batch=4", "evaluation_batches=2", "evaluation_size=8")
SMALL = [word for change in SETTINGS for word in ("--set", change)]


def test_a_training_leaves_models_metrics_and_a_table_of_all_seeds(tmp_path: Path) -> None:
    ended = in_process("train", "nop", *SMALL, "--seeds", "0-1", "--device", "cpu", "-o", tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(tmp_path / "run/report.html") and (tmp_path / "run/report.html").is_file()
    assert set(pd.read_csv(tmp_path / "run/tables/training.csv")["seed"]) == {0, 1}
    assert "2/2 seed-1/nop  step 4/4  loss" in ended.stderr and "sink" in ended.stderr
    held = load_toy(tmp_path / "run/training/seed-1/nop/model.safetensors")
    assert (held.arm, held.config.steps, held.config.tokens) == ("nop", 4, 6)
    config = json.loads((tmp_path / "run/run.json").read_text())
    assert config["status"] == "complete" and config["command"][0] == "sinklab"
    assert config["final"]["seed-0/nop"]["step"] == 4


def test_a_pathway_run_has_its_three_arms(tmp_path: Path) -> None:
    ended = in_process("train", "pathway", *SMALL, "--set", "hidden=16", "--device", "cpu", "-o", tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    assert set(pd.read_csv(tmp_path / "run/tables/training.csv")["arm"]) == {"attention", "global", "global+penalty"}


def test_a_sweep_trains_one_model_a_point(tmp_path: Path) -> None:
    words = ["--sweep", "damping", "--set", "dampings=0,0.5", "--device", "cpu", "-o", tmp_path / "run"]
    ended = in_process("train", "nop-branch", *SMALL, *words)
    assert ended.returncode == 0, ended.stderr
    for arm, damping in (("gamma=0", 0), ("gamma=0.5", 0.5)):
        held = load_toy(tmp_path / "run/training/seed-0" / arm / "model.safetensors")
        assert held.config.damping == damping  # type: ignore[attr-defined]


def test_a_trainings_report_can_be_drawn_again(tmp_path: Path) -> None:
    assert in_process("train", "nop", *SMALL, "--device", "cpu", "-o", tmp_path / "run").returncode == 0
    before = (tmp_path / "run/report.html").read_bytes()
    (tmp_path / "run/report.html").unlink()
    ended = in_process("report", tmp_path / "run")
    assert ended.returncode == 0 and ended.stdout.strip() == str(tmp_path / "run/report.html"), ended.stderr
    assert (tmp_path / "run/report.html").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sorting"], "sorting"),
        (["nop", "--config", "huge"], "nop has no variant 'huge'; it has paper, laptop."),
        (["nop-branch", "--sweep", "frequency", "--set", "steps=5"], "every point takes frequency_steps"),
        (["nop", "--set", "stepz=3"], "nop has nothing called 'stepz' to set"),
        (["nop", "--set", "steps=x"], "steps is of type int, which 'x' is not."),
        (["nop", "--seeds", "a"], "--seeds is like 0-4 or 0,2,5, not 'a'."),
        (["nop", "--seeds", "3-1"], "--seeds is like 0-4 or 0,2,5, not '3-1'."),
        (["nop", "--sweep", "damping"], "--sweep is frequency or damping, of nop-branch"),
        (["nop", "--resume", "--overwrite"], "give one of them"),
        (["nop", "--device", "abacus"], "--device is auto, cpu"),
        (["nop", "--set", "dim=1"], "Tokens have two channels at least"),
        (["nop", "--set", "lr=inf"], "lr is a finite number, not inf."),
        (["nop", "--set", "weight_decay=nan"], "weight_decay is a finite number, not nan."),
        (["nop-branch", "--set", "threshold=nan"], "threshold is a finite number, not nan."),
        (["nop-branch", "--set", "frequencies=0.1,nan"], "frequencies is a finite number, not nan."),
        (["pathway", "--set", "penalty=nan"], "penalty is a finite number, not nan."),
        (["nop", "--set", "batch=99999999999999999999"], "batch is at most 1,048,576; 99999999999999999999 was given."),
        (["nop", "--set", "steps=99999999999999999999"], "steps is at most 1,000,000,000"),
        (["broadcast", "--set", "layers=5000"], "layers is at most 1,000; 5000 was given."),
        (["nop", "--seeds", "99999999999999999999"], "A seed is a number from 0 to 2147483647"),
        (["nop", "--seeds", "0-2147483647"], "are 2,147,483,648 seeds; the most is 10,000."),
        (["nop", "--seeds", "1,1"], "Seeds are different numbers"),
        (["nop-branch", "--sweep", "damping", "--set", "dampings=0.5,0.50"], "dampings are different numbers"),
        (["nop-branch", "--sweep", "frequency", "--set", "frequencies=0.1,0.1"], "frequencies are different numbers"),
        (["vit", "--set", "batch=99999999999999999999"], "batch is at most 1,048,576"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence_and_no_folder(
    tmp_path: Path, words: list[str], sentence: str
) -> None:
    small = [] if words[0] == "vit" else SMALL
    ended = in_process("train", words[0], *small, *words[1:], "-o", tmp_path / "run")
    assert ended.returncode == 2
    assert sentence in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_refused_name_is_answered_before_torch_is_loaded() -> None:
    program = "import sys; sys.argv = ['sinklab', 'train', 'nop', '--config', 'huge']\nfrom sinklab.cli import main\n"
    program += (
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 2\nassert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_a_killed_training_says_how_to_go_on_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    words = ["train", "nop", *SMALL, "--set", "steps=100000", "--set", "record_every=1", "--device", "cpu"]
    command = [sys.executable, "-m", "sinklab", *words, "-o", str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        process.stderr.readline()  # the first line of progress: training is on its way
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 130
    assert "stopped. What was trained is kept" in said and "--resume" in said
    folder = tmp_path / "run/training/seed-0/nop"
    done = read_metrics(folder / "metrics.jsonl")[-1]["step"]
    assert 0 < done < 100_000 and (folder / "checkpoint.safetensors").is_file()
    assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize("members", [7, [7], {"a": 1}, [["a"]], "seed-0/nop"])
def test_a_run_that_does_not_name_its_models_is_a_sentence_to_every_command(tmp_path: Path, members: object) -> None:
    about = {"schema_version": 1, "sinklab": "0", "purpose": "training", "status": "complete", "members": members}
    (tmp_path / "run.json").write_text(json.dumps(about))
    for command in ("diagnose", "patch", "compare", "report", "evaluate"):
        ended = in_process(command, tmp_path)
        assert ended.returncode == 2 and "sinklab: " in ended.stderr, ended.stderr


def test_another_table_is_no_table_of_a_controlled_task(tmp_path: Path) -> None:
    assert in_process("train", "nop", *SMALL, "--device", "cpu", "-o", tmp_path / "run").returncode == 0
    (tmp_path / "run/tables/training.csv").write_text("a,b\n1,2\n")
    for command in ("compare", "report"):
        ended = in_process(command, tmp_path / "run")
        assert ended.returncode == 2 and "tables/training.csv" in ended.stderr, ended.stderr


def test_overwriting_a_training_removes_what_its_old_models_were_diagnosed_as(tmp_path: Path) -> None:
    words = ["train", "nop", *SMALL, "--device", "cpu", "-o", tmp_path / "run"]
    in_process(*words)
    (tmp_path / "run/diagnosed/seed-0").mkdir(parents=True)
    (tmp_path / "run/mine.txt").write_text("the user's")
    assert in_process(*words, "--overwrite").returncode == 0
    assert not (tmp_path / "run/diagnosed").exists() and (tmp_path / "run/mine.txt").is_file()


def test_one_of_something_is_not_called_many(tmp_path: Path) -> None:
    ones = [
        word for name in ("steps", "batch", "evaluation_batches", "evaluation_size") for word in ("--set", f"{name}=1")
    ]
    in_process("train", "nop", *SMALL, *ones, "--device", "cpu", "-o", tmp_path / "run")
    page = (tmp_path / "run/report.html").read_text()
    assert "1 step of 1 fresh sequence " in page and "1 batch of 1 sequence " in page
    for many in ("steps", "batches", "sequences", "fresh sequences"):
        assert f" 1 {many}" not in page and f">1 {many}" not in page


@pytest.mark.parametrize(("task", "option"), [("nop", "evaluation_size"), ("lm", "context"), ("vit", "--workers")])
def test_out_of_memory_suggests_what_a_training_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: str, option: str
) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("sinklab.device.pick_device", too_large)
    ended = in_process("train", task, "-o", tmp_path / "run")
    assert ended.returncode == 2 and "ran out of memory: use a smaller --set batch=…" in ended.stderr
    assert option in ended.stderr and "--batch-size" not in ended.stderr and "--size" not in ended.stderr
