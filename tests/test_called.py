"""A handle that is called with what its model cannot take says so in words, and never answers with something else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sinklab
from sinklab.errors import InputError

SEQUENCE = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("given", "said"), [
    (SEQUENCE[:, :1], "exactly 32 tokens"),  # one would be broadcast over the position table
    (SEQUENCE[:, :31], "exactly 32 tokens"),
    (SEQUENCE[..., :63], "batch tokens 64"),
    (SEQUENCE.double(), "float64"),
    (SEQUENCE.long(), "int64"),
    (None, "not None"),
    ("words", "not a str"),
])  # fmt: skip
def test_a_controlled_model_takes_its_own_sequences_and_nothing_else(given: object, said: str) -> None:
    model = sinklab.load("toy:nop")
    with pytest.raises(InputError, match=said):
        model(given)  # type: ignore[arg-type]
    assert model(SEQUENCE).shape == SEQUENCE.shape and "sequences of 32" in repr(model)


@pytest.mark.parametrize(("given", "said"), [
    (torch.tensor([[0, 170]]), "0 to 169; 170"),
    (torch.tensor([[-1, 3]]), "0 to 169; -1"),
    (torch.tensor([[0.0, 1.0]]), "not float32"),
    (torch.tensor([0, 1]), r"shape \[2\]"),
    (torch.zeros(1, 0, dtype=torch.int64), r"shape \[1, 0\]"),
    (torch.zeros(1, 129, dtype=torch.int64), "up to 128 tokens"),
])  # fmt: skip
def test_a_language_model_takes_ids_that_it_has(given: Tensor, said: str) -> None:
    model = sinklab.load("lm:transformer-tiny")
    with pytest.raises(InputError, match=said):
        model(given)
    assert len(model(torch.tensor([[0, 169]], dtype=torch.int32))) == 1


@pytest.mark.parametrize(("given", "said"), [
    (torch.zeros(1, 3, 28, 28, dtype=torch.uint8), "not uint8"),
    (torch.zeros(1, 3, 28, 28).numpy(), "not a ndarray"),
])  # fmt: skip
def test_pixels_of_another_kind_are_refused_in_words(given: Tensor, said: str) -> None:
    with pytest.raises(InputError, match=said):
        sinklab.load("demo")(given)


@pytest.mark.parametrize("given", [None, 3, [1]])
def test_what_names_no_run_and_no_model_is_told_so(given: object) -> None:
    for function in (sinklab.open_run, sinklab.patch, sinklab.load):
        with pytest.raises(InputError, match="not"):
            function(given)  # type: ignore[operator]
