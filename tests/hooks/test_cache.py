"""run_with_cache: TransformerLens names and axes on models that TransformerLens does not load."""

from __future__ import annotations

import pytest
import torch
from families import HEADS, LAYERS, WIDTH, module, pixels

from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.cache import run_with_cache
from sinklab.hooks.site import find_sites

pytest.importorskip("transformer_lens", reason="the lens extra is not installed")


@pytest.mark.parametrize("name", ["timm dinov2 registers", "openclip", "openclip tokens first", "hf dinov2"])
def test_names_and_axes_are_transformer_lenss(name: str) -> None:
    _, cache = run_with_cache(module(name), pixels(name), names=["*"])
    tokens = cache["resid_pre", 0].shape[1]
    head = WIDTH // HEADS
    for hook in ("q", "k", "v", "z"):
        assert cache[hook, 1].shape == (2, tokens, HEADS, head)
    assert cache["pattern", 1].shape == (2, HEADS, tokens, tokens)
    assert cache["result", 0].shape == (2, tokens, HEADS, WIDTH)
    torch.testing.assert_close(cache["pattern", 0].sum(-1), torch.ones(2, HEADS, tokens))
    assert cache.model.cfg.n_layers == LAYERS


@pytest.mark.parametrize("name", ["timm dinov2", "openclip", "openclip tokens first", "hf clip", "timm beit"])
def test_heads_and_bias_add_up_to_what_the_attention_adds(name: str) -> None:
    _, cache = run_with_cache(module(name), pixels(name), names=["*hook_result", "*hook_resid*"])
    for site in find_sites(module(name)):
        update = cache["result", site.layer].sum(2)
        bias = site.output_bias()
        update = update if bias is None else update + bias.float()
        added = cache["resid_mid", site.layer] - cache["resid_pre", site.layer]
        torch.testing.assert_close(update, added, rtol=1e-4, atol=1e-4)


def test_z_is_the_pattern_times_the_values() -> None:
    _, cache = run_with_cache(module("timm eva02"), pixels("timm eva02"))
    rebuilt = torch.einsum("bhqk,bkhd->bqhd", cache["pattern", 1], cache["v", 1])
    torch.testing.assert_close(rebuilt, cache["z", 1], rtol=1e-4, atol=1e-5)


def test_grouped_keys_stay_as_the_model_has_them() -> None:
    """Complaint 13."""
    _, cache = run_with_cache(module("hf llama"), pixels("hf llama"), names=["*hook_k", "*hook_pattern"])
    assert cache["k", 0].shape[2] == 2 and cache["pattern", 0].shape[1] == HEADS
    assert cache["pattern", 0].triu(1).abs().max() == 0


def test_a_name_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(NotFoundError, match="hook_pattern"):
        run_with_cache(module("timm dinov2"), pixels("timm dinov2"), names=["blocks.9.*"])


def test_more_than_the_limit_is_refused_with_the_size_needed() -> None:
    """Complaint 19."""
    with pytest.raises(InputError, match=r"need about \d+ MB, more than the limit"):
        run_with_cache(module("timm dinov2"), pixels("timm dinov2"), limit="1KB")
    with pytest.raises(InputError, match="2GB"):
        run_with_cache(module("timm dinov2"), pixels("timm dinov2"), limit="two")
