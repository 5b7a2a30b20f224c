"""`patch` on every kind of model: LayerScale, registers, nn.MultiheadAttention, grouped queries, gates, bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command_line import write_pictures
from families import FAMILIES, fresh

import sinklab

CLASSES = ("nop", "broadcast", "intermediate")
VISION = [name for name, family in FAMILIES.items() if not family.text]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "photos", 6)


def patched(name: str, pictures: Path, folder: Path, **options: Any) -> sinklab.Diagnosis:
    tokens = sinklab.TokenMap(prefix=(), patch_size=(8, 8)) if name in ("a user's own", "timm grouped rope") else None
    model = sinklab.attach(fresh(name), tokens=tokens)
    rule, kept = sinklab.SinkRule.mass(0.01), {"size": 32, "report": False}
    run = sinklab.diagnose(model, pictures, folder / "run", rule=rule, **kept, **options)
    return sinklab.patch(run, model, classes=CLASSES, per_class=2, block0=1, joint=True, report=False)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", VISION)
def test_every_edit_acts_and_passes_its_checks(name: str, pictures: Path, tmp_path: Path) -> None:
    effects = patched(name, pictures, tmp_path).effects
    assert set(effects["edit"]) == {"zero", "mean", "donor", "ordinary", "route", "zero_ordinary"}
    single = effects[effects["joint"] == 0]
    assert (single["fired"] == 1).all() and (single["patch_change"] > 0).mean() > 0.9
    assert effects["identity_error"].max() < 1e-5 and effects["prefix_error"].max() < 1e-4
    assert np.isfinite(effects["patch_change"]).all()
    prefix = "cls" in sinklab.open_run(tmp_path / "run").config["model"]["prefix"]
    assert effects["cls_change"].notna().all() == prefix


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_under_bfloat16_the_order_of_effects_stays(pictures: Path, tmp_path: Path) -> None:
    exact = patched("timm dinov2", pictures, tmp_path / "fp32").effects
    coarse = patched("timm dinov2", pictures, tmp_path / "bf16", dtype="bfloat16").effects
    keys = ["image", "layer", "head", "edit", "joint", "class", "sink_index"]  # where both edit the same key
    both = exact[exact["joint"] == 0].merge(coarse, on=keys, suffixes=("", "_bf16"))
    big = both[(both["patch_change"] > 0.05) & both["edit"].isin(["zero", "route"])]
    assert len(big) >= 10
    assert np.corrcoef(big["patch_change"], big["patch_change_bf16"])[0, 1] > 0.98
    assert 1e-5 < coarse["identity_error"].max() < 5e-2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_classifiers_answers_are_measured(pictures: Path, tmp_path: Path) -> None:
    """By hand: the same edit with hooks.edit, and logits from timm's own forward_head."""
    import timm

    torch.manual_seed(0)
    module = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=5).eval()
    for block in module.blocks:
        block.attn.qkv.weight.data.mul_(6)
        block.attn.proj.weight.data.mul_(6)
    model = sinklab.attach(module.requires_grad_(False))
    run = sinklab.diagnose(model, pictures, tmp_path / "run", rule=sinklab.SinkRule.mass(0.01), size=32, report=False)
    labels = {path.name: number % 5 for number, path in enumerate(sorted(pictures.iterdir()))}
    run = sinklab.patch(run, model, classes=CLASSES, edits=("zero", "route"), labels=labels, report=False)
    effects = run.effects
    assert effects[["kl", "top1_same", "ce_change"]].notna().all().all() and (effects["kl"] >= -1e-12).all()
    row = effects[effects["edit"] == "zero"].sort_values("kl").iloc[-1]
    from sinklab.data.images import open_image
    from sinklab.sinks.options import ScanOptions

    ref = next(ref for ref in sinklab.find_images(pictures) if ref.id == row["image"])
    pixels = ScanOptions(size=32).transform(model)(open_image(ref), ref.id)[None]
    edit = sinklab.Edit.zero(head=(int(row["layer"]), int(row["head"])), at=int(row["sink_index"]))
    with torch.inference_mode(), sinklab.HookManager(model) as hooks:
        before = module.forward_head(hooks.run(pixels))[0].double().log_softmax(-1)
        with hooks.edit([edit]):
            after = module.forward_head(hooks.run(pixels))[0].double().log_softmax(-1)
    assert row["kl"] == pytest.approx(float((before.exp() * (before - after)).sum()), rel=1e-3)
    label = labels[row["image"]]
    assert row["ce_change"] == pytest.approx(float(before[label] - after[label]), rel=1e-3, abs=1e-6)
    kept = {"classes": CLASSES, "edits": ("zero",), "overwrite": True, "report": False}
    without = sinklab.patch(run, model, metrics=("patch",), **kept)
    assert without.effects[["kl", "cls_change"]].isna().all().all()
    assert isinstance(without.effects, pd.DataFrame)
