"""The configs of the controlled tasks: the paper's budgets, changes from the command line, and refusals."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from sinklab.errors import InputError, NotFoundError
from sinklab.training.toy_config import KINDS, VARIANTS, BroadcastConfig, config_from, make_config, members

EVERY = [(kind, variant) for kind, variants in VARIANTS.items() for variant in variants]


@pytest.mark.parametrize(
    ("kind", "lr", "batch", "steps"),
    [
        ("nop", 3e-3, 1024, 30_000),
        ("nop-branch", 3e-3, 2048, 30_000),
        ("broadcast", 5e-4, 1024, 30_000),
        ("pathway", 5e-4, 1024, 30_000),
    ],
)
def test_the_papers_budgets(kind: str, lr: float, batch: int, steps: int) -> None:
    config = make_config(kind, "paper")
    assert (config.lr, config.batch, config.steps, config.weight_decay) == (lr, batch, steps, 1e-4)
    assert {config.rate(step) for step in (0, 100, 29_999)} == {1.0}
    assert (config.evaluation_batches, config.evaluation_size, config.centred) == (64, 256, False)


def test_the_papers_sweeps() -> None:
    config = make_config("nop-branch", "paper")
    swept = [member.config for member in members(config, [0], "frequency")]
    assert {one.steps for one in swept} == {20_000}
    assert [round(one.threshold, 3) for one in (swept[0], swept[-1])] == [1.282, -1.282]  # type: ignore[attr-defined]
    assert [member.config.damping for member in members(config, [0], "damping")] == [  # type: ignore[attr-defined]
        *(0, 1e-3, 1e-2, 0.1, 0.5, 1)
    ]


@pytest.mark.parametrize(("kind", "variant"), EVERY)
def test_a_config_is_the_same_after_json(kind: str, variant: str) -> None:
    config = make_config(kind, variant)
    assert config_from(kind, json.loads(json.dumps(asdict(config)))) == config


def test_a_learning_rate_rises_over_the_warmup_and_falls_to_zero_over_the_decay() -> None:
    config = make_config("nop", "paper", ["steps=100", "warmup=0.1", "decay=0.5"])
    rates = [config.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9:51] == [1.0] * 42
    assert rates[75] == pytest.approx(0.5) and rates[99] == pytest.approx(0.02)


def test_values_are_set_with_the_type_that_they_have() -> None:
    config = make_config("pathway", "laptop", ["steps=7", "lr=1e-4", "centred=true", "trained=global, attention"])
    assert isinstance(config, BroadcastConfig) and (config.steps, config.lr, config.centred) == (7, 1e-4, True)
    assert config.arms() == ("global", "attention")


@pytest.mark.parametrize(
    ("kind", "variant", "change", "words"),
    [
        ("sorting", "paper", "steps=1", "There is no controlled task 'sorting'; there are nop, nop-branch"),
        ("nop", "e1", "steps=1", "nop has no variant 'e1'; it has paper, laptop"),
        ("nop", "paper", "penalty=1", "nothing called 'penalty' to set; it has tokens, dim"),
        ("nop", "paper", "steps", "--set is like steps=500, not 'steps'"),
        ("nop", "paper", "steps=many", "steps is of type int, which 'many' is not"),
        ("nop", "paper", "centred=perhaps", "centred is of type bool, which 'perhaps' is not"),
        ("nop", "paper", "steps=0", "steps is a number from 1 on; 0 was given"),
        ("nop", "paper", "lr=0", "lr is positive"),
        ("nop", "paper", "lr=nan", "lr is a finite number"),
        ("nop", "paper", "decay=2", "decay is a share of the steps"),
        ("nop", "paper", "tokens=2", "three tokens at least"),
        ("nop-branch", "paper", "loss=mlp", "loss is branch or block"),
        ("nop-branch", "paper", "damping=2", r"The damping lies in \[0, 1\]"),
        ("nop-branch", "paper", "frequencies=0.5,1", "strictly between 0 and 1"),
        ("nop-branch", "paper", "frequencies=0.5,1e-17", "strictly between 0 and 1"),
        ("pathway", "paper", "trained=global,local", "trained names different arms"),
        ("pathway", "paper", "penalty_layers=max", "penalty_layers is sum or mean"),
        ("pathway", "paper", "penalty=-1", "weight is not negative"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(kind: str, variant: str, change: str, words: str) -> None:
    with pytest.raises((InputError, NotFoundError), match=words):
        make_config(kind, variant, [change])


@pytest.mark.parametrize("seeds", [[], [-1], [1, 1]])
def test_seeds_are_different_numbers(seeds: list[int]) -> None:
    with pytest.raises(InputError, match="different numbers from 0 on"):
        members(make_config("nop"), seeds)


def test_only_the_branch_supervised_form_is_swept() -> None:
    with pytest.raises(InputError, match="of nop-branch; 'damping' of nop"):
        members(make_config("nop"), [0], "damping")


def test_a_saved_config_with_other_fields_is_refused() -> None:
    saved = asdict(make_config("nop"))
    with pytest.raises(InputError, match="differs from this version's in heads"):
        config_from("nop", saved | {"heads": 2})
    assert set(KINDS) == set(VARIANTS)


@pytest.mark.parametrize(
    ("sweep", "change", "names"),
    [
        ("frequency", "frequencies=0.1,0.1001", ["p=0.1000", "p=0.1001"]),
        ("frequency", "frequencies=0.1,0.5", ["p=0.100", "p=0.500"]),
        ("damping", "dampings=0.1,0.10000001", ["gamma=0.1", "gamma=0.10000001"]),
        ("frequency", "frequencies=0.3,0.30000000000000004", ["p=0.29999999999999999", "p=0.30000000000000004"]),
    ],
)
def test_points_of_a_sweep_that_differ_have_names_that_differ(sweep: str, change: str, names: list[str]) -> None:
    planned = members(make_config("nop-branch", "laptop", [change]), [0], sweep)
    assert [member.arm for member in planned] == names
