from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import FrozenInstanceError

import pytest

from sinklab.data.image_list import ImageList, ImageRef, as_text
from sinklab.errors import InputError


def listed(count: int) -> ImageList:
    return ImageList(refs=tuple(ImageRef(f"{i:04d}.png", f"/x/{i:04d}.png", i) for i in range(count)), sources=("/x",))


def test_a_sample_keeps_list_order_and_its_size() -> None:
    ids = [ref.id for ref in listed(200).sample(30, seed=3)]
    assert len(ids) == 30
    assert ids == sorted(ids)


def test_a_sample_is_the_same_every_time_and_differs_between_seeds() -> None:
    first, again, other = (listed(200).sample(30, seed=seed).refs for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_larger_limit_keeps_the_picks_of_a_smaller_one() -> None:
    small, large = (set(listed(200).sample(limit).refs) for limit in (10, 50))
    assert small < large


def test_a_sample_does_not_depend_on_the_order_of_the_list() -> None:
    forward = listed(200)
    backward = ImageList(refs=forward.refs[::-1], sources=("/x",))
    assert set(forward.sample(20).refs) == set(backward.sample(20).refs)


def test_every_picture_is_drawn_about_equally_often() -> None:
    drawn = Counter(ref.id for seed in range(2000) for ref in listed(20).sample(5, seed=seed))
    # binomial(2000, 1/4): mean 500, standard deviation 19.4; five of them either side
    assert len(drawn) == 20
    assert all(abs(times - 500) < 97 for times in drawn.values())


def test_a_limit_beyond_the_list_keeps_all_of_it() -> None:
    assert listed(7).sample(8).refs == listed(7).refs == listed(7).sample(None).refs


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(InputError, match="from 1 on"):
        listed(7).sample(limit)


def test_the_hash_changes_with_an_id_a_size_and_the_order() -> None:
    one, two = ImageRef("a.png", "/x/a.png", 1), ImageRef("b.png", "/x/b.png", 2)
    lists = [(one, two), (two, one), (one,), (one, ImageRef("b.png", "/x/b.png", 3)), (one, ImageRef("c.png", "", 2))]
    assert len({ImageList(refs=refs, sources=()).sha256 for refs in lists}) == len(lists)


def test_the_hash_does_not_depend_on_where_the_folder_lies() -> None:
    here, there = (ImageList(refs=(ImageRef("a.png", f"{at}/a.png", 1),), sources=(at,)) for at in ("/x", "/y"))
    assert here.sha256 == there.sha256


def test_a_list_cannot_be_changed_and_travels_to_other_processes() -> None:
    images = listed(3)
    with pytest.raises(FrozenInstanceError):
        images.refs = ()  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        images[0].id = "other"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(images)) == images


def test_a_name_that_is_not_utf8_becomes_text_that_is() -> None:
    name = as_text(b"caf\xe9.png".decode("utf-8", "surrogateescape"))
    assert name == r"caf\xe9.png"
    assert as_text("café ☕.png") == "café ☕.png"
