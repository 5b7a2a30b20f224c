"""The built-in images: the same everywhere and always, labelled, and with the spectrum of photographs."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from sinklab.data import procedural
from sinklab.data.procedural import CLASSES, SHAPES, TEXTURES, ProceduralImages
from sinklab.errors import InputError


def test_a_picture_depends_on_seed_split_and_index_alone() -> None:
    one, again = ProceduralImages(count=50), ProceduralImages(count=9)
    for index in (8, 0, 3):  # in another order, from a smaller set
        assert torch.equal(one.picture(index), again.picture(index))
        assert one.label(index) == again.label(index)
    other = (ProceduralImages(count=9, seed=1), ProceduralImages(count=9, split="validation"))
    assert all(not torch.equal(one.picture(3), images.picture(3)) for images in other)


def test_pictures_are_uint8_of_the_size_asked_for_and_use_its_range() -> None:
    for size in (32, 64, 100):
        picture = ProceduralImages(count=1, size=size).picture(0)
        assert picture.dtype == torch.uint8 and picture.shape == (3, size, size)
        assert int(picture.max()) - int(picture.min()) > 100


def test_labels_are_all_about_equally_frequent() -> None:
    images = ProceduralImages(count=2400)
    counts = np.bincount([images.label(i) for i in range(2400)], minlength=len(CLASSES))
    assert len(CLASSES) == 12 == images.classes.index(f"{SHAPES[-1]}, {TEXTURES[-1]}") + 1
    assert counts.min() > 140 and counts.max() < 260  # 200 each, five standard deviations of 13.5


def test_dead_leaves_have_the_falling_power_spectrum_of_photographs() -> None:
    power = np.zeros((64, 64))
    for seed in range(150):
        gray = procedural._dead_leaves(np.random.default_rng(seed), 64).mean(0)
        power += np.abs(np.fft.fft2(gray - gray.mean())) ** 2
    frequency = np.hypot(np.fft.fftfreq(64)[:, None], np.fft.fftfreq(64)[None])
    used = (frequency > 0.03) & (frequency < 0.3)
    slope = np.polyfit(np.log(frequency[used]), np.log(power[used]), 1)[0]
    assert -3.0 < slope < -1.6  # photographs: about -2


def test_the_object_of_one_label_is_drawn_differently_in_every_picture() -> None:
    images = ProceduralImages(count=300)
    same = [i for i in range(300) if images.label(i) == 0][:5]
    pictures = [images.picture(i) for i in same]
    assert all(not torch.equal(a, b) for a in pictures for b in pictures if a is not b)


def test_a_worker_is_sent_the_numbers_and_not_the_pictures() -> None:
    images = ProceduralImages(count=20)
    for i in range(20):
        images.picture(i)
    sent = pickle.dumps(images)
    assert len(sent) < 500
    assert torch.equal(pickle.loads(sent).picture(7), images.picture(7))
    assert pickle.loads(sent).sha256 == images.sha256 != ProceduralImages(count=21).sha256


@pytest.mark.parametrize("changes", [{"count": 0}, {"size": 8}, {"seed": -1}, {"split": "test"}])
def test_sets_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match="Procedural images are 1 or more"):
        ProceduralImages(**{"count": 4, **changes})  # type: ignore[arg-type]


def test_a_picture_beyond_the_last_is_refused() -> None:
    with pytest.raises(InputError, match="no picture 4 among 4"):
        ProceduralImages(count=4).picture(4)
