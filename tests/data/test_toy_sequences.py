"""The sequences that a controlled model is measured on are those of its own task, or none."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest

import sinklab
from sinklab.errors import InputError
from sinklab.models.toy_file import shipped_toy


def copied(folder: Path, **changed: Any) -> Path:
    """The shipped NOP model, with its .json changed."""
    source = shipped_toy("nop")
    copyfile(source, folder / "model.safetensors")
    saved = json.loads(source.with_suffix(".json").read_text(encoding="utf-8"))
    (folder / "model.json").write_text(json.dumps(saved | changed), encoding="utf-8")
    return folder / "model.safetensors"


def test_a_model_whose_file_names_another_seed_is_not_measured_on_that_task(tmp_path: Path) -> None:
    path = copied(tmp_path, seed=77)
    with pytest.raises(InputError, match=r"trained on another task than nop of seed 77 .*\.json was changed"):
        sinklab.diagnose(str(path), output=tmp_path / "run", limit=8)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("changed", "said"), [
    ({"seed": None}, "its seed is null"),
    ({"seed": "0"}, "its seed is"),
    ({"signature": None}, "its signature is no list"),
])  # fmt: skip
def test_a_file_that_names_no_task_is_refused_in_words(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        sinklab.load(str(copied(tmp_path, **changed)))


def test_the_note_on_the_rule_stands_where_the_rule_was_left_open_and_nowhere_else(tmp_path: Path) -> None:
    def notes(name: str, **chosen: Any) -> str:
        run = sinklab.diagnose(name, output=tmp_path / f"run-{len(list(tmp_path.iterdir()))}", limit=8, report=False,
                               **chosen)  # fmt: skip
        return " ".join([*run.config["notes"], *run.config["model"]["notes"]])

    assert "found by their mass" in notes("toy:nop")
    for rule in ("strict", "relaxed", "mass"):
        assert "mass" not in notes("toy:nop", rule=rule)
    assert "mass" not in notes("toy:broadcast")
