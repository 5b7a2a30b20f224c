"""What a training keeps over kills and resumes beside its weights, and what it says of files that were lost."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinklab.data.labelled import photographs
from sinklab.data.procedural import ProceduralImages
from sinklab.training.loop import CHECKPOINT, Progress, Stopped
from sinklab.training.vit import train_vit
from sinklab.training.vit_config import ViTConfig, make_config

IMAGES = ProceduralImages(count=12, size=16)
pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {
    **{"image": 16, "dim": 12, "depth": 2, "heads": 2, "views": 2, "projector_hidden": 8, "projector_dim": 4},
    **{"slices": 16, "batch": 4, "epochs": 3, "warmup_epochs": 0.5, "score_images": 2},
    **{"record_every": 1, "score_every": 9, "checkpoint_every": 2, "save_every": 1},
}


def small(**changes: Any) -> ViTConfig:
    return replace(make_config("baseline-tiny"), **{**SMALL, **changes})


def at_step(step: int, act: Callable[[], None]) -> Callable[[str, Progress], None]:
    return lambda name, state: act() if state.step == step else None


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Killed(Exception):
    """Stands for a kill in the middle of a training."""


def kill() -> None:
    raise Killed


def said_by(path: Path, images: Any = IMAGES, **options: Any) -> list[str]:
    """Train, or go on, and give every warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_vit(path, [small()], images, **options)
    return [str(warning.message) for warning in caught]


def damaged_photographs(root: Path) -> Any:
    for number in range(12):
        folder = root / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(IMAGES.picture(number).permute(1, 2, 0).numpy()).save(folder / f"{number:02d}.png")
    for name in ("a/02.png", "b/05.png", "b/11.png"):
        (root / name).write_bytes(b"no picture")
    return photographs(root)


@pytest.mark.parametrize(("act", "error", "steps"), [(terminate, Stopped, (4, 8)), (kill, Killed, (5, 9))])
def test_a_training_that_was_interrupted_twice_names_all_pictures_that_it_could_not_read(
    tmp_path: Path, act: Callable[[], None], error: type[BaseException], steps: tuple[int, int]
) -> None:
    images = damaged_photographs(tmp_path / "photos")
    for step in steps:
        with pytest.raises(error):
            train_vit(tmp_path / "run", [small()], images, resume=True, progress=at_step(step, act))
    run = train_vit(tmp_path / "run", [small()], images, resume=True)
    assert run is not None
    assert run.config["unreadable"] == {"seed-0/baseline-tiny": ["a/02.png", "b/05.png", "b/11.png"]}


def test_pictures_that_could_not_be_read_are_said_at_the_end_of_training_and_of_evaluation(tmp_path: Path) -> None:
    said = said_by(tmp_path / "run", damaged_photographs(tmp_path / "photos"))
    assert len(said) == 2
    assert "3 of 12 training images could not be read" in said[0] and "a/02.png, b/05.png, b/11.png" in said[0]
    assert "3 of 12 validation images could not be read and were left out" in said[1]
    assert said_by(tmp_path / "whole") == []


MEMBER = "training/seed-0/baseline-tiny"
KEPT = ["best", "epoch-0001", "epoch-0002", "epoch-0003"]


@pytest.mark.parametrize("damage", ["missing", "damaged"])
@pytest.mark.parametrize(
    "name", [*(f"{stem}.{end}" for stem in KEPT[:2] for end in ("safetensors", "json")), CHECKPOINT]
)
def test_a_file_that_a_finished_training_has_lost_is_said_by_resume(tmp_path: Path, name: str, damage: str) -> None:
    train_vit(tmp_path, [small()], IMAGES)
    assert said_by(tmp_path, resume=True) == []
    lost = tmp_path / MEMBER / name
    content = lost.read_bytes()
    lost.unlink() if damage == "missing" else lost.write_bytes(content[: len(content) // 2])
    said = said_by(tmp_path, resume=True)
    assert len(said) == 1 and f"seed-0/baseline-tiny: {name} is {damage}." in said[0]
    lost.write_bytes(content)
    assert said_by(tmp_path, resume=True) == []


def test_many_lost_files_are_said_in_one_sentence_and_epochs_of_validation_counted(tmp_path: Path) -> None:
    train_vit(tmp_path, [small()], IMAGES)
    member = tmp_path / MEMBER
    lines = (member / "validation.jsonl").read_text().splitlines(keepends=True)
    (member / "validation.jsonl").write_text(lines[0] + lines[1][:20])
    for path in [*member.glob("best.*"), *member.glob("epoch-*.json")]:
        path.unlink()
    (said,) = said_by(tmp_path, resume=True)
    names = "best.safetensors, best.json, epoch-0001.json, epoch-0002.json, epoch-0003.json"
    assert f"{names} are missing; validation.jsonl tells of 1 of 3 epochs." in said


def test_weights_that_no_training_without_labels_keeps_are_not_missed(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(12):
        Image.new("RGB", (20, 20), (20 * number, 0, 0)).save(tmp_path / f"photos/{number:02d}.png")
    images = photographs(tmp_path / "photos")
    assert said_by(tmp_path / "run", images) == said_by(tmp_path / "run", images, resume=True) == []
    (tmp_path / "run" / MEMBER / "validation.jsonl").unlink()
    (said,) = said_by(tmp_path / "run", images, resume=True)
    assert "seed-0/baseline-tiny: validation.jsonl tells of 0 of 3 epochs." in said


def test_lost_lines_of_validation_are_said_and_make_no_worse_epoch_the_best(tmp_path: Path) -> None:
    """The first epoch is made the best there can be: whatever comes after it must leave its weights alone."""
    with pytest.raises(Stopped):
        train_vit(tmp_path, [small()], IMAGES, progress=at_step(5, terminate))
    member = tmp_path / MEMBER
    told = json.loads((member / "best.json").read_text())
    assert told["epoch"] == 1
    told["validation"]["probe_accuracy"] = 1.0
    (member / "best.json").write_text(json.dumps(told))
    before = (member / "best.safetensors").read_bytes()
    (member / "validation.jsonl").write_text("")
    (said,) = said_by(tmp_path, resume=True)
    assert "validation.jsonl tells of 0 of 1 epochs" in said
    assert json.loads((member / "best.json").read_text()) == told
    assert (member / "best.safetensors").read_bytes() == before


def test_a_training_whose_checkpoint_is_lost_says_that_it_begins_anew(tmp_path: Path) -> None:
    train_vit(tmp_path / "whole", [small()], IMAGES)
    with pytest.raises(Stopped):
        train_vit(tmp_path / "run", [small()], IMAGES, progress=at_step(5, terminate))
    (tmp_path / "run" / MEMBER / CHECKPOINT).unlink()
    (said,) = said_by(tmp_path / "run", resume=True)
    assert "no checkpoint.safetensors to go on from: it is trained from step 0" in said
    for name in ("best.json", "best.safetensors", "validation.jsonl"):
        assert (tmp_path / "run" / MEMBER / name).read_bytes() == (tmp_path / "whole" / MEMBER / name).read_bytes()
