"""What must hold on a tiny model of every family: the same output, the true pattern, the float64 statistics."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from families import FAMILIES, fresh, module, pixels

from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.proof import prove
from sinklab.hooks.seam import AttentionCall
from sinklab.hooks.site import Site, find_sites
from sinklab.sinks.reader import StatisticsReader

ROUNDING = {"rtol": 1e-4, "atol": 1e-7}


class Calls(Reader):
    """Keeps every call."""

    def __init__(self) -> None:
        self.kept: list[tuple[Site, AttentionCall]] = []

    def attention(self, site: Site, call: AttentionCall) -> None:
        self.kept.append((site, call))


def tensor(result: object) -> torch.Tensor:
    if isinstance(result, torch.Tensor):
        return result
    return getattr(result, "last_hidden_state", None) if not isinstance(result, tuple) else result[0]


@pytest.fixture(params=list(FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_layer_is_a_site_with_the_declared_heads(name: str) -> None:
    """Complaints 1, 6, 13, 14: one record a layer, and head counts from shapes, grouped keys included."""
    family, calls = FAMILIES[name], Calls()
    with torch.inference_mode(), HookManager(module(name), calls) as hooks:
        hooks.run(pixels(name))
    assert len(calls.kept) == len(find_sites(module(name)))
    for site, call in calls.kept:
        assert (site.heads, site.kv_heads) == (family.heads, family.kv_heads)
        assert call.q.shape[:3] == (2, family.heads, family.tokens)
        assert call.kv_head == [head * call.k.shape[1] // family.heads for head in range(family.heads)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16 weights", "bfloat16 autocast"])
def test_attached_the_output_is_the_plain_output(name: str, precision: str) -> None:
    """Bit for bit; only nn.MultiheadAttention's stand-in is equal to rounding."""
    model, x = fresh(name), pixels(name)
    if precision == "bfloat16 weights":
        model = model.to(torch.bfloat16)
        x = x.to(torch.bfloat16) if x.is_floating_point() else x
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16 autocast"):
        plain = tensor(model(x))
        with HookManager(model, Calls()) as hooks:
            attached = tensor(hooks.run(x))
        after = tensor(model(x))
    assert torch.equal(plain, after)
    if FAMILIES[name].stand_in:
        torch.testing.assert_close(attached, plain, **({} if precision == "float32" else {"rtol": 0.1, "atol": 0.1}))
    else:
        assert torch.equal(attached, plain)


def test_the_attachment_proves_itself(name: str) -> None:
    """Complaints 8, 11: rows sum to one, A v is the kernel's z, and heads plus bias are the block's own update."""
    with torch.inference_mode():
        proofs = prove(module(name), pixels(name, batch=1))
    assert [proof.fired for proof in proofs] == [1] * len(proofs)
    assert max(proof.row_sums for proof in proofs) < 1e-12
    assert max(proof.kernel for proof in proofs) < 1e-5
    updates = [proof.update for proof in proofs if proof.update is not None]
    assert not updates or max(updates) < 1e-4


@pytest.mark.parametrize("precision", ["bfloat16 weights", "bfloat16 autocast", "float16 weights"])
def test_the_attachment_proves_itself_in_half_precision(name: str, precision: str) -> None:
    model, x = fresh(name), pixels(name, batch=1)
    if precision.endswith("weights"):
        kind = getattr(torch, precision.partition(" ")[0])
        model, x = model.to(kind), x.to(kind) if x.is_floating_point() else x
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16 autocast"):
        assert all(proof.fired == 1 for proof in prove(model, x))


def test_statistics_are_the_float64_truth(name: str) -> None:
    """All columns against materialised maps in float64, computed from the call's own q, k, v."""
    model, calls = module(name), Calls()
    sites = find_sites(model)
    reader = StatisticsReader(sites)
    with torch.inference_mode():
        with HookManager(model, calls) as hooks:
            hooks.run(pixels(name))
        with HookManager(model, reader) as hooks:
            hooks.run(pixels(name))
    layers, found, tokens = reader.take()
    assert layers == list(range(len(sites))) and set(tokens) == {FAMILIES[name].tokens}
    for layer, (site, call) in enumerate(calls.kept):
        weight = site.output_weight()  # Γ and any head scale are in it
        flat = weight.transpose(0, 1).flatten(1)
        truth = reference.reference_statistics(
            call.q, call.k, call.v, mask=call.mask, is_causal=call.is_causal, scale=call.scale, weight=flat
        )
        sure = truth["inflow_margin"] > 1e-6
        own = {column: values[:, layer].numpy() for column, values in found.items()}
        np.testing.assert_array_equal(own["sink_index"][sure], truth["sink_index"][sure])
        for column in reference.FLOATS:
            if column not in ("inflow_margin", "routed_fraction"):
                np.testing.assert_allclose(own[column][sure], truth[column][sure], **ROUNDING, err_msg=column)


def test_fast_mode_is_equal_to_rounding(name: str) -> None:
    model, sites = module(name), find_sites(module(name))
    slow, fast = StatisticsReader(sites), StatisticsReader(sites, fast=True)
    with torch.inference_mode():
        with HookManager(model, slow) as hooks:
            plain = tensor(hooks.run(pixels(name)))
        with HookManager(model, fast, attend=fast.attend) as hooks:
            other = tensor(hooks.run(pixels(name)))
    torch.testing.assert_close(other, plain, rtol=1e-3, atol=1e-4)
    expected, found = slow.take()[1], fast.take()[1]
    for column in ("inflow", "entropy", "stable_rank", "value_ratio_out"):
        torch.testing.assert_close(found[column][:, 0], expected[column][:, 0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith("hf ")])
def test_patterns_are_hugging_faces_own_eager_attentions(family: str) -> None:
    """Complaint 2: the same weights in eager mode hand out the maps; ours are the same maps."""
    calls, eager = Calls(), fresh(family)
    with torch.inference_mode():
        with HookManager(module(family), calls) as hooks:
            hooks.run(pixels(family))
        eager.set_attn_implementation("eager")
        maps = eager(pixels(family), output_attentions=True).attentions
    assert len(maps) == len(calls.kept)
    for (_, call), expected in zip(calls.kept, maps, strict=True):
        torch.testing.assert_close(call.pattern(dtype=torch.float32), expected, rtol=1e-3, atol=1e-5)
