"""Two models whose tables could differ never have one identity; one model has one, however it came into memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from command_line import PICTURE, TINY, tiny_state, write_pictures
from torch import nn

import sinklab
from sinklab.errors import InputError
from sinklab.models.loaded import Preprocessing
from sinklab.models.tokens import TokenMap
from sinklab.sinks.identity import model_identity, weights_digest

OTHER = Preprocessing(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), interpolation="nearest", size=(32, 32))


class Stop(Exception):
    pass


def network(**changes: object) -> nn.Module:
    module: nn.Module = timm.create_model("vit_tiny_patch16_224", **{**TINY, **changes}).eval()
    module.load_state_dict(tiny_state())
    return module


def permuted(module: nn.Module) -> nn.Module:
    """The same numbers in every tensor, in another order in one."""
    with torch.no_grad():
        weight = module.get_parameter("blocks.0.attn.qkv.weight")
        weight.copy_(weight.flip(0))
    return module


def doubled_round_a_nan(module: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        weight = module.get_parameter("blocks.0.mlp.fc1.weight")
        weight.mul_(factor)
        weight[0, 0] = torch.nan
    return module


def other_epsilon() -> nn.Module:
    module = network()
    module.get_submodule("blocks.0.norm1").eps = 0.1  # type: ignore[assignment]
    return module


CHANGED: dict[str, tuple[Callable[[], sinklab.Model], str]] = {
    "preprocessing": (lambda: sinklab.attach(network(), preprocessing=OTHER), "the model's preprocessing mean"),
    "order": (lambda: sinklab.attach(permuted(network())), "the model's weights"),
    "float64": (lambda: sinklab.attach(network().double()), "the model's parameters dtype float32 → float64"),
    "heads": (lambda: sinklab.attach(network(num_heads=4)), r"the model's heads \[2, 2\] → \[4, 4\]"),
    "epsilon": (lambda: sinklab.attach(other_epsilon()), "the model's modules"),
    "activation": (lambda: sinklab.attach(network(act_layer=nn.ReLU)), "the model's activation GELU → ReLU"),
    "tokens": (
        lambda: sinklab.attach(network(), tokens=TokenMap(prefix=("register",), patch_size=(16, 16))),
        r'the model\'s prefix tokens \["cls"\] → \["register"\]',
    ),
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"), 3)


def diagnosed(model: sinklab.Model, pictures: Path, run: Path, **options: object) -> None:
    sinklab.diagnose(model, pictures, output=run, size=PICTURE, batch_size=1, report=False, **options)  # type: ignore[arg-type]


def stopped(pictures: Path, run: Path) -> Path:
    """A run of the plain model that was interrupted after its second image."""

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise Stop

    with pytest.raises(Stop):
        diagnosed(sinklab.attach(network()), pictures, run, progress=stop)
    return run


@pytest.mark.parametrize("change", CHANGED)
def test_a_run_is_not_resumed_with_another_model_and_the_difference_is_named(
    change: str, pictures: Path, tmp_path: Path
) -> None:
    other, named = CHANGED[change]
    run = stopped(pictures, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=f"cannot be resumed with these: .*{named}"):
        diagnosed(other(), pictures, run, resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    diagnosed(sinklab.attach(network()), pictures, run, resume=True)


def test_weights_of_equal_sums_or_with_a_nan_are_told_apart() -> None:
    assert weights_digest(network()) == weights_digest(network())
    assert weights_digest(permuted(network())) != weights_digest(network())
    once, twice = (weights_digest(doubled_round_a_nan(network(), factor)) for factor in (1.0, 2.0))
    assert once != twice


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_type_have_a_digest_of_their_own(dtype: torch.dtype) -> None:
    stored = {"a": torch.arange(6.0).reshape(2, 3), "scalar": torch.tensor(3.0), "empty": torch.empty(0)}
    digests = set()
    for shape in ((2, 3), (3, 2)):
        module = nn.Module()
        for name, value in stored.items():
            value = value.reshape(shape) if name == "a" else value
            module.register_parameter(name, nn.Parameter(value.to(dtype)))
        digests.add(weights_digest(module))
    digests.add(weights_digest(nn.ParameterDict(stored)))
    assert len(digests) == 3


def test_where_the_tensors_lie_in_memory_does_not_matter() -> None:
    one, other = nn.Linear(3, 5), nn.Linear(3, 5)
    other.weight = nn.Parameter(one.weight.detach().t().contiguous().t())
    other.bias = one.bias
    assert not other.weight.is_contiguous()
    assert weights_digest(one) == weights_digest(other)


def test_every_preprocessing_fact_is_compared() -> None:
    from sinklab.sinks.options import ScanOptions

    model = sinklab.attach(network())
    options = ScanOptions(size="native")
    images = sinklab.find_images("demo")
    mine = options.settings(model, images, "cpu")
    loaded = model.loaded
    for change in (
        {"mean": (0.1, 0.5, 0.5)},
        {"std": (0.1, 0.5, 0.5)},
        {"interpolation": "nearest"},
        {"size": (48, 48)},
        {"crop_fraction": 0.5},
    ):
        told = replace(loaded, preprocessing=replace(loaded.preprocessing, **change))  # type: ignore[arg-type]
        assert options.settings(replace(model, loaded=told), images, "cpu")["model"] != mine["model"], change
    assert model_identity(model) == model_identity(sinklab.attach(network()))
