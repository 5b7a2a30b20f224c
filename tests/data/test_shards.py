from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sinklab.data.decode import UnreadableImage, open_image
from sinklab.data.sources import find_images
from sinklab.errors import InputError, NotFoundError

Shard = Callable[..., Path]


def test_members_are_read_at_their_offset_in_the_archives_order(tmp_path: Path, shard: Shard) -> None:
    path = shard(tmp_path / "s.tar", {"b.png": 200, "b.json": b"{}", "a/c d.png": 90, "./e.png": 30, ".f.png": 1})
    images = find_images(path)
    assert [ref.id for ref in images] == ["s.tar/b.png", "s.tar/a/c d.png", "s.tar/e.png"]
    assert [open_image(ref).getpixel((0, 0)) for ref in images] == [(200, 0, 0), (90, 0, 0), (30, 0, 0)]


def test_a_brace_pattern_names_shards_in_its_own_order(tmp_path: Path, shard: Shard) -> None:
    for i in range(11):
        shard(tmp_path / f"part-{i:03d}.tar", {"x.png": i})
    images = find_images(f"{tmp_path}/part-{{008..010}}.tar")
    assert [ref.id for ref in images] == [f"part-{i:03d}.tar/x.png" for i in (8, 9, 10)]


def test_a_glob_names_shards_sorted_and_tells_folders_apart(tmp_path: Path, shard: Shard) -> None:
    for name in ("b/0.tar", "a/0.tar", "a/1.tar"):
        shard(tmp_path / name, {"x.png": 1})
    expected = ["a/0.tar/x.png", "a/1.tar/x.png", "b/0.tar/x.png"]
    assert [ref.id for ref in find_images(f"{tmp_path}/*/*.tar")] == expected


def test_shards_of_one_name_in_two_folders_keep_apart(tmp_path: Path, shard: Shard) -> None:
    paths = [shard(tmp_path / name / "0.tar", {"x.png": 1}) for name in ("train", "val")]
    images = find_images(paths)
    assert [ref.id for ref in images] == ["train/0.tar/x.png", "val/0.tar/x.png"]
    assert any("begin with the folder's name" in note for note in images.notes)


def test_of_two_members_with_one_name_the_later_counts(tmp_path: Path, shard: Shard) -> None:
    path = shard(tmp_path / "s.tar", {"x.png": 10, "y.png": 20})
    shard(path, {"x.png": 30}, mode="a")
    images = find_images(path)
    assert [ref.id for ref in images] == ["s.tar/y.png", "s.tar/x.png"]
    assert open_image(images[1]).getpixel((0, 0)) == (30, 0, 0)
    assert images.notes == ("s.tar: 1 members come twice under one name; the later one counts.",)


def test_linked_members_are_left_out_and_noted(tmp_path: Path, shard: Shard) -> None:
    path = shard(tmp_path / "s.tar", {"x.png": 10})
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "x.png"
        archive.addfile(link)
    images = find_images(path)
    assert [ref.id for ref in images] == ["s.tar/x.png"]
    assert images.notes == ("s.tar: 1 members are links or sparse files and were left out.",)


@pytest.mark.parametrize("name", ["s.tar.gz", "s.tgz", "s.tar.xz", "photos.zip"])
def test_archives_that_cannot_be_read_by_offset_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(InputError, match="cannot be read member by member.*plain .tar"):
        find_images(tmp_path / name)


def test_a_compressed_archive_named_tar_is_refused(tmp_path: Path, shard: Shard) -> None:
    path = shard(tmp_path / "s.tar", {"x.png": 10}, mode="w:gz")
    with pytest.raises(InputError, match="not a whole, uncompressed tar"):
        find_images(path)


def test_a_shard_that_is_cut_short_is_refused(tmp_path: Path, shard: Shard) -> None:
    path = shard(tmp_path / "s.tar", {f"{i}.png": bytes(5000) for i in range(4)})
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(InputError, match="not a whole, uncompressed tar"):
        find_images(path)


def test_a_shard_cut_after_it_was_indexed_makes_its_pictures_unreadable(tmp_path: Path, shard: Shard) -> None:
    path = shard(tmp_path / "s.tar", {"x.png": 10})
    images = find_images(path)
    path.write_bytes(path.read_bytes()[:530])
    with pytest.raises(UnreadableImage, match="its shard ends before it"):
        open_image(images[0])


def test_an_empty_member_is_an_empty_file(tmp_path: Path, shard: Shard) -> None:
    images = find_images(shard(tmp_path / "s.tar", {"x.png": b"", "y.png": 3}))
    with pytest.raises(UnreadableImage, match="the file is empty"):
        open_image(images[0])


def test_a_shard_without_pictures_is_named(tmp_path: Path, shard: Shard) -> None:
    with pytest.raises(NotFoundError, match="holds no images"):
        find_images(shard(tmp_path / "s.tar", {"x.json": b"{}"}))


def test_a_missing_shard_of_a_pattern_is_named(tmp_path: Path, shard: Shard) -> None:
    shard(tmp_path / "0.tar", {"x.png": 1})
    with pytest.raises(NotFoundError, match=r"Nothing matches .*/1\.tar, which is part of"):
        find_images(f"{tmp_path}/{{0..2}}.tar")


def test_an_archive_that_was_written_as_a_stream_reads_the_same(tmp_path: Path, shard: Shard) -> None:
    plain = shard(tmp_path / "s.tar", {"x.png": 10, "y.png": 77})
    stream = io.BytesIO()
    with tarfile.open(plain) as source, tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as target:
        for member in source:
            member.pax_headers = {"comment": "ü" * 300}  # an extended header moves every offset
            target.addfile(member, source.extractfile(member))
    (tmp_path / "t.tar").write_bytes(stream.getvalue())
    assert [open_image(ref).getpixel((0, 0)) for ref in find_images(tmp_path / "t.tar")] == [(10, 0, 0), (77, 0, 0)]


BLOCK = 512


@pytest.fixture
def six(tmp_path: Path, shard: Shard) -> Path:
    return shard(tmp_path / "s.tar", {f"{i}.png": 20 * i for i in range(6)})


def headers(path: Path) -> list[int]:
    with tarfile.open(path) as archive:
        return [member.offset for member in archive]


def flipped(content: bytearray, third: int) -> bytes:
    content[third + 10] ^= 0xFF
    return bytes(content)


def zeroed(content: bytearray, third: int) -> bytes:
    content[third : third + BLOCK] = bytes(BLOCK)
    return bytes(content)


def zeros_in_the_middle(content: bytearray, third: int) -> bytes:
    content[third : third + 2 * BLOCK] = bytes(2 * BLOCK)
    return bytes(content)


DAMAGE: dict[str, tuple[Callable[[bytearray, int], bytes], str]] = {
    "a byte of a header": (flipped, "there is more at byte"),
    "a header of zeros": (zeroed, "there is more at byte"),
    "two blocks of zeros": (zeros_in_the_middle, "there is more at byte"),
    "cut between two members": (lambda content, third: bytes(content[:third]), "end mark .* is missing"),
    "cut inside a header": (lambda content, third: bytes(content[: third + 100]), "there is more at byte"),
    "cut inside zeros": (lambda content, third: bytes(content[:third]) + bytes(BLOCK + 9), "end mark .* is missing"),
    "two archives": (lambda content, third: bytes(content * 2), "several archives one after another"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_shard_never_loses_members_silently(six: Path, kind: str) -> None:
    damage, said = DAMAGE[kind]
    place = headers(six)[3]
    six.write_bytes(damage(bytearray(six.read_bytes()), place))
    with pytest.raises(InputError, match=rf"The shard .*s\.tar is .*{said}"):
        find_images(six)


def test_no_flipped_byte_of_a_header_goes_unnoticed(six: Path) -> None:
    whole, wanted = six.read_bytes(), [ref.id for ref in find_images(six)]
    for header in headers(six):
        for place in (0, 99, 124, 130, 148, 156, 257, 345, 499):
            content = bytearray(whole)
            content[header + place] ^= 0x04
            six.write_bytes(content)
            with pytest.raises(InputError, match=r"s\.tar"):
                find_images(six)
    six.write_bytes(whole)
    assert [ref.id for ref in find_images(six)] == wanted


def test_the_padding_at_the_end_may_be_of_any_length(six: Path) -> None:
    content = six.read_bytes().rstrip(b"\0")
    content += bytes(-len(content) % BLOCK)
    for blocks in (2, 3, 20, 5000):
        six.write_bytes(content + bytes(BLOCK * blocks))
        assert len(find_images(six)) == 6
