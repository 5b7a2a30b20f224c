"""The loop: going on after a stop changes nothing, checkpoints are whole, and what cannot be used is refused."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sinklab.errors import InputError
from sinklab.training.loop import CHECKPOINT, METRICS, Progress, Recipe, Stopped, read_metrics, train


def recipe(steps: int = 12, **changes: Any) -> Recipe:
    """Regression with noise from a generator that is drawn from as training goes on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    noise = torch.Generator().manual_seed(7)

    def batch(step: int) -> Tensor:
        return torch.randn(16, 4, generator=torch.Generator().manual_seed(step)) + torch.randn(16, 4, generator=noise)

    def loss(x: Tensor) -> dict[str, Tensor]:
        return {"total": (model(x) - x.sum(-1, keepdim=True)).square().mean()}

    return replace(
        Recipe(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.05),
            steps=steps,
            batch=batch,
            loss=loss,
            rate=lambda step: 1 - step / steps,
            score=lambda done: {"norm": float(sum(p.square().sum() for p in model.parameters()))},
            score_every=1,
            record_every=1,
            checkpoint_every=4,
            generators={"noise": noise},
            fingerprint="mine",
        ),
        **changes,
    )


def lines(folder: Path) -> list[dict[str, float]]:
    return read_metrics(folder / METRICS)


def weights(one: Recipe) -> list[Tensor]:
    return [value.clone() for value in one.model.state_dict().values()]


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_k_steps_and_the_rest_after_resuming_are_bit_for_bit_all_steps_at_once(tmp_path: Path, stop: int) -> None:
    whole, first, second = recipe(), recipe(), recipe()
    train(whole, tmp_path / "whole")
    train(first, tmp_path / "parts", until=stop)
    train(second, tmp_path / "parts", resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(second), strict=True))
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")
    assert (tmp_path / "whole" / CHECKPOINT).read_bytes() == (tmp_path / "parts" / CHECKPOINT).read_bytes()


def test_lines_written_after_the_last_checkpoint_are_not_there_twice(tmp_path: Path) -> None:
    whole, killed = recipe(), recipe()
    train(whole, tmp_path / "whole")
    train(killed, tmp_path / "parts", until=5)
    with (tmp_path / "parts" / METRICS).open(
        "a"
    ) as stream:  # what a kill leaves behind: a step too many, and half a line
        stream.write(json.dumps({"step": 6, "total": 1.0}) + '\n{"step": 7, "to')
    train(recipe(), tmp_path / "parts", resume=True)
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")


def test_resuming_what_is_finished_trains_no_further(tmp_path: Path) -> None:
    last = train(recipe(), tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()
    again = recipe()
    assert train(again, tmp_path, resume=True) == last
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_without_resume_a_training_starts_from_the_beginning(tmp_path: Path) -> None:
    train(recipe(), tmp_path, until=5)
    train(recipe(), tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 13))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_leaves_a_checkpoint_to_go_on_from(tmp_path: Path, number: int) -> None:
    whole, stopped, after = recipe(), recipe(), recipe()
    train(whole, tmp_path / "whole")

    def send(state: Progress) -> None:
        if state.step == 5:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(Stopped, match="after 5 of 12 steps"):
        train(stopped, tmp_path / "parts", progress=send)
    assert signal.getsignal(number) is before
    train(after, tmp_path / "parts", resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(after), strict=True))


def test_progress_tells_loss_score_and_time_left(tmp_path: Path) -> None:
    told: list[Progress] = []
    train(recipe(), tmp_path, progress=told.append)
    assert [state.step for state in told] == list(range(1, 13))
    assert told[0].loss == lines(tmp_path)[0]["total"] and set(told[0].score) == {"norm"}
    assert told[0].seconds_left is not None and told[0].seconds_left > 0 and told[-1].seconds_left == 0


def test_scores_between_two_lines_have_lines_of_their_own(tmp_path: Path) -> None:
    train(recipe(record_every=6, score_every=2), tmp_path)
    assert [(line["step"], "total" in line) for line in lines(tmp_path)] == [
        *((2, False), (4, False), (6, True), (8, False), (10, False), (12, True))
    ]


def test_the_rate_scales_the_optimizers_own(tmp_path: Path) -> None:
    one = recipe(steps=4)
    train(one, tmp_path)
    assert one.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * (1 - 3 / 4))


def test_a_gradient_is_clipped_to_the_norm_asked_for(tmp_path: Path) -> None:
    one = recipe(steps=1, clip=1e-3)
    train(one, tmp_path)
    total = sum(float(p.grad.square().sum()) for p in one.model.parameters() if p.grad is not None)
    assert total**0.5 == pytest.approx(1e-3, rel=1e-3)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    train(recipe(), tmp_path, until=2)
    with pytest.raises(InputError, match="other settings"):
        train(recipe(fingerprint="another"), tmp_path, resume=True)


@pytest.mark.parametrize("cut", [0, 20, 500])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, cut: int) -> None:
    train(recipe(), tmp_path, until=2)
    path = tmp_path / CHECKPOINT
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError, match="checkpoint.safetensors is not a whole checkpoint"):
        train(recipe(), tmp_path, resume=True)


def test_a_loss_that_is_no_longer_a_number_is_an_error_and_no_checkpoint(tmp_path: Path) -> None:
    one = recipe()
    broken = replace(one, loss=lambda x: {"total": one.model(x).sum() * float("nan")})
    with pytest.raises(InputError, match="after 1 steps: the training has diverged"):
        train(broken, tmp_path)
    assert not (tmp_path / CHECKPOINT).exists()


def test_a_recipe_without_steps_is_refused() -> None:
    with pytest.raises(InputError, match="steps is at least 1; 0"):
        replace(recipe(), steps=0)
