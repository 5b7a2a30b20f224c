"""Pictures that need no download: dead leaves with one textured shape before them, labelled, drawn from seed and index.

Dead leaves (discs and squares of scale-free sizes that cover one another) have the edges and the falling power spectrum
of photographs; the shape is what a picture is of. The label is shape × texture, and each has a hue that it varies
about. A picture depends on seed, split and index alone: neither on what was drawn before it nor on who draws it.

Letters: S side in pixels.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sinklab.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

Plane = npt.NDArray[np.float32]

SHAPES = ("disc", "square", "triangle", "cross")
TEXTURES = ("stripes", "checks", "spots")
CLASSES = tuple(f"{shape}, {texture}" for shape in SHAPES for texture in TEXTURES)
SPLITS = ("train", "validation")
LEAVES = 48
MOST_KEPT = 1 << 28
"""Bytes of drawn pictures that are kept for the next epoch."""
VERSION = 1
"""Of the drawing; raised whenever a picture of the same seed and index looks otherwise."""


@dataclass(frozen=True, kw_only=True)
class ProceduralImages:
    """`count` pictures of one split. Raises InputError for numbers that cannot be."""

    count: int
    size: int = 64
    """S."""
    seed: int = 0
    split: str = "train"

    def __post_init__(self) -> None:
        if self.count < 1 or self.size < 16 or self.seed < 0 or self.split not in SPLITS:
            raise InputError(
                "Procedural images are 1 or more, of 16 pixels or more, with a seed from 0 on, for "
                f"{' or '.join(SPLITS)}; {self} was asked for."
            )

    def __len__(self) -> int:
        return self.count

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, by number."""
        return CLASSES

    @property
    def sha256(self) -> str:
        """Says which pictures these are; equal sets draw equal pictures."""
        return hashlib.sha256(f"procedural-{VERSION} {sorted(asdict(self).items())}".encode()).hexdigest()

    def label(self, index: int) -> int:
        """A number below 12; all are about equally frequent."""
        return int(self._generator(index).integers(len(CLASSES)))

    def picture(self, index: int) -> Tensor:
        """uint8 [3 S S]; a small set is drawn once and kept."""
        import torch

        if index not in self._kept:
            drawn = torch.from_numpy(self.draw(index))
            if len(self._kept) * drawn.numel() >= MOST_KEPT:
                return drawn
            self._kept[index] = drawn
        return self._kept[index]

    @cached_property
    def _kept(self) -> dict[int, Tensor]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return asdict(self)  # to a worker travel the numbers, not the pictures

    def draw(self, index: int) -> npt.NDArray[np.uint8]:
        """The same as NumPy's [3 S S]."""
        if not 0 <= index < self.count:
            raise InputError(f"There is no picture {index} among {self.count}.")
        random = self._generator(index)
        label = int(random.integers(len(CLASSES)))
        canvas = _dead_leaves(random, self.size)
        _add_object(canvas, random, SHAPES[label // len(TEXTURES)], TEXTURES[label % len(TEXTURES)])
        canvas *= _light(random, self.size)
        canvas *= 255
        return np.clip(canvas, 0, 255).astype(np.uint8)

    def _generator(self, index: int) -> np.random.Generator:
        return np.random.default_rng([VERSION, self.seed, SPLITS.index(self.split), index])


def _dead_leaves(random: np.random.Generator, size: int) -> Plane:
    """[3 S S] in [0, 1]: discs and squares, the number of radius r falling as r⁻³, each with a grain of its own."""
    canvas = np.empty((3, size, size), np.float32)
    canvas[:] = random.random((3, 1, 1), dtype=np.float32)
    grain = _grain(random, size)
    palette = 0.5 + 0.22 * random.standard_normal((LEAVES, 3), dtype=np.float32)
    palette += 0.18 * random.standard_normal(
        (LEAVES, 1), dtype=np.float32
    )  # channels vary together, as they do outside
    least, most = size / 24, size / 1.8
    radii = 1 / np.sqrt(most**-2 + random.random(LEAVES) * (least**-2 - most**-2))
    places = random.random((LEAVES, 2)) * size
    square = random.random(LEAVES) < 0.4
    contrast = 0.02 + 0.12 * random.random(LEAVES)
    shift = random.integers(0, size, (LEAVES, 2))
    line = np.arange(size, dtype=np.float32) + np.float32(0.5)
    for i in range(LEAVES):
        (row, column), radius = places[i], radii[i]
        top, bottom = max(0, int(row - radius - 1)), min(size, int(row + radius + 2))
        left, right = max(0, int(column - radius - 1)), min(size, int(column + radius + 2))
        dy, dx = np.abs(line[top:bottom, None] - row), np.abs(line[None, left:right] - column)
        distance = np.maximum(dy, dx) if square[i] else np.sqrt(dy * dy + dx * dx)
        cover = np.clip(radius + 0.5 - distance, 0, 1)
        a, b = shift[i]
        colour = palette[i][:, None, None] + contrast[i] * grain[a : a + bottom - top, b : b + right - left]
        region = canvas[:, top:bottom, left:right]
        region += cover * (colour - region)
    return canvas


def _grain(random: np.random.Generator, size: int) -> Plane:
    """Noise with amplitude 1/frequency, unit variance, periodic, tiled to [2S 2S]."""
    across = np.fft.fftfreq(size)[:, None] ** 2 + np.fft.rfftfreq(size)[None] ** 2
    across[0, 0] = np.inf
    spectrum = np.fft.rfft2(random.standard_normal((size, size), dtype=np.float32)) / np.sqrt(across)
    field = np.fft.irfft2(spectrum, s=(size, size)).astype(np.float32)
    return np.tile(field / field.std(), (2, 2))


def _light(random: np.random.Generator, size: int) -> Plane:
    """A gradient of brightness from one side to the other, [S S]."""
    slope_y, slope_x = 0.25 * random.standard_normal(2)
    line = np.linspace(-1, 1, size, dtype=np.float32)
    return (1 + slope_y * line[:, None] + slope_x * line[None]).clip(0.4, 1.6).astype(np.float32)


def _add_object(canvas: Plane, random: np.random.Generator, shape: str, texture: str) -> None:
    """Paint the shape that the picture is of, at a place, size, angle and in colours of its own."""
    size = canvas.shape[-1]
    radius = size * random.uniform(0.22, 0.4)
    row, column = random.uniform(0.3 * size, 0.7 * size, 2)
    y, x = _turned(size, row, column, random.uniform(0, 2 * np.pi))
    cover = np.clip(radius * _inside(shape, y / radius, x / radius) + 0.5, 0, 1)
    period = size * random.uniform(0.08, 0.16)
    y, x = _turned(size, row, column, random.uniform(0, 2 * np.pi))
    phase = random.uniform(0, 1, 2)
    mix = _texture(texture, y / period + phase[0], x / period + phase[1])
    light, dark = _colours(random, (SHAPES.index(shape) * len(TEXTURES) + TEXTURES.index(texture)) / len(CLASSES))
    canvas += cover * (light + mix * (dark - light) - canvas)


def _colours(random: np.random.Generator, hue: float) -> tuple[Plane, Plane]:
    """A light and a dark colour [3 1 1] about a hue: things of one kind are of like colours, and never of one."""
    hue += 0.05 * random.standard_normal()
    wheel = (1 + np.cos(2 * np.pi * (hue - np.arange(3) / 3))) / 2  # R, G, B
    pale, strength = random.uniform(0, 0.4), random.uniform(0.6, 1.0)
    tone = (strength * (pale + (1 - pale) * wheel)).astype(np.float32)[:, None, None]
    return tone, tone * np.float32(random.uniform(0.15, 0.5))


def _turned(size: int, row: float, column: float, angle: float) -> tuple[Plane, Plane]:
    """Pixels' coordinates in a frame round (row, column) that is turned by `angle`."""
    line = np.arange(size, dtype=np.float32) + np.float32(0.5)
    dy, dx = line[:, None] - np.float32(row), line[None] - np.float32(column)
    sine, cosine = np.float32(np.sin(angle)), np.float32(np.cos(angle))
    return cosine * dy + sine * dx, cosine * dx - sine * dy


def _inside(shape: str, y: Plane, x: Plane) -> Plane:
    """How far a point lies inside a shape of about unit size; negative outside."""
    tall, wide = np.abs(y), np.abs(x)
    inside = {
        "disc": lambda: 0.9 - np.sqrt(y * y + x * x),
        "square": lambda: 0.8 - np.maximum(tall, wide),
        "triangle": lambda: 0.55 - np.maximum(-y, 0.5 * y + 0.866 * wide),
        "cross": lambda: np.minimum(0.32 - np.minimum(tall, wide), 1 - np.maximum(tall, wide)),
    }[shape]()
    return inside.astype(np.float32)


def _texture(texture: str, y: Plane, x: Plane) -> Plane:
    """0 for the first colour to 1 for the second; period 1."""
    if texture == "stripes":
        wave = np.sin(2 * np.pi * y)
    elif texture == "checks":
        wave = 2 * np.sin(np.pi * y) * np.sin(np.pi * x)
    else:
        wave = 2 * (np.cos(2 * np.pi * y) + np.cos(2 * np.pi * x)) - 1.4
    return np.clip(0.5 + 1.5 * wave, 0, 1)
