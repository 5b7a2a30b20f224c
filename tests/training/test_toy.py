"""Runs of the controlled tasks: arms that may be compared, resuming, what an edit must and must not change."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sinklab.data.toy import BroadcastTask, NopBranchTask, NopTask
from sinklab.errors import InputError, NotFoundError
from sinklab.models.toy import BroadcastModel, NopModel
from sinklab.training.loop import Diverged, Progress, Stopped, read_metrics, train
from sinklab.training.toy import build_recipe, build_task, load_toy, losses, read_evaluation, train_toy
from sinklab.training.toy_config import Member, TrainConfig, make_config, members
from sinklab.training.toy_edits import run_model
from sinklab.training.toy_measure import WHOLE, evaluate, interaction, look_up

TINY = ("tokens=6", "dim=8", "steps=6", "batch=4", "record_every=1", "score_every=2", "checkpoint_every=2")
FEW = ("evaluation_batches=2", "evaluation_size=8")


@pytest.fixture(autouse=True)
def drawn_alike() -> Iterator[None]:
    """Models that a test builds itself are the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def tiny(kind: str, *more: str) -> TrainConfig:
    wide = ("hidden=16",) if kind in ("broadcast", "pathway") else ()
    return make_config(kind, "laptop", [*TINY, *FEW, *wide, *more])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run that must not depend on how often it was interrupted."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "run.json" and not path.name.startswith(".")
    }


def test_arms_of_one_seed_share_task_batches_and_the_first_weights_of_attention_and_mlp(tmp_path: Path) -> None:
    run = train_toy(tmp_path, tiny("pathway"), [0, 1])
    for record in (run.config["tasks"], run.config["first_weights"]):
        by_seed = [
            {record[f"seed-{seed}/{arm}"] for arm in ("attention", "global", "global+penalty")} for seed in (0, 1)
        ]
        assert [len(values) for values in by_seed] == [1, 1]
        assert by_seed[0] != by_seed[1]


def test_the_penalty_changes_nothing_but_what_is_minimised(tmp_path: Path) -> None:
    run = train_toy(tmp_path, tiny("pathway"), [0])
    first = [read_metrics(tmp_path / "training" / name / "metrics.jsonl")[0] for name in run.config["members"][1:]]
    assert first[0]["loss"] == first[1]["loss"] and first[0]["penalty"] == first[1]["penalty"]
    assert first[0]["total"] == first[0]["loss"]
    assert first[1]["total"] == pytest.approx(first[1]["loss"] + first[1]["penalty"])


@pytest.mark.parametrize("kind", ["nop-branch", "pathway"])
def test_a_run_that_was_stopped_and_resumed_is_the_run_that_was_not(tmp_path: Path, kind: str) -> None:
    train_toy(tmp_path / "whole", tiny(kind), [0, 1])

    def stop(member: Member, state: Progress) -> None:
        if member.seed == 0 and state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        train_toy(tmp_path / "parts", tiny(kind), [0, 1], progress=stop)
    run = train_toy(tmp_path / "parts", tiny(kind), [0, 1], resume=True)
    assert run.config["status"] == "complete"
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


def test_a_run_is_resumed_under_its_own_settings_only(tmp_path: Path) -> None:
    train_toy(tmp_path, tiny("nop"), [0])
    with pytest.raises(InputError, match="lr 0.01 → 0.02"):
        train_toy(tmp_path, tiny("nop", "lr=0.02"), [0], resume=True)
    with pytest.raises(InputError, match="holds a run already"):
        train_toy(tmp_path, tiny("nop"), [0])


def test_overwriting_removes_the_trainings_that_were_there(tmp_path: Path) -> None:
    train_toy(tmp_path, tiny("nop"), [0])
    train_toy(tmp_path, tiny("nop"), [1], overwrite=True)
    assert not (tmp_path / "training" / "seed-0").exists()


@pytest.mark.parametrize("kind", ["nop", "nop-branch", "broadcast", "pathway"])
def test_a_saved_model_comes_back_with_its_task_and_its_numbers(tmp_path: Path, kind: str) -> None:
    run = train_toy(tmp_path, tiny(kind), [2])
    name = run.config["members"][-1]
    held = load_toy(tmp_path / "training" / name / "model.safetensors")
    assert (held.seed, f"seed-2/{held.arm}", held.config) == (2, name, tiny(kind).of_arm(held.arm))
    again = evaluate(held.model, held.task, batches=2, size=8)
    saved = read_evaluation(run, name)
    assert [(row["edit"], row["metric"]) for row in again] == [(row["edit"], row["metric"]) for row in saved]
    assert all(a["mean"] == b["mean"] or math.isnan(a["mean"]) for a, b in zip(again, saved, strict=True))


def test_a_model_file_that_is_not_one_is_refused_with_its_name(tmp_path: Path) -> None:
    train_toy(tmp_path, tiny("nop"), [0])
    path = tmp_path / "training/seed-0/nop/model.safetensors"
    with pytest.raises(NotFoundError, match="there is no .*other.safetensors"):
        load_toy(tmp_path / "other.safetensors")
    saved = json.loads(path.with_suffix(".json").read_text())
    for changed, words in (
        ({"signature": [0.0] * 24}, "draws differently"),
        ({"format": "x"}, "not a trained controlled"),
    ):
        path.with_suffix(".json").write_text(json.dumps(saved | changed))
        with pytest.raises(InputError, match=words):
            load_toy(path)
    path.with_suffix(".json").write_text(json.dumps(saved))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="model.safetensors and its .json are not a trained"):
        load_toy(path)


def test_the_donors_value_changes_nothing_where_the_sink_does_not_see_its_input() -> None:
    """Token 0's input is always 0, so every sequence has the same value there, trained or not."""
    rows = evaluate(NopModel(), NopTask(seed=0), batches=2, size=16)
    for metric in ("delta_rms_nop", "delta_rms_active"):
        assert look_up(rows, 0, "donor", metric) == 0
        assert look_up(rows, 0, "ordinary", metric) > 0
    assert look_up(rows, 0, "donor", "task_mse") == look_up(rows, 0, "baseline", "task_mse")


@pytest.mark.parametrize("gate", [None, "learned", "uniform"])
def test_an_edit_of_one_value_changes_the_update_as_the_closed_form_says(gate: str | None) -> None:
    rows = evaluate(BroadcastModel(pathway=gate), BroadcastTask(seed=0), batches=1, size=8)
    assert all(look_up(rows, layer, "donor", "closed_form_error") < 1e-4 for layer in (0, 1))


def test_a_shared_state_edit_of_a_uniform_last_layer_is_wholly_shared_before_the_mlp() -> None:
    model = BroadcastModel(pathway="uniform")
    last = model.blocks[1]
    torch.nn.init.zeros_(last.mlp[2].weight)  # type: ignore[index,union-attr,arg-type]
    rows = evaluate(model, BroadcastTask(seed=0), batches=1, size=8)
    assert look_up(rows, 1, "donor_state", "shared_energy") == pytest.approx(1, abs=1e-5)


def test_the_right_answer_has_no_error_and_a_donors_answer_is_found_in_the_donors_target() -> None:
    """A model that does nothing: its error is the payload's energy, to x itself it has none."""
    model = BroadcastModel()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.out_proj.weight)  # type: ignore[union-attr,arg-type]
        for part in (block.mlp[2].weight, block.mlp[2].bias):  # type: ignore[index,union-attr]
            torch.nn.init.zeros_(part)  # type: ignore[arg-type]
    task = BroadcastTask(seed=0)
    rows = evaluate(model, task, batches=1, size=64)
    payload = task.payload(task.batch(0, 64, purpose="evaluation").x)
    assert look_up(rows, WHOLE, "baseline", "no_payload_mse") == 0
    assert look_up(rows, WHOLE, "baseline", "task_mse") == pytest.approx(float(payload.square().mean()), rel=1e-5)


def test_means_have_the_standard_error_of_their_batches() -> None:
    task, model = NopBranchTask(seed=0), NopModel()
    (row,) = [row for row in evaluate(model, task, batches=3, size=4) if row["metric"] == "branch_mse"]
    with torch.no_grad():
        single = [
            float((run_model(model, batch.x)[1][0].update - batch.target).square().mean())
            for batch in (task.batch(number, 4, purpose="evaluation") for number in range(3))
        ]
    mean = sum(single) / 3
    assert row["mean"] == pytest.approx(mean)
    assert row["sem"] == pytest.approx((sum((value - mean) ** 2 for value in single) / 2 / 3) ** 0.5, rel=1e-3)


def test_where_nothing_is_flagged_there_is_no_attention_of_flagged_tokens() -> None:
    rows = evaluate(NopModel(), NopBranchTask(seed=0, threshold=10), batches=2, size=4)
    (flagged,) = [row for row in rows if row["metric"] == "attention_flagged"]
    assert math.isnan(flagged["mean"]) and math.isnan(flagged["sem"])
    assert 0 < look_up(rows, 0, "baseline", "attention_other") < 1


def test_theta_is_what_stands_between_two_tokens_in_their_logit() -> None:
    model = NopModel()
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    head: Any = model.blocks[0].attention
    with torch.no_grad():
        logit = head.q_proj(x[0]) @ head.k_proj(x[1])
    assert float(x[0].double() @ interaction(model, 0) @ x[1].double()) == pytest.approx(float(logit), rel=1e-4)


def test_the_block_form_of_the_branch_loss_has_the_normalised_stream_as_residual() -> None:
    config = replace(make_config("nop-branch", "paper"), loss="block")  # type: ignore[call-arg]
    model, batch = NopModel(), build_task(config, 0).batch(0, 4)
    with torch.no_grad():
        block: Any = model.blocks[0]
        h = block.normalised(batch.x)
        expected = (h + block.attention(h) - batch.target).square().mean()
        assert float(losses(model, batch, config)["total"]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(("denominator", "collapses"), [("gradient", False), ("stopgrad", True)])
def test_with_a_stopped_gradient_the_penalty_shrinks_the_attention_branch_away(
    tmp_path: Path, denominator: str, collapses: bool
) -> None:
    changes = ("steps=300", "batch=32", "dim=16", "tokens=8", "hidden=32", "lr=5e-3", "score_every=300")
    config = make_config("pathway", "paper", [*changes, f"penalty_denominator={denominator}"])
    recipe = build_recipe(Member(seed=0, arm="global+penalty", config=config))
    x = build_task(config, 0).batch(0, 64, purpose="evaluation").x

    def attention_rms() -> float:
        with torch.no_grad():
            return max(float(layer.update.square().mean().sqrt()) for layer in run_model(recipe.model, x)[1])  # type: ignore[arg-type]

    before = attention_rms()
    train(recipe, tmp_path)
    assert attention_rms() < before / 50 if collapses else attention_rms() > before


def test_a_run_of_five_seeds_has_every_arm_of_each() -> None:
    planned = members(make_config("pathway", "paper"), range(5))
    assert len(planned) == 5 * 5 and len({member.name for member in planned}) == 25
    assert len(members(make_config("nop-branch", "paper"), [0], "frequency")) == 20
    assert len(members(make_config("nop-branch", "paper"), [0], "damping")) == 6


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
def test_a_compiled_step_trains_what_the_plain_one_trains(tmp_path: Path) -> None:
    plain, compiled = (train_toy(tmp_path / str(on), tiny("nop"), [0], compile=on) for on in (False, True))
    lines = [read_metrics(run.path / "training/seed-0/nop/metrics.jsonl") for run in (plain, compiled)]
    assert len(lines[0]) == len(lines[1]) == 6
    for one, other in zip(*lines, strict=True):
        assert one["total"] == pytest.approx(other["total"], rel=1e-4)


@pytest.mark.parametrize("kind", ["nop", "nop-branch", "broadcast"])
def test_a_last_step_that_diverges_is_said_and_its_model_is_not_evaluated(kind: str, tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="diverged"):
        train_toy(tmp_path, tiny(kind, "steps=1", "lr=1e9"), [0])
    assert not list(tmp_path.rglob("evaluation.json"))
