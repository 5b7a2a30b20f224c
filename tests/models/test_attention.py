"""Attention: one fused call where the kernel is softmax, gates in their place, and what the rows of a kernel sum to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sinklab.models.attention import GATE_BIAS, KERNELS, Attention, scaled_logits


def drawn(**options: object) -> Attention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attention = Attention(12, 3, **options)  # type: ignore[arg-type]
        nn.init.normal_(attention.qkv.weight, std=0.5)
        return attention.eval()


def tokens() -> Tensor:
    return torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(1))


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += function is F.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("gate", ["none", "elementwise", "headwise"])
@pytest.mark.parametrize("kernel", list(KERNELS))
def test_softmax_attention_is_one_fused_call_and_other_kernels_none(gate: str, kernel: str) -> None:
    with Counting() as counting:
        drawn(gate=gate, kernel=kernel)(tokens())
    assert counting.calls == (kernel == "softmax")


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_z_is_the_pattern_times_the_values(kernel: str) -> None:
    attention = drawn(kernel=kernel)
    _, _, v = attention.heads(tokens())
    expected = attention.project(attention.pattern(tokens()) @ v)
    assert torch.allclose(attention(tokens()), expected, atol=1e-6)


def test_rows_sum_to_what_each_kernel_says() -> None:
    sums = {kernel: drawn(kernel=kernel).pattern(tokens()).sum(-1) for kernel in KERNELS}
    assert torch.allclose(sums["softmax"], torch.ones(2, 3, 7))
    assert float(sums["clipped"].max()) <= 1 + 1e-6 and float(sums["clipped"].min()) >= 0
    assert float(sums["sink-logit"].max()) < 1 and float(sums["sink-logit"].min()) > 0
    assert float(sums["relu"].min()) >= 0 and 0 < float(sums["sigmoid"].max()) < 7


def test_a_clipped_pattern_has_exact_zeros_where_softmax_is_small() -> None:
    soft, clipped = drawn().pattern(tokens()), drawn(kernel="clipped").pattern(tokens())
    assert bool(((clipped == 0) == (1.03 * soft <= 0.03)).all()) and bool((clipped == 0).any())


def test_other_kernels_follow_their_formulas() -> None:
    q, k, _ = drawn().heads(tokens())
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(4)
    assert torch.allclose(scaled_logits(q, k), logits, atol=1e-5)
    assert torch.allclose(drawn(kernel="relu").pattern(tokens()), logits.clamp_min(0) / 7, atol=1e-5)
    assert torch.allclose(drawn(kernel="sigmoid").pattern(tokens()), 1 / (1 + 7 * torch.exp(-logits)), atol=1e-5)
    assert torch.allclose(drawn(kernel="polynomial").pattern(tokens()), logits**3 / 7**0.5, atol=1e-4)


def test_a_very_low_sink_logit_gives_softmax_and_a_very_high_one_nothing() -> None:
    attention, soft = drawn(kernel="sink-logit"), drawn()
    nn.init.constant_(attention.kernel.logit, -100.0)  # type: ignore[union-attr, arg-type]
    assert torch.allclose(attention(tokens()), soft(tokens()), atol=1e-5)
    nn.init.constant_(attention.kernel.logit, 100.0)  # type: ignore[union-attr, arg-type]
    assert float(attention.pattern(tokens()).abs().max()) < 1e-6


@pytest.mark.parametrize("gate", ["elementwise", "headwise"])
def test_a_gate_starts_at_sigma_of_two_and_scales_z_before_the_projection(gate: str) -> None:
    attention, plain = drawn(gate=gate), drawn()
    plain.load_state_dict({n: v for n, v in attention.state_dict().items() if not n.startswith("gate.")})
    nn.init.zeros_(attention.proj.bias)
    nn.init.zeros_(plain.proj.bias)
    start = 1 / (1 + math.exp(-GATE_BIAS))
    assert start == pytest.approx(0.881, abs=1e-3)
    gated, ungated = attention.with_ungated(tokens())
    assert torch.allclose(gated, start * plain(tokens()), atol=1e-4)
    assert torch.equal(ungated, plain(tokens())) and torch.equal(gated, attention(tokens()))


def test_a_headwise_gate_closes_one_head_and_an_elementwise_one_channel() -> None:
    attention = drawn(gate="headwise")
    with torch.no_grad():
        attention.gate.bias[1] = -100.0  # type: ignore[union-attr]
    opened = attention.gate(tokens())  # type: ignore[misc]
    assert opened.shape == (2, 3, 7, 1) and float(opened[:, 1].max()) < 1e-6 < float(opened[:, 0].min())
    attention = drawn(gate="elementwise")
    with torch.no_grad():
        attention.gate.bias[5] = -100.0  # type: ignore[union-attr]
    opened = attention.gate(tokens())  # type: ignore[misc]
    assert opened.shape == (2, 3, 7, 4) and float(opened[:, 1, :, 1].max()) < 1e-6  # channel 5 is head 1, entry 1


def test_spectral_scaling_gives_queries_and_keys_a_largest_singular_value_of_their_gain() -> None:
    attention = drawn(spectral=True).train()
    for _ in range(200):
        attention(tokens())
    query, key, value = attention._qkv_weight().chunk(3)
    assert float(torch.linalg.matrix_norm(query, 2)) == pytest.approx(1, abs=1e-3)
    assert float(torch.linalg.matrix_norm(key, 2)) == pytest.approx(1, abs=1e-3)
    assert torch.equal(value, attention.qkv.weight.chunk(3)[2])
