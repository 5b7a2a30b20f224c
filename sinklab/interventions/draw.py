"""Every random choice of an experiment: donors, ordinary patches, held-out images.

Each choice is a hash of the seed and of names (the image's id, the layer, the head), so it depends on nothing else:
not on the order of images, batches, workers, ranks or devices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from sinklab.errors import InputError


def number(seed: int, *names: str | int) -> int:
    """A number of 256 random bits that belongs to these names."""
    return int.from_bytes(hashlib.sha256(json.dumps([seed, *names]).encode()).digest(), "big")


def below(limit: int, seed: int, *names: str | int) -> int:
    """A uniform draw from 0 … limit − 1 (the bias of 256 bits is below 1e-60)."""
    assert limit > 0
    return number(seed, *names) % limit


def shuffled(ids: Sequence[str], seed: int, purpose: str) -> list[str]:
    """The ids in an order that depends on the seed and on the ids alone."""
    return sorted(ids, key=lambda image: (number(seed, purpose, image), image))


def donors(ids: Sequence[str], seed: int, noun: str = "image") -> dict[str, str]:
    """Image → its donor: a random cycle through all images, so none is its own donor and each donates once.

    Raises InputError for fewer than two images.
    """
    if len(ids) < 2:
        raise InputError(f"A donor is another {noun}, and there are {len(ids)} in all: give at least two.")
    cycle = shuffled(ids, seed, "donor")
    return dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))


def held_out(ids: Sequence[str], fraction: float, seed: int, noun: str = "image") -> list[str]:
    """A fraction of the images, at least one and not all, in their shuffled order. InputError for fewer than two."""
    if not 0 < fraction < 1:
        raise InputError(f"The held-out fraction lies between 0 and 1, not {fraction}.")
    if len(ids) < 2:
        folder = ", or a folder of held-out images" if noun == "image" else ""
        raise InputError(f"With one {noun} none can be held out: give more{folder}.")
    count = min(max(1, round(fraction * len(ids))), len(ids) - 1)
    return shuffled(ids, seed, "held out")[:count]


def other_token(tokens: Sequence[int], taken: int, seed: int, *names: str | int) -> int | None:
    """One of `tokens`, uniformly, but not `taken`; None if no other is there."""
    choices = [token for token in tokens if token != taken]
    return choices[below(len(choices), seed, *names)] if choices else None
