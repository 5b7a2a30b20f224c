"""Labels by place: a folder a class, or a .cls beside a shard's picture."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinklab.data.decode import UnreadableImage
from sinklab.data.labelled import labelled_images, photographs
from sinklab.errors import InputError


def png(seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def folders(root: Path, names: tuple[str, ...] = ("cats", "dogs", "dogs/puppies")) -> Path:
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / f"{number}.png").write_bytes(png(number))
    return root


def shard(path: Path, labels: dict[str, str | None]) -> Path:
    with tarfile.open(path, "w") as archive:
        for number, (key, label) in enumerate(labels.items()):
            for name, content in ((f"{key}.png", png(number)), (f"{key}.cls", label)):
                if content is not None:
                    held = content if isinstance(content, bytes) else content.encode()
                    member = tarfile.TarInfo(name)
                    member.size = len(held)
                    archive.addfile(member, io.BytesIO(held))
    return path


def test_the_first_folder_is_the_label(tmp_path: Path) -> None:
    found = photographs(folders(tmp_path))
    assert found.classes == ("cats", "dogs")
    assert [(ref.id, found.label(i)) for i, ref in enumerate(found.images)] == [
        ("cats/0.png", 0),
        ("dogs/1.png", 1),
        ("dogs/puppies/2.png", 1),
    ]
    assert found.picture(1).shape == (3, 20, 24)


def test_a_shards_cls_members_are_the_labels_and_numbers_come_in_their_own_order(tmp_path: Path) -> None:
    found = photographs(shard(tmp_path / "a.tar", {"x/0001": "10", "x/0002": "9\n", "x/0003": "10"}))
    assert found.classes == ("9", "10") and found.labels == (1, 0, 1)


def test_images_without_folders_or_labels_have_none(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    found = photographs(tmp_path)
    assert found.classes == () and found.label(0) == -1
    mixed = photographs(shard(tmp_path / "b.tar", {"1": "cat", "2": None, "3": "dog"}))
    assert mixed.classes == ("cat", "dog") and mixed.labels == (0, -1, 1)


def test_validation_images_have_the_training_images_classes(tmp_path: Path) -> None:
    only_dogs = photographs(folders(tmp_path / "a", ("dogs",)), classes=("cats", "dogs"))
    assert only_dogs.labels == (1,)
    with pytest.raises(InputError, match="'birds' is none of the 2 classes"):
        photographs(folders(tmp_path / "b", ("birds",)), classes=("cats", "dogs"))


def test_an_unreadable_picture_says_so_when_it_is_asked_for(tmp_path: Path) -> None:
    folders(tmp_path)
    (tmp_path / "cats" / "9.png").write_bytes(b"nothing")
    found = photographs(tmp_path)
    with pytest.raises(UnreadableImage, match="cats/9.png"):
        found.picture(1)


def test_shards_may_spell_their_ending_large(tmp_path: Path) -> None:
    named = [shard(tmp_path / f"{name}.TAR", {f"{name}1": "3", f"{name}2": "5"}) for name in "ab"]
    assert photographs(named).labels == (0, 1, 0, 1)


def test_a_name_without_letters_is_not_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders(tmp_path))
    with pytest.raises(InputError, match="names no images"):
        labelled_images([""])


def test_the_hash_follows_labels_and_classes_and_not_only_the_pictures(tmp_path: Path) -> None:
    """A shard whose pictures stay, with one label changed, with another class's name, and as it was."""
    said = [{"1": "cat", "2": "dog"}, {"1": "dog", "2": "cat"}, {"1": "cat", "2": "owl"}, {"1": "cat", "2": "dog"}]
    found = [photographs(shard(tmp_path / "a.tar", {**labels, "3": "cat"})) for labels in said]
    assert len({one.images.sha256 for one in found}) == 1
    hashes = [one.sha256 for one in found]
    assert len(set(hashes)) == 3 and hashes[0] == hashes[3]
