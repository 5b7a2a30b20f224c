"""doctor: the proof site by site, and what the model's precision costs against a float64 copy of it."""

from __future__ import annotations

import pytest
import reference
import torch
from families import HEADS, LAYERS, fresh, pixels

import sinklab
from sinklab.errors import InputError
from sinklab.sinks.doctor import Examination, examine

READABLE = (
    "timm dinov2 registers",
    "timm dinov3",
    "timm beit",
    "openclip",
    "openclip custom",
    "hf dinov2",
    "hf siglip",
)


def examined(name: str, **options: str) -> Examination:
    return examine(sinklab.attach(fresh(name)), pixels(name, batch=1), **options)


@pytest.mark.parametrize("name", READABLE)
def test_every_statistic_of_an_fp32_model_is_near_its_float64_copys(name: str) -> None:
    """Complaint 21: the same input in the model's own precision and in float64 on the CPU."""
    found = examined(name)
    assert {drift.column for drift in found.drifts} == {*reference.FLOATS, "token_norm_ratio"} - {"inflow_margin"}
    assert 0 < max(drift.worst for drift in found.drifts) < 1e-3
    assert all(0 <= drift.layer < LAYERS and 0 <= drift.head < HEADS for drift in found.drifts)
    assert (found.moved, found.not_finite, found.heads) == (0, 0, LAYERS * HEADS)
    assert [proof.fired for proof in found.proofs] == [1] * LAYERS


def test_bfloat16_costs_more_than_fp32() -> None:
    exact = {drift.column: drift.worst for drift in examined("timm dinov2").drifts}
    coarse = {drift.column: drift.worst for drift in examined("timm dinov2", dtype="bfloat16").drifts}
    assert coarse["inflow"] > 100 * exact["inflow"]
    assert coarse["inflow"] < 0.3


def test_the_facts_name_device_type_and_precision() -> None:
    """Complaint 21."""
    facts = examined("timm dinov2", dtype="bfloat16").facts
    assert (facts["device"], facts["model dtype"], facts["run as"]) == ("cpu", "float32", "bfloat16")
    assert facts["TF32"] == "off" and facts["matmul precision"] == torch.get_float32_matmul_precision()


def test_the_model_is_left_as_it_was() -> None:
    module = fresh("openclip")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    examine(sinklab.attach(module), pixels("openclip", batch=1))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())


def test_a_head_that_is_not_finite_is_counted_and_compared_with_nothing() -> None:
    """Complaint 20."""
    module = fresh("timm dinov2")
    module.blocks[1].attn.qkv.weight[0, 0] = torch.nan  # the first query row of the last layer: head 0
    found = examine(sinklab.attach(module), pixels("timm dinov2", batch=1))
    assert found.not_finite == 1
    assert all(drift.worst < 1e-3 for drift in found.drifts)


def test_an_attachment_that_is_not_faithful_is_an_error_that_names_the_site() -> None:
    from families import timm_vit
    from timm.models.vision_transformer import ResPostBlock

    module = timm_vit(block_fn=ResPostBlock).eval()
    tokens = sinklab.TokenMap(prefix=("cls",), patch_size=(8, 8))
    with pytest.raises(InputError, match="attn"):
        examine(sinklab.attach(module, tokens=tokens), pixels("timm dinov2", batch=1))
