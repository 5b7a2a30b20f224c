"""What a training is shown: the same pictures and views whoever asks for them, and unreadable ones stood in for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sinklab.data.labelled import Photographs, photographs
from sinklab.data.procedural import ProceduralImages
from sinklab.errors import InputError
from sinklab.training.distributed import Ranks
from sinklab.training.views import Views, ViewShape
from sinklab.training.vit_config import ViTConfig, make_config
from sinklab.training.vit_feed import Feed, Order, measured


def config(**changes: Any) -> ViTConfig:
    return replace(make_config("baseline-tiny"), **{"image": 16, "batch": 4, "views": 2, **changes})


def feed(images: Any = None, **options: Any) -> Feed:
    chosen = options.pop("config", config())
    return Feed(images or ProceduralImages(count=10, size=16), chosen, 0, batches=20, **options)


def test_an_epoch_shows_every_picture_at_most_once_and_the_next_in_another_order() -> None:
    order = Order(images=10, step=4, seed=0)
    epochs = [[order.positions(number) for number in (2 * e, 2 * e + 1)] for e in range(2)]
    assert order.per_epoch == 2 and [epoch for batches in epochs for epoch, _ in batches] == [0, 0, 1, 1]
    shown = [[p for _, positions in batches for p in positions] for batches in epochs]
    assert all(len(set(positions)) == 8 for positions in shown) and shown[0] != shown[1]


@pytest.mark.parametrize(("parts", "world"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_ranks_and_accumulated_parts_share_one_batch_out(parts: int, world: int) -> None:
    whole = Order(images=19, step=8, seed=3)
    for step in range(6):
        together = [
            position
            for part in range(parts)
            for rank in range(world)
            for position in Order(images=19, step=8, seed=3, parts=parts, rank=rank, world=world).positions(
                step * parts + part
            )[1]
        ]
        assert together == whole.positions(step)[1]


def test_a_batch_is_the_same_whenever_it_is_asked_for() -> None:
    first, second = feed(), feed()
    for number in range(3):
        first(number)
    torch.rand(5)  # what else is drawn does not matter
    assert torch.equal(first(7).pictures, second(7).pictures)
    assert not torch.equal(first(7).pictures, second(9).pictures)


def test_ranks_see_the_halves_of_what_one_process_sees() -> None:
    whole = feed()(1)
    halves = [feed(ranks=Ranks(rank=rank, world=2))(1) for rank in range(2)]
    assert torch.equal(torch.cat([half.pictures for half in halves]), whole.pictures)
    assert torch.equal(torch.cat([half.labels for half in halves]), whole.labels)


def test_a_worker_makes_the_views_that_the_process_itself_makes() -> None:
    own, theirs = feed(), feed(workers=1)
    for number in (0, 1):
        assert torch.equal(own(number).pictures, theirs(number).pictures)


def test_views_of_one_picture_differ_and_are_normalised() -> None:
    picture = ProceduralImages(count=1).picture(0)
    state = torch.get_rng_state()
    views = Views(ViewShape(size=32))(picture, 5)
    assert views.shape == (4, 3, 32, 32) and views.dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(views[0], views[1]) and -2.2 < float(views.min()) < float(views.max()) < 2.7
    assert torch.equal(views, Views(ViewShape(size=32))(picture, 5))


def test_views_without_any_change_but_the_crop_are_the_picture() -> None:
    picture = ProceduralImages(count=1, size=32).picture(0)
    shape = ViewShape(count=40, size=32, crop=1.0, jitter=0, solarize=0, blur_sigma=0.1)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (picture / 255 - mean[:, None, None]) / std[:, None, None]
    gaps = (Views(shape)(picture, 0) - expected).flatten(1).abs().amax(1)
    assert float(gaps.min()) < 0.03  # neither flipped nor gray, and cropped to all of it


@pytest.mark.parametrize("changes", [{"count": 0}, {"crop": 0.0}, {"blur_kernel": 4}, {"jitter": 2.0}])
def test_views_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        ViewShape(**changes)


def pictures(root: Path, damaged: tuple[int, ...] = (2, 3)) -> Photographs:
    for number in range(8):
        folder = root / f"class{number % 2}"
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (20, 20), (30 * number, 0, 0)).save(folder / f"{number}.png")
        if number in damaged:
            (folder / f"{number}.png").write_bytes(b"damaged")
    return photographs(root)


def test_unreadable_pictures_are_stood_in_for_by_the_next_and_counted(tmp_path: Path) -> None:
    found = feed(pictures(tmp_path))
    for number in range(4):
        shown = found(number)
        assert shown.pictures.shape == (4, 2, 3, 16, 16) and int(shown.labels.min()) >= 0
    assert found.skipped == {"class0/2.png", "class1/3.png"}


def test_a_folder_of_nothing_but_unreadable_pictures_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="8 images in a row cannot be read"):
        feed(pictures(tmp_path, tuple(range(8))))(0)


def test_fewer_images_than_a_batch_is_a_sentence() -> None:
    with pytest.raises(InputError, match="3 training images, fewer than one batch of 4"):
        feed(ProceduralImages(count=3, size=16))


def test_a_batch_that_cannot_be_shared_out_names_one_that_can() -> None:
    with pytest.raises(InputError, match="4 images does not divide evenly among 3 ranks: .* a multiple of 3"):
        feed(ranks=Ranks(world=3))
    with pytest.raises(InputError, match="among 2 ranks × 2 accumulated: .* a multiple of 4"):
        feed(config=config(batch=6, accumulate=2), ranks=Ranks(world=2))


def test_pictures_are_measured_in_the_middle(tmp_path: Path) -> None:
    pixels, labels, missed = measured(pictures(tmp_path, ()), [0, 5], 16)
    assert missed == []
    assert pixels.shape == (2, 3, 16, 16) and labels.tolist() == [0, 1]
    assert float(pixels[0].std(dim=(1, 2)).max()) < 1e-6  # one colour stays one colour
