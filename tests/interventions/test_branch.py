"""Branch edits: those of the controlled tasks, exact where exactness is known, and gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sinklab
from sinklab.data.toy import BroadcastTask
from sinklab.errors import InputError, NotFoundError
from sinklab.interventions.branch import (
    attention_off,
    donor_state,
    find_pathways,
    measure_branches,
    pathway_off,
    pathway_states,
)
from sinklab.models.pathway import GlobalPathway
from sinklab.models.tokens import TokenMap
from sinklab.models.toy import BroadcastModel
from sinklab.training.toy_edits import LayerEdit, run_model


@pytest.fixture(autouse=True)
def drawn_alike() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def toy(pathway: str | None = "learned") -> BroadcastModel:
    model = BroadcastModel(8, 16, hidden=32, pathway=pathway)
    for part in model.modules():
        if isinstance(part, GlobalPathway):  # large enough that an edit of it is no rounding
            nn.init.normal_(part.out.weight)
            nn.init.normal_(part.value.weight)
    return model.eval()


def batch(purpose: str = "evaluation") -> Tensor:
    return BroadcastTask(seed=0, tokens=8, dim=16).batch(0, 5, purpose=purpose).x


class ScaledAttention(nn.Module):
    """Two heads with biases, as a vision transformer has them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = 2, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class PathwayBlock(nn.Module):
    """x + ls1(attention) + ls3(pathway), then an MLP: a ViT's block with a pathway."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.pathway = ScaledAttention(dim), GlobalPathway(dim, 4)
        self.ls1, self.ls3 = nn.Parameter(torch.rand(dim)), nn.Parameter(torch.rand(dim))
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + (self.ls1 * self.attn(h) + self.ls3 * self.pathway(h))
        return x + self.mlp(self.norm2(x))


class PathwayViT(nn.Module):
    """CLS and patches of 4x4 pixels."""

    def __init__(self, dim: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, dim, 4, 4), nn.Parameter(torch.randn(1, 1, dim))
        self.blocks = nn.ModuleList(PathwayBlock(dim) for _ in range(layers))

    def embedded(self, pixels: Tensor) -> Tensor:
        return torch.cat([self.cls.expand(len(pixels), -1, -1), self.patch(pixels).flatten(2).mT], 1)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embedded(pixels)
        for block in self.blocks:
            x = block(x)
        return x


def vit() -> Any:
    preprocessing = sinklab.Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic", size=(16, 16))
    tokens = TokenMap(prefix=("cls",), patch_size=(4, 4))
    return sinklab.attach(PathwayViT().eval(), tokens=tokens, preprocessing=preprocessing)


def hooks_of(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


@pytest.mark.parametrize("gate", ["learned", "uniform"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_edits_are_those_of_the_controlled_tasks(gate: str, layer: int) -> None:
    model, x, donors = toy(gate), batch(), batch("donors")
    states = pathway_states(model, donors)
    open_states = [model.blocks[place].pathway.state(record.h)  # type: ignore[union-attr,operator]
                   for place, record in enumerate(run_model(model, donors)[1])]  # fmt: skip
    assert torch.allclose(states[layer], open_states[layer], atol=1e-6)
    for edit, change in (
        (attention_off(model, [layer]), LayerEdit(attention=False)),
        (pathway_off(model, [layer]), LayerEdit(pathway=False)),
        (donor_state(model, {layer: states[layer]}), LayerEdit(state=open_states[layer])),
    ):
        with torch.no_grad(), edit:
            ours = model(x)
        expected, _ = run_model(model, x, {layer: change})
        assert not torch.allclose(ours, model(x), atol=1e-3)
        assert torch.allclose(ours, expected, atol=1e-6 * float(expected.detach().abs().max()))


def test_without_either_branch_a_layer_is_its_mlp() -> None:
    model, x = toy(), batch()
    with torch.no_grad(), attention_off(model), pathway_off(model):
        ours = model(x)
        for block in model.blocks:
            x = x + block.mlp(block.norm2(x))  # type: ignore[operator,union-attr]
    assert torch.equal(ours, x)


def test_a_vits_attention_off_leaves_what_its_pathway_adds() -> None:
    model, pixels = vit(), torch.randn(3, 3, 16, 16)
    block = model.module.blocks[1]
    with torch.no_grad(), attention_off(model, [1]):
        ours = model(pixels)
    with torch.no_grad():
        x = model.module.blocks[0](
            torch.cat([model.module.cls.expand(3, -1, -1), model.module.patch(pixels).flatten(2).mT], 1)
        )
        x = x + block.ls3 * block.pathway(block.norm1(x))
        assert torch.allclose(ours, x + block.mlp(block.norm2(x)), atol=1e-6)


def test_an_inputs_own_state_changes_nothing() -> None:
    model, x = toy(), batch()
    with donor_state(model, pathway_states(model, x)), torch.no_grad():
        assert torch.equal(model(x), model(x)) and torch.allclose(model(x), run_model(model, x)[0], atol=1e-5)
    table = measure_branches(model, x, x)
    assert (table.loc[table["edit"] == "donor_state", "patch_change"] < 1e-6).all()


def test_an_edit_leaves_nothing_behind_not_even_after_an_exception() -> None:
    model, x = toy(), batch()
    before, hooks = model(x), hooks_of(model)
    for edit in (attention_off(model), pathway_off(model), donor_state(model, pathway_states(model, x[:2]))):
        with pytest.raises(RuntimeError, match="in between"), edit:
            raise RuntimeError("in between")
        assert hooks_of(model) == hooks
    with pytest.raises(InputError, match="of 2 inputs, but 5 came"), donor_state(model, pathway_states(model, x[:2])):
        model(x)
    assert hooks_of(model) == hooks
    assert torch.equal(model(x), before)


def test_an_edit_within_which_the_model_never_ran_is_an_error() -> None:
    model = toy()
    words = "2 of 2 branch edits never fired; the first is attention of layer 0"
    with pytest.raises(NotFoundError, match=words), attention_off(model):
        pass
    assert hooks_of(model) == 0


def test_a_model_without_a_pathway_is_told_so_in_a_sentence() -> None:
    model = toy(None)
    with pytest.raises(NotFoundError, match="no global pathway in any layer"), pathway_off(model):
        pass
    with pytest.raises(NotFoundError, match=r"Layer 1 has no global pathway \(block 'blocks.1'\)"):
        find_pathways(model, [1])
    words = "Layer 7 does not exist: this model has layers 0 to 1"
    with pytest.raises(NotFoundError, match=words), attention_off(model, [7]):
        pass
    with pytest.raises(NotFoundError, match="No attention|no attention"), attention_off(nn.Sequential(nn.Linear(2, 2))):
        pass


@pytest.mark.parametrize(
    ("states", "words"),
    [({}, "one layer at least"), ({0: torch.zeros(5, 3)}, r"\[batch 16\], not \[5, 3\]"), ({0: 1.0}, "not float")],
)
def test_states_that_do_not_fit_are_refused_before_anything_is_attached(states: Any, words: str) -> None:
    model = toy()
    with pytest.raises(InputError, match=words), donor_state(model, states):
        pass
    assert hooks_of(model) == 0


def test_a_uniform_pathways_edit_in_the_last_layer_is_shared_by_all_tokens_before_the_mlp() -> None:
    model = toy("uniform")
    nn.init.zeros_(model.blocks[1].mlp[2].weight)  # type: ignore[index,union-attr,arg-type]
    table = measure_branches(model, batch(), batch("donors"), layers=[1])
    shared = table[table["edit"].isin(["pathway_off", "donor_state"])]["shared_energy"]
    assert len(shared) == 10 and ((shared - 1).abs() < 1e-5).all()


def test_the_change_is_that_of_the_two_outputs() -> None:
    model, x, donors = toy(), batch(), batch("donors")
    table = measure_branches(model, x, donors)
    assert list(table["edit"].unique()) == ["attention_off", "pathway_off", "donor_state"]
    assert len(table) == 2 * 3 * 5 and table.loc[table["edit"] != "donor_state", "donor_cosine"].isna().all()
    edited = run_model(model, x, {1: LayerEdit(pathway=False)})[0]
    expected = (edited - model(x)).square().sum((1, 2)).sqrt() / model(x).square().sum((1, 2)).sqrt()
    ours = table[(table["layer"] == 1) & (table["edit"] == "pathway_off")]["patch_change"]
    assert torch.allclose(torch.tensor(ours.to_numpy()), expected.double(), rtol=1e-4)


def test_a_handles_patches_count_and_its_class_token_apart() -> None:
    model, pixels = vit(), torch.randn(3, 3, 16, 16)
    table = measure_branches(model, pixels, pixels.flip(0))
    assert len(table) == 2 * 3 * 3 and table["cls_change"].notna().all()
    with torch.no_grad(), pathway_off(model, [0]):
        after = model(pixels)
    before = model(pixels).detach()
    expected = (after - before)[:, 1:].norm(dim=(1, 2)) / before[:, 1:].norm(dim=(1, 2))
    ours = table[(table["layer"] == 0) & (table["edit"] == "pathway_off")]["patch_change"]
    assert torch.allclose(torch.tensor(ours.to_numpy()), expected.double(), rtol=1e-3)


def test_inputs_without_donors_are_refused() -> None:
    with pytest.raises(InputError, match=r"inputs are \[5, 8, 16\], donors \[2, 8, 16\]"):
        measure_branches(toy(), batch(), batch()[:2])
