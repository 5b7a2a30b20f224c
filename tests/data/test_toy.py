"""The controlled tasks: what is asked of which token, and that a batch depends on its seed and step alone."""

from __future__ import annotations

import math

import pytest
import torch

from sinklab.data.toy import BroadcastTask, NopBranchTask, NopTask, ToyTask, generator_for, task_loss
from sinklab.errors import InputError
from sinklab.training.toy_config import threshold_for

TASKS: list[ToyTask] = [NopTask(seed=3), NopBranchTask(seed=3), BroadcastTask(seed=3)]
IDS = ["nop", "nop-branch", "broadcast"]


@pytest.mark.parametrize("task", TASKS, ids=IDS)
def test_a_batch_depends_on_seed_and_step_and_not_on_what_was_drawn_before(task: ToyTask) -> None:
    first = task.batch(5, 4).x
    torch.randn(100)
    task.batch(6, 4)
    assert torch.equal(task.batch(5, 4).x, first)
    assert not torch.equal(task.batch(6, 4).x, first)
    assert not torch.equal(type(task)(seed=4).batch(5, 4).x, first)


@pytest.mark.parametrize("task", TASKS, ids=IDS)
def test_drawing_a_batch_leaves_torchs_own_generator_alone(task: ToyTask) -> None:
    before = torch.get_rng_state()
    task.batch(0, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_donors_and_scores_never_see_a_training_batch() -> None:
    purposes = ("task", "initialisation", "batches", "evaluation", "donors", "scores")
    assert len({generator_for(purpose, 0).initial_seed() for purpose in purposes}) == len(purposes)
    with pytest.raises(InputError, match="not for 'weather'"):
        generator_for("weather", 0)


@pytest.mark.parametrize("task", TASKS, ids=IDS)
def test_the_tasks_direction_has_length_one(task: ToyTask) -> None:
    assert float(task.vector.norm()) == pytest.approx(1)


def test_a_nop_query_keeps_its_input_and_an_active_one_is_to_become_zero() -> None:
    task = NopTask(seed=0)
    batch = task.batch(0, 8)
    active = (batch.x @ task.vector > 0)[..., None]
    assert torch.equal(batch.target, torch.where(active, 0.0, batch.x))
    assert torch.equal(batch.flags[:, 1:], ~active[:, 1:, 0])


def test_token_0_of_the_nop_task_is_zero_and_left_out_of_the_loss() -> None:
    batch = NopTask(seed=0).batch(0, 8)
    assert not batch.x[:, 0].any()
    wrong = batch.target.clone()
    wrong[:, 0] += 100
    assert float(task_loss(wrong, batch.target, batch.weight)) == 0
    wrong[:, 1] += 1
    assert float(task_loss(wrong, batch.target, batch.weight)) == pytest.approx(1 / 31)


def test_damped_tokens_are_to_be_updated_by_gamma_x_and_all_others_by_x() -> None:
    task = NopBranchTask(seed=0, damping=0.25, threshold=0.5)
    batch = task.batch(0, 8)
    flagged = batch.x @ task.vector > 0.5
    assert torch.equal(batch.flags, flagged)
    assert torch.equal(batch.target, torch.where(flagged[..., None], 0.25 * batch.x, batch.x))
    assert batch.weight.tolist() == [1.0] * 32


@pytest.mark.parametrize("frequency", [0.1, 0.5, 0.9])
def test_the_threshold_of_a_frequency_flags_that_share_of_the_tokens(frequency: float) -> None:
    flags = NopBranchTask(seed=0, threshold=threshold_for(frequency)).batch(0, 512).flags
    spread = math.sqrt(frequency * (1 - frequency) / flags.numel())
    assert float(flags.float().mean()) == pytest.approx(frequency, abs=5 * spread)


def test_a_dedicated_sink_is_zero_never_flagged_and_does_not_count() -> None:
    batch = NopBranchTask(seed=0, threshold=-10, dedicated=True).batch(0, 4)
    assert not batch.x[:, 0].any() and not batch.flags[:, 0].any() and batch.flags[:, 1:].all()
    assert batch.weight.tolist() == [0.0] + [1.0] * 31


def test_at_threshold_ten_no_token_is_flagged() -> None:
    assert not NopBranchTask(seed=0, threshold=10).batch(0, 512).flags.any()


def test_every_token_is_to_receive_the_rotated_source() -> None:
    task = BroadcastTask(seed=0)
    batch = task.batch(0, 4)
    for row in range(4):
        scores = [float(batch.x[row, j] @ task.vector) for j in range(32)]
        source = scores.index(max(scores))
        assert batch.flags[row].nonzero().tolist() == [[source]]
        expected = batch.x[row] + (batch.x[row, source] @ task.rotation)[None]
        torch.testing.assert_close(batch.target[row], expected)


def test_the_rotation_is_orthogonal() -> None:
    rotation = BroadcastTask(seed=0).rotation.double()
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(64).double(), rtol=0, atol=1e-6)


def test_what_layernorm_hides_of_a_direction_takes_that_share_of_the_tokens_to_the_wrong_side() -> None:
    task = NopTask(seed=0)
    x = task.batch(0, 2048).x[:, 1:]
    seen = torch.nn.functional.layer_norm(x, (64,)) @ task.vector  # the best that can be read: its sign
    wrong = ((seen > 0) != (x @ task.vector > 0)).float().mean()
    assert float(wrong) == pytest.approx(math.asin(abs(task.unreadable)) / math.pi, abs=0.005)
    assert float(wrong) > 0.03


def test_a_centred_direction_hides_nothing_from_layernorm() -> None:
    task = NopTask(seed=0, centred=True)
    x = task.batch(0, 64).x[:, 1:]
    seen = torch.nn.functional.layer_norm(x, (64,)) @ task.vector
    assert task.unreadable == pytest.approx(0, abs=1e-6)
    assert torch.equal(seen > 0, x @ task.vector > 0)


def test_a_fingerprint_tells_tasks_apart() -> None:
    tasks: list[ToyTask] = [
        NopTask(seed=0),
        NopTask(seed=1),
        NopTask(seed=0, centred=True),
        NopBranchTask(seed=0),
        NopBranchTask(seed=0, damping=0.1),
        BroadcastTask(seed=0),
        BroadcastTask(seed=0, tokens=16),
    ]
    assert len({task.fingerprint() for task in tasks}) == len(tasks)
    assert NopTask(seed=0).fingerprint() == NopTask(seed=0).fingerprint()


def test_a_damping_outside_zero_and_one_is_refused() -> None:
    with pytest.raises(InputError, match=r"\[0, 1\]; 1.5"):
        NopBranchTask(seed=0, damping=1.5)
