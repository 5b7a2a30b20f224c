"""Which token is what, where a sequence has something before it and something after."""

from __future__ import annotations

import pytest

from sinklab.errors import InputError
from sinklab.models.tokens import TokenMap

MASKED = TokenMap.sequence(("special",), ordinary="text", suffix=("special",))


def test_the_last_token_of_a_window_is_told_apart() -> None:
    assert [MASKED.kind(index, 5) for index in range(5)] == ["special", "text", "text", "text", "special"]
    assert list(MASKED.ordinary_among(5)) == [1, 2, 3]
    assert MASKED.tokens(1, 3) == 5


def test_without_a_suffix_all_tokens_behind_the_prefix_are_ordinary() -> None:
    vision = TokenMap(prefix=("cls", "register"), patch_size=(16, 16))
    assert list(vision.ordinary_among(vision.tokens(32, 32))) == [2, 3, 4, 5]
    assert vision.kind(5, 6) == vision.kind(5) == "patch"


def test_a_map_of_another_length_is_refused_with_its_suffix() -> None:
    with pytest.raises(InputError, match=r"expects 5 \(1 prefix \+ 3 of the sequence \+ 1 suffix\)"):
        MASKED.check(4, 1, 3)


def test_a_suffix_is_no_ordinary_token() -> None:
    with pytest.raises(InputError, match="prefix or suffix"):
        TokenMap.sequence((), suffix=("text",))
