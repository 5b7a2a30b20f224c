"""run_with_cache: TransformerLens names and axes on models that TransformerLens does not load."""

from __future__ import annotations

import re

import pytest
import torch
from families import FAMILIES, HEADS, LAYERS, WIDTH, fresh, module, pixels

from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.cache import run_with_cache
from sinklab.hooks.site import find_sites

pytest.importorskip("transformer_lens", reason="the lens extra is not installed")


@pytest.fixture(params=list(FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_names_and_axes_are_transformer_lenss(name: str) -> None:
    family = FAMILIES[name]
    tokens, sites = family.tokens, find_sites(module(name))
    dim = sites[0].head_dim
    _, cache = run_with_cache(module(name), pixels(name), names="*")
    hooks = 8 if sites[0].second_norm is None else 9
    assert len(cache) == hooks * LAYERS
    for layer in range(LAYERS):
        assert cache["q", layer].shape == cache["z", layer].shape == (2, tokens, family.heads, dim)
        assert cache["k", layer].shape == cache["v", layer].shape == (2, tokens, family.kv_heads, dim)
        assert cache["pattern", layer].shape == (2, family.heads, tokens, tokens)
        assert cache["result", layer].shape == (2, tokens, family.heads, WIDTH)
        assert cache["resid_pre", layer].shape == cache["resid_post", layer].shape == (2, tokens, WIDTH)
    torch.testing.assert_close(cache["resid_post", 0], cache["resid_pre", 1], rtol=0, atol=0)
    torch.testing.assert_close(cache["pattern", -1].sum(-1), torch.ones(2, family.heads, tokens))


def test_heads_and_bias_add_up_to_what_the_attention_adds(name: str) -> None:
    """Complaints 5, 6, 11; also where a gate or a norm stands between z and the projection."""
    _, cache = run_with_cache(module(name), pixels(name), names=["*hook_result", "*hook_resid*", "*hook_z"])
    for site in find_sites(module(name)):
        if site.second_norm is None:
            continue
        update, bias = cache["result", site.layer].sum(2), site.output_bias()
        update = update if bias is None else update + bias.float()
        added = cache["resid_mid", site.layer] - cache["resid_pre", site.layer]
        torch.testing.assert_close(update, added, rtol=1e-4, atol=1e-4)


def test_z_is_the_pattern_times_the_values(name: str) -> None:
    _, cache = run_with_cache(module(name), pixels(name))
    values = cache["v", 1].repeat_interleave(FAMILIES[name].heads // FAMILIES[name].kv_heads, dim=2)
    rebuilt = torch.einsum("bhqk,bkhd->bqhd", cache["pattern", 1], values)
    torch.testing.assert_close(rebuilt, cache["z", 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["hf llama", "timm grouped rope"])
def test_grouped_keys_stay_as_the_model_has_them(name: str) -> None:
    """Complaint 13: Llama hands them over as they are, timm's AttentionRope repeats them before the call."""
    _, cache = run_with_cache(module(name), pixels(name), names=["*hook_k", "*hook_v"])
    assert cache["k", 0].shape[2] == cache["v", 0].shape[2] == HEADS // 2
    assert not torch.equal(cache["v", 0][:, :, 0], cache["v", 0][:, :, 1])


def test_a_causal_pattern_is_lower_triangular() -> None:
    _, cache = run_with_cache(module("hf llama"), pixels("hf llama"), names="*hook_pattern")
    assert cache["pattern", 0].triu(1).abs().max() == 0


def test_a_pattern_computed_some_rows_at_a_time_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = run_with_cache(module("timm beit"), pixels("timm beit"), names="*hook_pattern")
    monkeypatch.setattr("sinklab.hooks.cache.ROWS", 5)
    _, parts = run_with_cache(module("timm beit"), pixels("timm beit"), names="*hook_pattern")
    torch.testing.assert_close(parts["pattern", 1], whole["pattern", 1])


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_patterns_of_a_bfloat16_model_are_fp32_and_sum_to_one(how: str) -> None:
    model, x = fresh("timm dinov2"), pixels("timm dinov2")
    if how == "weights":
        model, x = model.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        _, cache = run_with_cache(model, x, names="*")
    assert cache["v", 0].dtype == torch.bfloat16
    assert cache["pattern", 0].dtype == cache["result", 0].dtype == torch.float32
    assert (cache["pattern", 0].sum(-1) - 1).abs().max() < 1e-5


def test_the_output_is_the_plain_output_and_the_model_stays_as_it_was() -> None:
    model, x = fresh("timm dinov2"), pixels("timm dinov2")
    hooks = [len(child._forward_hooks) + len(child._forward_pre_hooks) for child in model.modules()]
    with torch.no_grad():
        plain = model(x)
    output, _ = run_with_cache(model, x)
    assert torch.equal(output, plain)
    assert hooks == [len(child._forward_hooks) + len(child._forward_pre_hooks) for child in model.modules()]


def test_what_is_kept_is_a_copy_of_its_own() -> None:
    """A view into q, k and v together would keep all three alive, and an in-place change would reach it."""
    _, cache = run_with_cache(module("timm dinov2"), pixels("timm dinov2"), names="*hook_q")
    kept = cache["q", 0]
    assert kept.is_contiguous() and kept.untyped_storage().nbytes() == kept.numel() * 4
    assert not kept.requires_grad


def test_only_what_was_named_is_kept() -> None:
    _, cache = run_with_cache(
        module("timm dinov2"), pixels("timm dinov2"), names=["blocks.1.attn.hook_v", "*0.hook_resid_mid"]
    )
    assert list(cache.keys()) == ["blocks.0.hook_resid_mid", "blocks.1.attn.hook_v"]


def test_a_name_that_matches_nothing_is_an_error_that_lists_the_names() -> None:
    """Complaint 16."""
    with pytest.raises(NotFoundError, match=r"'blocks\.9\.\*'.*0 to 1.*attn\.hook_pattern"):
        run_with_cache(module("timm dinov2"), pixels("timm dinov2"), names=["*hook_v", "blocks.9.*"])
    with pytest.raises(NotFoundError, match="hook_resid_post"):
        run_with_cache(module("a user's own"), pixels("a user's own"), names="*hook_resid_mid")
    with pytest.raises(NotFoundError, match="No name was given"):
        run_with_cache(module("timm dinov2"), pixels("timm dinov2"), names=[])


def test_more_than_the_limit_is_refused_with_the_size_needed_before_a_block_has_run() -> None:
    """Complaint 19."""
    model, ran = fresh("timm dinov2"), []
    model.blocks[0].norm1.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(InputError, match=r"need about 18\.5 kB for this input of 2 x 17 tokens.*limit of 1\.0 kB"):
        run_with_cache(model, pixels("timm dinov2"), names="*hook_pattern", limit="1KB")  # 2 · 2·4·17·17 · 4 bytes
    assert not ran
    with pytest.raises(InputError, match="2GB"):
        run_with_cache(module("timm dinov2"), pixels("timm dinov2"), limit="two")


def test_the_size_said_is_the_size_kept(name: str) -> None:
    _, cache = run_with_cache(module(name), pixels(name), names="*", limit=10**7)
    kept = sum(tensor.numel() * tensor.element_size() for tensor in cache.values())
    run_with_cache(module(name), pixels(name), names="*", limit=kept)
    with pytest.raises(InputError, match=re.escape(f"{kept / 1e3:.1f} kB")):
        run_with_cache(module(name), pixels(name), names="*", limit=kept - 1)


def test_head_results_follow_from_z_as_transformer_lens_computes_them() -> None:
    _, cache = run_with_cache(module("timm dinov2"), pixels("timm dinov2"))
    _, own = run_with_cache(module("timm dinov2"), pixels("timm dinov2"), names="*hook_result")
    stack, labels = cache.stack_head_results(return_labels=True, incl_remainder=True)
    assert labels[:5] == ["L0H0", "L0H1", "L0H2", "L0H3", "L1H0"] and len(labels) == HEADS * LAYERS + 1
    torch.testing.assert_close(stack[5], own["result", 1][:, :, 1])
    torch.testing.assert_close(stack.sum(0), cache["resid_post", 1])


def test_head_results_from_z_are_refused_where_a_gate_stands_between() -> None:
    _, cache = run_with_cache(module("timm gated"), pixels("timm gated"))
    with pytest.raises(InputError, match="gate between z and its projection"):
        cache.compute_head_results()


def test_what_only_reads_tensors_works() -> None:
    _, cache = run_with_cache(module("hf dinov2"), pixels("hf dinov2", batch=1))
    assert cache["v1"].shape == cache["v", -1].shape
    assert cache.stack_activation("pattern").shape[0] == LAYERS
    stream, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "final_post"] and stream.shape[0] == 5
    assert cache.apply_slice_to_batch_dim(slice(0, 1))["z", 0].shape[0] == 1
    assert cache.remove_batch_dim()["z", 0].dim() == 3


def test_what_needs_more_of_a_model_is_refused_and_never_answered_wrongly() -> None:
    _, cache = run_with_cache(module("hf dinov2"), pixels("hf dinov2"))
    with pytest.raises(InputError, match="apply_ln needs the scales"):
        cache.accumulated_resid(apply_ln=True)
    with pytest.raises(AttributeError, match="no 'tokens_to_residual_directions'"):
        cache.logit_attrs(cache["resid_post", 1][None], 0)
    with pytest.raises(KeyError):
        cache.decompose_resid()
