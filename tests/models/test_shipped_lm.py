"""The language models that come with sinklab: small, whole, and as good as their result file says."""

from __future__ import annotations

import math

import pytest
import torch

import sinklab
from sinklab.data.text import open_text
from sinklab.models.lm_file import NAMES, read_lm, shipped_lm


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_language_model_predicts_python_far_better_than_chance(name: str) -> None:
    """Eight windows of the library's own source: 7.4 bits a byte by chance, about 2 as trained."""
    held = read_lm(shipped_lm(name))
    text = open_text("stdlib").numbered_by(held.symbols)
    rows = text.rows([start for _, start in text.windows("validation", held.context)[:8]], held.context + 1)
    with torch.inference_mode():
        logits = held.model(rows[:, :-1])
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert float(nats) / math.log(2) < 3.2 < math.log2(len(held.symbols))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_under_a_megabyte_and_loads_by_its_name(name: str) -> None:
    assert shipped_lm(name).stat().st_size < 1_000_000
    model = sinklab.load(f"lm:{name}")
    assert model.tokens.kind(0) == "bos" and model.tokens.kind(1) == "text" and len(model.sites) == 4


def test_another_name_is_a_sentence() -> None:
    with pytest.raises(sinklab.NotFoundError, match="come with sinklab"):
        sinklab.load("lm:phase-9m")
