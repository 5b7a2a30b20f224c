"""The paper's four lemmas, on random instances, through the float64 reference.

Letters: N tokens, D head dim. Every head here has W_O = identity, so updates and z are the same.
"""

from __future__ import annotations

import math

import pytest
import torch
from reference import reference_statistics
from torch import Tensor

SEEDS = range(12)


def one_head(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[dict[str, float], Tensor]:
    """The statistics of one head, q k v [N D], and its pattern [N N]."""
    found = reference_statistics(q[None, None], k[None, None], v[None, None], weight=torch.eye(v.shape[1]), scale=scale)
    pattern = torch.from_numpy(found.pop("pattern")[0, 0])
    return {name: numbers[0, 0].item() for name, numbers in found.items()}, pattern


def sunk_head(seed: int, tokens: int = 9, dim: int = 5) -> tuple[dict[str, float], Tensor, Tensor]:
    """A head that sinks to a random key, more or less strongly by seed: statistics, pattern, values."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, dim, generator=generator).double() for _ in range(3))
    sink = int(torch.randint(tokens, (1,), generator=generator))
    toward = torch.nn.functional.normalize(torch.randn(dim, generator=generator).double(), dim=0)
    q = 0.5 * q + (3.8 + 0.1 * seed) * toward  # all queries share a direction, the sink's key points along it
    k[sink] = (3.8 + 0.1 * seed) * toward
    found, pattern = one_head(q, k, v)
    assert found["sink_index"] == sink and found["min_attention"] > 0.5
    return found, pattern, v


def variance(x: Tensor) -> Tensor:
    """Mean squared distance from the mean: V of Lemma 4."""
    return (x - x.mean(dim=0)).square().sum(dim=-1).mean()


@pytest.mark.parametrize("seed", SEEDS)
def test_lemma_1_a_small_output_under_a_sink_needs_a_small_value(seed: int):
    found, pattern, v = sunk_head(seed)
    v[found["sink_index"]] *= seed / 10  # from a null value to an ordinary one
    output, norm = pattern @ v, v.norm(dim=1)
    epsilon = 1 - found["min_attention"]
    delta, largest = output.norm(dim=1).max(), norm.max()
    assert norm[found["sink_index"]] <= (delta + epsilon * largest) / (1 - epsilon) + 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_lemma_1_a_null_value_bounds_the_output_by_epsilon(seed: int):
    found, pattern, v = sunk_head(seed)
    v[found["sink_index"]] = 0.0
    assert (pattern @ v).norm(dim=1).max() <= (1 - found["min_attention"]) * v.norm(dim=1).max() + 1e-12


def test_lemma_1_a_perfect_sink_hands_every_query_its_own_value():
    torch.manual_seed(0)
    q, k, v = torch.ones(6, 1).double(), torch.zeros(6, 1).double(), torch.randn(6, 4).double()
    k[2] = 2000.0  # exp(-2000) is zero in float64: epsilon is exactly 0
    found, pattern = one_head(q, k, v, scale=1.0)
    assert (found["sink_index"], found["min_attention"]) == (2, 1.0)
    assert torch.equal(pattern @ v, v[2].expand(6, 4))
    v[2] = 0.0
    assert one_head(q, k, v, scale=1.0)[0]["update_norm"] == 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_lemma_2_what_is_left_beside_the_sink_is_at_most_epsilon_times_the_largest_value(seed: int):
    found, pattern, v = sunk_head(seed)
    sink, epsilon = found["sink_index"], 1 - found["min_attention"]
    error = pattern.clone()
    error[:, sink] = 0.0  # E of A = a_s e_s^T + E
    assert error.abs().sum(dim=1).max() <= epsilon + 1e-12
    left = pattern @ v - pattern[:, sink, None] * v[sink]
    torch.testing.assert_close(left, error @ v)
    assert left.norm(dim=1).max() <= epsilon * v.norm(dim=1).max() + 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_lemma_2_bounds_the_energy_beyond_rank_one(seed: int):
    # a_s v_s^T is of rank one, so the singular values beyond the first hold at most |O - a_s v_s^T|_F^2 <= N eps^2 V^2
    found, pattern, v = sunk_head(seed)
    epsilon, energy = 1 - found["min_attention"], (pattern @ v).square().sum().item()
    beyond = (1 - found["rank1_energy"]) * energy
    assert beyond <= len(v) * epsilon**2 * v.norm(dim=1).max().item() ** 2 + 1e-12


def test_a_perfect_broadcast_has_stable_rank_one():
    torch.manual_seed(1)
    q, k, v = torch.ones(7, 1).double(), torch.zeros(7, 1).double(), torch.randn(7, 5).double()
    k[4] = 2000.0
    found, _ = one_head(q, k, v, scale=1.0)
    assert found["stable_rank"] == pytest.approx(1.0, abs=1e-12)
    assert found["stable_rank_head"] == pytest.approx(1.0, abs=1e-12)


def test_attention_of_each_token_to_itself_gives_orthogonal_values_their_full_rank():
    # The other end of the scale: q k^T = 2000 I makes A the identity, and U = V = I has N equal singular values.
    eye = torch.eye(6).double()
    assert one_head(2000 * eye, eye, eye, scale=1.0)[0]["stable_rank"] == pytest.approx(6.0)


def rank_one_interaction(x: Tensor, u: Tensor, sigma: float, dim: int) -> tuple[Tensor, Tensor]:
    """q and k [N D] of tokens x [N C] under W_Q W_K^T = sigma u u^T."""
    along = torch.nn.functional.normalize(torch.arange(1.0, dim + 1).double(), dim=0)
    weight = math.sqrt(sigma) * u[:, None] * along  # the same for queries and keys, [C D]
    torch.testing.assert_close(weight @ weight.T, sigma * u[:, None] * u)
    return x @ weight, x @ weight


def flagged_tokens(seed: int, gamma: float, tokens: int = 8, width: int = 6) -> tuple[Tensor, Tensor]:
    """Tokens [N C] whose first is gamma·u, and the unit vector u [C]; half of the others point along u."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.nn.functional.normalize(torch.randn(width, generator=generator).double(), dim=0)
    x = torch.randn(tokens, width, generator=generator).double()
    signs = torch.tensor([1.0, -1.0]).double().repeat(tokens // 2)
    x += (signs - x @ u)[:, None] * u  # <x_i, u> is exactly +1 or -1
    x[0] = gamma * u
    return x, u


@pytest.mark.parametrize("seed", SEEDS)
def test_lemma_3_the_sink_logit_is_sigma_gamma_and_the_query_s_share_of_u(seed: int):
    sigma, gamma, dim = 1.5 + seed, 2.0 + 0.5 * seed, 4
    x, u = flagged_tokens(seed, gamma)
    q, k = rank_one_interaction(x, u, sigma, dim)
    _, pattern = one_head(q, k, torch.ones(len(x), 1).double())
    logit = sigma * (x @ u)[:, None] * (x @ u) / math.sqrt(dim)  # S_ij of the lemma; S_is = sigma gamma <x_i,u>/sqrt(d)
    torch.testing.assert_close(logit[:, 0], sigma * gamma * (x @ u) / math.sqrt(dim))
    # a pattern knows its logits up to a constant in each row
    torch.testing.assert_close((pattern[:, :1] / pattern).log(), logit[:, :1] - logit)


@pytest.mark.parametrize(("sigma", "gamma"), [(40.0, 3.0), (2.0, 60.0)])
def test_lemma_3_a_spectral_spike_and_a_massive_activation_both_route_the_flagged_queries(sigma: float, gamma: float):
    x, u = flagged_tokens(0, gamma)
    _, pattern = one_head(*rank_one_interaction(x, u, sigma, 4), torch.ones(8, 1).double())
    flagged = x @ u > 0
    assert pattern[flagged, 0].min() > 0.999
    assert pattern[~flagged, 0].max() < 0.001
    weak = one_head(*rank_one_interaction(*flagged_tokens(0, 3.0), 2.0, 4), torch.ones(8, 1).double())[1]
    assert weak[flagged, 0].min() < 0.9  # neither route taken: no sink


@pytest.mark.parametrize("seed", SEEDS)
def test_lemma_4_one_vector_added_to_every_token_keeps_the_centred_variance(seed: int):
    torch.manual_seed(seed)
    x, shared = torch.randn(9, 5).double(), 10 * torch.randn(5).double()
    torch.testing.assert_close(variance(x + shared), variance(x), rtol=1e-12, atol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_lemma_4_the_expansion_of_the_variance_is_exact_and_its_rest_is_of_order_epsilon(seed: int):
    found, pattern, v = sunk_head(seed)
    sink, epsilon, largest = found["sink_index"], 1 - found["min_attention"], v.norm(dim=1).max()
    x = torch.randn(v.shape, generator=torch.Generator().manual_seed(100 + seed)).double()
    centred = x - x.mean(dim=0)  # d_i
    spread = pattern[:, sink] - pattern[:, sink].mean()  # delta_i
    beside = pattern @ v - pattern[:, sink, None] * v[sink]  # r_i
    beside = beside - beside.mean(dim=0)

    stated = variance(x) + 2 * (spread * (centred @ v[sink])).mean() + spread.square().mean() * v[sink].square().sum()
    rest = beside.square().sum(dim=1).mean() + 2 * (((centred + spread[:, None] * v[sink]) * beside).sum(dim=1)).mean()
    torch.testing.assert_close(variance(x + pattern @ v), stated + rest, rtol=1e-12, atol=1e-12)

    assert spread.abs().max() <= epsilon + 1e-12
    assert beside.norm(dim=1).max() <= 2 * epsilon * largest + 1e-12
    bound = 4 * epsilon * largest * variance(x).sqrt() + 8 * epsilon**2 * largest**2
    assert rest.abs() <= bound + 1e-12
