"""The phase-state model against its own equations, written out as double sums, in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.errors import InputError, NotFoundError
from sinklab.models.generation import KeyValues, generate
from sinklab.models.kuramoto import Bound, Gates, Kuramoto, PhaseAttention, PhaseBlock, lift
from sinklab.models.lm_config import ABLATIONS, SIZES, KuramotoConfig, TransformerConfig, named
from sinklab.models.lm_file import build_lm

SMALL = KuramotoConfig(phases=6, layers=2, hidden=8)
SYMBOLS = 11


@pytest.fixture(autouse=True)
def drawn_alike() -> Any:
    """Models that a test builds itself are the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def shaken(module: Any) -> Any:
    """In float64, and with no parameter at a special value."""
    module.double()
    for parameter in module.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return module.eval()


def model(**changes: Any) -> Kuramoto:
    return shaken(Kuramoto(replace(SMALL, **changes), SYMBOLS))  # type: ignore[no-any-return]


def attention(**changes: Any) -> PhaseAttention:
    config = replace(SMALL, **changes)
    gates = None if config.gates == "none" else shaken(Gates(config.phases, config.biases))
    return shaken(PhaseAttention(config, gates))  # type: ignore[no-any-return]


def phases(tokens: int = 7) -> Tensor:
    return 2 * math.pi * torch.rand(2, tokens, SMALL.phases, dtype=torch.float64)


def seen(module: PhaseAttention, theta: Tensor) -> dict[str, Tensor]:
    """What passes G's and a's hook points."""
    held: dict[str, Tensor] = {}
    handles = [
        getattr(module, name).register_forward_hook(lambda _m, _i, value, name=name: held.__setitem__(name, value))
        for name in ("read", "tangent")
    ]
    held["increment"] = module(theta)
    for handle in handles:
        handle.remove()
    return held


def direct(module: PhaseAttention, theta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A [B N N], G [B N k] complex, a [B N k] and the scores [B N N], each by its sum over pairs of tokens."""
    batch, tokens, k = theta.shape
    psi = torch.cat([theta.cos(), theta.sin()], -1)
    g_query = g_key = torch.ones_like(theta)
    if module.gates is not None:
        weight, bias = module.gates.linear.weight, module.gates.linear.bias
        raw = [F.softplus(psi @ weight[part].T + bias[part]) for part in (slice(0, k), slice(k, None))]
        g_query, g_key = (y / y.mean(-1, keepdim=True) for y in raw)
    omega = torch.zeros(k, dtype=theta.dtype) if module.frequencies is None else module.frequencies
    scores = torch.full((batch, tokens, tokens), -torch.inf, dtype=theta.dtype)
    pulls = torch.zeros(batch, tokens, tokens, k, dtype=theta.dtype)
    for t in range(tokens):
        for u in range(t + 1):
            gap = theta[:, t] - theta[:, u]
            kernel = g_query[:, t] * g_key[:, u] * (gap + omega * (t - u)).cos()
            scores[:, t, u] = module.temperature[0] / k**0.5 * kernel.sum(-1)
            pulls[:, t, u] = (-gap).sin()
    pattern = scores.softmax(-1)
    field = torch.einsum("btu,buj->btj", pattern.to(torch.complex128), torch.exp(1j * theta))
    return pattern, field, torch.einsum("btu,btuj->btj", pattern, pulls), scores


@pytest.mark.parametrize("changes", [{}, {"gates": "none"}, {"frequencies": "none"}], ids=str)
def test_the_fused_call_is_the_direct_double_sum(changes: dict[str, Any]) -> None:
    module, theta = attention(**changes), phases()
    held = seen(module, theta)
    _, field, a, _ = direct(module, theta)
    torch.testing.assert_close(held["tangent"], a, rtol=0, atol=1e-13)
    torch.testing.assert_close(held["read"], torch.cat([field.real, field.imag], -1), rtol=0, atol=1e-13)


def test_the_fused_calls_gradients_are_the_direct_sums() -> None:
    module, theta = attention(), phases().requires_grad_()
    probe = torch.randn_like(theta)
    wanted = [theta, *(p for p in module.parameters() if p.shape != ()), module.gates.linear.weight]  # type: ignore[union-attr]
    fused = torch.autograd.grad((seen(module, theta)["tangent"] * probe).sum(), wanted, allow_unused=True)
    summed = torch.autograd.grad((direct(module, theta)[2] * probe).sum(), wanted, allow_unused=True)
    assert sum(grad is not None for grad in summed) == 4  # θ, τ, ω and the gates
    for one, other in zip(fused, summed, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_one_attention_call_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    real = F.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append({"q": q.shape, "v": v.shape, **options})
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    model()(torch.zeros(2, 5, dtype=torch.long))
    assert len(calls) == SMALL.layers
    assert all(call["q"] == call["v"] == (2, 1, 5, 12) and call["is_causal"] for call in calls)
    assert calls[0]["scale"] == 6**-0.5


@pytest.mark.parametrize("name", ["", *ABLATIONS])
def test_a_later_token_changes_nothing_earlier(name: str) -> None:
    net = model(**ABLATIONS.get(name, {}))
    tokens = torch.randint(SYMBOLS, (1, 9))
    other = tokens.clone()
    other[0, 5:] = (tokens[0, 5:] + 1) % SYMBOLS  # every later one
    first, second = net(tokens), net(other)
    assert torch.equal(first[:, :5], second[:, :5])
    assert not torch.equal(first[:, 5:], second[:, 5:])


@pytest.mark.parametrize("ffn", ["none", "lift"])
def test_without_the_raw_angle_everything_is_periodic(ffn: str) -> None:
    block, theta = model(ffn=ffn).blocks[0], phases()
    turns = 2 * math.pi * torch.randint(-3, 4, theta.shape).double()
    torch.testing.assert_close(block(theta + turns), block(theta) + turns, rtol=0, atol=1e-12)


def test_the_swiglu_of_raw_angles_is_not_periodic() -> None:
    block, theta = model().blocks[0], phases()
    moved = block(theta + 2 * math.pi) - block(theta) - 2 * math.pi
    assert moved.abs().max() > 1e-3


def test_the_first_token_never_moves_in_the_attention_step() -> None:
    assert attention()(phases())[:, 0].abs().max() == 0
    assert seen(attention(heads=2), phases())["increment"][:, 0].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_token_stays_in_lower_precision_too(dtype: torch.dtype) -> None:
    module = attention().float()
    module.gates.float()  # type: ignore[union-attr]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        increment = module(phases().float())
    assert increment.dtype == torch.float32
    assert increment[:, 0].abs().max() == 0 < increment[:, 1:].abs().max()


def test_attention_maximises_expected_score_plus_entropy() -> None:
    with torch.no_grad():
        pattern, _, _, scores = (found[0, -1] for found in direct(attention(), phases()))  # of the last token

    def gain(p: Tensor) -> float:
        return float((p * scores).sum() - torch.xlogy(p, p).sum())

    best = gain(pattern)
    assert best == pytest.approx(float(scores.logsumexp(-1)), abs=1e-12)
    others = torch.distributions.Dirichlet(torch.ones(7, dtype=torch.float64)).sample((200,))
    assert all(gain(p) < best for p in others)
    nudge = torch.randn(7, dtype=torch.float64)
    nearby = pattern + 1e-4 * (nudge - nudge.mean())
    assert best - 1e-5 < gain(nearby) < best


def test_the_tangent_is_the_gradient_of_agreement_at_fixed_attention() -> None:
    module, theta = attention(), phases()
    pattern, _, a, _ = direct(module, theta)
    own = theta.clone().requires_grad_()
    gaps = own[:, :, None] - theta[:, None]  # the keys stay where they are
    agreement = (pattern.detach()[..., None] * gaps.cos()).sum()
    (slope,) = torch.autograd.grad(agreement, own)
    torch.testing.assert_close(slope, a.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(slope, seen(module, theta)["tangent"].detach(), rtol=0, atol=1e-13)


def test_turning_all_tokens_alike_leaves_scores_and_tangents() -> None:
    module, theta = attention(gates="none"), phases()
    turned = theta + torch.randn(SMALL.phases, dtype=torch.float64)
    torch.testing.assert_close(seen(module, turned)["tangent"], seen(module, theta)["tangent"], rtol=0, atol=1e-13)


def test_neither_field_nor_tangent_is_longer_than_one() -> None:
    held = seen(attention(), phases(30))
    real, imaginary = held["read"].chunk(2, -1)
    length = torch.hypot(real, imaginary)
    assert length.max() <= 1 + 1e-12
    assert (held["tangent"].abs() <= length + 1e-12).all()


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e4])
def test_an_increment_is_no_longer_than_its_radius(size: float) -> None:
    x = size * torch.randn(4, 5, SMALL.phases, dtype=torch.float64)
    radial, elementwise = (shaken(Bound(replace(SMALL, bound=kind))) for kind in ("radial", "elementwise"))
    assert (radial(x) / radial.radius).square().mean(-1).sqrt().max() <= 1 + 1e-12
    assert (elementwise(x).abs() <= elementwise.radius + 1e-12).all()
    if size < 1e-6:  # the slope at 0 is the radius
        torch.testing.assert_close(radial(x), radial.radius * x)
        torch.testing.assert_close(elementwise(x), elementwise.radius * x)


def test_a_radius_starts_where_it_is_asked_to() -> None:
    for radius in (0.1, 1.0, 3.0):
        torch.testing.assert_close(Bound(replace(SMALL, radius=radius)).radius, torch.full((6,), radius))


def test_gates_are_positive_and_have_mean_one_over_a_tokens_own_coordinates() -> None:
    gates = shaken(Gates(6, bias=True))
    psi = lift(phases())
    alone = gates(psi[:, :1])
    for gate, first in zip(gates(psi), alone, strict=True):
        assert (gate > 0).all()
        torch.testing.assert_close(gate.mean(-1), torch.ones(2, 7, dtype=torch.float64))
        torch.testing.assert_close(gate[:, :1], first)  # of no other token


def test_a_token_at_rest_has_a_gradient() -> None:
    net = model()
    F.cross_entropy(net(torch.zeros(1, 4, dtype=torch.long)).flatten(0, 1), torch.ones(4, dtype=torch.long)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_far_positions_keep_their_digits_in_single_precision() -> None:
    wide = attention()
    narrow = attention().float()
    narrow.load_state_dict(wide.state_dict())
    psi = torch.tensor([1.0] * 6 + [0.0] * 6)[None, None]
    with torch.no_grad():
        wide.frequencies.copy_(narrow.frequencies)  # type: ignore[union-attr]
        far = narrow.turned(psi, 100_000)
        exact = wide.turned(psi.double(), 100_000)
    assert (far - exact).abs().max() < 1e-6


def test_each_ablation_changes_what_is_computed_and_only_that() -> None:
    tokens = torch.randint(SYMBOLS, (1, 6))
    outputs = {}
    for name, changes in {"": {}, **ABLATIONS}.items():
        torch.manual_seed(0)
        config = replace(SMALL, **changes)
        net = shaken(Kuramoto(config, SYMBOLS))
        outputs[name] = net(tokens)
        assert outputs[name].shape == (1, 6, SYMBOLS) and outputs[name].isfinite().all()
    for name, logits in outputs.items():
        assert not name or not torch.allclose(logits, outputs[""])


def test_rotated_values_meet_as_they_turned() -> None:
    module, theta = attention(values="rotated"), phases()
    pattern = direct(module, theta)[0]
    phi = theta + module.frequencies * torch.arange(7)[:, None]  # type: ignore[operator]
    gaps = phi[:, None] - phi[:, :, None]  # [B t u k]
    expected = (pattern[..., None] * gaps.sin()).sum(2)
    torch.testing.assert_close(seen(module, theta)["tangent"], expected, rtol=0, atol=1e-12)


def test_heads_share_the_coordinates_and_each_is_a_model_of_its_own() -> None:
    two, theta = attention(heads=2, gates="none"), phases()
    halves = []
    for head, part in enumerate((slice(0, 3), slice(3, 6))):
        one = attention(phases=3, gates="none")
        one.temperature.data = two.temperature.data[head : head + 1]
        one.frequencies.data = two.frequencies.data[part]  # type: ignore[union-attr]
        halves.append(seen(one, theta[..., part])["tangent"])
    torch.testing.assert_close(seen(two, theta)["tangent"], torch.cat(halves, -1), rtol=0, atol=1e-13)


def test_the_readout_compares_phases_with_each_symbols() -> None:
    net = model()
    tokens = torch.randint(SYMBOLS, (1, 3))
    theta, table = net.states(tokens), net.phases.weight
    gaps = theta[0, :, None] - table
    expected = net.readout_scale / 6**0.5 * gaps.cos().sum(-1) + net.readout_bias
    torch.testing.assert_close(net(tokens)[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["phase", "transformer"])
def test_cached_keys_and_values_give_the_same_logits(kind: str) -> None:
    small: Any = {"phase": SMALL, "transformer": TransformerConfig(dim=8, heads=2, hidden=8, layers=2)}[kind]
    net = shaken(build_lm(small, SYMBOLS))
    tokens = torch.randint(SYMBOLS, (2, 9))
    whole = net(tokens)
    past = [KeyValues() for _ in net.blocks]
    pieces = [net.readout(net.final(piece, past)) for piece in tokens.split([4, 1, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-12)


def test_generation_takes_the_likeliest_next_token() -> None:
    net = model()
    written = generate(net, torch.randint(SYMBOLS, (2, 3)), 6, temperature=0)
    assert torch.equal(net(written)[:, 2:-1].argmax(-1), written[:, 3:])


def test_generation_draws_alike_for_alike_generators_and_looks_back_no_further_than_asked() -> None:
    net = model()
    start = torch.randint(SYMBOLS, (1, 3))
    one, two = (generate(net, start, 20, generator=torch.Generator().manual_seed(1), longest=4) for _ in range(2))
    assert torch.equal(one, two) and one.shape == (1, 23)


@pytest.mark.parametrize(
    ("name", "count"),
    [("phase-1m", 995_923), ("transformer-1m", 1_015_808), ("phase-5m", 4_794_324), ("transformer-5m", 4_798_976)],
)
def test_the_sizes_have_the_parameters_of_the_table(name: str, count: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in build_lm(named(name), 205).parameters()) == count


@pytest.mark.parametrize(("size", "allowed"), [("tiny", 0.01), ("1m", 0.021), ("5m", 0.01)])
def test_a_phase_model_and_its_transformer_have_about_as_many_parameters(size: str, allowed: float) -> None:
    with torch.device("meta"):
        counts = [
            sum(p.numel() for p in build_lm(named(f"{kind}-{size}"), 205).parameters())
            for kind in ("phase", "transformer")
        ]
    assert abs(counts[0] / counts[1] - 1) < allowed


def test_gates_are_shared_over_depth_unless_each_layer_has_its_own() -> None:
    shared, own = model(), model(gates="layer")
    assert shared.blocks[0].attention.gates is shared.blocks[1].attention.gates  # type: ignore[union-attr]
    assert own.blocks[0].attention.gates is not own.blocks[1].attention.gates  # type: ignore[union-attr]
    assert "gates.0.linear.weight" in shared.state_dict()
    assert isinstance(shared.blocks[0], PhaseBlock)


def test_a_copy_of_a_model_has_gates_of_its_own() -> None:
    from copy import deepcopy

    net = model()
    copy = deepcopy(net)
    assert copy.blocks[0].attention.gates is copy.gates[0]  # type: ignore[union-attr]
    assert copy.gates[0] is not net.gates[0]


def test_a_compiled_model_computes_the_same() -> None:
    net = model()
    tokens = torch.randint(SYMBOLS, (2, 6))
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), net(tokens), rtol=0, atol=1e-12)


def test_phases_stay_in_single_precision_under_autocast() -> None:
    net = Kuramoto(SMALL, SYMBOLS)
    tokens = torch.randint(SYMBOLS, (2, 40))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theta = net.states(tokens)
    assert theta.dtype == torch.float32
    assert (theta - net.states(tokens)).abs().max() < 0.05


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("phase-2m", "There is no language model 'phase-2m'; there are phase-tiny"),
        ("phase-1m+no-sun", "phase-1m has no ablation 'no-sun'"),
        ("transformer-1m+no-gates", "transformers none"),
    ],
)
def test_a_name_that_does_not_exist_is_answered_with_those_that_do(name: str, sentence: str) -> None:
    with pytest.raises(NotFoundError, match=sentence.replace("+", r"\+")):
        named(name)


def test_configs_that_cannot_be_are_refused() -> None:
    for wrong, sentence in (
        ({"heads": 4}, "6 phases do not go into 4"),
        ({"gates": "some"}, "gates is shared or layer or none, not 'some'"),
        ({"layers": 0}, "layers is a number from 1 on"),
        ({"radius": 0.0}, "radius is positive"),
    ):
        with pytest.raises(InputError, match=sentence):
            replace(SMALL, **wrong)  # type: ignore[arg-type]


def test_ablations_go_together() -> None:
    config = named("phase-tiny+no-gates+no-ffn")
    assert config == replace(SIZES["phase-tiny"], gates="none", ffn="none")
