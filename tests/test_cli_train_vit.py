"""`sinklab train vit` as it is typed: what it writes, how it goes on, and how it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from command_line import environment, in_process, write_pictures

from sinklab.models.attention import KERNELS
from sinklab.models.vit_file import read_vit
from sinklab.training.loop import read_metrics
from sinklab.training.vit_config import VARIANTS

SETTINGS = (
    *("image=16", "dim=12", "depth=2", "heads=2", "views=2", "projector_hidden=8", "projector_dim=4", "slices=8"),
    *("batch=4", "epochs=1", "warmup_epochs=0.5", "procedural=8", "validation_images=4", "score_images=2"),
    *("score_every=2", "record_every=1"),
)
SMALL = ["vit", "--device", "cpu", *(word for change in SETTINGS for word in ("--set", change))]


def test_every_named_variant_trains_and_leaves_a_model_and_its_sink_counts(tmp_path: Path) -> None:
    names = [word for variant in VARIANTS for word in ("--config", f"{variant}-tiny")]
    ended = in_process("train", *SMALL, *names, "-o", tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(tmp_path / "run/report.html") and os.path.isfile(ended.stdout.strip())
    table = pd.read_csv(tmp_path / "run/tables/training.csv")
    assert set(table["arm"]) == {f"{variant}-tiny" for variant in VARIANTS}
    for variant in VARIANTS:
        member = tmp_path / "run/training/seed-0" / f"{variant}-tiny"
        model, saved = read_vit(member / "model.safetensors")
        assert (saved["arm"], model.shape.registers) == (variant, 4 if variant.endswith("registers") else 0)
        last = read_metrics(member / "metrics.jsonl")[-1]
        assert {"relaxed_nop", "strict_broadcast", "max_inflow_1", "common_mode_1"} <= last.keys()


def test_kernels_without_a_softmax_call_train_without_sink_counts_and_say_so_once(tmp_path: Path) -> None:
    kernels = [kernel for kernel in KERNELS if kernel != "softmax"]
    assert kernels
    for kernel in kernels:
        words = ["--set", f"kernel={kernel}", "--seeds", "0-1", "-o", tmp_path / kernel]
        ended = in_process("train", *SMALL, *words)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.count("no sinks are counted") == 1 and f"its kernel, {kernel}," in ended.stderr
        last = read_metrics(tmp_path / kernel / "training/seed-1/baseline-tiny/metrics.jsonl")[-1]
        assert "common_mode_1" in last and not {"relaxed_nop", "max_inflow_1"} & last.keys()
        ended = in_process("train", *SMALL, *words, "--resume")
        assert ended.returncode == 0, ended.stderr
        notes = json.loads((tmp_path / kernel / "run.json").read_text())["notes"]
        assert sum("no sinks are counted" in note for note in notes) == 1


def test_photographs_with_a_folder_a_class_are_trained_on_and_unreadable_ones_counted(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        write_pictures(tmp_path / "photos" / name, 4)
    (tmp_path / "photos/cats/000.png").write_bytes(b"damaged")
    words = ["--data", tmp_path / "photos", "--config", "registers-tiny", "-o", tmp_path / "run"]
    ended = in_process("train", *SMALL, *words)
    assert ended.returncode == 0, ended.stderr
    config = json.loads((tmp_path / "run/run.json").read_text())
    assert config["unreadable"]["seed-0/registers-tiny"] == ["cats/000.png"]
    saved = json.loads((tmp_path / "run/training/seed-0/registers-tiny/model.json").read_text())
    assert saved["classes"] == ["cats", "dogs"]


def test_a_dry_run_writes_nothing_and_tells_what_it_saw(tmp_path: Path) -> None:
    ended = in_process("train", *SMALL, "--config", "global-penalty-tiny", "--steps", "2", "-o", tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["steps"] == 2 and told["terms"]["penalty"] > 0
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_dry_run_without_the_gpu_that_it_asks_for_is_refused(tmp_path: Path) -> None:
    ended = in_process("train", *SMALL, "--steps", "2", "--device", "cuda")
    assert ended.returncode == 2 and "torch sees no CUDA device here" in ended.stderr


def test_a_dry_run_under_torchrun_is_told_by_the_first_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        ended = in_process("train", *SMALL, "--steps", "1", "--config", "baseline-tiny, registers-tiny")
        assert ended.returncode == 0, ended.stderr
        told[rank] = [json.loads(line)["name"] for line in ended.stdout.splitlines()]
    assert told == {"0": ["baseline-tiny", "registers-tiny"], "1": []}


def test_help_names_all_that_can_be_trained() -> None:
    ended = in_process("train", "--help")
    assert "the controlled tasks, a language model, or vision transformers" in " ".join(ended.stdout.split())


def test_the_whole_vit_l_with_its_penalty_takes_steps_on_meta() -> None:
    ended = in_process("train", "vit", "--config", "global-penalty-L", "--steps", "2", "--device", "meta")
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["name"], told["steps"], told["terms"]) == ("global-penalty-L", 2, None)
    assert round(told["parameters"]["backbone"] / 1e6, 2) == 306.47  # 303.28 and the pathway's 3.19
    assert told["state_gib"] > 4 and 1 < told["saved_gib"] < 2  # an image in four views, in float32


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--device", "meta"], "--device meta computes nothing, so nothing can be trained there: give --steps 2 too"),
        (["--steps", "2", "--device", "foo"], "--device is auto, cpu, cuda, cuda:N or mps, not 'foo'"),
        (["--steps", "2", "--device", "cpu:x"], "--device is auto, cpu, cuda, cuda:N or mps, not 'cpu:x'"),
        (["--config", "baseline-tiny,baseline-XL"], "There is no vision transformer 'baseline-XL'"),
        (["--config", "baseline-XL"], "There is no vision transformer 'baseline-XL'"),
        (["--set", "stepz=3"], "nothing called 'stepz' to set"),
        (["--set", "batch=64"], "There are 8 training images, fewer than one batch of 64"),
        (["--data", "nowhere"], "There is no file or folder nowhere"),
        (["--validation", "nowhere"], "--validation belongs to --data"),
        (["--seeds", "a"], "--seeds is like 0-4 or 0,2,5, not 'a'."),
        (["--resume", "--overwrite"], "give one of them"),
        (["--fsdp"], "--fsdp shares the weights out over several processes, and this is one"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence_and_no_folder(
    tmp_path: Path, words: list[str], sentence: str
) -> None:
    ended = in_process("train", *SMALL, *words, "-o", tmp_path / "run")
    assert ended.returncode == 2
    assert sentence in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_training_that_is_terminated_says_how_to_go_on_and_goes_on(tmp_path: Path) -> None:
    words = ["train", *SMALL, "--set", "epochs=20", "-o", str(tmp_path / "run")]
    command = [sys.executable, "-m", "sinklab", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        process.stderr.readline()  # the first line of progress: training is on its way
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 130
    assert "stopped. What was trained is kept" in said and "--resume" in said
    assert (tmp_path / "run/training/seed-0/baseline-tiny/checkpoint.safetensors").is_file()
    ended = in_process(*words, "--resume")
    assert ended.returncode == 0, ended.stderr
    steps = [line["step"] for line in read_metrics(tmp_path / "run/training/seed-0/baseline-tiny/metrics.jsonl")]
    assert steps == list(range(1, 41)) and os.path.isfile(ended.stdout.strip())


def test_a_page_is_written_of_a_training_that_is_not_finished_and_of_pictures_without_labels(tmp_path: Path) -> None:
    write_pictures(tmp_path / "photos", 8)
    words = ["train", *SMALL, "--data", tmp_path / "photos", "--seeds", "0-1", "-o", tmp_path / "run"]
    ended = in_process(*words)
    assert ended.returncode == 0, ended.stderr
    text = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "vit-validation" not in text and "Accuracy of the online probe" not in text  # there is no probe
    assert not (tmp_path / "run/figures/vit-validation.csv").exists()
    whole = json.loads((tmp_path / "run/run.json").read_text()) | {"status": "running"}
    (tmp_path / "run/run.json").write_text(json.dumps(whole))
    (tmp_path / "run/training/seed-1/baseline-tiny/evaluation.json").unlink()
    ended = in_process("report", tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    text = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "1 of 2 trainings is finished" in text and "seed-1/baseline-tiny (step 2 of 2)" in text
    ended = in_process(*words, "--resume")
    assert ended.returncode == 0, ended.stderr
    assert "is finished" not in (tmp_path / "run/report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("held_out", [True, False])
def test_a_model_trained_on_photographs_is_diagnosed_and_patched_on_those_of_its_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_out: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("cats", "dogs")):
        write_pictures(tmp_path / "photos" / name, 4, side=40 + 10 * number)
        write_pictures(tmp_path / "val" / name, 3, side=41 + 10 * number)
    words = ["--data", "photos", *(["--validation", "val"] if held_out else []), "-o", "run"]
    ended = in_process("train", *SMALL, *words)
    assert ended.returncode == 0, ended.stderr
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    mass = ["--rule", "mass", "--mass", "0.001", "--device", "cpu"]
    ended = in_process("diagnose", "../run", *mass, "--no-report")
    assert ended.returncode == 0, ended.stderr
    source, whole = ("val", 6) if held_out else ("photos", 8)
    said = f"No images were named: the first 4 of {whole} images of {source}, as its training validated on"
    assert said in ended.stderr
    run = tmp_path / "run/diagnosed/seed-0/baseline-tiny"
    about = json.loads((run / "run.json").read_text())
    assert about["images"]["count"] == 4 and any(said in note for note in about["images"]["notes"])
    seen = sorted(set(pd.read_parquet(run / "sinks.parquet")["image"]))  # as many as validation_images says
    assert seen == [f"cats/{i:03d}.png" for i in range(whole // 2)] + [
        f"dogs/{i:03d}.png" for i in range(4 - whole // 2)
    ]
    ended = in_process("patch", "../run", "--min-events", 1, "--bootstrap", 9, "--device", "cpu", "--no-report")
    assert ended.returncode == 0 or "no head" in ended.stderr.lower(), ended.stderr
    assert "are not those of the run" not in ended.stderr
    for path in (tmp_path / source).rglob("*.png"):
        path.unlink()
    ended = in_process("diagnose", "../run", *mass, "--overwrite")
    assert ended.returncode == 2 and "Give images after the model." in ended.stderr, ended.stderr
    ended = in_process("diagnose", "../run", tmp_path / ("photos" if held_out else "val"), *mass, "--overwrite")
    assert ended.returncode == 0, ended.stderr
