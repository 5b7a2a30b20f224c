from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sinklab.data.decode import open_image
from sinklab.data.sources import DEMO_PHOTOGRAPHS, demo_photographs, find_images
from sinklab.errors import InputError, NotFoundError

Paint = Callable[..., Path]


def test_sources_keep_their_order(tmp_path: Path, paint: Paint) -> None:
    paint(tmp_path / "z" / "1.png"), paint(tmp_path / "a" / "2.png")
    images = find_images([tmp_path / "z", tmp_path / "a"])
    assert [ref.id for ref in images] == ["1.png", "2.png"]
    assert images.sources == (str(tmp_path / "z"), str(tmp_path / "a"))
    assert images.notes == ()


def test_one_path_alone_is_one_source(tmp_path: Path, paint: Paint) -> None:
    path = paint(tmp_path / "1.png")
    assert find_images(str(path)).refs == find_images(path).refs == find_images([path]).refs


def test_ids_do_not_depend_on_where_the_command_runs(
    tmp_path: Path, paint: Paint, monkeypatch: pytest.MonkeyPatch
) -> None:
    paint(tmp_path / "photos" / "a" / "1.png")
    absolute = find_images(tmp_path / "photos")
    monkeypatch.chdir(tmp_path / "photos")
    assert find_images(".").refs == find_images("../photos/").refs == absolute.refs


def test_a_picture_given_twice_is_counted_once_under_its_first_id(tmp_path: Path, paint: Paint) -> None:
    path = paint(tmp_path / "a" / "1.png")
    images = find_images([path, tmp_path, path, tmp_path / "a"])
    assert [ref.id for ref in images] == ["1.png"]
    assert images.notes == ("3 images were given more than once and are counted once.",)


def test_pictures_of_one_name_get_their_folders_name(tmp_path: Path, paint: Paint) -> None:
    for name in ("train/cat/1.png", "val/cat/1.png", "val/dog/2.png", "rest/3.png"):
        paint(tmp_path / name)
    images = find_images([tmp_path / "train", tmp_path / "val", tmp_path / "rest"])
    assert [ref.id for ref in images] == ["train/cat/1.png", "val/cat/1.png", "val/dog/2.png", "3.png"]


def test_folders_of_one_name_get_as_many_names_as_tell_them_apart(tmp_path: Path, paint: Paint) -> None:
    for name in ("x/train/images/1.png", "x/val/images/1.png"):
        paint(tmp_path / name)
    images = find_images([tmp_path / "x" / "train" / "images", tmp_path / "x" / "val" / "images"])
    assert [ref.id for ref in images] == ["train/images/1.png", "val/images/1.png"]


def test_single_files_of_one_name_are_told_apart_too(tmp_path: Path, paint: Paint) -> None:
    files = [paint(tmp_path / name / "1.png") for name in ("a", "b")]
    assert [ref.id for ref in find_images(files)] == ["a/1.png", "b/1.png"]


def test_an_imagefolder_sampled_by_a_limit_meets_many_classes(tmp_path: Path, paint: Paint) -> None:
    for i in range(10):
        for j in range(10):
            paint(tmp_path / f"class{i}" / f"{j}.png", size=(2, 2))
    images = find_images(tmp_path, limit=30, seed=1)
    assert len(images) == 30
    assert len({ref.id.split("/")[0] for ref in images}) >= 8
    assert images.sha256 != find_images(tmp_path, limit=30, seed=2).sha256


def test_a_list_names_pictures_relative_to_its_own_folder(tmp_path: Path, paint: Paint) -> None:
    for name in ("lists/b.png", "lists/a/c d.png", "lists/0.png"):
        paint(tmp_path / name)
    lines = "\ufeff# a comment\r\nb.png\r\n\r\n  a/c d.png  \r\n./b.png\r\n"
    (tmp_path / "lists" / "l.txt").write_text(lines, encoding="utf-8", newline="")
    images = find_images(f"@{tmp_path}/lists/l.txt")
    assert [ref.id for ref in images] == ["b.png", "a/c d.png"]
    assert images.notes == ("1 images were given more than once and are counted once.",)


def test_a_list_may_point_outside_its_folder(tmp_path: Path, paint: Paint) -> None:
    paint(tmp_path / "x" / "1.png"), paint(tmp_path / "y" / "1.png")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "l.txt").write_text(f"../x/1.png\n{tmp_path}/y/1.png\n")
    assert [ref.id for ref in find_images(f"@{tmp_path}/lists/l.txt")] == ["x/1.png", "y/1.png"]


def test_a_list_says_which_line_is_wrong(tmp_path: Path, paint: Paint) -> None:
    paint(tmp_path / "1.png")
    (tmp_path / "l.txt").write_text("1.png\n# no\nmissing.png\n")
    with pytest.raises(NotFoundError, match=r"l\.txt, line 3: There is no file or folder .*missing\.png"):
        find_images(f"@{tmp_path}/l.txt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "l.txt").write_text("folder\n")
    with pytest.raises(InputError, match="line 1: .*folder is not an image"):
        find_images(f"@{tmp_path}/l.txt")


def test_a_list_that_is_missing_or_empty_or_not_text_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="There is no list file"):
        find_images(f"@{tmp_path}/none.txt")
    (tmp_path / "l.txt").write_text("\n# nothing\n")
    with pytest.raises(NotFoundError, match="names no images"):
        find_images(f"@{tmp_path}/l.txt")
    (tmp_path / "l.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read as UTF-8"):
        find_images(f"@{tmp_path}/l.txt")


def test_a_pattern_may_name_pictures_and_folders(tmp_path: Path, paint: Paint) -> None:
    for name in ("a/2.png", "a/1.png", "b/3.png", "c/4.png"):
        paint(tmp_path / name)
    assert [ref.id for ref in find_images(f"{tmp_path}/a/*.png")] == ["1.png", "2.png"]
    assert [ref.id for ref in find_images(f"{tmp_path}/{{c,a}}")] == ["c/4.png", "a/1.png", "a/2.png"]
    assert len(find_images(f"{tmp_path}/**/*.png")) == 4


def test_a_path_that_exists_is_never_a_pattern(tmp_path: Path, paint: Paint) -> None:
    paint(tmp_path / "photos [1]" / "{a,b}.png")
    assert [ref.id for ref in find_images(tmp_path / "photos [1]")] == ["{a,b}.png"]
    assert [ref.id for ref in find_images(tmp_path / "photos [1]" / "{a,b}.png")] == ["{a,b}.png"]


def test_patterns_that_match_nothing_or_cannot_be_expanded_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="Nothing matches"):
        find_images(f"{tmp_path}/*.png")
    with pytest.raises(InputError, match="braces that do not match"):
        find_images(f"{tmp_path}/{{0..9.tar")
    with pytest.raises(InputError, match="more than 100000 paths"):
        find_images(f"{tmp_path}/{{0..999999999}}.tar")
    with pytest.raises(InputError, match="more than 100000 paths"):
        find_images(f"{tmp_path}/{{0..9999}}/{{0..9999}}.tar")


@pytest.mark.parametrize("url", ["https://example.org/a.jpg", "s3://bucket/{0..9}.tar", "pipe:cat a.tar"])
def test_what_is_not_on_this_machine_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="local files"):
        find_images(url)


def test_no_source_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="No images were named"):
        find_images([])


def test_the_demo_photographs_are_a_dozen_readable_pictures() -> None:
    images = demo_photographs()
    assert [ref.id for ref in images] == list(DEMO_PHOTOGRAPHS)
    assert len(images) == 12
    assert all(min(open_image(ref).size) >= 300 for ref in images)
    assert find_images("demo").sha256 == images.sha256


def test_a_folder_called_demo_is_named_by_its_path(
    tmp_path: Path, paint: Paint, monkeypatch: pytest.MonkeyPatch
) -> None:
    paint(tmp_path / "demo" / "1.png")
    monkeypatch.chdir(tmp_path)
    assert [ref.id for ref in find_images("./demo")] == ["1.png"]
    assert len(find_images("demo")) == 12
    assert any("the folder is ./demo" in note for note in find_images("demo").notes)


def test_a_missing_scikit_image_is_a_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinklab.data.sources.find_spec", lambda name: None)
    with pytest.raises(NotFoundError, match=r'pip install "sinklab\[demo\]"'):
        demo_photographs()


def test_importing_and_listing_loads_no_heavy_library() -> None:
    code = (
        "import sys, sinklab.data.images as i, sinklab.run; i.find_images('demo');"
        "heavy = ('torch', 'torchvision', 'numpy', 'pandas', 'pyarrow', 'PIL', 'skimage');"
        "print([name for name in heavy if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("between", ["\u2028", "\x0b", "\x0c", "\x85", "\x1c", "\u2029", "\r"])
def test_a_list_is_cut_at_line_ends_only(tmp_path: Path, paint: Paint, between: str) -> None:
    name = f"a{between}b.png"
    paint(tmp_path / "plain.png").rename(tmp_path / name)
    paint(tmp_path / "c.png")
    (tmp_path / "l.txt").write_bytes(f"{name}\r\n\r\n  \n # words\nc.png".encode())
    assert [ref.id for ref in find_images(f"@{tmp_path}/l.txt")] == [name, "c.png"]


def test_spaces_round_a_name_in_a_list_belong_to_it_where_a_file_is_so_named(tmp_path: Path, paint: Paint) -> None:
    paint(tmp_path / "a.png")
    (tmp_path / "l.txt").write_text(" a.png \n")
    assert [ref.id for ref in find_images(f"@{tmp_path}/l.txt")] == ["a.png"]
    paint(tmp_path / "plain.png").rename(tmp_path / " a.png ")
    assert [ref.id for ref in find_images(f"@{tmp_path}/l.txt")] == [" a.png "]


@pytest.mark.parametrize("given", ["", "  ", "@"])
def test_an_empty_source_is_not_the_present_folder(given: str) -> None:
    with pytest.raises(InputError, match="names no images .*unset variable"):
        find_images(given)
