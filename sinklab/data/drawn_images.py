"""Drawn pictures as a list that a diagnosis can read: `data.procedural` in the place of a folder of photographs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from sinklab.data.input_list import InputList
from sinklab.data.procedural import VERSION, ProceduralImages

HEADER = 54
"""Bytes of a BMP file before its pixels."""


@dataclass(frozen=True, slots=True)
class DrawnImage:
    """One picture of a procedural set."""

    pictures: ProceduralImages
    number: int

    offset = None
    """It is no member of a shard."""

    @property
    def id(self) -> str:
        return f"{self.pictures.split}-{self.pictures.seed}-{self.number:06d}"

    @property
    def path(self) -> str:
        """It lies in no file: it is drawn."""
        return ""

    @property
    def size(self) -> int:
        side = self.pictures.size
        return HEADER + side * (-(-3 * side // 4) * 4)  # rows of a BMP are whole words

    def content(self) -> bytes:
        """As a BMP file, which no library compresses: the same bytes everywhere."""
        return _drawn(self.pictures, self.number)


@lru_cache(maxsize=256)
def _drawn(pictures: ProceduralImages, number: int) -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pictures.draw(number).transpose(1, 2, 0)).save(file, format="BMP")
    return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class DrawnList(InputList):
    """A frozen, ordered list of drawn pictures."""

    noun: ClassVar[str] = "image"
    refs: tuple[DrawnImage, ...]


def drawn_images(saved: Mapping[str, Any]) -> DrawnList:
    """The pictures of a procedural set; `saved` holds its fields. Raises InputError for numbers that cannot be."""
    pictures = ProceduralImages(**{name: saved[name] for name in ("count", "size", "seed", "split")})
    refs = tuple(DrawnImage(pictures, number) for number in range(len(pictures)))
    about = f"drawn pictures ({pictures.split}, seed {pictures.seed}, {pictures.size} px, version {VERSION})"
    return DrawnList(refs=refs, sources=(about,))
