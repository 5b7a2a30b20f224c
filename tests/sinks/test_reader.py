"""The reader: one table a forward, token norms of each layer's input, and nothing kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import HEADS, LAYERS, fresh, module, pixels

from sinklab.errors import InputError
from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.site import find_sites
from sinklab.sinks.reader import StatisticsReader


def read(name: str, x: torch.Tensor, reader: StatisticsReader | None = None) -> Any:
    reader = reader or StatisticsReader(find_sites(module(name)))
    with torch.inference_mode(), HookManager(module(name), reader) as hooks:
        hooks.run(x)
    return reader.take()


@pytest.mark.parametrize("name", ["timm dinov2 registers", "openclip tokens first", "hf llama"])
def test_the_token_norm_ratio_is_the_sinks_norm_over_the_median(name: str) -> None:
    """Lemma 3's outlier, from each block's own input."""
    inputs = []

    class Inputs(Reader):
        def resid_pre(self, site: Any, x: torch.Tensor) -> None:
            inputs.append(x.double())

    with torch.inference_mode(), HookManager(module(name), Inputs()) as hooks:
        hooks.run(pixels(name))
    _, found, _ = read(name, pixels(name))
    for layer, x in enumerate(inputs):
        norms = np.sort(x.norm(dim=-1).numpy(), axis=-1)
        middle = norms[:, (norms.shape[-1] - 1) // 2]  # the lower of two
        own = x.norm(dim=-1).gather(-1, found["sink_index"][:, layer]).numpy()
        np.testing.assert_allclose(found["token_norm_ratio"][:, layer], own / middle[:, None], rtol=1e-5)


def test_what_was_taken_is_forgotten() -> None:
    """Complaint 19: a second, smaller batch gives its own rows only."""
    name = "timm dinov2"
    reader = StatisticsReader(find_sites(module(name)))
    _, first, _ = read(name, pixels(name, batch=3), reader)
    _, second, tokens = read(name, pixels(name, batch=3)[:1], reader)
    assert first["inflow"].shape == (3, LAYERS, HEADS) and second["inflow"].shape == (1, LAYERS, HEADS)
    assert tokens == [17] * LAYERS
    for column in second:
        torch.testing.assert_close(second[column], first[column][:1], rtol=1e-4, atol=1e-6)


def test_the_threshold_is_the_one_that_was_given() -> None:
    name = "timm dinov2"
    sites = find_sites(module(name))
    _, all_of_them, _ = read(name, pixels(name), StatisticsReader(sites, attention=0.0))
    _, strict, _ = read(name, pixels(name), StatisticsReader(sites, attention=1.01))
    assert (all_of_them["routed_count"] == 17).all() and (strict["routed_count"] == 0).all()


def test_layers_are_finished_together_or_apart_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "hf dinov2"
    _, together, _ = read(name, pixels(name))
    monkeypatch.setattr("sinklab.sinks.reader.PENDING_BYTES", 1)
    _, apart, _ = read(name, pixels(name))
    for column in together:
        torch.testing.assert_close(apart[column], together[column], rtol=1e-6, atol=0)


def test_a_second_forward_before_the_first_is_taken_is_an_error() -> None:
    """Complaint 16: two forwards would be averaged, or one lost."""
    reader = StatisticsReader(find_sites(module("timm dinov2")))
    with torch.inference_mode(), HookManager(module("timm dinov2"), reader) as hooks:
        hooks.run(pixels("timm dinov2"))
        with pytest.raises(InputError, match="before take"):
            hooks.run(pixels("timm dinov2"))


def test_layers_with_different_numbers_of_heads_are_refused_with_both_numbers() -> None:
    model = fresh("timm dinov2")
    attention = model.blocks[1].attn
    attention.num_heads, attention.head_dim = 2, attention.head_dim * HEADS // 2
    with pytest.raises(InputError, match=rf"different numbers of heads \(2, {HEADS}\)"):
        StatisticsReader(find_sites(model))
