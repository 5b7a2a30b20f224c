from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sinklab.errors import InputError
from sinklab.settings import (
    checkout_version,
    differences,
    fingerprint,
    layer_numbers,
    library_versions,
    plain,
    safe_name,
    utc_now,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"name": "demo", "sha256": "ab"},
    "options": {"dtype": "float32", "batch_size": 8, "attention": 0.5, "layers": None},
}


def changed(**options: object) -> dict[str, dict[str, Any]]:
    return {**SETTINGS, "options": {**SETTINGS["options"], **options}}


def test_a_fingerprint_does_not_depend_on_the_order_of_keys() -> None:
    backward = {key: dict(reversed(value.items())) for key, value in reversed(SETTINGS.items())}
    assert list(backward) != list(SETTINGS)
    assert fingerprint(backward) == fingerprint(SETTINGS)


@pytest.mark.parametrize(
    "change",
    [{"dtype": "bfloat16"}, {"batch_size": 9}, {"attention": 0.6}, {"layers": [1, 2]}, {"new": 1}, {"layers": "null"}],
)
def test_a_fingerprint_changes_with_every_setting_and_the_change_is_named(change: dict[str, object]) -> None:
    assert fingerprint(changed(**change)) != fingerprint(SETTINGS)
    assert len(differences(SETTINGS, changed(**change))) == 1


@pytest.mark.parametrize("same", [{"batch_size": 8.0}, {"batch_size": np.int64(8)}, {"attention": np.float64(0.5)}])
def test_one_number_written_in_two_ways_is_one_setting(same: dict[str, object]) -> None:
    assert fingerprint(changed(**same)) == fingerprint(SETTINGS)
    assert differences(SETTINGS, changed(**same)) == []


def test_settings_survive_a_file() -> None:
    settings = {"size": (14, 14), "layers": {3, 1, 2}, "path": Path("a/b"), "share": np.float32(0.1)}
    saved = json.loads(json.dumps(plain(settings)))
    assert fingerprint(saved) == fingerprint(settings)


def test_differences_are_written_as_the_user_typed_them() -> None:
    after = {
        "model": {"name": "demo", "sha256": "cd"},
        "options": {"dtype": "bfloat16", "batch_size": 4, "layers": None},
    }
    assert differences(SETTINGS, after) == [
        "the model's sha256 ab → cd",
        "--dtype float32 → bfloat16",
        "--batch-size 8 → 4",
        "--attention 0.5 → (not set)",
    ]


def vit(configs: dict[str, Any], training: str = "a", validation: str = "b") -> dict[str, Any]:
    images = {name: [training * 64, validation * 64] for name in configs}
    return {"kind": "vit", "configs": configs, "seeds": [0], "images": images}


def test_other_configs_are_told_by_their_names_and_not_field_by_field() -> None:
    tiny, wide = {"dim": 64, "depth": 6, "batch": 8}, {"dim": 384, "depth": 12, "batch": 8}
    before = vit({"baseline-tiny": tiny})
    assert differences(before, vit({"baseline-S": wide})) == ["configs baseline-tiny → baseline-S"]
    assert differences(before, vit({"baseline-tiny": {**tiny, "dim": 32}, "registers-tiny": tiny})) == [
        "configs baseline-tiny → baseline-tiny, registers-tiny",
        "configs.baseline-tiny.dim 64 → 32",
    ]


def test_other_images_are_told_in_words_and_their_hashes_shortened() -> None:
    both: dict[str, Any] = {"baseline-tiny": {"dim": 64}, "registers-tiny": {"dim": 64}}
    assert differences(vit(both), vit(both, training="c")) == ["other training images (aaaaaaaa… → cccccccc…)"]
    assert differences(vit(both), vit(both, validation="c")) == ["other validation images (bbbbbbbb… → cccccccc…)"]
    kept = {"images": {"hashes": ["a" * 64], "odd": "a" * 64}}
    assert differences(kept, {"images": {}}) == [
        'the inputs\' hashes ["aaaaaaaa…"] → (not set)',
        "the inputs' odd aaaaaaaa… → (not set)",
    ]


class Word(StrEnum):
    RELAXED = "relaxed"


def test_plain_content_is_strict_json() -> None:
    content = {
        1: [float("nan"), float("inf"), -float("inf"), 1.5],
        "numpy": [np.float32(0.5), np.int64(3), np.bool_(True), np.array([[1, 2]]), np.float64("nan")],
        "text": [Word.RELAXED, Path("a") / "b", np.str_("x")],
        "sets": {3, 1, 2},
        "none": None,
        "tuple": (True, False),
    }
    assert plain(content) == {
        "1": [None, None, None, 1.5],
        "numpy": [0.5, 3, True, [[1, 2]], None],
        "text": ["relaxed", "a/b", "x"],
        "sets": [1, 2, 3],
        "none": None,
        "tuple": [True, False],
    }
    json.dumps(plain(content), allow_nan=False)
    with pytest.raises(TypeError, match="object has no place in JSON"):
        plain({"x": object()})


def test_the_time_is_utc_to_the_second() -> None:
    then = datetime.strptime(utc_now(), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert abs((datetime.now(UTC) - then).total_seconds()) < 5


def test_versions_are_those_installed_and_others_are_left_out() -> None:
    assert library_versions(["numpy", "no-such-library-here"]) == {"numpy": np.__version__}


def test_a_checkout_knows_its_own_version_without_being_installed() -> None:
    import tomllib

    root = Path(__file__).parents[1]
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert library_versions(["sinklab"]) == {"sinklab": version}


def test_a_version_is_taken_from_sinklabs_own_project_file_alone(tmp_path: Path) -> None:
    assert checkout_version(tmp_path / "sinklab") is None
    for text in ('[project]\nname = "other"\nversion = "9"', "not toml ["):
        (tmp_path / "pyproject.toml").write_text(text)
        assert checkout_version(tmp_path / "sinklab") is None
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "sinklab"\nversion = "7.1"')
    assert checkout_version(tmp_path / "sinklab") == "7.1"


def test_layers_are_the_same_as_text_and_as_numbers() -> None:
    assert layer_numbers("0,5, 7-9") == layer_numbers([9, 8, 7, 5, 0, 0]) == (0, 5, 7, 8, 9)
    assert layer_numbers(np.arange(2)) == layer_numbers(range(2)) == layer_numbers("0-1") == (0, 1)
    assert layer_numbers(None) is None
    for wrong in ("1-", "a", "3-1", "", [1.5], ["1"], 3):
        with pytest.raises(InputError, match="like"):
            layer_numbers(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("timm:vit_base_patch14_reg4_dinov2.lvd142m", "vit_base_patch14_reg4_dinov2.lvd142m"),
        ("openclip:ViT-B-16/laion2b_s34b_b88k", "laion2b_s34b_b88k"),
        ("checkpoints/mine.safetensors", "mine.safetensors"),
        ("my ViT", "my-ViT"),
        ("..", "run"),
    ],
)
def test_a_models_name_becomes_the_name_of_a_folder(model: str, name: str) -> None:
    assert safe_name(model) == name
