"""Weights and sidecars that cannot be: each is refused in one sentence, whatever the library under it would say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from sinklab.errors import InputError
from sinklab.models.load import load
from sinklab.models.loaded import Preprocessing
from sinklab.sinks.options import ScanOptions

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32}


def state(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return timm.create_model("vit_tiny_patch16_224", **TINY).state_dict() | changes


def written(folder: Path, *, sidecar: dict[str, Any] | None = None, tensors: Any = None, **changes: Any) -> str:
    """A checkpoint with its sidecar; `changes` are fields of the sidecar."""
    told = {"model": "timm:vit_tiny_patch16_224", "kwargs": TINY} if sidecar is None else sidecar
    torch.save(state() if tensors is None else tensors, folder / "tiny.pth")
    (folder / "tiny.json").write_text(json.dumps(told | changes))
    return str(folder / "tiny.pth")


@pytest.mark.parametrize("kind", [torch.int8, torch.int32, torch.bool, torch.complex64])
def test_weights_that_are_no_floating_point_numbers_are_refused(kind: torch.dtype, tmp_path: Path) -> None:
    name = "blocks.0.attn.qkv.weight"
    path = written(tmp_path, tensors=state() | {name: state()[name].to(kind)})
    with pytest.raises(InputError, match=f"1 of the weights in tiny.pth.*{name} .{str(kind)[6:]}"):
        load(path, offline=True)


def test_weights_of_integers_alone_are_refused(tmp_path: Path) -> None:
    whole = {name: (value * 1000).to(torch.int32) for name, value in state().items()}
    with pytest.raises(InputError, match="floating point"):
        load(written(tmp_path, tensors=whole), offline=True)


def test_integers_in_a_hugging_face_file_are_refused(tmp_path: Path) -> None:
    import transformers

    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    tensors = transformers.Dinov2Model(transformers.Dinov2Config(**config)).state_dict()
    tensors["layernorm.weight"] = tensors["layernorm.weight"].to(torch.int8)
    told = {"model": "hf", "kwargs": {"model_type": "dinov2", **config}}
    with pytest.raises(InputError, match=r"layernorm.weight \(int8\)"):
        load(written(tmp_path, sidecar=told, tensors=tensors), offline=True)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_heads": 5},
        {"num_heads": 0},
        {"depth": "two"},
        {"embed_dim": -32},
        {"embed_dim": "x"},
        {"img_size": "x"},
        {"patch_size": 0},
        {"act_layer": "no such thing"},
        {"global_pool": "nowhere"},
        {"pretrained": True},
    ],
    ids=str,
)
def test_options_that_timm_cannot_build_with_are_refused(kwargs: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        load(written(tmp_path, kwargs=TINY | kwargs), offline=True)
    assert next(iter(kwargs)) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": "x"}, {"hidden_size": 33}, {"num_attention_heads": 0}, {"patch_size": 0}, {"image_size": "x"}],
    ids=str,
)
def test_a_configuration_that_transformers_cannot_build_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    told = {"model": "hf", "kwargs": {"model_type": "dinov2", **config, **changes}}
    with pytest.raises(InputError) as refused:
        load(written(tmp_path, sidecar=told), offline=True)
    assert "\n" not in str(refused.value).partition("nothing was loaded")[0]


@pytest.mark.parametrize("vision", [{"width": "x"}, {"heads": 7, "head_width": 5}, {"layers": "two"}, "x"], ids=str)
def test_a_tower_that_open_clip_cannot_build_is_refused(vision: Any, tmp_path: Path) -> None:
    told = {"model": "openclip:ViT-B-16", "kwargs": {"vision_cfg": vision}}
    with pytest.raises(InputError) as refused:
        load(written(tmp_path, sidecar=told), offline=True)
    assert "\n" not in str(refused.value).partition("nothing was loaded")[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mean", "x"),
        ("mean", [1, 2]),
        ("mean", [math.nan, 0, 0]),
        ("mean", None),
        ("std", ["a", "b", "c"]),
        ("std", [0, 0, 0]),
        ("std", [1, 1, math.inf]),
        ("size", "64"),
        ("size", [64]),
        ("size", [64.5, 64]),
        ("size", 0),
        ("crop_fraction", "x"),
        ("crop_fraction", 0),
        ("crop_fraction", math.nan),
        ("interpolation", 3),
        ("crop_mode", None),
    ],
)
def test_preprocessing_that_cannot_be_is_refused_and_the_sidecar_named(field: str, value: Any, tmp_path: Path) -> None:
    path = written(tmp_path, preprocessing={field: value})
    with pytest.raises(InputError, match=f"tiny.json: {field} of a model's preprocessing"):
        load(path, offline=True)


def test_one_number_is_a_square(tmp_path: Path) -> None:
    assert load(written(tmp_path, preprocessing={"size": 64}), offline=True).preprocessing.size == (64, 64)


def test_preprocessing_given_in_python_is_checked_alike() -> None:
    with pytest.raises(InputError, match=r"size of a model's preprocessing is \(height, width\)"):
        Preprocessing(mean=(0, 0, 0), std=(1, 1, 1), interpolation="bicubic", size=64)  # type: ignore[arg-type]
    assert ScanOptions().size == 224


def test_a_picture_in_the_models_place_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    picture, weights = tmp_path / "cat.PNG", Path(written(tmp_path))
    picture.write_bytes(b"\x89PNG")
    with pytest.raises(InputError, match=r"is a picture, not a model.*timm:NAME \S+cat.PNG --weights \S+tiny.pth"):
        load(str(picture), weights=weights)
    with pytest.raises(InputError, match=r"diagnose demo \S+cat.PNG"):
        load(str(picture))


def test_a_folder_in_the_models_place_keeps_the_weights_that_were_given(tmp_path: Path) -> None:
    weights = Path(written(tmp_path))
    folder = tmp_path / "photos"
    folder.mkdir()
    with pytest.raises(InputError, match=rf"sinklab diagnose timm:NAME {folder} --weights {weights}\."):
        load(str(folder), weights=weights)
    with pytest.raises(InputError, match=rf"sinklab diagnose demo {folder}\."):
        load(str(folder))


def test_other_shapes_are_told_one_a_line_and_ten_at_most(tmp_path: Path) -> None:
    path = written(tmp_path, kwargs=TINY | {"embed_dim": 64})
    with pytest.raises(InputError) as refused:
        load(path, offline=True)
    lines = str(refused.value).splitlines()
    shapes = [line for line in lines if ": model [" in line]
    assert len(shapes) == 10 and all(len(line) <= 120 for line in lines[1:])
    assert shapes[0].strip() == "cls_token: model [1, 1, 64], file [1, 1, 32]"
    assert any(line.strip().startswith("… and") for line in lines)
