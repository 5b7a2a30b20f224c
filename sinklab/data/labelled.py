"""Photographs with the labels that their place gives them: a folder a class, or WebDataset's .cls beside each picture.

| source | label |
|---|---|
| `cats/1.jpg`, `dogs/2.jpg` below the folder given | the first folder's name |
| a shard with `0001.jpg` and `0001.cls` | the number, or the name, in the .cls |
| a Parquet or Arrow table (`data.image_tables`) | its column `label` |
| anything else | none: such pictures train everything but the probe |
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from sinklab.data.decode import open_image
from sinklab.data.image_list import ImageList, ImageRef, as_text
from sinklab.data.image_tables import ImageTable, table_files
from sinklab.data.sources import find_images
from sinklab.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

LONGEST = 256
"""Bytes of a .cls that are read."""


@dataclass(frozen=True, kw_only=True)
class Photographs:
    """Pictures in a fixed order, and what each is of."""

    images: ImageList
    labels: tuple[int, ...]
    """A position in `classes` for each picture; −1 for none."""
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def sha256(self) -> str:
        """Of the list of pictures, and what each is of."""
        return hashlib.sha256(json.dumps([self.images.sha256, self.labels, self.classes]).encode()).hexdigest()

    @property
    def sources(self) -> tuple[str, ...]:
        """What was asked for, as it was written."""
        return self.images.sources

    def label(self, index: int) -> int:
        """−1 for none."""
        return self.labels[index]

    def picture(self, index: int) -> Tensor:
        """uint8 [3 H W], upright, at its own size. Raises UnreadableImage."""
        from torchvision.transforms.v2 import functional as v2

        pixels: Tensor = v2.pil_to_tensor(open_image(self.images[index]))
        return pixels


def photographs(
    sources: Sequence[str | Path] | str | Path, *, classes: Sequence[str] | None = None, limit: int | None = None
) -> Photographs:
    """What `find_images` finds, with labels.

    `classes` are those of the training pictures, when these are for validation: a label that is not among them is an
    InputError.
    """
    images = find_images(sources, limit=limit)
    folders = [] if isinstance(sources, (str, Path)) else [source for source in sources if Path(source).is_dir()]
    if len(folders) > 1 and any(path.is_dir() for folder in folders for path in Path(folder).iterdir()):
        raise InputError(
            "Several folders with folders inside: a picture's class would be the folder given and not its own. Put the "
            "class folders into one folder, which may hold links."
        )
    beside = _from_shards(images)
    names = [beside.get((ref.path, ref.offset)) or _folder(ref) for ref in images]
    known = tuple(classes) if classes is not None else tuple(sorted({n for n in names if n is not None}, key=_order))
    if len(known) < 2:
        return Photographs(images=images, labels=(-1,) * len(images), classes=())
    numbers = {name: number for number, name in enumerate(known)}
    strange = sorted({name for name in names if name is not None} - numbers.keys())
    if strange:
        raise InputError(
            f"The label {strange[0]!r} is none of the {len(known)} classes of the training images ({known[0]}, …)."
        )
    labels = tuple(-1 if name is None else numbers[name] for name in names)
    return Photographs(images=images, labels=labels, classes=known)


def labelled_images(sources: Sequence[str | Path], *, classes: Sequence[str] | None = None) -> Photographs | ImageTable:
    """Pictures with labels from files, folders and shards (`photographs`), or from Parquet and Arrow tables.

    Raises InputError where tables and other sources are given together.
    """
    files = [table_files(source) if str(source).strip() else [] for source in sources]  # "" is not this folder
    if not any(files):
        return photographs(sources, classes=classes)
    if not all(files):
        raise InputError("Tables of images (.parquet, .arrow) and other sources cannot be given together.")
    return ImageTable(
        [path for found in files for path in found], classes=classes, sources=[str(source) for source in sources]
    )


def _order(name: str) -> tuple[bool, int, str]:
    """Numbers in their own order, before names."""
    return (False, int(name), "") if name.isdecimal() else (True, 0, name)


def _folder(ref: ImageRef) -> str | None:
    """The first folder of a picture's id; a shard is not a folder."""
    parts = [part for part in ref.id.split("/")[:-1] if not part.lower().endswith(".tar")]
    return parts[0] if parts else None


def _from_shards(images: ImageList) -> dict[tuple[str, int | None], str]:
    """(shard, offset of the picture) → what the .cls of the same name says."""
    found: dict[tuple[str, int | None], str] = {}
    wanted: dict[str, dict[str, int | None]] = {}
    for ref in images:
        if ref.offset is not None:
            inside = ref.id[ref.id.lower().index(".tar/") + 5 :]
            wanted.setdefault(ref.path, {})[inside] = ref.offset
    for path, members in wanted.items():
        said: dict[str, str] = {}
        with tarfile.open(path, mode="r:") as archive:
            for member in archive:
                name = as_text(member.name.removeprefix("./"))
                stream = archive.extractfile(member) if name.endswith(".cls") and member.isreg() else None
                if stream is not None:
                    said[_key(name)] = stream.read(LONGEST).decode("utf-8", "replace").strip()
        found |= {(path, offset): said[_key(name)] for name, offset in members.items() if _key(name) in said}
    return found


def _key(member: str) -> str:
    """What WebDataset groups members by: the name up to the first dot after the last slash."""
    folder, _, name = member.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}"
