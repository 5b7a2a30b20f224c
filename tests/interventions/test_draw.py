"""Draws belong to the seed and to names, and to nothing else."""

from __future__ import annotations

import random

import pytest

from sinklab.errors import InputError
from sinklab.interventions.draw import below, donors, held_out, other_token

IDS = [f"picture {number}.png" for number in range(40)]


def test_donors_are_a_derangement_in_which_everyone_donates_once() -> None:
    for seed in range(20):
        for count in (2, 3, 7, 40):
            drawn = donors(IDS[:count], seed)
            assert set(drawn) == set(drawn.values()) == set(IDS[:count])
            assert all(image != donor for image, donor in drawn.items())


def test_the_order_of_the_list_changes_no_draw() -> None:
    mixed = random.Random(1).sample(IDS, len(IDS))
    assert donors(IDS, 3) == donors(mixed, 3) != donors(IDS, 4)
    assert held_out(IDS, 0.25, 3) == held_out(mixed, 0.25, 3)


def test_a_share_is_held_out_but_never_all_and_never_none() -> None:
    assert len(held_out(IDS, 0.25, 0)) == 10 and len(held_out(IDS[:2], 0.9, 0)) == 1
    assert len(held_out(IDS[:3], 0.01, 0)) == 1
    for fraction in (0.0, 1.0, -1.0):
        with pytest.raises(InputError):
            held_out(IDS, fraction, 0)
    with pytest.raises(InputError, match="at least two"):
        donors(IDS[:1], 0)


def test_a_token_is_drawn_uniformly_and_is_never_the_one_taken() -> None:
    drawn = [other_token(range(1, 5), 3, 0, "picture", layer, head) for layer in range(60) for head in range(50)]
    counts = {token: drawn.count(token) for token in (1, 2, 4)}
    assert set(drawn) == {1, 2, 4} and all(abs(count - 1000) < 120 for count in counts.values())
    assert other_token([3], 3, 0) is None and other_token([3], 0, 0) == 3
    assert below(10, 0, "a", 1) == below(10, 0, "a", 1)
