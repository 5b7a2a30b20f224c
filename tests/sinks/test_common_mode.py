"""The common-mode table: shares recomputed from the network's own updates, whatever the batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import sinklab
from sinklab.data.drawn_images import drawn_images
from sinklab.data.transform import ImageTransform
from sinklab.models.describe import IMAGENET
from sinklab.models.vit import ViT, ViTShape
from sinklab.sinks.common_mode import shares_table

SHAPE: dict[str, Any] = {"image": 32, "patch": 8, "dim": 24, "depth": 2, "heads": 3, "pathway_scale": 0.5}
PICTURES = {"count": 5, "size": 32, "seed": 0, "split": "validation"}


def drawn(**changes: Any) -> ViT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        vit = ViT(ViTShape(**SHAPE | changes)).eval()
        for parameter in vit.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return vit


def expected(vit: ViT, pixels: Tensor) -> pd.DataFrame:
    """Shares by the equation, from every update written out."""
    found: dict[tuple[int, str], Tensor] = {}
    with torch.no_grad():
        x = vit.embed(pixels)
        for layer, block in enumerate(vit.blocks):
            h = block.norm1(x)
            gated, ungated = block.attn.with_ungated(h)
            updates = {"attention": block.ls1(gated)}
            if vit.shape.gate != "none":
                updates["attention_ungated"] = block.ls1(ungated)
            if block.pathway is not None:
                updates["pathway"] = block.ls3(block.pathway(h))
            for name, o in updates.items():
                o = o.double()
                found[layer, name] = torch.stack([o.mean(1).square().mean(-1), o.square().mean((1, 2))], -1)
            x = block(x)
    return shares_table(found)


def test_shares_are_eq_5_of_the_networks_own_updates(tmp_path: Path) -> None:
    view = ImageTransform.paper(32, interpolation="bicubic", mean=IMAGENET[0], std=IMAGENET[1], patch_size=(8, 8))
    images = drawn_images(PICTURES)
    pixels = torch.stack([view.of(ref.content(), ref.id) for ref in images])
    for place, changes in enumerate([{}, {"gate": "elementwise", "pathway": "learned", "state_dim": 8}]):
        vit = drawn(**changes)
        table = expected(vit, pixels)
        for batch in (2, 5):
            run = sinklab.diagnose(
                sinklab.attach(vit), images, tmp_path / f"{place}-{batch}", size=32, batch_size=batch, report=False
            )
            found = run.table("common_mode")
            assert list(found["update"]) == list(table["update"])
            pd.testing.assert_frame_equal(found, table, check_dtype=False, rtol=1e-4)
            assert set(found["images"]) == {5}


def test_a_ratio_of_means_and_a_mean_of_ratios_by_hand() -> None:
    found = shares_table({(0, "attention"): torch.tensor([[1.0, 2.0], [0.0, 6.0]], dtype=torch.float64)})
    row = found.iloc[0]
    assert abs(row["share"] - 1 / 8) < 1e-9 and abs(row["share_by_image"] - 1 / 4) < 1e-9
    assert abs(row["sem"] - 0.25) < 1e-9 and row["rms"] == 2.0 and row["images"] == 2


def test_an_image_that_is_not_finite_is_left_out_and_the_others_are_counted() -> None:
    good, nan = [[1.0, 2.0], [0.0, 6.0]], float("nan")
    found = shares_table({(0, "attention"): torch.tensor([*good, [nan, 3.0]], dtype=torch.float64)})
    pd.testing.assert_frame_equal(found, shares_table({(0, "attention"): torch.tensor(good, dtype=torch.float64)}))
    none = shares_table({(0, "attention"): torch.tensor([[nan, nan]], dtype=torch.float64)})
    assert none["images"].to_list() == [0] and none["share"].isna().all()
