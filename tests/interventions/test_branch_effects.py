"""Branch edits of a run: means by hand, the same whatever was done before, also where no head sinks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import sinklab
from sinklab.data.drawn_images import drawn_images
from sinklab.errors import NotFoundError
from sinklab.interventions.branch import measure_branches
from sinklab.interventions.branch_effects import branch_table
from sinklab.interventions.draw import donors
from sinklab.models.vit import ViT, ViTShape

SHAPE: dict[str, Any] = {"image": 32, "patch": 8, "dim": 24, "depth": 2, "heads": 3, "state_dim": 8}
PICTURES = {"count": 5, "size": 32, "seed": 0, "split": "validation"}


def model(**changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        vit = ViT(ViTShape(**SHAPE | changes)).eval()
        for parameter in vit.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return sinklab.attach(vit)


def test_means_and_standard_errors_by_hand() -> None:
    rows = pd.DataFrame(
        {
            "layer": 0,
            "edit": ["attention_off"] * 2 + ["donor_state"] * 2,
            "image": ["a", "b"] * 2,
            "patch_change": [1.0, 3.0, 0.5, 0.5],
            "shared_energy": [0.5, 0.5, float("nan"), 0.25],
            "donor_cosine": [float("nan")] * 2 + [1.0, 0.0],
        }
    )
    table = branch_table(rows).set_index(["edit", "measure"])
    assert tuple(table.loc[("attention_off", "patch_change"), ["mean", "sem", "images"]]) == (2.0, 1.0, 2)
    assert tuple(table.loc[("donor_state", "shared_energy"), ["mean", "images"]]) == (0.25, 1)
    assert ("attention_off", "donor_cosine") not in table.index


def test_a_run_without_a_sunk_head_has_its_branches_edited_once(tmp_path: Path) -> None:
    handle, images = model(pathway="learned"), drawn_images(PICTURES)
    run = sinklab.diagnose(handle, images, tmp_path / "run", size=32)
    assert not len(run.sinks)
    with pytest.warns(UserWarning, match="No head is edited, only the branches"):
        patched = patch_again(run, handle, images)
    table = patched.table("branch_effects")
    assert set(zip(table["layer"], table["edit"], strict=True)) == {
        (layer, edit) for layer in (0, 1) for edit in ("attention_off", "pathway_off", "donor_state")
    }
    assert patched.config["branches"]["images"] == 5 and "patch" not in patched.config
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert "What the branches do" in page and "Common-mode share" in page
    first = (run.path / "tables/branch_effects.csv").stat().st_mtime_ns
    with pytest.warns(UserWarning):
        patch_again(sinklab.open_run(run.path), handle, images, resume=True)
    assert (run.path / "tables/branch_effects.csv").stat().st_mtime_ns == first

    ids = [ref.id for ref in images]
    donor_of = donors(ids, 0)
    view = sinklab_view(handle)
    pixels = torch.stack([view.of(ref.content(), ref.id) for ref in images])
    others = pixels[[ids.index(donor_of[name]) for name in ids]]
    own = measure_branches(handle, pixels, others).groupby(["layer", "edit"])["patch_change"].mean()
    mean = table[table["measure"] == "patch_change"].set_index(["layer", "edit"])["mean"]
    pd.testing.assert_series_equal(mean.sort_index(), own.sort_index(), check_names=False, rtol=1e-5)


def test_without_a_pathway_a_run_without_sinks_is_refused_as_before(tmp_path: Path) -> None:
    handle, images = model(), drawn_images(PICTURES)
    run = sinklab.diagnose(handle, images, tmp_path / "run", size=32, report=False)
    with pytest.raises(NotFoundError, match="no event of class"):
        patch_again(run, handle, images)


def test_a_controlled_pathway_model_has_its_branches_edited_too(tmp_path: Path) -> None:
    run = sinklab.diagnose("toy:pathway-penalty", output=tmp_path / "run", limit=12, report=False)
    with pytest.warns(UserWarning, match="only the branches"):
        patched = sinklab.patch(run)
    mean = patched.table("branch_effects").pivot(index="layer", columns=["edit", "measure"], values="mean")
    assert mean["pathway_off", "patch_change"].max() > mean["attention_off", "patch_change"].min()
    assert mean["donor_state", "donor_cosine"].max() > 0.9  # in one layer the state is what all tokens share


def sinklab_view(handle: Any) -> Any:
    from sinklab.inputs import view_for

    return view_for(handle, 32)


def patch_again(run: Any, handle: Any, images: Any, **chosen: Any) -> Any:
    """`sinklab.patch` of a run whose pictures are drawn and whose model is in memory."""
    handle.loaded.__dict__["pictures"] = PICTURES  # as a member of a training run has them
    return sinklab.patch(run, handle, **chosen)


def test_a_plain_vision_transformer_of_ours_has_its_attention_switched_off_layer_by_layer(tmp_path: Path) -> None:
    from sinklab.models.vit_file import described
    from sinklab.training.checkpoint import save_model

    vit = model().module
    about = {**described(vit.shape), "arm": "baseline", "seed": 0, "step": 1, "pictures": PICTURES}
    save_model(tmp_path / "m/model.safetensors", vit, about)
    run = sinklab.diagnose(str(tmp_path / "m"), output=tmp_path / "run", report=False)
    with pytest.warns(UserWarning, match="No head is edited, only the branches"):
        table = sinklab.patch(run).table("branch_effects")
    assert set(table["edit"]) == {"attention_off"} and set(table["layer"]) == {0, 1}

    images = drawn_images(PICTURES)
    pixels = torch.stack([sinklab_view(model()).of(ref.content(), ref.id) for ref in images])
    with torch.no_grad():
        before = vit(pixels)[:, 1:]
        vit.blocks[1].attn.proj.weight.zero_()  # nothing is added, whatever the pattern
        vit.blocks[1].attn.proj.bias.zero_()
        gap = vit(pixels)[:, 1:] - before
    expected = ((gap**2).sum((1, 2)) / (before**2).sum((1, 2))).sqrt().mean()
    mean = table.set_index(["layer", "measure"])["mean"]
    assert mean[1, "patch_change"] == pytest.approx(float(expected), rel=1e-4)
