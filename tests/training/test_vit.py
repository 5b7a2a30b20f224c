"""Runs of vision transformers: resuming is exact, ranks agree, and what goes wrong is said."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

from sinklab.data.labelled import photographs
from sinklab.data.procedural import ProceduralImages
from sinklab.errors import InputError
from sinklab.models.vit import ViT
from sinklab.models.vit_file import read_vit
from sinklab.training.loop import METRICS, Progress, Stopped, read_metrics
from sinklab.training.vit import train_vit
from sinklab.training.vit_config import ViTConfig, make_config
from sinklab.training.vit_dry_run import dry_run
from sinklab.training.vit_evaluate import evaluate, layer_scores
from sinklab.training.vit_member import build_model, build_optimizer

IMAGES = ProceduralImages(count=12, size=16)
pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {
    **{"image": 16, "dim": 12, "depth": 3, "heads": 2, "views": 2, "projector_hidden": 8, "projector_dim": 4},
    **{"slices": 16, "batch": 4, "epochs": 2, "warmup_epochs": 0.5, "drop_path": 0.2, "score_images": 4},
    **{"record_every": 1, "score_every": 2, "checkpoint_every": 2, "save_every": 1},
}


def small(name: str = "gated-global-penalty-registers-tiny", **changes: Any) -> ViTConfig:
    return replace(make_config(name), **{**SMALL, **changes})


def folder(run: Path, config: ViTConfig) -> Path:
    return run / "training/seed-0" / config.name


def trained(path: Path, config: ViTConfig, **options: Any) -> Any:
    return train_vit(path, [config], IMAGES, **options)


def stop_after(step: int) -> Any:
    def tell(name: str, state: Progress) -> None:
        if state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return tell


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_that_was_killed_and_resumed_has_the_loss_curve_of_one_that_was_not(
    tmp_path: Path, accumulate: int
) -> None:
    config = small(accumulate=accumulate)
    trained(tmp_path / "whole", config)
    with pytest.raises(Stopped, match="SIGTERM after 3 of 6 steps"):
        trained(tmp_path / "parts", config, progress=stop_after(3))
    trained(tmp_path / "parts", config, resume=True)
    whole, parts = (folder(tmp_path / name, config) for name in ("whole", "parts"))
    assert read_metrics(whole / METRICS) == read_metrics(parts / METRICS)
    for name in ("checkpoint.safetensors", "model.safetensors", "best.safetensors", "validation.jsonl"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name


def test_a_kill_without_warning_costs_the_steps_since_the_checkpoint_and_changes_nothing(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(name: str, state: Progress) -> None:
        if state.step == 5:
            raise Killed

    config = small()
    trained(tmp_path / "whole", config)
    with pytest.raises(Killed):
        trained(tmp_path / "parts", config, progress=kill)
    trained(tmp_path / "parts", config, resume=True)
    whole, parts = (folder(tmp_path / name, config) for name in ("whole", "parts"))
    assert read_metrics(whole / METRICS) == read_metrics(parts / METRICS)


def test_a_run_leaves_models_their_epochs_metrics_by_layer_and_a_table(tmp_path: Path) -> None:
    config = small()
    told: list[tuple[int, ...]] = []

    def score(network: ViT, pixels: Tensor) -> dict[str, float]:
        told.append(tuple(pixels.shape))
        return {"sinks": 3.0}

    run = trained(tmp_path, config, score=score, validation=ProceduralImages(count=5, size=16, split="validation"))
    assert run.config["status"] == "complete" and run.config["purpose"] == "training"
    assert run.config["members"] == [f"seed-0/{config.name}"]
    member = folder(tmp_path, config)
    assert {path.name for path in member.glob("epoch-*")} == {
        f"epoch-000{epoch}.{kind}" for epoch in (1, 2) for kind in ("safetensors", "json")
    }
    last = read_metrics(member / METRICS)[-1]
    assert {
        "sigreg",
        "invariance",
        "probe",
        "penalty",
        "sinks",
        "common_mode_2",
        "common_mode_ungated_0",
    } <= last.keys()
    assert set(told) == {(4, 3, 16, 16)}
    model, saved = read_vit(member / "model.safetensors")
    assert (saved["kind"], saved["arm"], saved["seed"]) == ("vit", "gated-global-penalty-registers", 0)
    assert model.shape.registers == 4 and model(torch.zeros(1, 3, 16, 16)).shape == (1, 9, 12)
    table = pd.read_csv(tmp_path / "tables/training.csv")
    assert table[table["metric"] == "common_mode"]["layer"].tolist() == [0, 1, 2]
    assert float(table[table["metric"] == "images"]["value"].iloc[0]) == 5


def test_a_run_is_resumed_under_its_own_settings_only_and_the_fields_are_named(tmp_path: Path) -> None:
    trained(tmp_path, small(epochs=1))
    with pytest.raises(InputError, match=r"lr 0.002 → 0.1.*other settings|other settings.*lr 0.002 → 0.1"):
        trained(tmp_path, small(epochs=1, lr=0.1), resume=True)
    with pytest.raises(InputError, match="holds a run already"):
        trained(tmp_path, small(epochs=1))


def poison(network: ViT, pixels: Tensor) -> dict[str, float]:
    for block in network.blocks:
        block.attn.proj.bias.fill_(float("inf"))
    return {}


def test_a_loss_that_is_no_number_stops_the_training_names_the_term_and_keeps_what_was_seen(tmp_path: Path) -> None:
    config = small(checkpoint_every=50, score_every=2)
    with pytest.raises(InputError, match="after 2 steps its sigreg is nan. No checkpoint had been written yet"):
        trained(tmp_path, config, score=poison)
    assert [line["step"] for line in read_metrics(folder(tmp_path, config) / METRICS)] == [1, 2]


def test_weights_that_are_no_numbers_never_take_the_place_of_a_checkpoint_or_of_a_model(tmp_path: Path) -> None:
    config = small(checkpoint_every=1, score_every=2)
    with pytest.raises(InputError, match="After 2 steps weights are no longer numbers"):
        trained(tmp_path / "a", config, score=poison)
    kept = safe_open(folder(tmp_path / "a", config) / "checkpoint.safetensors", "pt")
    assert all(bool(kept.get_tensor(key).isfinite().all()) for key in kept.keys())  # noqa: SIM118
    last = small(checkpoint_every=50, score_every=6)  # of 6 steps: no loss is computed with what the last one leaves
    with pytest.raises(InputError, match="After 6 steps weights are no longer numbers"):
        trained(tmp_path / "b", last, score=poison)
    assert not (folder(tmp_path / "b", last) / "model.safetensors").exists()


@pytest.mark.parametrize(("kernel", "low", "high"), [("softmax", 1, 1), ("clipped", 0, 1), ("sink-logit", 0, 1)])
def test_what_rows_sum_to_is_told_of_kernels_that_may_leave_something_out(kernel: str, low: float, high: float) -> None:
    model = build_model(small("baseline-tiny", kernel=kernel), 0, 2).eval()
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = {name: value for name, value in layer_scores(model, pixels).items() if name.startswith("row_sum")}
    if kernel == "softmax":
        assert found == {}
        return
    first: Any = model.vit.blocks[0]
    seen: list[Tensor] = []
    first.norm1.register_forward_hook(lambda module, args, h: seen.append(h))
    model.vit(pixels)
    q, k, _ = first.attn.heads(seen[0])
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if kernel == "sink-logit":  # one more logit, 0 at first, whose weight goes nowhere
        rows = logits.exp().sum(-1) / (1 + logits.exp().sum(-1))
    else:
        rows = (1.03 * torch.softmax(logits, -1) - 0.03).clamp(0, 1).sum(-1)
    assert found["row_sum_0"] == pytest.approx(rows.mean().item(), abs=1e-5)
    assert len(found) == 3 and all(low < value < high for value in found.values())


def test_huge_weights_with_which_nothing_can_be_computed_are_not_kept(tmp_path: Path) -> None:
    config = small("baseline-tiny", epochs=1, warmup_epochs=0.0, lr=1e9, last_rate=1.0, batch=12)  # one step in all
    with pytest.raises(InputError, match="no longer"):
        trained(tmp_path, config)
    assert not list(tmp_path.rglob("model.safetensors")) and not list(tmp_path.rglob("best.safetensors"))


def test_the_state_kept_at_an_epoch_is_what_a_training_goes_on_from_to_the_same_end(tmp_path: Path) -> None:
    config = small(save_every=1)
    trained(tmp_path, config)
    own = folder(tmp_path, config)
    before = {path.name: path.read_bytes() for path in own.iterdir()}
    assert {"checkpoint-best.safetensors", "checkpoint-epoch-0001.safetensors"} < before.keys()
    (own / "checkpoint.safetensors").write_bytes(before["checkpoint-epoch-0001.safetensors"])
    (own / "evaluation.json").unlink()
    trained(tmp_path, config, resume=True)
    assert {path.name: path.read_bytes() for path in own.iterdir()} == before


def test_what_cannot_be_overwrites_nothing(tmp_path: Path) -> None:
    config = small(epochs=1)
    trained(tmp_path, config)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    for wrong in ({"heads": 5}, {"gate": "none at all"}, {"kernel": "round"}, {"image": 17}, {"crop": 0.0}):
        with pytest.raises(InputError):
            trained(tmp_path, small(epochs=1, **wrong), overwrite=True)
    assert {path: path.read_bytes() for path in before} == before


def photograph_folder(root: Path, labelled: int, unlabelled: int = 0, broken: int = 0) -> Path:
    """So many pictures in the folders a and b, so many beside these, and so many files that are no pictures."""
    for number in range(labelled + unlabelled):
        place = root / "ab"[number % 2] if number < labelled else root
        place.mkdir(parents=True, exist_ok=True)
        pixels = IMAGES.picture(number).permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(place / f"{number}.png")
    for number in range(broken):
        (root / "a" / f"broken{number}.png").write_bytes(b"no picture")
    return root


def test_pictures_without_a_label_or_that_cannot_be_read_do_not_count_for_the_probe(tmp_path: Path) -> None:
    """Twice the same labelled pictures, once with others among them: accuracy and loss are those of the labelled."""
    plain, mixed = (
        photographs(photograph_folder(tmp_path / name, 6, **more))
        for name, more in {"plain": {}, "mixed": {"unlabelled": 4, "broken": 3}}.items()
    )
    assert mixed.classes == plain.classes == ("a", "b") and len(mixed) == 13
    model = build_model(small("baseline-tiny"), 0, 2)
    found, other = (evaluate(model, images, size=16, limit=100, batch=2) for images in (plain, mixed))
    assert (found["images"], found["unreadable"]) == (6, 0) and (other["images"], other["unreadable"]) == (10, 3)
    assert other["probe_accuracy"] == found["probe_accuracy"]
    assert other["probe_loss"] == pytest.approx(found["probe_loss"], rel=1e-5)


def test_pictures_for_validation_that_have_no_labels_have_no_accuracy(tmp_path: Path) -> None:
    images = photographs(photograph_folder(tmp_path / "flat", 0, 4))
    found = evaluate(build_model(small("baseline-tiny"), 0, 2), images, size=16, limit=100)
    assert found["images"] == 4 and found["probe_accuracy"] is None and found["probe_loss"] is None


def test_pictures_none_of_which_can_be_read_are_said(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    images = photographs(photograph_folder(tmp_path, 0, 0, 2))
    with pytest.raises(InputError, match="None of the 2 images for validation can be read"):
        evaluate(build_model(small("baseline-tiny"), 0, 2), images, size=16, limit=100)


def test_fewer_images_than_a_batch_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="12 training images, fewer than one batch of 16"):
        trained(tmp_path / "run", small(batch=16))
    assert not (tmp_path / "run").exists()


def test_what_is_finished_is_not_trained_again(tmp_path: Path) -> None:
    configs = [small("baseline-tiny", epochs=1), small("registers-tiny", epochs=1)]
    train_vit(tmp_path, configs, IMAGES, seeds=[0, 1])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")}
    assert len(before) == 4
    train_vit(tmp_path, configs, IMAGES, seeds=[0, 1], resume=True)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")}


def test_weight_decay_is_on_everything_or_spares_what_is_usually_spared() -> None:
    model = build_model(small("registers-tiny"), 0, 3)
    everything = build_optimizer(model, small("registers-tiny")).param_groups
    assert [group["weight_decay"] for group in everything] == [0.05, 1e-7]
    spared = build_optimizer(model, small("registers-tiny", decay_all=False)).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    told = {names[id(p)] for p in spared[1]["params"]}
    assert spared[1]["weight_decay"] == 0 and {"vit.pos_embed", "vit.norm.bias", "vit.blocks.0.ls1.gamma"} <= told
    assert "vit.blocks.0.attn.qkv.weight" not in told and not any(name.startswith("probe") for name in told)
    assert sum(len(group["params"]) for group in spared) == len(names)


def test_shrinking_the_attention_branch_does_not_lower_the_penalty() -> None:
    model = build_model(small("global-penalty-tiny", drop_path=0.0), 0, 0).double()
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, measured = model.vit(pixels, measure="gated")
    penalty = model.penalty(measured)
    penalty.backward()
    gamma = model.vit.blocks[-1].ls1.gamma  # type: ignore[union-attr]
    along = float((gamma.grad * gamma.detach()).sum())  # type: ignore[operator, union-attr]
    assert abs(along) < 1e-5 * float(penalty.detach())  # with a stopped gradient it would be the share itself


def test_a_dry_run_on_meta_takes_steps_of_the_whole_vit_l() -> None:
    told = dry_run(make_config("gated-global-penalty-registers-L"), steps=2, device="meta")
    assert told["terms"] is None and told["state_gib"] == pytest.approx(16 * 339.26e6 / 2**30, abs=0.01)


def test_a_dry_run_on_a_cpu_has_a_finite_loss() -> None:
    told = dry_run(replace(make_config("global-penalty-L"), dim=32, heads=2, depth=3, image=32), steps=2, device="cpu")
    assert {"total", "sigreg", "invariance", "probe", "penalty", "probe_accuracy"} == set(told["terms"])
    assert json.dumps(told)


def test_images_without_labels_train_all_but_the_probe_and_none_are_the_best(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(4):
        pixels = IMAGES.picture(number).permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(tmp_path / f"photos/{number}.png")
    config = small("baseline-tiny", epochs=1)
    train_vit(tmp_path / "run", [config], photographs(tmp_path / "photos"))
    member = folder(tmp_path / "run", config)
    assert (member / "model.safetensors").is_file() and not (member / "best.safetensors").exists()
    assert "probe" not in read_metrics(member / METRICS)[-1]
    assert set(pd.read_csv(tmp_path / "run/tables/training.csv")["metric"]) == {"images", "unreadable", "common_mode"}


@pytest.mark.parametrize(
    ("name", "words"),
    [("model.safetensors", None), ("model.json", "{}"), ("evaluation.json", "[]"), ("evaluation.json", "[{]")],
)
def test_what_was_lost_of_a_finished_training_is_made_again_from_its_checkpoint(
    tmp_path: Path, name: str, words: str | None
) -> None:
    config = small()
    trained(tmp_path, config)
    own = folder(tmp_path, config)
    before = {path.name: path.read_bytes() for path in own.iterdir()}
    (own / name).unlink() if words is None else (own / name).write_text(words)
    assert trained(tmp_path, config, resume=True).config["status"] == "complete"
    assert {path.name: path.read_bytes() for path in own.iterdir()} == before
