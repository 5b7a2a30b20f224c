"""A diagnosis from end to end, images to tables, on a tiny random model of every family of vision models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from command_line import write_pictures

import sinklab
from sinklab.models.loaded import Preprocessing
from sinklab.sinks.table import head_schema

VISION = [name for name, family in families.FAMILIES.items() if not family.text]
REPORTED = ("timm dinov2 registers", "hf siglip")
"""The page takes longer than all the rest: it is written for one model with registers and one without any prefix."""
IMAGES = 2
DOCUMENTED = {
    *("schema_version", "sinklab", "command", "status", "model", "images", "options", "rule", "definition", "seeds"),
    *("versions", "device", "dtype", "tf32", "matmul_precision", "timings", "notes"),
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"), IMAGES)


def handle(name: str) -> sinklab.Model:
    """The family's model, attached as a user would; for a class that no library knows, its tokens are told."""
    module = families.module(name)
    if not isinstance(module, families.Patches):
        return sinklab.attach(module)
    half = (0.5, 0.5, 0.5)
    return sinklab.attach(
        module,
        tokens=sinklab.TokenMap(prefix=(), patch_size=(families.PATCH, families.PATCH)),
        preprocessing=Preprocessing(mean=half, std=half, interpolation="bicubic", size=(32, 32)),
    )


@pytest.mark.parametrize("name", VISION)
def test_a_diagnosis_writes_a_whole_run(name: str, pictures: Path, tmp_path: Path) -> None:
    family, model = families.FAMILIES[name], handle(name)
    options: dict[str, Any] = {"size": families.IMAGE, "device": "cpu", "report": name in REPORTED}
    rule = sinklab.SinkRule.mass(0.1)  # so that some heads sink in random weights
    run = sinklab.diagnose(model, pictures, output=tmp_path / "run", rule=rule, **options)

    heads, prefix = run.heads, model.tokens.prefix
    assert list(heads.columns) == head_schema().names
    assert len(heads) == IMAGES * len(model.sites) * family.heads and heads["finite"].all()
    assert not heads.duplicated(["image", "layer", "head"]).any()
    assert (heads["tokens"] == family.tokens).all() and heads["sink_index"].between(0, family.tokens - 1).all()
    kinds = np.array([*prefix, *["patch"] * (family.tokens - len(prefix))])[heads["sink_index"]]
    assert (heads["sink_kind"] == kinds).all()
    patch, (_, columns) = kinds == "patch", model.tokens.grid(families.IMAGE, families.IMAGE)
    place = heads["sink_row"] * columns + heads["sink_column"] + len(prefix)
    assert (place[patch] == heads["sink_index"][patch]).all()
    assert (heads.loc[~patch, ["sink_row", "sink_column"]] == -1).all().all()

    assert run.config.keys() >= DOCUMENTED and run.config["status"] == "complete"
    assert run.config["model"]["heads"] == family.heads and len(run.config["model"]["sites"]) == len(model.sites)
    assert len(run.sinks) == rule.events(heads).sum() > 0
    assert run.summary and len(run.table("spectrum")) in (0, len(model.sites) * family.heads)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.module.modules())
    if options["report"]:
        page = (run.path / "report.html").read_text()
        assert page.lower().startswith("<!doctype html>") and f"{IMAGES} images" in page


@pytest.mark.parametrize("name", [name for name in VISION if name.startswith("hf ")])
def test_a_hugging_face_folder_is_diagnosed_by_its_path(name: str, pictures: Path, tmp_path: Path) -> None:
    families.fresh(name).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    model = sinklab.load(f"hf:{tmp_path / 'model'}", offline=True)
    options: dict[str, Any] = {"size": families.IMAGE, "device": "cpu", "report": False}
    run = sinklab.diagnose(model, pictures, output=tmp_path / "run", **options)
    attached = sinklab.diagnose(handle(name), pictures, output=tmp_path / "attached", **options)
    assert run.config["model"]["family"] == "hf" and len(run.config["model"]["sha256"]) == 64
    exact = ["tokens", "queries", "sink_index", "sink_kind", "routed_count", "inflow", "stable_rank"]
    assert run.heads[exact].equals(attached.heads[exact])
