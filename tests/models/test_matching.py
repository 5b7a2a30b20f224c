"""The report of a checkpoint beside an architecture, and loading whole or not at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sinklab.errors import InputError
from sinklab.models.matching import compare, fill, on_meta, require_fit


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))


def test_every_name_stands_under_one_heading() -> None:
    model = build().state_dict()
    shared = torch.zeros(3, 2)
    original = {"0.weight": shared, "bias_of_old": torch.zeros(3), "1.weight": torch.zeros(4), "x": torch.zeros(1)}
    state = {
        "0.weight": shared,
        "0.bias": original["bias_of_old"],
        "1.weight": original["1.weight"],
        "x": original["x"],
    }
    report = compare(model, state, original, ignored=("epoch",), optional=("head.",))
    assert report.counts() == {
        "matched": 1,
        "renamed": 1,
        "missing": 1,
        "unexpected": 1,
        "mismatched": 1,
        "ignored": 1,
    }
    assert report.mismatched == (("1.weight", (3,), (4,)),)
    with pytest.raises(InputError) as caught:
        require_fit(report, file="w.pth", architecture="a net", advice="Look again.")
    said = str(caught.value)
    for part in ("w.pth", "a net", "nothing was loaded", "missing", "1.bias", "model [3], file [4]", "Look again."):
        assert part in said


def test_long_lists_are_cut_but_counted() -> None:
    state = {f"extra.{number}": torch.zeros(1) for number in range(40)}
    text = compare({}, state, state).text()
    assert "40" in text and "and 34 more" in text


def test_a_filled_module_holds_the_tensors_and_no_other() -> None:
    state = {name: torch.randn_like(value) for name, value in build().state_dict().items()}
    module = fill(build, state, torch.float32)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert not any(value.is_meta for value in module.parameters())


def test_filled_weights_share_no_memory_with_each_other() -> None:
    whole = torch.randn(6, 2)
    state = {"0.weight": whole[:3], "0.bias": torch.zeros(3), "1.weight": whole[3:, 0], "1.bias": torch.zeros(3)}
    module = fill(build, state, torch.float32)
    sizes = [value.untyped_storage().nbytes() // 4 for value in module.parameters()]
    assert sizes == [6, 3, 3, 3]


def test_tables_that_no_checkpoint_holds_are_computed() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    module = fill(Table, {"linear.weight": torch.eye(2), "linear.bias": torch.ones(2)}, torch.float32)
    assert torch.equal(module.get_buffer("table"), torch.arange(3.0))
    assert torch.equal(module.get_parameter("linear.weight"), torch.eye(2))


def test_filling_leaves_the_random_state_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    fill(build, build_state(), torch.float32)
    assert torch.equal(torch.rand(1), expected)


def build_state() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(value.shape) for name, value in on_meta(build).state_dict().items()}
