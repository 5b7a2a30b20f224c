"""Sites are found by the parts of an attention module and by the two norms of its block, never by a class's name."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, HEADS, LAYERS, WIDTH, OwnAttention, fresh, module, openclip_tower
from torch import nn

from sinklab.hooks.site import AttentionParts, find_sites, register


@pytest.fixture(params=list(FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_layers_count_from_zero_in_the_models_own_order(name: str) -> None:
    """Complaint 14."""
    sites, paths = find_sites(module(name)), dict(module(name).named_modules())
    assert [site.layer for site in sites] == list(range(LAYERS))
    for site in sites:
        assert paths[site.name] is site.attention and paths[site.block] is site.block_module
        assert site.name.startswith(site.block + ".")
        assert any(part == str(site.layer) for part in site.block.split("."))


@pytest.mark.parametrize("family", [n for n, f in FAMILIES.items() if n != "a user's own" and not f.stand_in])
def test_renaming_the_classes_changes_nothing(family: str) -> None:
    """Libraries rename and flatten their classes; the parameters of a checkpoint keep their names."""
    model = fresh(family)
    before = [(site.name, site.heads, site.kv_heads, site.head_dim) for site in find_sites(model)]
    for child in model.modules():
        child.__class__ = type("Renamed", (type(child),), {})
    assert [(site.name, site.heads, site.kv_heads, site.head_dim) for site in find_sites(model)] == before


def test_output_weights_map_each_heads_z_to_its_share_of_the_update(name: str) -> None:
    """Complaint 11: Γ W_h and Γ b are what the projection and the LayerScale do to z, head by head."""
    site = find_sites(module(name))[1]
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(3, site.heads, site.head_dim, generator=generator)
    scaled = z if site.parts.head_scale is None else z * site.parts.head_scale().reshape(-1, 1)
    with torch.no_grad():
        expected = site.parts.projection(scaled.flatten(1))
    expected = expected if site.layer_scale is None else expected * site.layer_scale
    bias = site.output_bias()
    update = torch.einsum("nhd,hcd->nc", z.double(), site.output_weight())
    update = update if bias is None else update + bias
    torch.testing.assert_close(update.float(), expected, rtol=1e-4, atol=1e-5)


def test_query_and_key_weights_are_the_rows_that_make_q_and_k() -> None:
    attention = module("timm dinov2").blocks[0].attn
    parts = find_sites(module("timm dinov2"))[0].parts
    assert parts.query_weight is not None and parts.key_weight is not None
    x = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    q, k, _ = attention.qkv(x).chunk(3, dim=-1)
    bias = attention.qkv.bias.chunk(3)
    torch.testing.assert_close(x @ parts.query_weight().T + bias[0], q)
    torch.testing.assert_close(x @ parts.key_weight().T + bias[1], k)


@pytest.mark.parametrize(
    ("name", "after"),
    [("timm gated", "gate"), ("timm scale norm", "norm"), ("openclip inner norm", "norm"), ("timm dinov2", None)],
)
def test_what_stands_between_attention_and_projection_is_said(name: str, after: str | None) -> None:
    assert {site.parts.after for site in find_sites(module(name))} == {after}


def test_pooling_heads_are_not_layers() -> None:
    for name in ("timm siglip", "hf siglip", "openclip timm trunk"):
        assert len(find_sites(module(name))) == LAYERS
    pooled = openclip_tower(attentional_pool=True, attn_pooler_queries=3, attn_pooler_heads=2)
    assert [site.name for site in find_sites(pooled)] == [f"transformer.resblocks.{i}.attn" for i in range(LAYERS)]


def test_the_text_tower_of_a_clip_is_layers_too_if_the_whole_clip_is_given() -> None:
    import open_clip

    settings = {"width": WIDTH, "layers": 1, "head_width": 8, "image_size": 32, "patch_size": 16}
    text = {"width": WIDTH, "layers": 1, "heads": HEADS, "context_length": 8, "vocab_size": 50}
    clip = open_clip.CLIP(16, settings, text)
    assert len(find_sites(clip)) == 2 and len(find_sites(clip.visual)) == 1


@pytest.mark.parametrize("name", ["openclip tokens first", "openclip", "timm dinov2"])
def test_stacks_that_run_tokens_first_are_known(name: str) -> None:
    assert {site.tokens_first for site in find_sites(module(name))} == {name == "openclip tokens first"}


def test_a_registered_subclass_has_its_own_description() -> None:
    class Special(OwnAttention):
        pass

    holder = nn.Sequential(nn.Sequential(Special()))
    assert find_sites(holder)[0].heads == HEADS  # as its parent
    register(Special, lambda own: AttentionParts(heads=2, projection=own.back))
    assert find_sites(holder)[0].heads == 2
    register(Special, lambda own: AttentionParts(heads=3, projection=own.back))
    assert find_sites(holder)[0].heads == 3


def test_a_registered_description_may_decline_a_module() -> None:
    class Sometimes(OwnAttention):
        pass

    register(Sometimes, lambda own: None if own.shape[0] == 1 else AttentionParts(heads=HEADS, projection=own.back))
    model = nn.Sequential(nn.Sequential(Sometimes()), nn.Sequential(Sometimes(heads=1)))
    assert [site.name for site in find_sites(model)] == ["0.0"]


def test_finding_sites_touches_no_weight() -> None:
    """Complaint 17: nothing is folded, centred or rewritten."""
    model = fresh("openclip scaled heads")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for site in find_sites(model):
        site.output_weight(), site.output_bias()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
