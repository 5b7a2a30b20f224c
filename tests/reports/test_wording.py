"""Numbers and lists as a reader sees them."""

from __future__ import annotations

import pytest

from sinklab.reports.wording import each_or_ends, layers_phrase, number, percent, plural, ranges, settled


@pytest.mark.parametrize(
    ("value", "digits", "written"),
    [
        (0.0123, 2, "0.012"),
        (1.0, 3, "1.00"),
        (123.4, 2, "123"),
        (22056576.0, 2, "22,056,576"),
        (0.000012, 2, "1.2e-05"),
        (0.0, 2, "0"),
        (float("nan"), 2, "–"),
        (float("inf"), 2, "–"),
    ],
)
def test_a_number_keeps_its_significant_digits(value: float, digits: int, written: str) -> None:
    assert number(value, digits) == written


def test_a_difference_within_rounding_is_nothing_and_a_larger_one_stays() -> None:
    assert number(settled(3e-8)) == "0" and number(settled(-6.1e-8)) == "0"
    assert settled(-2e-7) == -2e-7 and number(settled(float("nan"))) == "–"


def test_a_percentage_never_rounds_something_to_nothing_nor_nearly_all_to_all() -> None:
    assert percent(0.001).startswith("<1") and percent(0.999).startswith(">99")
    assert percent(0.0).startswith("0") and percent(1.0).startswith("100")


def test_a_percentage_does_not_break_across_lines() -> None:
    assert " " not in percent(0.42)


def test_three_neighbours_become_a_range_and_two_do_not() -> None:
    assert ranges([9, 3, 4, 5, 0]) == "0, 3–5 and 9"
    assert ranges([1, 2]) == "1 and 2"
    assert ranges([]) == ""


def test_one_layer_is_singular() -> None:
    assert layers_phrase([3, 3]) == "layer 3"
    assert layers_phrase([3, 4, 5]) == "layers 3–5"
    assert (plural(1, "head"), plural(0, "head"), plural(1200, "head")) == ("1 head", "0 heads", "1,200 heads")


def test_of_many_variants_a_sentence_tells_the_least_and_the_most() -> None:
    said = [f"{name} {value}" for name, value in zip("abcdef", (3, 1, 2, 9, 4, 5), strict=True)]
    assert each_or_ends(said[:5], [3, 1, 2, 9, 4]) == "a 3, b 1, c 2, d 9 and e 4"
    assert each_or_ends(said, [3, 1, 2, 9, 4, 5]) == "from b 1 to d 9 (6 variants)"
