"""Real picture files, made where a test needs them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image

Paint = Callable[..., Path]


@pytest.fixture
def paint() -> Paint:
    """Write a small RGB picture (its own colour by `shade`) and say where it lies."""

    def write(path: Path, *, shade: int = 128, size: tuple[int, int] = (24, 20)) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (shade, 255 - shade, 7)).save(path)
        return path

    return write


@pytest.fixture
def shard() -> Callable[..., Path]:
    """Write a plain tar whose members are PNGs (or the bytes that are given)."""

    def write(path: Path, members: dict[str, int | bytes], mode: Literal["w", "w:gz", "a"] = "w") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, mode) as archive:
            for name, content in members.items():
                if isinstance(content, int):
                    stream = io.BytesIO()
                    Image.new("RGB", (24, 20), (content, 0, 0)).save(stream, "PNG")
                    content = stream.getvalue()
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return path

    return write


@pytest.fixture
def noise() -> Image.Image:
    """A picture without any symmetry: 60 wide, 40 high."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))
