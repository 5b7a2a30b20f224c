"""`sinklab train lm`, `evaluate` and `compare` as they are typed: what they write and how they refuse."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from command_line import environment, in_process

from sinklab.models.lm_file import read_lm
from sinklab.training.loop import read_metrics

SETTINGS = ("steps=4", "batch=4", "context=8", "stride=4", "model.layers=1", "model.hidden=8", "sample=5")
SMALL = [word for change in SETTINGS for word in ("--set", change)] + ["--device", "cpu"]
CONTENT = b"the phases of many clocks meet, and one by one they agree. " * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "clocks.txt").write_bytes(CONTENT)
    return tmp_path / "clocks.txt"


def test_a_training_leaves_models_metrics_a_sample_and_a_table(tmp_path: Path, text: Path) -> None:
    words = ["--config", "phase-tiny,transformer-tiny", "--text", text, "--seeds", "0-1", "-o", tmp_path / "run"]
    ended = in_process("train", "lm", *SMALL, *words)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(tmp_path / "run/report.html")
    table = pd.read_csv(tmp_path / "run/tables/training.csv")
    assert list(zip(table["seed"], table["config"], strict=True)) == [
        *((0, "phase-tiny"), (0, "transformer-tiny"), (1, "phase-tiny"), (1, "transformer-tiny"))
    ]
    assert "4/4 seed-1/transformer-tiny  step 4/4  loss" in ended.stderr and "bits a byte  validation" in ended.stderr
    folder = tmp_path / "run/training/seed-1/phase-tiny"
    held = read_lm(folder / "model.safetensors")
    assert held.context == 8 and held.saved["text"]["name"] == "clocks.txt"
    assert len((folder / "sample.txt").read_bytes()) == 8 + 5
    config = json.loads((tmp_path / "run/run.json").read_text())
    assert (config["status"], config["purpose"]) == ("complete", "training")
    assert config["timings"]["seed-0/phase-tiny"]["train_seconds"] > 0


def test_evaluate_repeats_the_trainings_own_numbers_whatever_the_batch_size(tmp_path: Path, text: Path) -> None:
    in_process("train", "lm", *SMALL, "--text", text, "-o", tmp_path / "run")
    ended = in_process("evaluate", tmp_path / "run", "--text", text, "--batch-size", 3, "-o", tmp_path / "found.csv")
    assert ended.returncode == 0, ended.stderr
    found = pd.read_csv(tmp_path / "found.csv").set_index("split")
    trained = pd.read_csv(tmp_path / "run/tables/training.csv").iloc[0]
    for split in ("validation", "test"):
        assert found.loc[split, "bpc"] == pytest.approx(trained[f"{split}_bpc"], rel=1e-6)
        assert found.loc[split, "bytes"] == trained[f"{split}_bytes"]
    assert found["same_text"].all() and set(found["stride"]) == {4} and set(found["context"]) == {8}
    lines = ended.stdout.splitlines()
    assert lines[0].split("\t") == ["member", "split", "bpc", "bytes", "context", "stride"] and len(lines) == 3


def test_evaluate_reads_one_model_on_another_text_by_another_window(tmp_path: Path, text: Path) -> None:
    in_process("train", "lm", *SMALL, "--text", text, "-o", tmp_path / "run")
    (tmp_path / "other.txt").write_bytes(b"one by one the clocks agree. " * 30)
    model = tmp_path / "run/training/seed-0/phase-tiny/model.safetensors"
    words = ["--text", tmp_path / "other.txt", "--splits", "test", "--context", 16, "--stride", 2, "--device", "cpu"]
    ended = in_process("evaluate", model, *words)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[1].split("\t")[3:] == ["43", "16", "2"]
    assert "note: model was not trained on other.txt with these splits" in ended.stderr


def test_evaluate_takes_a_members_folder_and_a_shipped_model(tmp_path: Path, text: Path) -> None:
    in_process("train", "lm", *SMALL, "--text", text, "-o", tmp_path / "run")
    words = ["--text", text, "--splits", "test", "--device", "cpu"]
    ended = in_process("evaluate", tmp_path / "run/training/seed-0/phase-tiny", *words)
    assert ended.returncode == 0 and "phase-tiny" in ended.stdout and "not trained" not in ended.stderr, ended.stderr
    ended = in_process("evaluate", "lm:phase-tiny", *words, "--context", 16, "--stride", 8)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[1].startswith("lm:phase-tiny")
    assert "note: lm:phase-tiny was not trained on clocks.txt" in ended.stderr
    ended = in_process("evaluate", "lm:phase-huge", *words)
    assert ended.returncode == 2 and "phase-tiny, transformer-tiny come with sinklab" in ended.stderr


def test_a_model_is_shown_no_text_that_it_learned_from_though_that_is_short_and_renamed(
    tmp_path: Path, text: Path
) -> None:
    in_process("train", "lm", *SMALL, "--text", text, "-o", tmp_path / "run")
    for name, part in (("clocks.txt", "validation"), ("renamed.txt", "validation"), ("other.txt", "text")):
        path = text.rename(tmp_path / name) if name == "renamed.txt" else tmp_path / name
        if name == "other.txt":
            path.write_bytes(CONTENT[:-1])
        words = ["--text", path, "-o", tmp_path / name[:3], "--no-report", "--device", "cpu"]
        ended = in_process("diagnose", tmp_path / "run/training/seed-0/phase-tiny", *words)
        assert ended.returncode == 0, ended.stderr
        images = pd.read_parquet(tmp_path / name[:3] / "heads")["image"]
        assert {image.split("/")[0] for image in images} == {part}


def test_compare_prints_every_seeds_summary_and_paired_differences(tmp_path: Path, text: Path) -> None:
    for name in ("phase-tiny", "transformer-tiny"):
        words = ["--config", name, "--text", text, "--seeds", "0,2", "-o", tmp_path / name]
        assert in_process("train", "lm", *SMALL, *words).returncode == 0
    runs = [tmp_path / "phase-tiny", tmp_path / "transformer-tiny"]
    ended = in_process("compare", *runs, "-o", tmp_path / "all.csv")
    assert ended.returncode == 0, ended.stderr
    values = pd.read_csv(tmp_path / "all.csv")
    assert len(values) == 2 * 2 * 2
    tests = values[values["measure"] == "test_bpc"].pivot(index="seed", columns="arm", values="value")
    gap = (tests["transformer-tiny"] - tests["phase-tiny"]).mean()
    said = [line.split("\t") for line in ended.stdout.splitlines()]
    (row,) = [line for line in said if line[0] == "test_bpc"]
    assert row[2:4] == ["transformer-tiny", "2"] and row[5] == f"{gap:.4f}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--config", "phase-2m"], "There is no language model 'phase-2m'"),
        (["--config", "phase-tiny+no-sun"], "phase-tiny has no ablation 'no-sun'"),
        (["--set", "stepz=3"], "phase-tiny has nothing called 'stepz' to set"),
        (["--set", "stride=9"], "stride is at most the context"),
        (["--seeds", "a"], "--seeds is like 0-4 or 0,2,5, not 'a'."),
        (["--split", "1,2"], "--split is three positive shares like 90,5,5, not '1,2'."),
        (["--split", "nan,nan,nan"], "--split is three positive shares like 90,5,5, not 'nan,nan,nan'."),
        (["--split", "inf,1,1"], "--split is three positive shares"),
        (["--set", "lr=inf"], "lr is a finite number, not inf."),
        (["--set", "betas=0.9,nan"], "betas is a finite number, not nan."),
        (["--set", "model.rope_base=nan"], "rope_base is a finite number, not nan."),
        (["--set", "model.hidden=99999999999999999999"], "hidden is at most 1,048,576"),
        (["--seeds", "99999999999999999999"], "A seed is a number from 0 to 2147483647"),
        (["--text", ""], "A text has a name that is not empty"),
        (["--resume", "--overwrite"], "give one of them"),
        (["--device", "abacus"], "--device is auto, cpu"),
        (["--text", "nowhere.txt"], "There is no text nowhere.txt"),
        (["--set", "context=200"], "The validation split of clocks.txt has 59 bytes"),
        (["--text", "enwik8=clocks.txt"], "There is no text clocks.txt"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence_and_no_folder(
    tmp_path: Path, text: Path, words: list[str], sentence: str
) -> None:
    ended = in_process("train", "lm", *SMALL, "--text", text, "-o", tmp_path / "run", *words)
    assert ended.returncode == 2
    assert sentence in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


def test_evaluate_and_compare_refuse_with_a_sentence(tmp_path: Path, text: Path) -> None:
    in_process("train", "lm", *SMALL, "--text", text, "-o", tmp_path / "run")
    in_process("train", "nop", "--set", "steps=2", "--set", "evaluation_batches=1", "-o", tmp_path / "nop")
    (tmp_path / "strange.txt").write_bytes(CONTENT + b"!")
    (tmp_path / "nothing.txt").write_bytes(b"")
    for words, sentence in (
        (["evaluate", tmp_path / "nothing"], "There is no run folder"),
        (["evaluate", tmp_path / "nop"], "is of kind 'nop'"),
        (["evaluate", tmp_path / "run", "--member", "seed-9/x"], "has no 'seed-9/x'; it has seed-0/phase-tiny"),
        (
            ["evaluate", tmp_path / "run", "--text", tmp_path / "strange.txt"],
            "no symbol for (33 “!”; the first is byte 1,180 of the text)",
        ),
        (["evaluate", tmp_path / "run", "--text", text, "--splits", "dev"], "there is no split 'dev'"),
        (["evaluate", tmp_path / "run", "--text", text, "--stride", "9"], "between 1 and the context, 8; 9"),
        (["compare", tmp_path / "run", tmp_path / "nop"], "Runs of one kind"),
        (["compare", tmp_path / "run", "-o", "x.txt"], "--output is a .csv file"),
        (["compare", tmp_path / "run", "-o", tmp_path / "new/x.csv"], f"there is no folder {tmp_path / 'new'}."),
        (["evaluate", tmp_path / "run", "-o", tmp_path / "new/x.csv"], f"there is no folder {tmp_path / 'new'}."),
        (["evaluate", tmp_path / "run", "--text", ""], "A text has a name that is not empty"),
        (
            ["evaluate", tmp_path / "run", "--text", tmp_path / "nothing.txt"],
            "is empty: there is nothing in it to read",
        ),
    ):
        ended = in_process(*words)
        assert ended.returncode == 2 and sentence in ended.stderr, ended.stderr
    assert not (tmp_path / "new").exists()


def test_evaluate_and_compare_name_what_they_leave_out_and_say_nothing_twice(tmp_path: Path, text: Path) -> None:
    in_process("train", "lm", *SMALL, "--text", text, "--seeds", "0,1", "-o", tmp_path / "run")
    lost = tmp_path / "run/training/seed-1/phase-tiny/model.safetensors"
    lost.write_bytes(lost.read_bytes()[:50])
    ended = in_process("evaluate", tmp_path / "run", "--text", text, "--splits", "test,test", "--device", "cpu")
    assert ended.returncode == 0, ended.stderr
    assert "left out, for their weights are not there or not whole: seed-1/phase-tiny." in ended.stderr
    assert [line.split("\t")[:2] for line in ended.stdout.splitlines()[1:]] == [["seed-0/phase-tiny", "test"]]
    ended = in_process("evaluate", tmp_path / "run", "--text", text, "--member", "seed-1/phase-tiny")
    assert ended.returncode == 2 and "The weights of seed-1/phase-tiny in the run" in ended.stderr
    table = tmp_path / "run/tables/training.csv"
    table.write_text("\n".join(table.read_text().splitlines()[:2]) + "\n")
    ended = in_process("compare", tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    assert f"there are no numbers of them: {tmp_path / 'run'}/seed-1/phase-tiny." in ended.stderr


@pytest.mark.parametrize("words", ["a,b\n", "a,b\n1,2\n", "config,seed,lr,validation_bpc,test_bpc\nx,0,high,1,1\n", ""])
def test_another_table_in_the_place_of_a_trainings_is_a_sentence(tmp_path: Path, text: Path, words: str) -> None:
    in_process("train", "lm", *SMALL, "--text", text, "-o", tmp_path / "run")
    (tmp_path / "run/tables/training.csv").write_text(words)
    for command in ("compare", "report"):
        ended = in_process(command, tmp_path / "run")
        assert ended.returncode == 2, ended.stdout
        assert "tables/training.csv" in ended.stderr and "Traceback" not in ended.stderr


def test_a_refused_name_is_answered_before_torch_is_loaded() -> None:
    program = "import sys; sys.argv = ['sinklab', 'train', 'lm', '--config', 'huge']\nfrom sinklab.cli import main\n"
    program += (
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 2\nassert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_a_killed_training_goes_on_where_it_was(tmp_path: Path, text: Path) -> None:
    words = ["train", "lm", *SMALL, "--set", "steps=3000", "--set", "record_every=1", "--text", str(text)]
    command = [sys.executable, "-m", "sinklab", *words, "-o", str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        process.stderr.readline()  # the first line of progress: training is on its way
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 130, said
    assert "stopped. What was trained is kept" in said and "--resume" in said
    folder = tmp_path / "run/training/seed-0/phase-tiny"
    done = read_metrics(folder / "metrics.jsonl")[-1]["step"]
    assert 0 < done < 3000 and (folder / "checkpoint.safetensors").is_file()
    assert not (folder / "model.safetensors").exists()
