"""The controlled tasks are the ground truth: a diagnosis and a patching must find what they were trained to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from command_line import in_process
from torch import Tensor

import sinklab
from sinklab.data.toy import BroadcastTask, NopTask, task_from
from sinklab.data.toy_effects import task_effects
from sinklab.data.toy_sequences import toy_sequences
from sinklab.interventions.task import task_table
from sinklab.models.toy_file import read_toy, shipped_toy

LIMIT = 512


def patched(name: str, folder: Path) -> sinklab.Diagnosis:
    run = sinklab.diagnose(name, output=folder, limit=LIMIT, report=False)
    return sinklab.patch(run, report=False, bootstrap=200)


@pytest.fixture(scope="module")
def nop(tmp_path_factory: pytest.TempPathFactory) -> sinklab.Diagnosis:
    return patched("toy:nop", tmp_path_factory.mktemp("toy") / "nop")


@pytest.fixture(scope="module")
def broadcast(tmp_path_factory: pytest.TempPathFactory) -> sinklab.Diagnosis:
    return patched("toy:broadcast", tmp_path_factory.mktemp("toy") / "broadcast")


def means(run: sinklab.Diagnosis, metric: str) -> pd.Series:
    table = run.table("task_effects")
    return table[table["metric"] == metric].set_index("edit")["mean"]


def test_every_sink_of_the_nop_task_is_named_a_nop_by_observation_and_by_intervention(nop: sinklab.Diagnosis) -> None:
    assert set(nop.sinks["class_causal"]) == {"nop"} and len(nop.sinks) == LIMIT
    assert set(nop.sinks["sink_kind"]) == {"bos"}
    verdicts = nop.table("causal_verdicts")
    assert set(verdicts["verdict"]) == {"nop"} and bool(verdicts["agrees"].all())


def test_table_2_holds_on_the_shipped_model(nop: sinklab.Diagnosis) -> None:
    """ordinary and route do much, zero next to nothing, and a donor exactly nothing: its token 0 has no content."""
    nothing, active = means(nop, "delta_rms_nop"), means(nop, "delta_rms_active")
    assert nothing["donor"] == active["donor"] == nothing["mean"] == 0.0
    assert 0 < nothing["zero"] < 0.1 * min(nothing["ordinary"], nothing["route"])
    assert active["ordinary"] < 0.3 * nothing["ordinary"]  # active queries do not attend to the sink
    errors = means(nop, "task_mse")
    assert errors["donor"] == errors["baseline"] and errors["ordinary"] > 5 * errors["baseline"]


def test_every_sink_of_the_broadcast_task_is_named_a_broadcast(broadcast: sinklab.Diagnosis) -> None:
    sinks = broadcast.sinks
    assert set(sinks["class_causal"]) == {"broadcast"} and len(sinks) > 0.9 * LIMIT
    verdicts = broadcast.table("causal_verdicts")
    assert set(verdicts["verdict"]) == {"broadcast"} and bool(verdicts["agrees"].all())


def test_the_sink_of_the_broadcast_task_is_the_source_of_the_payload(broadcast: sinklab.Diagnosis) -> None:
    sinks, task = broadcast.sinks, task_of_shipped("broadcast")
    sources = [int(task.sources(sequence(task, name)[None])) for name in sinks["image"]]
    assert float(np.mean(sinks["sink_index"].to_numpy() == sources)) > 0.95


def test_table_3_holds_on_the_shipped_model(broadcast: sinklab.Diagnosis) -> None:
    """A donor's value makes the output the donor's: near x + p_donor, far from the task's own target."""
    aimed, own = means(broadcast, "donor_target_mse"), means(broadcast, "task_mse")
    assert aimed["donor"] < 0.25 * aimed["baseline"] and own["donor"] > 5 * own["baseline"]
    assert means(broadcast, "payload_cosine")["donor"] > 0.85 and means(broadcast, "shared_energy")["donor"] > 0.99
    assert own["zero_ordinary"] == pytest.approx(own["baseline"], rel=0.1)
    assert own["zero"] > 5 * own["baseline"] and own["route"] > 5 * own["baseline"]
    assert means(broadcast, "donor_improvement")["donor"] == pytest.approx(aimed["baseline"] - aimed["donor"])


def task_of_shipped(name: str) -> BroadcastTask:
    saved = read_toy(shipped_toy(name))[1]
    task = task_from(saved["kind"], saved["seed"], saved["config"])
    assert isinstance(task, BroadcastTask)
    return task


def sequence(task: BroadcastTask, name: str) -> Tensor:
    index = int(name.removeprefix("sequence-"))
    return task.batch(index // 256, 256, purpose="evaluation").x[index % 256]


def test_donor_rows_recomputed_with_whole_maps_in_float64_agree(broadcast: sinklab.Diagnosis) -> None:
    """A second route: written-out attention, one sequence at a time, no hooks, no batches, no resumed forward."""
    network, saved = read_toy(shipped_toy("broadcast"))
    network, task = network.double().requires_grad_(False), task_of_shipped("broadcast")
    effects = broadcast.effects
    rows = effects[(effects["edit"] == "donor") & (effects["joint"] == 0)].head(8)
    for row in rows.to_dict("records"):
        own, donor = (sequence(task, row[name]).double() for name in ("image", "donor"))
        at = broadcast.heads[(broadcast.heads["image"] == row["donor"]) & (broadcast.heads["layer"] == row["layer"])]
        value = run_openly(network, donor)[1][row["layer"]][int(at["sink_index"].iloc[0])]
        plain = run_openly(network, own)[0]
        edited = run_openly(network, own, (row["layer"], row["sink_index"], value))[0]
        rest = [token for token in range(task.tokens) if token != row["sink_index"]]
        change, size = (edited - plain)[rest], plain[rest]
        expected = change.square().sum(-1).mean().sqrt() / size.square().sum(-1).mean().sqrt()
        assert row["patch_change"] == pytest.approx(float(expected), rel=1e-4)
        target = own + donor[int(task.sources(donor[None].float()))] @ task.rotation.double()
        assert row["donor_target_mse"] == pytest.approx(float((edited - target).square().mean()), rel=1e-4)
    assert len(rows) == 8


def run_openly(network: torch.nn.Module, x: Tensor, edit: tuple[int, int, Tensor] | None = None) -> tuple[Tensor, list]:
    """The final stream [N C] of one sequence, and each layer's values [N C]."""
    values = []
    for layer, block in enumerate(network.blocks):
        h = block.normalised(x[None])[0]
        head = block.attention
        pattern = torch.softmax(head.q_proj(h) @ head.k_proj(h).T / 8, dim=-1)
        v = head.v_proj(h)
        values.append(v)
        if edit is not None and edit[0] == layer:
            v = v.clone()
            v[edit[1]] = edit[2]
        x = x + head.out_proj(pattern @ v)
        x = x + block.mlp(block.norm2(x))
    return x, values


def test_sequences_grouped_or_alone_have_the_same_effects(tmp_path: Path) -> None:
    """Sixty-four sequences run together: the same numbers, to rounding, as one by one."""
    from dataclasses import replace

    from sinklab.handle import Model

    handle = sinklab.load("toy:broadcast")
    assert handle.loaded.sequences is not None
    alone = replace(handle.loaded, sequences=replace(handle.loaded.sequences, together=1))
    found = []
    for place, model in (("grouped", handle), ("alone", Model(loaded=alone, sites=handle.sites))):
        run = sinklab.diagnose(model, output=tmp_path / place, limit=70, report=False)
        sinklab.patch(run, model=model, report=False, bootstrap=10, min_events=1)
        found.append(run.effects)
    keys = ["image", "layer", "head", "edit", "fired", "kept_queries", "edited_index", "donor"]
    pd.testing.assert_frame_equal(found[0][keys], found[1][keys])
    for name in ("patch_change", "shared_energy", "donor_cosine", "task_mse", "donor_target_mse", "payload_cosine"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-4, atol=1e-5)


def test_root_mean_squares_are_taken_over_all_tokens_of_a_batch() -> None:
    """Two sequences of 1 and 3 moved tokens by 2 and 1: √((1·4 + 3·1)/4), not the mean of 2 and 1."""
    shared = {"layer": 0, "head": 0, "class": "nop", "edit": "zero", "joint": 0, "shared_energy": 1.0}
    counts = {"task_mse": 0.0, "task_mse_before": 0.0, "moved_active": 0.0, "tokens_active": 1.0}
    rows = [
        {**shared, **counts, "image_index": 0, "moved_nop": 4.0, "tokens_nop": 1.0},
        {**shared, **counts, "image_index": 1, "moved_nop": 3.0, "tokens_nop": 3.0},
    ]
    table = task_table(pd.DataFrame(rows), NopTask(seed=0))
    (found,) = table[(table["edit"] == "zero") & (table["metric"] == "delta_rms_nop")]["mean"]
    assert found == pytest.approx((7 / 4) ** 0.5)


def test_an_output_equal_to_the_donors_target_has_no_error_against_it() -> None:
    task = BroadcastTask(seed=1)
    x, donor = (task.batch(0, 3, purpose=purpose).x for purpose in ("evaluation", "donors"))
    aimed = x + task.payload(donor)[:, None]
    found = task_effects(task, x, donor, before=task.of(x).target, after=aimed)
    assert float(found["donor_target_mse"].max()) < 1e-12 and float(found["task_mse_before"].max()) < 1e-12
    assert float(found["payload_cosine"].min()) > 1 - 1e-6


def test_the_evaluation_sequences_are_those_of_the_tasks_own_batches() -> None:
    saved = read_toy(shipped_toy("nop"))[1]
    listed = toy_sequences(saved)
    assert len(listed) == 64 * 256 and len({ref.id for ref in listed}) == len(listed)
    task = task_from(saved["kind"], saved["seed"], saved["config"])
    held = np.frombuffer(listed[300].content(), dtype="float32").reshape(32, 64)
    np.testing.assert_array_equal(held, task.batch(1, 256, purpose="evaluation").x[44].numpy())


def test_a_training_run_is_diagnosed_and_patched_whole_from_the_command_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = in_process("train", "nop", "-o", run, "--seeds", "0-1", "--set", "steps=150")
    assert done.returncode == 0, done.stderr
    refused = in_process("patch", run)
    assert refused.returncode == 2 and "were not diagnosed yet" in refused.stderr
    for words in (("diagnose", run, "--limit", 128), ("patch", run, "--bootstrap", 50)):
        done = in_process(*words, "--no-report")
        assert done.returncode == 0, done.stderr
    for seed in (0, 1):
        member = sinklab.open_run(run / f"diagnosed/seed-{seed}/nop")
        assert len(member.effects) and (member.path / "tables/task_effects.csv").is_file()
    one = sinklab.load(run / "training/seed-1/nop")
    assert one.provenance.sha256 == member.config["model"]["sha256"]
    with pytest.raises(sinklab.InputError, match="trained 2 models"):
        sinklab.load(run)


def test_images_for_a_model_of_sequences_are_refused(tmp_path: Path) -> None:
    with pytest.raises(sinklab.InputError, match="reads sequences, and images were given"):
        sinklab.diagnose("toy:nop", "demo", tmp_path / "run")
    assert not (tmp_path / "run").exists()
