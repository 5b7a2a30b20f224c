from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sinklab.data.sources import find_images
from sinklab.errors import InputError, NotFoundError

Paint = Callable[..., Path]


def ids(*sources: str | Path) -> list[str]:
    return [ref.id for ref in find_images(list(sources))]


def test_a_folder_gives_every_picture_at_any_depth_sorted_by_codepoint(tmp_path: Path, paint: Paint) -> None:
    for name in ("b/z.png", "b/A.jpg", "a-b/1.png", "a/1.JPEG", "Z.webp", "ä.bmp", "a.tiff", "a/deep/er/2.gif"):
        paint(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not a picture")
    expected = ["Z.webp", "a-b/1.png", "a.tiff", "a/1.JPEG", "a/deep/er/2.gif", "b/A.jpg", "b/z.png", "ä.bmp"]
    assert ids(tmp_path) == expected


def test_hidden_files_and_folders_are_left_out(tmp_path: Path, paint: Paint) -> None:
    for name in ("1.png", ".2.png", "._3.png", ".cache/4.png", "a/.b/5.png"):
        paint(tmp_path / name)
    assert ids(tmp_path) == ["1.png"]


def test_names_with_spaces_and_unicode_stay_as_they_are(tmp_path: Path, paint: Paint) -> None:
    paint(tmp_path / "été à la plage" / "naïve photo ☀.png")
    assert ids(tmp_path) == ["été à la plage/naïve photo ☀.png"]


def test_a_name_that_is_not_utf8_is_found_and_named(tmp_path: Path, paint: Paint) -> None:
    plain = paint(tmp_path / "plain.png")
    try:
        os.rename(os.fsencode(plain), os.fsencode(tmp_path) + b"/caf\xe9.png")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    assert ids(tmp_path) == [r"caf\xe9.png"]


def test_the_size_is_the_files_own(tmp_path: Path, paint: Paint) -> None:
    path = paint(tmp_path / "1.png")
    assert find_images(tmp_path)[0].size == path.stat().st_size


def test_a_loop_of_links_ends_and_counts_each_picture_once(tmp_path: Path, paint: Paint) -> None:
    paint(tmp_path / "photos" / "a" / "1.png")
    paint(tmp_path / "outside" / "2.png")
    (tmp_path / "photos" / "a" / "loop").symlink_to(tmp_path / "photos")
    (tmp_path / "photos" / "self").symlink_to("self")
    (tmp_path / "photos" / "up").symlink_to(tmp_path)
    assert ids(tmp_path / "photos") == ["a/1.png"]


def test_a_linked_folder_is_followed(tmp_path: Path, paint: Paint) -> None:
    paint(tmp_path / "elsewhere" / "2.png")
    paint(tmp_path / "photos" / "1.png")
    (tmp_path / "photos" / "link").symlink_to(tmp_path / "elsewhere")
    assert ids(tmp_path / "photos") == ["1.png", "link/2.png"]


def test_a_link_never_takes_a_pictures_own_id_away(tmp_path: Path, paint: Paint) -> None:
    paint(tmp_path / "z" / "1.png")
    (tmp_path / "a").symlink_to(tmp_path / "z")  # sorts before z, and leads to the same picture
    assert ids(tmp_path) == ["z/1.png"]


def test_a_linked_picture_is_counted_once_with_its_original(tmp_path: Path, paint: Paint) -> None:
    paint(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    images = find_images(tmp_path)
    assert [ref.id for ref in images] == ["a.png"]
    assert images.notes == ("1 images were given more than once and are counted once.",)


def test_a_link_into_nowhere_stays_in_the_list_so_that_it_is_reported(tmp_path: Path) -> None:
    (tmp_path / "gone.png").symlink_to(tmp_path / "missing.png")
    assert find_images(tmp_path)[0].size == -1


def test_a_pipe_named_like_a_picture_is_not_opened(tmp_path: Path, paint: Paint) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    paint(tmp_path / "1.png")
    assert ids(tmp_path) == ["1.png"]
    with pytest.raises(InputError, match="is not an image"):
        find_images(tmp_path / "pipe.png")


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=f"The folder {tmp_path} holds no images"):
        find_images(tmp_path)


def test_a_folder_of_shards_says_how_to_name_them(tmp_path: Path, shard: Callable[..., Path]) -> None:
    shard(tmp_path / "0.tar", {"1.png": 1})
    with pytest.raises(NotFoundError, match=r"It holds 1 \.tar shards: name them as '.*/\*\.tar'"):
        find_images(tmp_path)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="There is no file or folder .*nowhere"):
        find_images(tmp_path / "nowhere")


def test_a_folder_that_may_not_be_read_is_a_sentence() -> None:
    folder = Path(tempfile.mkdtemp())
    user = os.geteuid()
    try:
        folder.chmod(0o755)
        (folder / "locked").mkdir(mode=0o000)
        (folder / "locked").chmod(0o000)
        if user == 0:
            os.seteuid(65534)  # root may read everything
        with pytest.raises(InputError, match="locked cannot be read: Permission denied"):
            find_images(str(folder))
    finally:
        os.seteuid(user)
        (folder / "locked").chmod(0o700)
        shutil.rmtree(folder)


def test_a_file_named_outright_may_have_any_extension_if_it_is_a_picture(tmp_path: Path, paint: Paint) -> None:
    paint(tmp_path / "1.png").rename(tmp_path / "no-extension")
    assert ids(tmp_path / "no-extension") == ["no-extension"]
    (tmp_path / "notes.txt").write_text("words")
    with pytest.raises(InputError, match=r"notes\.txt is not an image: sinklab takes JPEG"):
        find_images(tmp_path / "notes.txt")


def run_folder(path: Path, paint: Paint) -> Path:
    paint(path / "figures" / "fig1.png")
    paint(path / "overlays" / "picture-0.jpg")
    (path / "run.json").write_text('{"schema_version": 1, "sinklab": "0.1.0", "status": "running"')  # cut short
    return path


def test_the_pictures_of_sinklabs_own_runs_are_no_images_and_a_note_says_so(tmp_path: Path, paint: Paint) -> None:
    paint(tmp_path / "photos" / "a" / "1.png")
    run_folder(tmp_path / "photos" / "runs" / "x", paint)
    run_folder(tmp_path / "elsewhere", paint)
    (tmp_path / "photos" / "link").symlink_to(tmp_path / "elsewhere")
    images = find_images(tmp_path / "photos")
    assert [ref.id for ref in images] == ["a/1.png"]
    assert images.notes == (f"Left out of {tmp_path}/photos, as sinklab's own runs: link, runs/x.",)


@pytest.mark.parametrize("pattern", ["**/*.png", "*", "*/*", "*/*/*.png"])
def test_a_pattern_does_not_reach_into_sinklabs_own_runs(tmp_path: Path, paint: Paint, pattern: str) -> None:
    for name in ("1.png", "a/2.png", "a/b/3.png"):
        paint(tmp_path / "photos" / name)
    run_folder(tmp_path / "photos" / "r", paint)
    run_folder(tmp_path / "photos" / "a" / "b" / "r", paint)
    images = find_images(f"{tmp_path}/photos/{pattern}")
    assert len(images) > 0
    assert not any("fig1" in ref.id or "picture" in ref.id for ref in images)
    assert any("sinklab's own runs" in note for note in images.notes)


def test_a_relative_pattern_leaves_runs_out_too(tmp_path: Path, paint: Paint, monkeypatch: pytest.MonkeyPatch) -> None:
    paint(tmp_path / "a" / "1.png")
    run_folder(tmp_path / "r", paint)
    monkeypatch.chdir(tmp_path)
    assert ids("*/*.png") == ids("**/*.png") == ["a/1.png"]


def test_a_folder_of_nothing_but_runs_says_so(tmp_path: Path, paint: Paint) -> None:
    run_folder(tmp_path / "r", paint)
    for folder, named in ((tmp_path, "r"), (tmp_path / "r", r"\.")):
        with pytest.raises(NotFoundError, match=rf"holds no images .* as sinklab's own runs: {named}\."):
            find_images(folder)


def test_a_run_file_of_another_program_hides_nothing(tmp_path: Path, paint: Paint) -> None:
    paint(tmp_path / "a" / "1.png")
    (tmp_path / "a" / "run.json").write_text('{"name": "another tool"}')
    assert ids(tmp_path) == ["a/1.png"]


def test_a_folder_inside_a_run_can_be_named_outright(tmp_path: Path, paint: Paint) -> None:
    run_folder(tmp_path / "r", paint)
    assert ids(tmp_path / "r" / "overlays") == ["picture-0.jpg"]
