from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sinklab.data.images import (
    Batch,
    ImageList,
    ImageTransform,
    UnreadableImage,
    batch_numbers,
    batches,
    find_images,
    open_image,
)
from sinklab.errors import InputError

Paint = Callable[..., Path]

TRANSFORM = ImageTransform.paper(
    16, interpolation="bilinear", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), patch_size=(8, 8)
)


@pytest.fixture
def photos(tmp_path: Path, paint: Paint) -> ImageList:
    """Eleven pictures, of which 03 is words, 04 is empty and 08 is smaller than a patch."""
    for i in range(11):
        paint(tmp_path / "photos" / f"{i:02d}.png", shade=20 * i)
    (tmp_path / "photos" / "03.png").write_text("words")
    (tmp_path / "photos" / "04.png").write_bytes(b"")
    paint(tmp_path / "photos" / "08.png", size=(40, 7))
    return find_images(tmp_path / "photos")


def rows(found: list[Batch]) -> list[tuple[int, str, float]]:
    return [
        (index, name, float(pixels.double().sum()))
        for batch in found
        for index, name, pixels in zip(batch.indices, batch.ids, batch.pixels, strict=True)
    ]


def test_a_batch_holds_its_own_stretch_of_the_list(photos: ImageList) -> None:
    found = list(batches(photos, TRANSFORM, batch_size=3))
    assert [batch.number for batch in found] == [0, 1, 2, 3]
    assert [batch.indices for batch in found] == [[0, 1, 2], [5], [6, 7], [9, 10]]
    assert [batch.ids for batch in found][1] == ["05.png"]
    assert [tuple(batch.pixels.shape) for batch in found] == [
        (3, 3, 16, 16),
        (1, 3, 16, 16),
        (2, 3, 16, 16),
        (2, 3, 16, 16),
    ]
    assert all(batch.pixels.dtype == torch.float32 for batch in found)


def test_pixels_are_the_transforms(photos: ImageList) -> None:
    for batch in batches(photos, TRANSFORM, batch_size=4):
        for index, pixels in zip(batch.indices, batch.pixels, strict=True):
            assert torch.equal(pixels, TRANSFORM(open_image(photos[index])))


def test_what_cannot_be_used_is_named_with_its_reason(photos: ImageList) -> None:
    skipped = [pair for batch in batches(photos, TRANSFORM, batch_size=3) for pair in batch.skipped]
    assert [name for name, _ in skipped] == ["03.png", "04.png", "08.png"]
    assert skipped[1][1] == "the file is empty"
    assert skipped[2][1] == "its 7x40 pixels are smaller than one patch of 8x8"


def test_a_batch_of_unreadable_pictures_is_empty_and_still_there(photos: ImageList) -> None:
    found = list(batches(photos, TRANSFORM, batch_size=1))
    assert len(found) == 11
    assert found[3].pixels.shape == (0, 3, 16, 16)
    assert (found[3].indices, found[3].ids) == ([], [])


@pytest.mark.parametrize("workers", [0, 2])
def test_strict_stops_at_the_first_unreadable_picture(photos: ImageList, workers: int) -> None:
    found = batches(photos, TRANSFORM, batch_size=2, strict=True, workers=workers)
    assert next(found).number == 0
    with pytest.raises(UnreadableImage, match=r"^The image 03\.png cannot be used: it is not a JPEG.*picture\.$"):
        list(found)


def test_workers_change_nothing(photos: ImageList) -> None:
    alone, two = (list(batches(photos, TRANSFORM, batch_size=2, workers=workers)) for workers in (0, 2))
    assert rows(alone) == rows(two)
    assert [batch.number for batch in alone] == [batch.number for batch in two]
    assert [batch.skipped for batch in alone] == [batch.skipped for batch in two]
    assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(alone, two, strict=True))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_share_out_whole_batches(photos: ImageList, world: int) -> None:
    alone = list(batches(photos, TRANSFORM, batch_size=2))
    shared = [
        batch for rank in range(world) for batch in batches(photos, TRANSFORM, batch_size=2, rank=rank, world=world)
    ]
    assert sorted(batch.number for batch in shared) == [0, 1, 2, 3, 4, 5]
    assert sorted(rows(shared)) == rows(alone)


def test_the_size_of_a_batch_changes_no_picture(photos: ImageList) -> None:
    seen = [rows(list(batches(photos, TRANSFORM, batch_size=size))) for size in (1, 2, 5, 100)]
    assert seen[0] == seen[1] == seen[2] == seen[3]


def test_batches_that_are_done_are_not_read_again(photos: ImageList) -> None:
    found = batches(photos, TRANSFORM, batch_size=2, skip_batches={0, 3, 5, 99})
    assert [batch.number for batch in found] == [1, 2, 4]
    assert list(batches(photos, TRANSFORM, batch_size=2, workers=2, skip_batches=set(range(6)))) == []


def test_batch_numbers_cover_the_list_once() -> None:
    assert batch_numbers(10, batch_size=4) == [0, 1, 2]
    assert batch_numbers(0, batch_size=4) == []
    assert batch_numbers(8, batch_size=4, rank=1, world=2) == [1]


def test_settings_that_cannot_be_met_are_refused_before_anything_is_read(photos: ImageList) -> None:
    with pytest.raises(InputError, match="at least one input"):
        batches(photos, TRANSFORM, batch_size=0)
    with pytest.raises(InputError, match="0 or more"):
        batches(photos, TRANSFORM, batch_size=1, workers=-1)
    with pytest.raises(InputError, match="Rank 2 does not exist"):
        batches(photos, TRANSFORM, batch_size=1, rank=2, world=2)


def test_pinning_is_left_out_where_there_is_no_gpu(photos: ImageList) -> None:
    found = list(batches(photos, TRANSFORM, batch_size=4, pin_memory=True))
    assert [batch.pixels.is_pinned() for batch in found] == [torch.cuda.is_available()] * 3


def test_leaving_the_loop_early_ends_the_reading_thread(photos: ImageList) -> None:
    def readers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("sinklab-images")]

    for batch in (found := batches(photos, TRANSFORM, batch_size=1)):
        assert readers()
        if batch.number == 2:
            break
    found.close()  # type: ignore[attr-defined]
    assert not readers()


SCRIPT = """
import sys, time
from sinklab.data.images import *
if __name__ == "__main__":
    images = find_images(sys.argv[1])
    transform = ImageTransform.paper(16, interpolation="bilinear", mean=(.5, .5, .5), std=(.5, .5, .5))
    for batch in batches(images, transform, batch_size=1, workers=int(sys.argv[2])):
        print(batch.number, flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupt_ends_everything_without_a_workers_traceback(photos: ImageList, workers: int) -> None:
    folder = str(Path(photos[0].path).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, folder, str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n"
    os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does: every process of the group gets it
    stderr = process.communicate(timeout=30)[1]
    assert stderr.count("Traceback") == 1
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _alive(process.pid):
        time.sleep(0.05)
    assert not _alive(process.pid)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_that_dies_is_a_sentence(photos: ImageList) -> None:
    with pytest.raises(InputError, match="A process that reads images died"):
        list(batches(photos, _Deadly(**vars(TRANSFORM)), batch_size=1, workers=1))


class _Deadly(ImageTransform):
    """Stands for the kernel's out-of-memory killer."""

    def __call__(self, image: object, name: str = "") -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError
