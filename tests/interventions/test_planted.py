"""On a model whose weights were set by hand, observation and intervention must both say what was planted."""

from __future__ import annotations

import numpy as np
import pandas as pd
import planted
import pytest
import torch

import sinklab

NOP, BROADCAST = (1, 0), (1, 1)


@pytest.fixture(scope="module")
def model() -> sinklab.Model:
    return planted.planted()


@pytest.fixture(scope="module")
def run(model: sinklab.Model, tmp_path_factory: pytest.TempPathFactory) -> sinklab.Diagnosis:
    folder = tmp_path_factory.mktemp("planted")
    photos = planted.photographs(folder / "photos", 40)
    found = sinklab.diagnose(model, photos, folder / "run", size=planted.SIDE, report=False)
    return sinklab.patch(found, model, joint=True, report=False)


@pytest.fixture(scope="module")
def effects(run: sinklab.Diagnosis) -> pd.DataFrame:
    found = run.effects
    return found[found["joint"] == 0].set_index(["layer", "head", "edit", "image"]).sort_index()


def of(effects: pd.DataFrame, head: tuple[int, int], edit: str) -> pd.DataFrame:
    found: pd.DataFrame = effects.loc[(*head, edit)]
    return found


def test_diagnose_names_both(run: sinklab.Diagnosis) -> None:
    """Lemmas 1 and 2: o_i = v_s, and the broadcast's update has rank one."""
    named = run.sinks.groupby(["layer", "head"])["class_causal"].agg(set)
    assert named[NOP] == {"nop"} and named[BROADCAST] == {"broadcast"}
    sinks = run.sinks.set_index(["layer", "head"])
    assert (sinks.loc[[NOP], "value_ratio_out"] == 0).all()
    assert (sinks.loc[[BROADCAST], "stable_rank"] - 1).abs().max() < 1e-6
    assert (sinks.loc[[NOP, BROADCAST], "sink_kind"] == "cls").all()


def test_zeroing_a_nop_changes_nothing_at_all(effects: pd.DataFrame) -> None:
    for edit in ("zero", "mean", "donor"):
        assert (of(effects, NOP, edit)["patch_change"] == 0).all()
        assert of(effects, NOP, edit)["shared_energy"].isna().all()
    assert of(effects, NOP, "ordinary")["patch_change"].min() > 0.02


def test_zeroing_the_broadcast_takes_its_payload_from_every_patch(
    effects: pd.DataFrame, run: sinklab.Diagnosis, model: sinklab.Model
) -> None:
    """The last block is linear after the softmax: P' − P = −A_is u_s with A_is = 1, by hand from the pixels."""
    from sinklab.data.images import find_images, open_image
    from sinklab.sinks.options import ScanOptions

    transform, network = ScanOptions(size=planted.SIDE).transform(model), model.module.double()
    try:
        own = of(effects, BROADCAST, "zero")
        for ref in find_images(run.config["images"]["sources"]):
            if ref.id not in own.index:
                continue
            pixels = transform(open_image(ref), ref.id)[None].double()
            shown = network.patches(pixels).flatten(2).transpose(1, 2)[0]  # [16 8]
            mean = torch.cat([torch.zeros(1, planted.DIM, dtype=torch.float64), shown]).mean(0)
            payload = planted.PAYLOAD.double() + 0.05 * mean  # u_s: what [CLS] holds, and the image's mean in it
            final = model(pixels)[0, 1:]
            expected = payload.norm() / final.square().sum(-1).mean().sqrt()
            assert own.loc[ref.id, "patch_change"] == pytest.approx(float(expected), rel=1e-5)
            assert own.loc[ref.id, "shared_energy"] == pytest.approx(1.0, abs=1e-9)
    finally:
        model.module.float()


def test_the_verdicts_are_what_was_planted(run: sinklab.Diagnosis) -> None:
    verdicts = run.table("causal_verdicts")
    heads = verdicts[verdicts["level"] == "head"].set_index(["layer", "head"])
    assert heads.loc[NOP, "verdict"] == "nop" and heads.loc[BROADCAST, "verdict"] == "broadcast"
    assert heads["agrees"].astype(bool).all()
    classes = verdicts[(verdicts["level"] == "class") & (verdicts["blocks"] == "all")].set_index("class")
    assert classes["verdict"].to_dict() == {"nop": "nop", "broadcast": "broadcast"}


def test_a_swapped_payload_points_to_the_donor(effects: pd.DataFrame) -> None:
    """A donor's value differs by the donor's own image, so the shared change is small and one vector for all."""
    swapped = of(effects, BROADCAST, "donor")
    assert (swapped["patch_change"] < 0.1 * of(effects, BROADCAST, "zero")["patch_change"]).all()
    assert (swapped["shared_energy"] - 1).abs().max() < 1e-6


def test_routing_removal_leaves_what_the_other_keys_hold(effects: pd.DataFrame) -> None:
    assert of(effects, NOP, "route")["patch_change"].min() > 0
    ratio = of(effects, BROADCAST, "route")["patch_change"] / of(effects, BROADCAST, "zero")["patch_change"]
    assert ((ratio > 0.5) & (ratio < 2)).all()
    assert (effects["kept_queries"] == 0).all() and (effects["fired"] == 1).all()


def test_the_control_does_less_than_the_edit(effects: pd.DataFrame) -> None:
    """No query attends to any other patch, so zeroing one does nothing."""
    assert of(effects, BROADCAST, "zero_ordinary")["patch_change"].max() < 1e-12


def test_editing_both_heads_of_a_class_at_once_is_in_the_table(run: sinklab.Diagnosis) -> None:
    joint = run.effects[run.effects["joint"] > 0]
    assert set(joint["class"]) == {"nop", "broadcast"} and set(joint["layer"]) == {-1}
    single = run.effects[(run.effects["joint"] == 0) & (run.effects["class"] == "broadcast")]
    together = joint[joint["class"] == "broadcast"].set_index(["image", "edit"])["patch_change"].sort_index()
    alone = single.set_index(["image", "edit"])["patch_change"].sort_index()
    pd.testing.assert_series_equal(together, alone)  # the class has one head, so together is alone


def test_the_checks_of_every_edit_are_tight(run: sinklab.Diagnosis) -> None:
    about = run.config["patch"]
    assert about["checks"]["null_bit_identical"] and about["checks"]["null_layers"] == [1]
    assert about["checks"]["identity_error_max"] < 1e-6
    assert about["checks"]["prefix_error_max"] < 1e-6
    assert about["images"]["heldout"] == 10 and about["images"]["edited"] == 30
    assert not set(about["heldout"]["images"]) & set(run.effects["image"])
    assert np.isfinite(run.table("effects")["mean"]).all()
