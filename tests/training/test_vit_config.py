"""The recipe's numbers: the paper's schedule, its variants by name, and what cannot be."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from sinklab.errors import InputError, NotFoundError
from sinklab.training.vit_config import SIZES, VARIANTS, ViTConfig, config_from, config_names, make_config


def test_the_rate_at_epoch_50_is_the_papers() -> None:
    config = make_config("baseline-L")
    assert config.lr * config.rate(50 * 5004, 5004) == pytest.approx(2.936e-4, rel=1e-3)


def test_the_rate_rises_linearly_peaks_after_ten_epochs_and_ends_at_a_thousandth() -> None:
    config, per_epoch = make_config("baseline-L"), 100
    assert config.rate(0, per_epoch) == pytest.approx(1 / 1000)  # never a step at a rate of 0
    assert config.rate(499, per_epoch) == pytest.approx(0.5)
    assert config.rate(1000, per_epoch) == 1.0
    assert config.rate(10_000, per_epoch) == pytest.approx(1e-3)
    rates = [config.rate(step, per_epoch) for step in range(1000, 10_000, 50)]
    assert rates == sorted(rates, reverse=True)


def test_every_variant_has_every_size() -> None:
    assert len(config_names()) == len(VARIANTS) * len(SIZES) == 10 * 5
    for name in config_names():
        assert make_config(name).name == name


def test_variants_are_what_their_names_say() -> None:
    registers = make_config("gated-headwise-registers-B")
    assert (registers.gate, registers.registers, registers.penalty, registers.dim) == ("headwise", 4, 0.0, 768)
    penalised = make_config("gated-global-penalty-L")
    assert (penalised.gate, penalised.pathway, penalised.penalty) == ("elementwise", "learned", 0.1)
    assert (penalised.layer_scale, penalised.penalty_first) == (1.0, 1)
    assert make_config("baseline-L").layer_scale == 1e-4


def test_tiny_variants_are_trained_alike() -> None:
    part_of_the_variant = {"variant", "registers", "gate", "pathway", "penalty"}
    told = [
        {k: v for k, v in asdict(make_config(f"{v}-tiny")).items() if k not in part_of_the_variant} for v in VARIANTS
    ]
    assert all(one == told[0] for one in told)


def test_a_config_is_what_it_was_after_being_saved() -> None:
    config = make_config("registers-S", ["epochs=20", "decay_all=false", "lr=1e-3"])
    assert (config.epochs, config.decay_all, config.lr) == (20, False, 1e-3)
    assert config_from(asdict(config)) == config
    with pytest.raises(InputError, match="differs from this version's in colour"):
        config_from(asdict(config) | {"colour": 1})


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("baseline-XL", "epochs=20", "There is no vision transformer 'baseline-XL': perhaps baseline-L"),
        ("gated-L", "epochs=20", "A name is VARIANT-SIZE"),
        ("baseline-L", "steps=1", "nothing called 'steps' to set; it has variant, size, image"),
        ("baseline-L", "variant=registers", "ask for registers-L instead"),
        ("baseline-L", "epochs=many", "epochs is of type int, which 'many' is not"),
        ("baseline-L", "epochs", "--set is like steps=500"),
        ("baseline-L", "epochs=10", "warm-up of 10 epochs leaves nothing of a training of 10 epochs.*--set warmup"),
        ("baseline-tiny", "epochs=1", "a training of 1 epoch: shorten it .--set warmup_epochs=0 leaves it out"),
        ("baseline-L", "batch=0", "batch is a number from 1 on"),
        ("baseline-L", "registers=-1", "registers is a number from 0 on"),
        ("baseline-L", "lr=nan", "lr is a finite number, not nan"),
        ("baseline-L", "accumulate=3", "256 images does not divide evenly into 3 accumulated parts"),
        ("baseline-L", "precision=fp8", "bf16 or fp32"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(name: str, change: str, words: str) -> None:
    with pytest.raises((InputError, NotFoundError), match=words):
        make_config(name, [change])


def test_the_defaults_are_the_papers_vit_l() -> None:
    assert asdict(ViTConfig()) == asdict(make_config("baseline-L"))


def test_one_epoch_is_trained_without_a_warm_up_as_the_refusal_says() -> None:
    config = make_config("baseline-tiny", ["epochs=1", "warmup_epochs=0"])
    assert config.rate(0, 4) == 1.0 and config.rate(3, 4) < 1.0
