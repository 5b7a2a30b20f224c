"""All columns of the demo model's head table against an independent computation in float64.

The truth shares no code with the package: a float64 copy of the timm module, its qkv caught by plain forward hooks and
split here, and the statistics of `reference.py` from materialised maps.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from torch import Tensor

import sinklab

PHOTOGRAPHS = ("astronaut.png", "coffee.png")
ROUNDING = 1e-4
"""Relative; the table is float32, and so are the model's own operations."""
ENTROPY_ROUNDING = 5e-7
"""In nats: rows with nearly all attention on one key have an entropy near 0 whose digits float32 attention has lost."""

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Truth:
    """What the float64 copy saw: everything [image, layer, head], in the table's order."""

    statistics: dict[str, np.ndarray]
    norms: Tensor
    """[layer, image, token]: of the residual stream at each block's input."""
    nearest: np.ndarray
    """How near the nearest query's attention to s comes to one half."""


@pytest.fixture(scope="module")
def demo() -> Any:
    pytest.importorskip("onnx")
    return sinklab.load("demo")


@pytest.fixture(scope="module")
def photographs() -> list[Path]:
    skimage = pytest.importorskip("skimage")
    return [Path(skimage.__file__).parent / "data" / name for name in PHOTOGRAPHS]


@pytest.fixture(scope="module")
def heads(demo: Any, photographs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    folder = tmp_path_factory.mktemp("agreement") / "run"
    return sinklab.diagnose(demo, photographs, output=folder, device="cpu", report=False).heads


@pytest.fixture(scope="module")
def truth(demo: Any, photographs: list[Path]) -> Truth:
    pixels = torch.stack([as_the_paper_does(path, demo.preprocessing) for path in photographs])
    module = copy.deepcopy(demo.module).double().eval()
    inputs: list[Tensor] = []
    projected: list[Tensor] = []
    for block in module.blocks:
        block.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
        block.attn.qkv.register_forward_hook(lambda _, given, made: projected.append(made.detach()))
    with torch.no_grad():
        module(pixels.double())

    layers = []
    for block, qkv in zip(module.blocks, projected, strict=True):
        batch, tokens, width = qkv.shape
        q, k, v = qkv.reshape(batch, tokens, 3, block.attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        layers.append(
            reference.reference_statistics(q, k, v, weight=block.attn.proj.weight, layer_scale=block.ls1.gamma)
        )
        assert width == 3 * block.attn.proj.weight.shape[1]
    statistics = {name: np.stack([layer[name] for layer in layers], axis=1) for name in layers[0] if name != "pattern"}
    sinks = statistics["sink_index"]
    nearest = np.stack(
        [
            np.abs(np.take_along_axis(layer["pattern"], sinks[:, i, :, None, None], axis=3) - 0.5).min(axis=(2, 3))
            for i, layer in enumerate(layers)
        ],
        axis=1,
    )
    return Truth(statistics, torch.stack(inputs).norm(dim=-1), nearest)


def as_the_paper_does(path: Path, preprocessing: Any) -> Tensor:
    """Short side to 256, the centre 224 cropped, normalised: with Pillow and NumPy alone. [3 224 224]."""
    from PIL import Image

    picture = Image.open(path).convert("RGB")
    scale = 256 / min(picture.size)
    width, height = (int(side * scale) for side in picture.size)  # the long side rounds down, as torchvision's does
    left, top = round((width - 224) / 2), round((height - 224) / 2)
    picture = picture.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + 224, top + 224))
    values = np.asarray(picture, dtype=np.float64) / 255
    values = (values - np.array(preprocessing.mean)) / np.array(preprocessing.std)
    return torch.from_numpy(values.transpose(2, 0, 1)).float()


def measured(heads: pd.DataFrame, column: str, truth: Truth) -> np.ndarray:
    """A column of the table in the truth's shape."""
    return heads[column].to_numpy().reshape(truth.statistics["inflow"].shape)


def decided(truth: Truth) -> np.ndarray:
    """Where rounding cannot have chosen another sink."""
    return truth.statistics["inflow_margin"] > 1e-6


def test_the_table_has_one_row_for_each_photograph_layer_and_head(heads: pd.DataFrame) -> None:
    assert len(heads) == len(PHOTOGRAPHS) * 12 * 6
    assert heads["finite"].all()
    assert not heads.isna().any().any()
    assert list(heads["image"].unique()) == list(PHOTOGRAPHS)
    assert (heads["tokens"] == 257).all() and (heads["queries"] == 257).all()


@pytest.mark.parametrize("column", [name for name in reference.FLOATS if name != "inflow_margin"])
def test_a_column_is_the_float64_truth(column: str, heads: pd.DataFrame, truth: Truth) -> None:
    sure = decided(truth)
    assert sure.mean() > 0.95
    if column == "routed_fraction":
        sure &= truth.nearest > 1e-5
    near_zero = ENTROPY_ROUNDING if column == "entropy" else 0.0
    np.testing.assert_allclose(
        measured(heads, column, truth)[sure], truth.statistics[column][sure], rtol=ROUNDING, atol=near_zero
    )


def test_the_margin_over_the_runner_up_is_the_truths(heads: pd.DataFrame, truth: Truth) -> None:
    np.testing.assert_allclose(
        measured(heads, "inflow_margin", truth), truth.statistics["inflow_margin"], rtol=ROUNDING, atol=1e-6
    )


def test_the_sink_is_the_truths_wherever_there_is_a_margin(heads: pd.DataFrame, truth: Truth) -> None:
    sure = decided(truth)
    assert np.array_equal(measured(heads, "sink_index", truth)[sure], truth.statistics["sink_index"][sure])


def test_the_routed_queries_are_the_truths_unless_one_lies_on_the_threshold(heads: pd.DataFrame, truth: Truth) -> None:
    sure = decided(truth) & (truth.nearest > 1e-5)
    assert sure.mean() > 0.9
    counts = truth.statistics["routed_count"][sure]
    assert np.array_equal(measured(heads, "routed_count", truth)[sure], counts)
    assert counts.max() > 200  # otherwise the equality would say little


def test_the_sinks_norm_over_the_median_token_norm_is_the_truths(heads: pd.DataFrame, truth: Truth) -> None:
    norms = truth.norms.permute(1, 0, 2)  # [image layer token]
    sink = torch.from_numpy(measured(heads, "sink_index", truth).astype(np.int64))
    expected = norms.gather(2, sink) / norms.median(dim=2, keepdim=True).values
    np.testing.assert_allclose(measured(heads, "token_norm_ratio", truth), expected.numpy(), rtol=ROUNDING)


def test_kind_and_place_follow_from_the_index_on_a_grid_of_sixteen(heads: pd.DataFrame) -> None:
    for index, kind, *place in heads[["sink_index", "sink_kind", "sink_row", "sink_column"]].to_numpy().tolist():
        assert kind == ("cls" if index == 0 else "patch")
        assert place == ([-1, -1] if index == 0 else list(divmod(index - 1, 16)))
    assert {"cls", "patch"} == set(heads["sink_kind"])


def test_block_zero_alone_shows_both_regimes(heads: pd.DataFrame) -> None:
    first = heads[heads["layer"] == 0].groupby("head")
    cls = first["sink_kind"].agg(lambda kinds: set(kinds) == {"cls"})
    quiet = cls & (first["value_ratio_out"].median() < 0.25)
    loud = ~cls & (first["inflow"].min() > 0.7) & (first["stable_rank"].median() < 1.05)
    assert quiet.any(), "a [CLS] sink whose value is small: a NOP"
    assert loud.any(), "a patch sink with a rank-one update: a broadcast"
