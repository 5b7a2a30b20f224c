"""`sinklab diagnose hf:DIR --text PATH` and `sinklab patch RUN` as they are typed, on tiny language models."""

from __future__ import annotations

import json
from pathlib import Path

import language_models
import pandas as pd
import pytest
from command_line import in_process

import sinklab

RULE = ("--rule", "mass", "--mass", "0.05", "--device", "cpu")
FEW = ("--class", "nop,broadcast,intermediate", "--min-events", "2", "--min-events-analysis", "1", "--bootstrap", "50")


def diagnosed(folder: Path, kind: str, prefix: str = "hf") -> Path:
    model, text = language_models.save(folder / "model", kind), language_models.save_text(folder)
    ended = in_process("diagnose", f"{prefix}:{model}", "--text", text, "-o", folder / "run", "--limit", "6", *RULE)
    assert ended.returncode == 0, ended.stderr
    return folder / "run"


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_a_language_model_is_diagnosed_and_patched_from_the_command_line(kind: str, tmp_path: Path) -> None:
    run = diagnosed(tmp_path, kind)
    config = json.loads((run / "run.json").read_text())
    assert config["images"]["noun"] == "sequence" and config["model"]["ordinary"] == "text"
    ended = in_process("patch", run, *FEW, "--device", "cpu")
    assert ended.returncode == 0, ended.stderr
    found = sinklab.open_run(run).effects
    assert (found["patch_change"] > 0).any() and found["identity_error"].max() < 1e-5
    assert found["kl"].notna().all() == (kind != "bert")
    page = (run / "report.html").read_text()
    assert "sequence" in page and "patch tokens" not in page
    kinds = set(pd.read_csv(run / "tables/counts_per_image.csv")["kind"])
    assert kinds == {"bos", "special", "text", "token", "all"}


def test_a_text_that_has_moved_is_named_again_and_another_is_refused(tmp_path: Path) -> None:
    run = diagnosed(tmp_path, "gpt2")
    moved = (tmp_path / "words.txt").rename(tmp_path / "moved.txt")
    assert "There is no text" in in_process("patch", run, *FEW, "--device", "cpu").stderr
    ended = in_process("patch", run, "--text", moved, *FEW, "--device", "cpu", "--no-report")
    assert ended.returncode == 0, ended.stderr
    other = tmp_path / "other.txt"
    other.write_text(language_models.TEXT[100:] + language_models.TEXT[:100])
    ended = in_process("patch", run, "--text", other, *FEW, "--device", "cpu", "--overwrite")
    assert ended.returncode == 2 and "validation/00000" in ended.stderr


def test_images_are_refused_by_a_language_model(tmp_path: Path) -> None:
    from command_line import write_pictures

    folder = language_models.save(tmp_path / "model", "gpt2")
    ended = in_process("diagnose", f"hf:{folder}", write_pictures(tmp_path / "photos", 2), "-o", tmp_path / "run")
    assert ended.returncode == 2 and "reads sequences, and images were given" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_the_list_of_models_names_language_models_and_bridges() -> None:
    ended = in_process("models")
    assert "tlens:REPO_OR_DIR" in ended.stdout and "BERT" in ended.stdout
