"""The controlled models: their size, their decomposition, and what the pathway computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sinklab
from sinklab.errors import InputError
from sinklab.models.pathway import GlobalPathway
from sinklab.models.toy import BroadcastModel, NopModel, ToyBlock, ToyModel
from sinklab.training.toy_edits import LayerEdit, run_model


def seeded(build: Any, **options: Any) -> ToyModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: ToyModel = build(**options)
        return model


def tokens(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 32, 64, generator=torch.Generator().manual_seed(1))


def size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


MODELS = [
    (NopModel, {}),
    (BroadcastModel, {}),
    *((BroadcastModel, {"pathway": gate}) for gate in ("learned", "uniform")),
]
NAMES = ["nop", "broadcast", "learned", "uniform"]


def test_the_nop_model_has_18624_parameters() -> None:
    assert size(NopModel()) == 18_624


def test_the_broadcast_model_has_101504_parameters() -> None:
    assert size(BroadcastModel()) == 101_504


@pytest.mark.parametrize(("gate", "recipient"), [("learned", 64 + 1), ("uniform", 0)])
def test_a_pathway_adds_a_pooling_vector_two_matrices_and_its_gate_to_each_layer(gate: str, recipient: int) -> None:
    assert size(BroadcastModel(pathway=gate)) == 101_504 + 2 * (64 + 2 * 64 * 64 + recipient)


def test_attention_and_mlp_start_the_same_with_and_without_a_pathway() -> None:
    plain, with_pathway = seeded(BroadcastModel), seeded(BroadcastModel, pathway="learned")
    others = with_pathway.state_dict()
    assert all(torch.equal(value, others[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize(("build", "options"), MODELS, ids=NAMES)
def test_what_is_read_of_a_controlled_model_is_what_it_computes(build: type[ToyModel], options: dict[str, str]) -> None:
    model = seeded(build, **options)
    proofs = sinklab.prove(model, tokens(1))
    assert len(proofs) == len(model.blocks)
    assert all(proof.update is not None and proof.update < 1e-5 for proof in proofs)


@pytest.mark.parametrize(("build", "options"), MODELS, ids=NAMES)
def test_written_out_and_unedited_a_model_gives_its_own_output(build: type[ToyModel], options: dict[str, str]) -> None:
    model = seeded(build, **options)
    with torch.no_grad():
        torch.testing.assert_close(run_model(model, tokens(), {0: LayerEdit()})[0], model(tokens()))


def test_the_residual_stream_of_the_nop_model_is_its_raw_input() -> None:
    model = seeded(NopModel)
    block = model.blocks[0]
    assert isinstance(block, ToyBlock)
    with torch.no_grad():
        block.attention.out_proj.weight.zero_()
        assert torch.equal(model(tokens()), tokens())


def test_the_updates_handed_out_are_those_that_the_stream_received() -> None:
    model = seeded(NopModel)
    updates: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    with torch.no_grad():
        produced = model(tokens(), updates)
        assert torch.equal(tokens() + updates[0][0], produced)


def test_the_pathway_starts_by_giving_every_token_half_of_the_state() -> None:
    pathway = GlobalPathway(64, 64)
    with torch.no_grad():
        pathway.recipient.weight.zero_()  # type: ignore[union-attr]
        assert torch.equal(pathway.gate(tokens()), torch.full((2, 32, 1), 0.5))


def test_the_pathway_does_not_know_positions() -> None:
    pathway, order = GlobalPathway(64, 64), torch.randperm(32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(pathway(tokens()[:, order]), pathway(tokens())[:, order])


def test_a_uniform_pathway_gives_all_tokens_the_same() -> None:
    pathway = GlobalPathway(64, 64, gate="uniform")
    with torch.no_grad():
        update = pathway(tokens())
        torch.testing.assert_close(update, update[:, :1].expand_as(update), rtol=0, atol=0)


def test_the_state_is_the_pooled_value() -> None:
    """Against Eq. 4 term by term: Σ_j π_j W_VG h_j."""
    pathway, h = GlobalPathway(64, 64).double(), tokens().double()
    with torch.no_grad():
        weights = (h @ pathway.pool.weight[0]).softmax(-1)
        expected = sum(weights[:, j, None] * (h[:, j] @ pathway.value.weight.T) for j in range(32))
        torch.testing.assert_close(pathway.state(h), expected)


def test_an_unknown_gate_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="learned, hier, uniform, not 'open'"):
        GlobalPathway(4, 4, gate="open")
