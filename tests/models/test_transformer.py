"""The matched transformer: what it is by definition, and one attention call a layer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.errors import InputError
from sinklab.hooks.manager import HookManager
from sinklab.models.generation import KeyValues
from sinklab.models.lm_config import TransformerConfig
from sinklab.models.transformer import CausalAttention, Transformer, rope, turns

SMALL = TransformerConfig(dim=8, heads=2, hidden=12, layers=2)
SYMBOLS = 11


@pytest.fixture(autouse=True)
def drawn_alike() -> Any:
    """Models that a test builds itself are the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def model() -> Transformer:
    net = Transformer(SMALL, SYMBOLS).double().eval()
    for parameter in net.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return net


def test_a_later_token_changes_nothing_earlier() -> None:
    net, tokens = model(), torch.randint(SYMBOLS, (1, 9))
    other = tokens.clone()
    other[0, 5:] = (tokens[0, 5:] + 1) % SYMBOLS
    first, second = net(tokens), net(other)
    assert torch.equal(first[:, :5], second[:, :5])
    assert not torch.equal(first[:, 5:], second[:, 5:])


def test_scores_depend_on_the_distance_of_two_tokens_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(t: int, u: int) -> float:
        turned = (
            rope(x, turns(torch.tensor([float(at)]).double(), 8, 1e4, torch.float64)) for x, at in ((q, t), (k, u))
        )
        return float((next(turned) * next(turned)).sum())

    assert score(9, 4) == pytest.approx(score(1005, 1000), abs=1e-10)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def test_a_rotation_keeps_lengths_and_turns_the_first_pair_by_one_radian_a_token() -> None:
    x = torch.randn(1, 1, 5, 8, dtype=torch.float64)
    turned = rope(x, turns(torch.arange(5).double(), 8, 1e4, torch.float64))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    complex_x, complex_turned = (torch.complex(part[..., 0], part[..., 4]) for part in (x, turned))
    torch.testing.assert_close(complex_turned / complex_x, torch.exp(1j * torch.arange(5)).to(complex_x)[None, None])


def test_attention_is_the_softmax_of_scaled_products_over_earlier_tokens() -> None:
    attention = CausalAttention(SMALL).double()
    h = torch.randn(1, 4, 8, dtype=torch.float64)
    turn = turns(torch.arange(4).double(), 4, 1e4, torch.float64)
    outputs = []
    for head in range(2):
        part = slice(4 * head, 4 * head + 4)
        q, k, v = (proj(h)[..., part] for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
        scores = rope(q[:, None], turn)[0, 0] @ rope(k[:, None], turn)[0, 0].T / 2  # √4
        scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
        outputs.append(scores.softmax(-1) @ v[0])
    torch.testing.assert_close(attention(h)[0], torch.cat(outputs, -1) @ attention.out_proj.weight.T)


def test_one_attention_call_a_layer_and_hooks_find_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    net, tokens = model(), torch.randint(SYMBOLS, (2, 5))
    calls: list[bool] = []
    real = F.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append(options["is_causal"])
        return real(q, k, v, **options)

    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", counted)
        plain = net(tokens)
    assert calls == [True, True]
    with torch.no_grad(), HookManager(net) as hooks:
        assert torch.equal(hooks.run(tokens), plain)
        assert [site.heads for site in hooks.sites] == [2, 2]


def test_embedding_and_readout_are_one_matrix_and_there_are_no_biases() -> None:
    net = model()
    names = dict(net.named_parameters())
    assert not [name for name in names if "bias" in name]
    tokens = torch.randint(SYMBOLS, (1, 3))
    torch.testing.assert_close(net(tokens), net.final(tokens) @ net.embedding.weight.T)


def test_at_first_every_symbol_is_about_as_likely() -> None:
    net = Transformer(TransformerConfig(), 205)
    tokens = torch.randint(205, (4, 65))
    with torch.no_grad():
        nats = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert float(nats) == pytest.approx(math.log(205), abs=0.3)


def test_first_weights_have_the_spread_asked_for() -> None:
    net = Transformer(TransformerConfig(dim=64, heads=2, hidden=200, layers=2, init=0.4), 205)
    block: Any = net.blocks[0]
    for weight, std in (
        (net.embedding.weight, 0.05),
        (block.attention.q_proj.weight, 0.05),
        (block.mlp.gate_and_up.weight, 0.05),
        (block.attention.out_proj.weight, 0.025),
        (block.mlp.down.weight, 0.025),
    ):
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.05)


def test_a_compiled_model_computes_the_same() -> None:
    net, tokens = model(), torch.randint(SYMBOLS, (2, 6))
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), net(tokens), rtol=0, atol=1e-12)


def test_heads_that_rope_cannot_turn_are_refused() -> None:
    with pytest.raises(InputError, match="8 channels do not make pairs in 8"):
        TransformerConfig(dim=8, heads=8)


@pytest.mark.parametrize("fresh", [1, 3])
def test_a_cache_of_four_lets_no_query_see_more_than_four_tokens(fresh: int) -> None:
    """`longest` counts the new token too: it is the context that was trained on."""
    past = KeyValues(4)
    for _ in range(6):
        new = torch.zeros(1, 1, fresh, 2)
        keys, _ = past.extend(new, new)
        assert keys.shape[2] <= 4
    assert keys.shape[2] == 4 and past.seen == 6 * fresh
