from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from sinklab.data.decode import ORIENTATION, UnreadableImage, is_picture, open_image


def pixel(path: Path, at: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    image = open_image(path)
    assert image.mode == "RGB"
    value = image.getpixel(at)
    assert isinstance(value, tuple)
    return value


LOSSLESS: dict[str, dict[str, Any]] = {"jpg": {"quality": 100, "subsampling": 0}, "webp": {"lossless": True}}
"""How to save a format with its least loss."""


def close(left: Image.Image, right: Image.Image, within: int) -> bool:
    return bool(np.abs(np.asarray(left, int) - np.asarray(right, int)).max() <= within)


@pytest.mark.parametrize("extension", ["png", "bmp", "tiff", "webp", "gif", "jpg"])
def test_every_format_gives_its_pixels(tmp_path: Path, extension: str) -> None:
    blocks = Image.new("RGB", (32, 16), (200, 30, 60))
    blocks.paste((10, 220, 90), (16, 0, 32, 16))
    path = tmp_path / f"1.{extension}"
    blocks.save(path, **LOSSLESS.get(extension, {}))
    assert open_image(path).size == (32, 16)
    assert close(open_image(path), blocks, within=3 if extension == "jpg" else 0)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("extension", ["jpg", "png", "webp", "tiff"])
def test_exif_orientation_is_applied_once(tmp_path: Path, noise: Image.Image, orientation: int, extension: str) -> None:
    smooth = noise.resize((6, 4)).resize((60, 40))
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / f"1.{extension}"
    smooth.save(path, exif=exif, **LOSSLESS.get(extension, {}))
    with Image.open(path) as stored:
        expected = ImageOps.exif_transpose(stored).convert("RGB")
    assert open_image(path).size == ((40, 60) if orientation > 4 else (60, 40))
    assert close(open_image(path), expected, within=0)


def test_a_phone_photograph_stands_upright(tmp_path: Path) -> None:
    # EXIF 6: the stored picture has to be turned a quarter clockwise, so its left edge comes to lie at the top
    stored = Image.new("RGB", (32, 16), "black")
    stored.paste("white", (0, 0, 16, 16))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    stored.save(tmp_path / "1.png", exif=exif)
    assert open_image(tmp_path / "1.png").size == (16, 32)
    assert pixel(tmp_path / "1.png", (8, 2)) == (255, 255, 255)
    assert pixel(tmp_path / "1.png", (8, 30)) == (0, 0, 0)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"Exif\x00\x00garbage, not a header", b"Exif\x00\x00MM\x00*\xff\xff\xff\xff"])
def test_broken_exif_does_not_spoil_good_pixels(tmp_path: Path, exif: bytes) -> None:
    Image.new("RGB", (16, 16), (100, 100, 100)).save(tmp_path / "1.jpg", exif=exif)
    assert pixel(tmp_path / "1.jpg") == (100, 100, 100)


def test_gray_and_one_bit_become_equal_channels(tmp_path: Path) -> None:
    Image.new("L", (4, 4), 77).save(tmp_path / "l.png")
    Image.new("1", (4, 4), 1).save(tmp_path / "1.png")
    assert pixel(tmp_path / "l.png") == (77, 77, 77)
    assert pixel(tmp_path / "1.png") == (255, 255, 255)


@pytest.mark.parametrize("alpha, expected", [(255, (200, 0, 100)), (0, (255, 255, 255)), (128, (227, 127, 177))])
def test_transparency_lies_over_white(tmp_path: Path, alpha: int, expected: tuple[int, ...]) -> None:
    # α = 128/255: 200·α + 255·(1 − α) = 227.4, 0 → 127.0, 100 → 177.2
    Image.new("RGBA", (4, 4), (200, 0, 100, alpha)).save(tmp_path / "1.png")
    assert np.allclose(pixel(tmp_path / "1.png"), expected, atol=1)


def test_gray_with_alpha_lies_over_white(tmp_path: Path) -> None:
    Image.new("LA", (4, 4), (0, 64)).save(tmp_path / "1.png")
    assert np.allclose(pixel(tmp_path / "1.png"), 255 - 64, atol=1)


def test_a_palette_gives_its_colours_and_its_transparent_ones_white(tmp_path: Path) -> None:
    image = Image.new("P", (4, 4))
    image.putpalette([10, 20, 30, 200, 100, 0])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "opaque.png")
    image.save(tmp_path / "clear.png", transparency=0)
    image.save(tmp_path / "clear.gif", transparency=0)
    assert [pixel(tmp_path / "opaque.png", (x, 0)) for x in (0, 1)] == [(10, 20, 30), (200, 100, 0)]
    assert [pixel(tmp_path / "clear.png", (x, 0)) for x in (0, 1)] == [(255, 255, 255), (200, 100, 0)]
    assert [pixel(tmp_path / "clear.gif", (x, 0)) for x in (0, 1)] == [(255, 255, 255), (200, 100, 0)]


def test_a_single_transparent_colour_becomes_white(tmp_path: Path) -> None:
    image = Image.new("RGB", (4, 4), (1, 2, 3))
    image.putpixel((1, 0), (9, 9, 9))
    image.save(tmp_path / "1.png", transparency=(1, 2, 3))
    assert [pixel(tmp_path / "1.png", (x, 0)) for x in (0, 1)] == [(255, 255, 255), (9, 9, 9)]


@pytest.mark.parametrize("extension", ["png", "tiff"])
def test_sixteen_bit_gray_is_scaled_and_not_clipped(tmp_path: Path, extension: str) -> None:
    values = np.array([[0, 128, 129, 257, 32768, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / f"1.{extension}")
    seen = [pixel(tmp_path / f"1.{extension}", (x, 0))[0] for x in range(6)]
    assert seen == [round(value / 257) for value in values[0].tolist()] == [0, 0, 1, 1, 128, 255]


def test_big_endian_sixteen_bit_tiff_means_the_same(tmp_path: Path) -> None:
    header = b"MM\x00*" + struct.pack(">I", 8)
    tags = [(256, 1, 2), (257, 1, 1), (258, 1, 16), (259, 1, 1), (262, 1, 1), (273, 2, 0), (277, 1, 1), (279, 2, 4)]
    entries = b""
    for tag, kind, value in tags:
        if tag == 273:
            value = 8 + 2 + 12 * len(tags) + 4
        packed = struct.pack(">I", value) if kind == 2 else struct.pack(">HH", value, 0)
        entries += struct.pack(">HHI", tag, 4 if kind == 2 else 3, 1) + packed
    content = header + struct.pack(">H", len(tags)) + entries + bytes(4) + struct.pack(">HH", 65535, 257)
    (tmp_path / "1.tif").write_bytes(content)
    assert [pixel(tmp_path / "1.tif", (x, 0))[0] for x in (0, 1)] == [255, 1]


def test_sixteen_bit_colour_keeps_its_upper_byte(tmp_path: Path) -> None:
    import zlib

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    row = b"\0" + struct.pack(">HHH", 65535, 32768, 300)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0))
    content = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
    (tmp_path / "1.png").write_bytes(content)
    assert pixel(tmp_path / "1.png") == (255, 128, 1)


def test_thirty_two_bit_integers_pass_only_where_they_fit_sixteen(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 65535]], dtype=np.int32)).save(tmp_path / "fits.tiff")
    Image.fromarray(np.array([[0, 70000]], dtype=np.int32)).save(tmp_path / "large.tiff")
    assert pixel(tmp_path / "fits.tiff", (1, 0)) == (255, 255, 255)
    with pytest.raises(UnreadableImage, match="do not fit 16 bits"):
        open_image(tmp_path / "large.tiff")


def test_floating_point_pixels_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0.0, 1.0]], dtype=np.float32)).save(tmp_path / "1.tiff")
    with pytest.raises(UnreadableImage, match="floating-point numbers of unknown scale"):
        open_image(tmp_path / "1.tiff")


def test_cmyk_is_converted(tmp_path: Path) -> None:
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "1.jpg", quality=95)
    assert np.allclose(pixel(tmp_path / "1.jpg", (8, 8)), (255, 0, 0), atol=4)


def test_an_animation_gives_its_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for extension in ("gif", "webp", "png", "tiff"):
        path = tmp_path / f"1.{extension}"
        frames[0].save(path, save_all=True, append_images=frames[1:])
        assert np.allclose(pixel(path), (255, 0, 0), atol=3), extension


def test_the_content_and_not_the_extension_says_what_a_file_is(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), (1, 2, 3)).save(tmp_path / "1.png")
    (tmp_path / "1.png").rename(tmp_path / "1.jpg")
    assert pixel(tmp_path / "1.jpg") == (1, 2, 3)


def test_a_picture_of_one_pixel_opens(tmp_path: Path) -> None:
    Image.new("RGB", (1, 1), (1, 2, 3)).save(tmp_path / "1.png")
    assert open_image(tmp_path / "1.png").size == (1, 1)


@pytest.mark.parametrize("extension", ["jpg", "png", "gif", "webp", "tiff", "bmp"])
def test_a_picture_that_is_cut_short_is_refused(tmp_path: Path, noise: Image.Image, extension: str) -> None:
    path = tmp_path / f"1.{extension}"
    noise.save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UnreadableImage, match="damaged|cut short"):
        open_image(path)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_random_damage_never_raises_anything_else(tmp_path: Path, noise: Image.Image) -> None:
    random = np.random.default_rng(1)
    refused = 0
    for extension in ("jpg", "png", "gif", "tiff", "bmp", "webp"):
        noise.save(tmp_path / f"whole.{extension}")
        whole = (tmp_path / f"whole.{extension}").read_bytes()
        for _ in range(40):
            content = bytearray(whole)
            for _ in range(4):
                content[random.integers(len(content))] = random.integers(256)
            (tmp_path / "1").write_bytes(content)
            try:
                assert open_image(tmp_path / "1").mode == "RGB"
            except UnreadableImage:
                refused += 1
    assert refused > 20


def test_words_and_nothing_are_not_pictures(tmp_path: Path) -> None:
    (tmp_path / "words.jpg").write_text("not a picture")
    (tmp_path / "empty.jpg").write_bytes(b"")
    with pytest.raises(UnreadableImage, match="it is not a JPEG, PNG, WebP, BMP, TIFF or GIF picture"):
        open_image(tmp_path / "words.jpg")
    with pytest.raises(UnreadableImage, match="the file is empty"):
        open_image(tmp_path / "empty.jpg")
    assert not is_picture(tmp_path / "words.jpg")


def test_formats_that_start_programs_are_not_tried(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    with pytest.raises(UnreadableImage, match="it is not a"):
        open_image(tmp_path / "1.jpg")


def test_a_file_that_went_away_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImage, match="No such file or directory"):
        open_image(tmp_path / "gone.png")


def test_more_pixels_than_are_safe_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("1", (100, 100)).save(tmp_path / "1.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4000)
    with pytest.raises(UnreadableImage, match="more than the 8,000 pixels that are safe"):
        open_image(tmp_path / "1.png")


def test_the_error_keeps_its_sentence_between_processes() -> None:
    error = pickle.loads(pickle.dumps(UnreadableImage("a/b.png", "the file is empty")))
    assert (error.image, error.reason) == ("a/b.png", "the file is empty")
    assert str(error) == "The image a/b.png cannot be used: the file is empty."
