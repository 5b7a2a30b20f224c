"""Natural mistakes from Python: each ends in a sentence that says what would fit, before anything is written."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from command_line import TINY
from PIL import Image

import sinklab
from sinklab.errors import InputError, NotFoundError
from sinklab.sinks.classify import SinkDefinition
from sinklab.sinks.rule import SinkRule


def tiny(**options: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **TINY | options).eval()


@pytest.fixture
def photograph(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 48, 3), dtype=np.uint8)).save(path)
    return path


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"layers": 1}, r"like \[0, 5, 7\], not 1"),
        ({"layers": "0-"}, "not '0-'"),
        ({"layers": []}, "empty list"),
        ({"layers": [0.5]}, "layer numbers"),
        ({"size": (32, 32)}, r"one whole number.*not \(32, 32\)"),
        ({"size": "32"}, "not '32'"),
        ({"size": 32.0}, "not 32.0"),
        ({"limit": 2.5}, "limit is a whole number"),
        ({"batch_size": 2.5}, "batch_size is a whole number"),
        ({"batch_size": True}, "batch_size is a whole number"),
        ({"workers": "2"}, "workers is a whole number"),
        ({"seed": "a"}, "seed is a whole number"),
        ({"images": torch.zeros(1, 3, 32, 32)}, r"not a Tensor; pixels already in memory.*run_with_cache"),
        ({"images": [np.zeros((3, 3))]}, "not a list with a ndarray in it"),
        ({"images": Image.new("RGB", (32, 32))}, "not a Image; pixels"),
        ({"rule": 3}, "one of relaxed, strict, mass, not 3"),
        ({"definition": None}, "one of causal, counts, not None"),
        ({"model": 3}, "not int"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_natural_mistake_is_a_sentence_and_no_run(
    given: dict[str, Any], said: str, photograph: Path, tmp_path: Path
) -> None:
    arguments = {"model": tiny(), "images": photograph, "output": tmp_path / "run", "size": 32, **given}
    with pytest.raises((InputError, NotFoundError), match=said):
        sinklab.diagnose(**arguments)
    assert not (tmp_path / "run").exists()


def test_rules_have_names_and_a_module_is_attached(photograph: Path, tmp_path: Path) -> None:
    run = sinklab.diagnose(tiny(), photograph, tmp_path / "run", rule="strict", size=np.int64(32), report=False)
    assert run.config["rule"]["name"] == "strict" and run.config["model"]["name"] == "VisionTransformer"
    with pytest.raises(NotFoundError, match="no sink rule 'strictest'"):
        sinklab.diagnose(tiny(), photograph, tmp_path / "other", rule="strictest", size=32)


@pytest.mark.parametrize("how", [torch.float16, torch.float64])
def test_autocast_over_another_precision_is_refused(how: torch.dtype, photograph: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=str(how).removeprefix("torch.")):
        sinklab.diagnose(tiny().to(how), photograph, tmp_path / "run", size=32, dtype="bfloat16")


def test_a_module_on_meta_is_refused(photograph: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="meta device"):
        sinklab.diagnose(tiny().to("meta"), photograph, tmp_path / "run", size=32)


def test_a_single_token_has_no_sink(photograph: Path, tmp_path: Path) -> None:
    """One patch and no CLS: nothing in such a head is NaN, so no row of a table may say that it is not finite."""
    module = tiny(img_size=16, class_token=False, global_pool="avg")
    with pytest.raises(InputError, match="nothing else to attend to"):
        sinklab.diagnose(module, photograph, tmp_path / "run", size=16)


def mixed() -> Any:
    """A block of two heads, then one of four."""
    module, other = tiny(), tiny(num_heads=4)
    module.blocks[1] = other.blocks[1]
    return module


@pytest.mark.parametrize(("layer", "heads"), [(0, 2), (1, 4)])
def test_blocks_of_other_head_counts_can_be_left_out(layer: int, heads: int, photograph: Path, tmp_path: Path) -> None:
    run = sinklab.diagnose(mixed(), photograph, tmp_path / "run", size=32, layers=[layer])
    assert run.heads["head"].nunique() == heads and set(run.heads["layer"]) == {layer}


def test_blocks_of_different_head_counts_are_refused_together(photograph: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"numbers of heads \(2, 4\)"):
        sinklab.diagnose(mixed(), photograph, tmp_path / "run", size=32)


@pytest.mark.parametrize("number", ["0.5", None, True, torch.tensor(0.7)], ids=str)
def test_a_threshold_is_a_number(number: Any) -> None:
    for make in (
        lambda: SinkRule.relaxed(number),
        lambda: SinkRule.relaxed(fraction=number),
        lambda: SinkRule.strict(number),
        lambda: SinkRule.mass(number),
        lambda: SinkDefinition(name="own", axis="value_ratio_out", nop=number),
        lambda: SinkDefinition(name="own", axis="value_ratio_out", broadcast=number),
    ):
        with pytest.raises(InputError, match="is a number, not"):
            make()


def test_fractions_and_numpys_numbers_are_the_decimals_they_are_written_as() -> None:
    for nine_tenths in (Fraction(9, 10), np.float32(0.9), 0.9):
        rule = SinkRule.relaxed(fraction=nine_tenths)  # type: ignore[arg-type]
        assert rule == SinkRule.relaxed() and rule.sentence() == SinkRule.relaxed().sentence()


def attached(model: sinklab.Model, x: torch.Tensor) -> None:
    with sinklab.HookManager(model) as hooks:
        hooks.run(x)


def test_pixels_of_a_size_that_the_model_cannot_take_are_refused_in_words() -> None:
    model = sinklab.attach(tiny(dynamic_img_size=False))
    for attempt in (sinklab.prove, lambda m, x: m(x), attached):
        with pytest.raises(InputError, match="32x32 only"):
            attempt(model, torch.randn(1, 3, 100, 100))
    with pytest.raises(InputError, match=r"not shape \[3, 32, 32\]"):
        sinklab.prove(model, torch.randn(3, 32, 32))
    with pytest.raises(InputError, match="prove needs"):
        sinklab.prove(model)
