"""A member is finished only if its files are whole; going on makes again what is not, and the run is as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sinklab.data.text import Text, open_text
from sinklab.errors import InputError
from sinklab.run import Run
from sinklab.training.compare import read_results
from sinklab.training.lm import train_lm
from sinklab.training.lm_config import make_lm_config
from sinklab.training.toy import train_toy
from sinklab.training.toy_config import make_config

NOP = make_config(
    "nop",
    "laptop",
    ["tokens=6", "dim=8", "steps=4", "batch=4", "evaluation_batches=2", "evaluation_size=8", "record_every=1"],
)
SMALL = [
    *("steps=6", "batch=4", "context=8", "stride=4", "record_every=1", "validate_every=2", "checkpoint_every=2"),
    *("validation_windows=4", "sample=5", "model.layers=1", "model.hidden=8", "model.phases=8"),
]
LM = make_lm_config("phase-tiny", SMALL)
Damage = Callable[[Path], object]


def lose(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def write(name: str, words: str) -> Damage:
    return lambda folder: (folder / name).write_text(words)


def cut(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:60])


def kill_between_two_names(folder: Path) -> None:
    """As a kill leaves it after the weights have their last name and before their .json has."""
    (folder / "model.json").rename(folder / "best.json")
    (folder / "evaluation.json").unlink()


ANY = [
    lose("model.safetensors"),
    cut("model.safetensors"),
    lose("model.json"),
    write("model.json", "{}"),
    write("model.json", "[]"),
    lose("evaluation.json"),
    cut("evaluation.json"),
    write("evaluation.json", "[]"),
    write("evaluation.json", "{}"),
    write("evaluation.json", "[7]"),
]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "run.json" and not path.name.startswith(".")
    }


@pytest.fixture(scope="module")
def nop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_toy(tmp_path_factory.mktemp("toy") / "run", NOP).path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    path = tmp_path_factory.mktemp("text") / "clocks.txt"
    path.write_bytes(b"the phases of many clocks meet, and one by one they agree. " * 20)
    return open_text(path)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory, text: Text) -> Path:
    return train_lm(tmp_path_factory.mktemp("lm") / "run", [LM], text=text).path


@pytest.mark.parametrize("damage", ANY)
def test_a_controlled_model_that_lost_a_file_is_made_whole_from_its_checkpoint(
    tmp_path: Path, nop: Path, damage: Damage
) -> None:
    shutil.copytree(nop, tmp_path / "run")
    damage(tmp_path / "run/training/seed-0/nop")
    run = train_toy(tmp_path / "run", NOP, resume=True)
    assert run.config["status"] == "complete"
    assert contents(tmp_path / "run") == contents(nop)


@pytest.mark.filterwarnings("ignore:The best weights of")
@pytest.mark.parametrize(
    "damage",
    [
        *ANY,
        kill_between_two_names,
        lose("last.safetensors"),
        lose("sample.txt"),
        write("evaluation.json", '{"validation_bpc": 1.0}'),
        write("best.json", "{}"),
    ],
)
def test_a_language_model_that_lost_a_file_is_made_whole(tmp_path: Path, lm: Path, text: Text, damage: Damage) -> None:
    shutil.copytree(lm, tmp_path / "run")
    folder = tmp_path / "run/training/seed-0/phase-tiny"
    damage(folder)
    train_lm(tmp_path / "run", [LM], text=text, resume=True)
    (folder / "best.json").unlink(missing_ok=True)
    assert contents(tmp_path / "run") == contents(lm)


def test_best_weights_that_no_checkpoint_has_are_trained_anew_which_is_said(tmp_path: Path, text: Text) -> None:
    """The rate of the last steps is so large that an earlier look was better."""
    config = make_lm_config("phase-tiny", [*SMALL, "lr=3", "floor=1", "warmup=0"])
    whole = train_lm(tmp_path / "whole", [config], text=text)
    shutil.copytree(whole.path, tmp_path / "run")
    folder = tmp_path / "run/training/seed-0/phase-tiny"
    (folder / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="those after [24] steps, are lost: it is trained again from its beginning"):
        train_lm(tmp_path / "run", [config], text=text, resume=True)
    assert contents(tmp_path / "run") == contents(whole.path)


@pytest.mark.parametrize("words", [None, "", "{}\n", "[1]\n", '{"step": 4}\n', '{"step": "4", "total": 1}\n'])
def test_lost_metrics_are_a_sentence_and_the_run_stays_complete(tmp_path: Path, nop: Path, words: str | None) -> None:
    shutil.copytree(nop, tmp_path / "run")
    path = tmp_path / "run/training/seed-0/nop/metrics.jsonl"
    path.unlink()
    if words is not None:
        path.write_text(words)
    with pytest.raises(InputError, match="has lost the line of step 4.*--resume trains that model from its beginning"):
        train_toy(tmp_path / "run", NOP, resume=True)
    assert Run.open(tmp_path / "run").config["status"] == "complete"
    assert len(read_results([tmp_path / "run"]))
    shutil.rmtree(path.parent)  # as the sentence says
    train_toy(tmp_path / "run", NOP, resume=True)
    assert contents(tmp_path / "run") == contents(nop)
