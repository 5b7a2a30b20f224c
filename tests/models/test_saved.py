"""Models named by a path: sidecar configs, and the folders of earlier runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from sinklab.errors import InputError, NotFoundError
from sinklab.models.load import load
from sinklab.models.loaded import Loaded

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32}


def checkpoint(folder: Path, sidecar: dict[str, Any] | None = None) -> Path:
    torch.manual_seed(2)
    folder.mkdir(exist_ok=True)
    torch.save(timm.create_model("vit_tiny_patch16_224", **TINY).state_dict(), folder / "fine.tuned.pth")
    told = {"model": "timm:vit_tiny_patch16_224", "kwargs": TINY} if sidecar is None else sidecar
    (folder / "fine.tuned.json").write_text(json.dumps(told))
    return folder / "fine.tuned.pth"


def run_folder(folder: Path, loaded: Loaded) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"model": asdict(loaded.provenance), "status": "complete"}))
    return folder


def same(left: Loaded, right: Loaded) -> bool:
    pixels = torch.randn(1, 3, 32, 32)
    return torch.equal(left.forward(left.module, pixels), right.forward(right.module, pixels))


def test_a_sidecar_says_the_architecture_and_its_options(tmp_path: Path) -> None:
    loaded = load(str(checkpoint(tmp_path)), offline=True)
    assert loaded.provenance.architecture == "vit_tiny_patch16_224"
    assert loaded.extra["position_table"]["grid"] == [2, 2]
    assert loaded.provenance.name == str(tmp_path / "fine.tuned.pth")


def test_a_sidecar_may_set_preprocessing(tmp_path: Path) -> None:
    told = {"model": "timm:vit_tiny_patch16_224", "kwargs": TINY, "preprocessing": {"mean": [0.1, 0.2, 0.3]}}
    loaded = load(str(checkpoint(tmp_path, told)), offline=True)
    assert loaded.preprocessing.mean == (0.1, 0.2, 0.3)
    assert not any("assumed" in note for note in loaded.provenance.notes)


def test_a_hugging_face_config_may_stand_in_the_sidecar(tmp_path: Path) -> None:
    import transformers

    config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    model = transformers.Dinov2Model(transformers.Dinov2Config(**config)).eval()
    torch.save(model.state_dict(), tmp_path / "w.bin")
    told = {"model": "hf", "kwargs": {"model_type": "dinov2", **config}}
    (tmp_path / "w.json").write_text(json.dumps(told))
    loaded = load(str(tmp_path / "w.bin"), offline=True)
    pixels = torch.randn(1, 3, 28, 28)
    assert torch.equal(loaded.forward(loaded.module, pixels), model(pixels).last_hidden_state)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, 'no "model"'),
        ({"model": "timm:vit_tiny_patch16_224", "color": 1}, "unknown field 'color'"),
        ({"model": "timm:vit_tiny_patch16_224", "kwargs": []}, "kwargs must be a JSON object"),
        ({"model": "demo"}, "what fits is timm:NAME"),
        ({"model": "timm:vit_tiny_patch16_224", "preprocessing": {"brightness": 1}}, "no field 'brightness'"),
    ],
)
def test_a_sidecar_that_does_not_fit_gets_a_sentence(tmp_path: Path, told: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        load(str(checkpoint(tmp_path, told)))
    assert said in str(caught.value)


def test_a_checkpoint_without_a_sidecar_says_what_to_write(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    path.with_suffix(".json").unlink()
    with pytest.raises(NotFoundError, match=r"fine\.tuned\.json.*--weights"):
        load(str(path))
    path.with_suffix(".json").write_text("{")
    with pytest.raises(InputError, match="not readable JSON"):
        load(str(path))


def test_a_run_folder_gives_the_model_it_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path / "weights")
    monkeypatch.chdir(path.parent)
    first = load(path.name)  # a relative path, from another folder than the second load's
    monkeypatch.chdir(tmp_path)
    again = load(str(run_folder(tmp_path / "run", first)), offline=True)
    assert same(first, again)
    drawn = load("timm:test_vit", random_weights=True, seed=4, image_size=(32, 48))
    assert same(drawn, load(str(run_folder(tmp_path / "drawn", drawn))))


def test_weights_that_changed_since_the_run_are_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    run = run_folder(tmp_path / "run", load(str(path)))
    state = torch.load(path)
    state["norm.bias"] += 1
    torch.save(state, path)
    with pytest.raises(InputError, match="have changed since the run"):
        load(str(run))
    path.unlink()
    with pytest.raises(NotFoundError):
        load(str(run))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"model": {"family": "attached"}}, "attached from memory"),
        ({"model": {"family": "trained"}}, "does not record a model that can be loaded again"),
        ({"status": "running"}, "does not say which model"),
    ],
)
def test_a_run_without_a_model_to_load_gets_a_sentence(tmp_path: Path, record: dict[str, Any], said: str) -> None:
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=said):
        load(str(tmp_path))


def test_a_folder_that_is_no_run_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no run\.json"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=f"hf:{tmp_path}"):
        load(str(tmp_path))
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InputError, match="brings its own weights"):
        load(str(tmp_path), random_weights=True)
