"""Bytes of a picture → 8-bit RGB, upright; whatever that cannot be done for is an `UnreadableImage` with its reason.

| what arrives | what it means |
|---|---|
| EXIF orientation | applied, so that the picture stands as its photographer saw it |
| grayscale, 1 bit | the same value in R, G and B |
| transparency (RGBA, LA, palette, single colour) | the picture laid over white |
| 16-bit gray | divided by 257 and rounded: 65535 becomes 255 (16-bit colour: Pillow keeps the upper byte) |
| 32-bit integers | as 16-bit gray where every value lies in 0…65535, else refused |
| floating point | refused: its scale is not known |
| CMYK, YCbCr | converted by Pillow; colour profiles (ICC) are not applied, as in the usual evaluation pipelines |
| several frames or pages | the first |
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING

from sinklab.data.image_list import ImageRef
from sinklab.errors import InputError, printable

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
"""The only decoders that are tried, whatever the extension: others (EPS, PDF) would start programs."""

ORIENTATION = 0x0112


class UnreadableImage(InputError):
    """A picture that cannot be used; `image` is its id, `reason` a phrase that says why."""

    def __init__(self, image: str, reason: str) -> None:
        super().__init__(image, reason)
        self.image = image
        self.reason = reason

    def __str__(self) -> str:
        return f"The image {printable(self.image)} cannot be used: {printable(self.reason)}."


def open_image(source: ImageRef | str | Path) -> Image:
    """The picture as Pillow's "RGB" at its full size (table above).

    Raises UnreadableImage. Truncated files are refused, never filled up with gray.
    """
    ref = source if isinstance(source, ImageRef) else ImageRef(str(source), str(source), -1)
    return decoded(content_of(ref), ref.id)


def decoded(content: bytes, name: str) -> Image:
    """The picture in a file's bytes, as `open_image` gives it; `name` is for the sentence of an UnreadableImage."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            image.load()
            return upright(_to_rgb(image, name), _orientation(image))
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(name, "it is not a JPEG, PNG, WebP, BMP, TIFF or GIF picture") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise UnreadableImage(name, f"it has more than the {limit:,} pixels that are safe to decode") from None
    except OSError as error:
        reason = error.strerror or f"it is damaged or cut short ({error})"
        raise UnreadableImage(name, reason) from error
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes make decoders raise nearly anything (SyntaxError, struct.error, …)
        raise UnreadableImage(name, f"it is damaged ({type(error).__name__}: {error})") from error


def is_picture(path: Path) -> bool:
    """Whether a file's first bytes are those of a picture."""
    from PIL import Image

    try:
        with Image.open(path, formats=FORMATS):
            return True
    except Exception:
        return False


def upright(image: Image, orientation: int) -> Image:
    """The picture turned as EXIF's orientation (1 to 8) asks; other numbers mean nothing and change nothing."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


def content_of(ref: ImageRef) -> bytes:
    """The picture's bytes: its own file's, or its part of a shard. Raises UnreadableImage."""
    try:
        with Path(ref.path).open("rb") as stream:
            stream.seek(ref.offset or 0)
            content = stream.read() if ref.offset is None else stream.read(ref.size)
    except OSError as error:
        raise UnreadableImage(ref.id, error.strerror or str(error)) from error
    except ValueError as error:  # a name with a NUL in it
        raise UnreadableImage(ref.id, str(error)) from error
    if not content and (ref.offset is None or not ref.size):
        raise UnreadableImage(ref.id, "the file is empty")
    if ref.offset is not None and len(content) < ref.size:
        raise UnreadableImage(ref.id, f"its shard ends before it ({len(content)} of {ref.size} bytes are there)")
    return content


def content_digest(content: bytes) -> str:
    """A short hash of a picture's bytes, all of them, to notice that a file was changed."""
    return hashlib.sha256(content).hexdigest()[:16]


def _orientation(image: Image) -> int:
    """EXIF's orientation; 1 where there is none, or none that can be read (the pixels are good all the same).

    Read after the pixels: a PNG may carry it behind them, and Pillow has already turned a TIFF by then.
    """
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) else 1


def _to_rgb(image: Image, name: str) -> Image:
    """A loaded picture of any mode as 8-bit RGB."""
    from PIL import Image

    if image.mode == "F":
        raise UnreadableImage(name, "its pixels are floating-point numbers of unknown scale; save it with 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = _gray_of_16_bits(image, name)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        image = Image.alpha_composite(white, layer)
    return image.convert("RGB")


def _gray_of_16_bits(image: Image, name: str) -> Image:
    """16-bit gray scaled to 8 bits: 65535 = 255 · 257."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image).astype(np.int64)
    if values.size and (values.min() < 0 or values.max() > 65535):
        raise UnreadableImage(
            name, f"its 32-bit values ({values.min()} to {values.max()}) do not fit 16 bits; save it with 8 or 16 bits"
        )
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))
