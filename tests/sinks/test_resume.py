"""A resumed run is that of the images as they are: changed ones are noticed, skipped ones tried again."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import timm
from command_line import PICTURE, TINY, in_process, tiny_state, write_pictures
from PIL import Image

import sinklab
from sinklab.diagnosis import Diagnosis
from sinklab.errors import InputError

IMAGES = 7


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def model() -> sinklab.Model:
    module = timm.create_model("vit_tiny_patch16_224", **TINY).eval()
    module.load_state_dict(tiny_state())
    return sinklab.attach(module)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Bitmaps: any two of one shape have one size."""
    for path in write_pictures(tmp_path / "pictures", IMAGES).iterdir():
        Image.open(path).resize((40, 40)).save(path.with_suffix(".bmp"))
        path.unlink()
    return tmp_path / "pictures"


Go = Callable[..., Diagnosis]


@pytest.fixture
def go(model: sinklab.Model, pictures: Path, tmp_path: Path) -> Go:
    def call(run: str = "run", images: Path = pictures, **options: object) -> Diagnosis:
        options = {"size": PICTURE, "batch_size": 2, "report": False, **options}
        return sinklab.diagnose(model, images, output=tmp_path / run, **options)  # type: ignore[arg-type]

    return call


def stop_after(images: int) -> Callable[[int, int], None]:
    def stop(done: int, total: int) -> None:
        if done >= images:
            raise Stop

    return stop


def changed_in_place(path: Path) -> None:
    """The same file, size and times, and one bit of one pixel in its middle."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def assert_same(run: Diagnosis, other: Diagnosis) -> None:
    pd.testing.assert_frame_equal(run.heads, other.heads, check_exact=True)
    assert run.summary == other.summary
    assert run.config["images"]["skipped"] == other.config["images"]["skipped"]


def test_an_image_changed_after_it_was_measured_is_named(go: Go, pictures: Path) -> None:
    with pytest.raises(Stop):
        go(progress=stop_after(2))
    changed_in_place(pictures / "001.bmp")
    with pytest.raises(InputError, match=r"1 of the images .* hold other bytes now: 001\.bmp\. .*--overwrite"):
        go(resume=True)
    changed_in_place(pictures / "001.bmp")  # back again
    assert_same(go(resume=True), go("whole"))


def test_an_image_changed_before_it_was_measured_counts_as_it_is(go: Go, pictures: Path) -> None:
    with pytest.raises(Stop):
        go(progress=stop_after(2))
    changed_in_place(pictures / "005.bmp")
    assert_same(go(resume=True), go("whole"))


def test_a_member_of_a_shard_changed_in_place_is_named_and_a_moved_one_is_not(
    go: Go, pictures: Path, tmp_path: Path
) -> None:
    def packed(*first: str) -> Path:
        with tarfile.open(tmp_path / "s.tar", "w") as archive:
            for name in (*first, *sorted(path.name for path in pictures.iterdir())):
                archive.add(pictures / name if name != "note.txt" else tmp_path / name, name)
        return tmp_path / "s.tar"

    (tmp_path / "note.txt").write_text("x" * 700)
    with pytest.raises(Stop):
        go(images=packed(), progress=stop_after(2))
    changed_in_place(pictures / "000.bmp")
    with pytest.raises(InputError, match=r"hold other bytes now: s\.tar/000\.bmp\."):
        go(images=packed(), resume=True)
    changed_in_place(pictures / "000.bmp")
    assert_same(go(images=packed("note.txt"), resume=True), go("whole", packed()))


def test_a_run_copied_with_its_images_goes_on_elsewhere(go: Go, pictures: Path, tmp_path: Path) -> None:
    whole = go("whole")
    with pytest.raises(Stop):
        go(progress=stop_after(4))
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere" / "run")
    shutil.copytree(pictures, tmp_path / "elsewhere" / "photos", copy_function=shutil.copyfile)  # new times
    shutil.rmtree(pictures)
    assert_same(go("elsewhere/run", tmp_path / "elsewhere" / "photos", resume=True), whole)


def test_an_image_that_can_be_read_again_is_measured_and_the_run_is_as_if_it_always_could(
    go: Go, pictures: Path, tmp_path: Path
) -> None:
    whole = go("whole")
    kept = {name: (pictures / name).read_bytes() for name in ("002.bmp", "005.bmp")}
    for name, content in kept.items():
        (pictures / name).write_bytes(bytes(len(content)))
    with pytest.raises(Stop):
        go(progress=stop_after(6))
    assert [image for image, _ in Diagnosis.open(tmp_path / "run").skipped()] == ["002.bmp", "005.bmp"]
    (pictures / "002.bmp").write_bytes(kept["002.bmp"])
    run = go(resume=True)
    assert [entry["image"] for entry in run.config["images"]["skipped"]] == ["005.bmp"]
    assert_same(run, go("one damaged"))
    (pictures / "005.bmp").write_bytes(kept["005.bmp"])
    assert_same(go(resume=True), whole)  # a complete run too


def test_another_reason_for_skipping_is_recorded(go: Go, pictures: Path) -> None:
    whole = (pictures / "002.bmp").read_bytes()
    (pictures / "002.bmp").write_bytes(bytes(len(whole)))
    go()
    (pictures / "002.bmp").write_bytes(whole[:100] + b"\x80" * (len(whole) - 100))
    (pictures / "002.bmp").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(len(whole) - 8))
    assert_same(go(resume=True), go("whole"))


def test_what_is_still_damaged_is_not_computed_again_and_strict_images_refuses_it(go: Go, pictures: Path) -> None:
    (pictures / "003.bmp").write_bytes(b"no")
    run = go()
    parts = {path.name: path.stat().st_mtime_ns for path in (run.path / "heads").iterdir()}
    go(resume=True)
    assert {path.name: path.stat().st_mtime_ns for path in (run.path / "heads").iterdir()} == parts
    with pytest.raises(InputError, match=r"003\.bmp cannot be used"):
        go(resume=True, strict_images=True)


def test_a_complete_run_that_lost_a_part_is_not_read_and_goes_on_to_the_same_end(go: Go, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        go(progress=stop_after(4))
    run = go(resume=True)
    whole = go("whole")
    assert len(list((run.path / "heads").iterdir())) == 2
    sorted((run.path / "heads").iterdir())[0].unlink()
    with pytest.raises(InputError, match=r"lack 4 of 7 images \(the first is number 0 of the list\): .*--resume"):
        sinklab.open_run(run.path)
    told = in_process("report", run.path)
    assert told.returncode == 2 and "--resume" in told.stderr
    assert_same(go(resume=True), whole)
    assert_same(sinklab.open_run(run.path), whole)


def test_a_run_inside_the_image_folder_measures_the_same_images_every_time(
    go: Go, pictures: Path, tmp_path: Path
) -> None:
    whole = go("whole")
    with pytest.raises(Stop):
        go("pictures/runs/a", progress=stop_after(2))
    rule = sinklab.SinkRule.mass(0.01)  # so that there are crops of images to be left out
    assert_same(go("pictures/runs/a", resume=True), whole)
    again = go("pictures/runs/a", overwrite=True, report=True, rule=rule)
    pd.testing.assert_frame_equal(again.heads, whole.heads, check_exact=True)
    assert list(again.path.glob("overlays/*.jpg")) and list(again.path.glob("figures/*.png"))
    go("pictures/runs/a", resume=True, rule=rule)
    beside = go("pictures/runs/b")
    pd.testing.assert_frame_equal(beside.heads, whole.heads, check_exact=True)
    assert any("sinklab's own runs: runs/a" in note for note in beside.config["images"]["notes"])
    crop = next(again.path.glob("overlays/*.jpg"))
    with pytest.raises(InputError, match="is a result of the run .*, which --overwrite removes"):
        go("pictures/runs/a", crop, overwrite=True)
    assert crop.exists()


def test_images_that_vanish_after_the_scan_are_missing_from_the_photographs_only(
    go: Go, pictures: Path, tmp_path: Path
) -> None:
    rule = sinklab.SinkRule.mass(0.01)
    whole = go("whole", rule=rule)
    shown = {path.name for path in whole.path.glob("overlays/*.jpg")}
    lost = int(sorted(shown)[0].removeprefix("picture-").removesuffix(".jpg"))

    def vanish(done: int, total: int) -> None:
        if done == total:
            (pictures / f"00{lost}.bmp").unlink(missing_ok=True)

    with pytest.warns(UserWarning, match=f"The image 00{lost}.bmp cannot be used: No such file"):
        run = go(rule=rule, report=True, progress=vanish)
    assert run.config["status"] == "complete"
    assert [note for note in run.config["notes"] if f"00{lost}.bmp" in note and "was measured" in note]
    assert {path.name for path in run.path.glob("overlays/*.jpg")} == shown - {f"picture-{lost}.jpg"}
    assert_same(run, whole)

    images = sinklab.find_images(tmp_path / "pictures")

    def all_vanish(done: int, total: int) -> None:
        if done == total:
            shutil.rmtree(pictures, ignore_errors=True)

    with pytest.warns(UserWarning, match="was measured"):
        assert go("none", images, rule=rule, progress=all_vanish).config["status"] == "complete"
