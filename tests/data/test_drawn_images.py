"""Drawn pictures as a list: the very pixels of the set, told apart by name, from what a run saved of them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinklab.data.drawn_images import drawn_images
from sinklab.data.procedural import ProceduralImages
from sinklab.errors import InputError

SAVED: dict[str, Any] = {"kind": "procedural", "count": 5, "size": 18, "seed": 3, "split": "validation"}


def test_each_reference_holds_the_sets_own_pixels() -> None:
    found = drawn_images(SAVED)
    pictures = ProceduralImages(count=5, size=18, seed=3, split="validation")
    assert len(found) == 5
    for number, ref in enumerate(found):
        held = np.asarray(Image.open(io.BytesIO(ref.content())).convert("RGB")).transpose(2, 0, 1)
        assert np.array_equal(held, pictures.draw(number)) and len(ref.content()) == ref.size


def test_another_seed_split_or_size_is_another_list() -> None:
    changes: list[dict[str, Any]] = [{}, {"seed": 4}, {"split": "train"}, {"size": 20}]
    assert len({drawn_images(SAVED | change).sha256 for change in changes}) == 4


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="1 or more"):
        drawn_images(SAVED | {"count": 0})
