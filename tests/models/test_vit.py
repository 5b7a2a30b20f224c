"""The vision transformer: the paper's parameter counts, timm's outputs, parts that do what their equations say."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import sinklab
from sinklab.errors import InputError, NotFoundError
from sinklab.models.pathway import GlobalPathway, common_mode
from sinklab.models.vit import SIZES, DropPath, LayerScale, ViT, ViTShape, moments, shares
from sinklab.models.vit_file import from_authors, load_into, shape_of, timm_arguments, to_timm

SMALL: dict[str, Any] = {"image": 32, "patch": 8, "dim": 24, "depth": 3, "heads": 3}


def drawn(seed: int = 0, **changes: Any) -> ViT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ViT(ViTShape(**SMALL | changes))


def pixels(count: int = 2, side: int = 32) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def parameters(**changes: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in ViT(ViTShape(**SIZES["L"] | changes)).parameters())


def test_vit_l_has_as_many_parameters_as_the_paper_says() -> None:
    plain = parameters()
    assert round(plain / 1e6, 1) == 303.3
    assert round((parameters(gate="elementwise") - plain) / 1e6, 1) == 25.2
    assert round((parameters(gate="headwise") - plain) / 1e6, 2) == 0.39
    assert round((parameters(pathway="learned") - plain) / 1e6, 2) == 3.19
    assert parameters(registers=4) - plain == 2 * 4 * 1024  # the tokens, and their places in the position table


@pytest.mark.parametrize(
    "changes",
    [{}, {"registers": 4}, {"layer_scale": None}, {"qkv_bias": True, "norm_eps": 1e-6}, {"layer_scale": 1.0}],
)
def test_the_plain_network_is_timms_with_the_same_weights(changes: dict[str, Any]) -> None:
    mine = drawn(**changes).eval()
    theirs = VisionTransformer(**timm_arguments(mine.shape)).eval()
    theirs.load_state_dict(to_timm(mine))
    assert torch.allclose(mine(pixels()), theirs.forward_features(pixels()), atol=1e-5)
    back, report = from_authors(theirs.state_dict())
    again = ViT(mine.shape).eval()
    load_into(again, back)
    assert torch.equal(again(pixels()), mine(pixels())) and not report.left_out


def test_timms_vit_large_has_the_same_names_and_shapes() -> None:
    shape = ViTShape(**SIZES["L"], layer_scale=None, qkv_bias=True, norm_eps=1e-6)
    with torch.device("meta"):
        theirs = timm.create_model("vit_large_patch16_224", pretrained=False).state_dict()
        mine = ViT(shape).state_dict()
    taken, report = from_authors(theirs)
    assert {name: value.shape for name, value in taken.items()} == {name: value.shape for name, value in mine.items()}
    assert set(report.left_out) == {"head.weight", "head.bias"}
    assert shape_of(taken).depth == 24 and shape_of(taken).heads == 16


def authors_keys(model: ViT) -> dict[str, Tensor]:
    """A model's weights as the paper's scripts name them."""
    names = {"attn.gate.": "attn.gate_proj.", "pathway.pool.": "gp.w_P.", "pathway.value.": "gp.W_VG."}
    names |= {"pathway.out.": "gp.W_OG.", "pathway.recipient.": "gp.gate."}
    state = {}
    for name, value in model.state_dict().items():
        for here, there in names.items():
            name = name.replace(here, there)
        state[f"backbone.{name}"] = value
    return state


@pytest.mark.parametrize(
    "changes",
    [
        {"gate": "elementwise", "registers": 4},
        {"gate": "headwise", "pathway": "hier", "pathway_scale": 1.0},
        {"pathway": "learned", "layer_scale": 1.0},
        {"pathway": "uniform"},
    ],
)
def test_the_papers_checkpoints_come_back_by_their_own_keys(changes: dict[str, Any]) -> None:
    model = drawn(**changes).eval()
    state = {f"module.{name}": value for name, value in authors_keys(model).items()}
    state |= {"module.projector.0.weight": torch.zeros(2), "module.probe.1.weight": torch.zeros(2)}
    weights, report = from_authors(state)
    assert set(report.left_out) == {"module.projector.0.weight", "module.probe.1.weight"}
    assert "left out: module.projector.0.weight" in report.sentence()
    shape = shape_of(weights, heads=3)
    again = ViT(shape).eval()
    load_into(again, weights)
    assert (shape.gate, shape.pathway, shape.registers) == (
        model.shape.gate,
        model.shape.pathway,
        model.shape.registers,
    )
    assert torch.equal(again(pixels()), model(pixels()))


def test_weights_that_do_not_fit_are_refused_with_their_names() -> None:
    weights = drawn(gate="headwise").state_dict()
    with pytest.raises(InputError, match="unknown: blocks.0.attn.gate.bias, blocks.0.attn.gate.weight"):
        load_into(drawn(), weights)
    with pytest.raises(InputError, match="missing: register_tokens; of another shape: pos_embed"):
        load_into(drawn(registers=2), drawn().state_dict())
    with pytest.raises(InputError, match="holds no vision transformer"):
        from_authors({"conv1.weight": torch.zeros(1)})
    with pytest.raises(InputError, match="give heads"):
        shape_of(drawn().state_dict())


def test_variants_of_one_seed_begin_with_the_same_weights() -> None:
    plain = drawn().state_dict()
    for changes in ({"registers": 4}, {"gate": "elementwise"}, {"pathway": "hier"}, {"gate": "headwise"}):
        other = drawn(**changes)
        state = other.state_dict()
        differing = [n for n in plain if plain[n].shape == state[n].shape and not torch.equal(plain[n], state[n])]
        assert not differing
        places = torch.cat([other.pos_embed[:, :1], other.pos_embed[:, 1 + other.shape.registers :]], 1)
        assert torch.equal(places, plain["pos_embed"])


def test_at_the_start_the_learned_gate_is_a_half_and_the_hierarchical_a_quarter() -> None:
    for gate, start in (("learned", 0.5), ("hier", 0.25), ("uniform", 1.0)):
        pathway = GlobalPathway(8, 4, gate=gate)
        assert float(pathway.gate(torch.zeros(1, 3, 8)).mean().detach()) == pytest.approx(start)


def test_the_pathway_adds_the_same_direction_to_all_tokens() -> None:
    pathway = GlobalPathway(8, 4)
    update = pathway(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)))
    assert float(torch.linalg.matrix_rank(update[0])) == 1


def test_a_block_adds_its_three_branches_to_the_stream() -> None:
    block = drawn(pathway="learned", layer_scale=1.0, pathway_scale=2.0, gate="headwise").blocks[1].eval()
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
    h = block.norm1(x)
    middle = x + block.attn(h) + 2 * block.pathway(h)
    assert torch.allclose(block(x), middle + block.mlp(block.norm2(middle)), atol=1e-6)


def test_drop_path_leaves_out_both_branches_of_an_image_together_and_keeps_the_mean() -> None:
    drop = DropPath(0.25).train()
    ones = torch.ones(20_000, 1, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = drop(ones, 3 * ones)
    assert torch.equal(3 * first, second) and float(first.mean()) == pytest.approx(1, abs=0.02)
    assert torch.equal(drop.eval()(ones)[0], ones)
    rates = [block.drop_path1.rate for block in drawn(drop_path=0.1).blocks]
    assert rates == pytest.approx([0, 0.05, 0.1])


def test_moments_give_the_common_mode_share_of_what_a_block_adds() -> None:
    model = drawn(gate="elementwise", layer_scale=1.0).eval()
    _, measured = model(pixels(), measure="gated")
    expected, x = [], model.embed(pixels())
    for block in model.blocks:
        expected.append(common_mode(block.ls1(block.attn(block.norm1(x)))))
        x = block(x)
    assert torch.allclose(shares(measured), torch.stack(expected), rtol=1e-5)
    gates_open = drawn(gate="elementwise", layer_scale=1.0).eval()
    for block in gates_open.blocks:
        nn.init.constant_(block.attn.gate.bias, 100.0)  # σ = 1: with and without the gate are one
    gated, ungated = (gates_open(pixels(), measure=kind)[1] for kind in ("gated", "ungated"))
    assert torch.allclose(gated, ungated)
    assert not torch.allclose(model(pixels(), measure="ungated")[1], measured)


def test_moments_are_of_the_update_with_its_layer_scale() -> None:
    small, large = drawn(layer_scale=1e-4).eval(), drawn(layer_scale=1.0).eval()
    _, first = small(pixels(), measure="gated")
    _, second = large(pixels(), measure="gated")
    assert float((first[0, 1] / second[0, 1]).detach()) == pytest.approx(1e-8, rel=1e-3)
    assert float(moments(torch.ones(2, 3, 4))[0]) == 1


def test_activation_checkpointing_changes_no_gradient() -> None:
    found = []
    for checkpointing in (False, True):
        model = drawn(gate="headwise", pathway="learned", drop_path=0.3).train()
        model.checkpointing = checkpointing
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            tokens, measured = model(pixels(8), measure="gated")
        (tokens.square().mean() + shares(measured).mean()).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_another_size_of_image_resamples_the_positions() -> None:
    model = drawn(registers=2).eval()
    assert model(pixels(1, 48)).shape == (1, 3 + 36, 24)
    constant = drawn().eval()
    nn.init.ones_(constant.pos_embed)
    assert torch.allclose(constant.positions(6, 5), torch.ones(1, 31, 24), atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"registers": 4, "gate": "elementwise"},
        {"gate": "headwise", "pathway": "learned"},
        {"pathway": "hier", "pathway_scale": 1.0},
    ],
)
def test_sinklab_attaches_to_every_variant_and_proves_it(changes: dict[str, Any]) -> None:
    network = drawn(layer_scale=1.0, **changes).eval()
    model = sinklab.attach(network)
    assert model.tokens == network.tokens and model.preprocessing.size == (32, 32)
    assert len(model.sites) == 3 and model.sites[0].heads == 3
    proofs = sinklab.prove(model, pixels())
    assert all(proof.fired == 1 and proof.update is not None and proof.update < 1e-4 for proof in proofs)
    assert isinstance(network.blocks[0].ls1, LayerScale)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": 25}, "3 heads do not divide a width of 25"),
        ({"image": 33}, "do not tile an image of 33"),
        ({"gate": "sigmoid"}, "none, elementwise, headwise, not 'sigmoid'"),
        ({"kernel": "linear"}, "kernel is one of softmax, clipped"),
        ({"pathway": "wide"}, "learned, hier, uniform, not 'wide'"),
        ({"depth": 0}, "depth is at least 1"),
        ({"drop_path": 1.0}, r"drop_path lies in \[0, 1\)"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        drawn(**changes)


def test_a_kernel_without_a_fused_call_is_refused_in_a_sentence() -> None:
    with pytest.raises(NotFoundError, match="blocks.0.attn"):
        sinklab.prove(sinklab.attach(drawn(kernel="relu").eval()), pixels())
