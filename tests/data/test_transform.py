from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import transforms_imagenet_eval

from sinklab.data.decode import UnreadableImage
from sinklab.data.transform import ImageTransform
from sinklab.errors import InputError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def paper(size: int = 32, interpolation: str = "bicubic", patch: int = 1) -> ImageTransform:
    return ImageTransform.paper(size, interpolation=interpolation, mean=MEAN, std=STD, patch_size=(patch, patch))


def native(
    size: tuple[int, int], fraction: float = 1.0, mode: str = "center", interpolation: str = "bicubic"
) -> ImageTransform:
    return ImageTransform.native(
        size, crop_fraction=fraction, crop_mode=mode, interpolation=interpolation, mean=MEAN, std=STD
    )


def photograph(width: int, height: int) -> Image.Image:
    """Noise over a slope: sharp and smooth at once, without symmetry."""
    slope = np.linspace(0, 120, width)[None, :, None] + np.linspace(0, 60, height)[:, None, None]
    return Image.fromarray((slope + np.random.default_rng(0).integers(0, 75, (height, width, 3))).astype(np.uint8))


@pytest.mark.parametrize("width, height", [(60, 40), (40, 61), (33, 33), (301, 97), (20, 16)])
@pytest.mark.parametrize(
    "size, fraction, mode",
    [
        ((32, 32), 0.875, "center"),
        ((28, 28), 1.0, "center"),
        ((32, 32), 0.95, "squash"),
        ((28, 42), 0.9, "center"),
        ((42, 28), 1.0, "squash"),
    ],
)
def test_the_native_transform_is_timms_own(
    width: int, height: int, size: tuple[int, int], fraction: float, mode: str
) -> None:
    image = photograph(width, height)
    theirs = transforms_imagenet_eval(
        size, crop_pct=fraction, crop_mode=mode, interpolation="bicubic", mean=MEAN, std=STD
    )
    ours = native(size, fraction, mode)(image)
    assert ours.shape == (3, *size)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs(image), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_the_papers_protocol_resizes_to_256_and_keeps_the_middle_224(interpolation: str) -> None:
    image = photograph(400, 300)
    resampling = Image.Resampling[interpolation.upper()]
    by_hand = image.resize((341, 256), resampling).crop((58, 16, 58 + 224, 16 + 224))  # (341 − 224) / 2 = 58.5 → 58
    assert np.array_equal(np.asarray(paper(224, interpolation).crop(image)), np.asarray(by_hand))


def test_the_crop_is_what_the_pixels_show() -> None:
    transform, image = paper(), photograph(60, 40)
    shown = transform(image) * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    crop = np.asarray(transform.crop(image)).transpose(2, 0, 1)
    assert transform.crop(image).size == (32, 32)
    assert np.abs(shown.numpy() * 255 - crop).max() < 1e-3


@pytest.mark.parametrize("size", [16, 98, 224, 518])
def test_the_short_side_keeps_the_papers_ratio(size: int) -> None:
    assert paper(size).scale == (round(size * 256 / 224),) * 2


def test_a_small_picture_is_enlarged() -> None:
    assert paper(224, patch=14).crop(photograph(20, 15)).size == (224, 224)


@pytest.mark.parametrize("width, height", [(13, 40), (40, 13), (1, 5000), (1, 1)])
def test_a_picture_smaller_than_one_patch_is_refused(width: int, height: int) -> None:
    with pytest.raises(
        UnreadableImage, match=f"its {height}x{width} pixels are smaller than one patch of 14x14"
    ) as error:
        paper(224, patch=14)(photograph(width, height), "x.png")
    assert error.value.image == "x.png"


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("width, height", [(1300, 20), (20, 1300)])
def test_a_ribbon_gives_the_crop_that_a_whole_resize_would(width: int, height: int, interpolation: str) -> None:
    transform, image = paper(interpolation=interpolation), photograph(width, height)
    long = int(37 * 65)
    whole = image.resize((long, 37) if width > height else (37, long), Image.Resampling[interpolation.upper()])
    top, left = round((whole.height - 32) / 2), round((whole.width - 32) / 2)
    expected = np.asarray(whole.crop((left, top, left + 32, top + 32)), int)
    apart = np.abs(np.asarray(transform.crop(image), int) - expected)
    # Pillow rounds and clips between its two passes, whose order differs; a shift by half a pixel gives a mean above 5
    assert apart.max() <= 8
    assert apart.mean() < 0.5


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("interpolation", ["bicubic", "nearest"])
def test_a_ribbon_takes_no_more_memory_than_other_pictures(interpolation: str) -> None:
    def peak() -> int:
        return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])

    image, transform = Image.new("RGB", (60_000, 15)), paper(224, interpolation, patch=14)
    transform.crop(photograph(40, 40))  # loads what it needs
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = peak()
    assert transform.crop(image).size == (224, 224)
    assert peak() - before < 100_000  # kB; whole, the resized picture has 256 × 1 024 000 pixels of 4 bytes: 1 GB


def test_a_transform_travels_to_other_processes_and_says_what_it_does() -> None:
    assert pickle.loads(pickle.dumps(paper())) == paper()
    assert paper(224).sentence() == "short side resized to 256 px (bicubic), centre crop of 224x224 px"
    assert native((28, 42)).sentence().startswith("resized until 28x42 px are covered")
    assert native((28, 42), mode="squash").sentence().startswith("both sides resized to 28x42 px")


def test_settings_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(InputError, match="at least one pixel"):
        paper(0)
    with pytest.raises(InputError, match="interpolation is one of"):
        paper(interpolation="random")
    with pytest.raises(InputError, match="crop fraction"):
        native((28, 28), fraction=1.5)
    with pytest.raises(InputError, match="crop mode"):
        native((28, 28), mode="border")
    with pytest.raises(InputError, match="std above 0"):
        ImageTransform.paper(28, interpolation="bicubic", mean=MEAN, std=(1.0, 0.0, 1.0))
