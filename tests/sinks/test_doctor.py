"""The doctor: small drift where the attachment is faithful, and the model as it was."""

from __future__ import annotations

import math

import families
import pytest
import torch

import sinklab
from sinklab.sinks.doctor import Examination, examine


def examined(name: str, dtype: str = "float32", module: torch.nn.Module | None = None) -> Examination:
    return examine(sinklab.attach(module or families.fresh(name)), families.pixels(name, batch=1), dtype=dtype)


@pytest.mark.parametrize("name", ["timm dinov2 registers", "openclip", "hf dinov3"])
def test_fp32_drifts_from_float64_by_rounding_alone(name: str) -> None:
    """Complaint 21: the same image in float64 on the CPU; no dominant key moves."""
    found = examined(name)
    assert {drift.column for drift in found.drifts} >= {"inflow", "entropy", "stable_rank", "value_ratio_out"}
    assert max(drift.worst for drift in found.drifts) < 1e-4
    assert (found.moved, found.not_finite, found.heads) == (0, 0, families.LAYERS * families.HEADS)
    assert [proof.fired for proof in found.proofs] == [1] * families.LAYERS


@pytest.mark.parametrize("name", ["timm dinov2", "openclip", "openclip tokens first", "hf siglip"])
def test_autocast_is_proved_and_its_larger_drift_is_told(name: str) -> None:
    """Also nn.MultiheadAttention's stand-in: under autocast its output is fp32, but rounded as bf16 is."""
    found = examined(name, "bfloat16")
    assert 1e-4 < max(drift.worst for drift in found.drifts) < 3
    assert found.facts["run as"] == "bfloat16" and {proof.dtype for proof in found.proofs} == {"bfloat16"}


def test_heads_that_are_not_finite_are_counted_and_not_compared() -> None:
    """Complaint 20."""
    module = families.fresh("timm dinov2")
    with torch.no_grad():
        module.blocks[1].attn.qkv.weight[0, 0] = torch.nan  # type: ignore[union-attr,index]
    found = examined("timm dinov2", module=module)
    assert found.not_finite == 1 and max(drift.worst for drift in found.drifts) < 1e-4


def test_the_model_is_left_as_it_was() -> None:
    module = families.fresh("timm beit")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    examined("timm beit", module=module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert next(module.parameters()).dtype == torch.float32


def test_the_verdict_counts_the_sites_that_agree_and_names_the_limit() -> None:
    assert examined("timm dinov2").verdict().startswith(f"All {families.LAYERS} sites agree (largest error ")
    assert (
        "limit 1e-04)." in examined("timm dinov2").verdict()
        and "limit 8e-02" in examined("timm dinov2", "bfloat16").verdict()
    )


def test_a_model_of_nan_alone_gets_no_good_verdict_and_no_error_of_zero() -> None:
    module = families.fresh("timm dinov2")
    with torch.no_grad():
        module.patch_embed.proj.weight.fill_(torch.nan)  # type: ignore[union-attr,operator]
    found = examined("timm dinov2", module=module)
    assert found.verdict() == f"Nothing could be compared: no site of {families.LAYERS} gives a finite number."
    assert found.drifts and all(math.isnan(drift.worst) for drift in found.drifts)
    assert found.not_finite == found.heads


def test_what_is_not_finite_is_in_the_verdict() -> None:
    module = families.fresh("timm dinov2")
    with torch.no_grad():
        module.blocks[1].attn.qkv.weight[0, 0] = torch.nan  # type: ignore[union-attr,index]
    assert "1 of 8 heads are not finite" in examined("timm dinov2", module=module).verdict()


def test_blocks_of_different_head_counts_are_examined_together() -> None:
    import timm

    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_classes": 0}
    module, other = (timm.create_model("vit_tiny_patch16_224", num_heads=heads, **shape).eval() for heads in (2, 4))
    module.blocks[1] = other.blocks[1]
    found = examined("timm dinov2", module=module)
    assert found.heads == 6 and max(drift.worst for drift in found.drifts) < 1e-4
    assert all(drift.head < (2, 4)[drift.layer] for drift in found.drifts)
