"""What the model sees of a picture: resize, crop, normalise; the same for every picture of a run.

Letters: H height, W width of the crop, in pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sinklab.data.decode import UnreadableImage, decoded
from sinklab.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")

LONGEST_ASPECT = 16
"""From this ratio of the resized picture to the square of its short side, only the part that is kept is resized."""


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """Picture → crop → float32 [3 H W]; frozen and picklable. Build with `paper` or `native`."""

    height: int
    width: int
    scale: tuple[int, int]
    """Height and width that the picture is resized towards, at least the crop's own."""
    keep_aspect: bool
    """Resize until `scale` is just covered; False: to exactly `scale`, squashing."""
    interpolation: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    patch_size: tuple[int, int] = (1, 1)
    """A picture of fewer pixels than one patch, on either side, is refused; larger ones are enlarged as needed."""

    def __post_init__(self) -> None:
        if min(self.height, self.width, *self.patch_size) < 1:
            raise InputError(f"A crop has at least one pixel a side, not {self.height}x{self.width}.")
        if self.scale[0] < self.height or self.scale[1] < self.width:
            raise InputError(f"A crop of {self.height}x{self.width} does not fit in a picture of {self.scale}.")
        if self.interpolation not in INTERPOLATIONS:
            raise InputError(f"An interpolation is one of {', '.join(INTERPOLATIONS)}, not {self.interpolation!r}.")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise InputError(f"Mean and std are three numbers, std above 0, not {self.mean} and {self.std}.")

    @classmethod
    def paper(
        cls,
        size: int = 224,
        *,
        interpolation: str,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        patch_size: tuple[int, int] = (1, 1),
    ) -> ImageTransform:
        """The paper's protocol: short side to size · 256/224, then the centre `size` × `size`."""
        short = round(size * 256 / 224)
        return cls(
            height=size,
            width=size,
            scale=(short, short),
            keep_aspect=True,
            interpolation=interpolation,
            mean=mean,
            std=std,
            patch_size=patch_size,
        )

    @classmethod
    def native(
        cls,
        size: tuple[int, int],
        *,
        crop_fraction: float,
        crop_mode: str,
        interpolation: str,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        patch_size: tuple[int, int] = (1, 1),
    ) -> ImageTransform:
        """The model's own evaluation transform: resize to size / crop_fraction, then the centre `size` (height, width).

        `crop_mode` is "center" (the aspect is kept) or "squash" (both sides to size / crop_fraction), as timm has them.
        """
        if not 0 < crop_fraction <= 1:
            raise InputError(f"A crop fraction lies above 0 and at most at 1, not at {crop_fraction}.")
        if crop_mode not in ("center", "squash"):
            raise InputError(f'A crop mode is "center" or "squash", not {crop_mode!r}.')
        return cls(
            height=size[0],
            width=size[1],
            scale=(math.floor(size[0] / crop_fraction), math.floor(size[1] / crop_fraction)),
            keep_aspect=crop_mode == "center",
            interpolation=interpolation,
            mean=mean,
            std=std,
            patch_size=patch_size,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return (3, self.height, self.width)

    def of(self, content: bytes, name: str) -> Tensor:
        """The tensor of a picture file's bytes. Raises UnreadableImage."""
        return self(decoded(content, name), name)

    def sentence(self) -> str:
        """What happens to a picture, in words."""
        height, width = self.scale
        if not self.keep_aspect:
            first = f"both sides resized to {height}x{width} px"
        elif height == width:
            first = f"short side resized to {height} px"
        else:
            first = f"resized until {height}x{width} px are covered"
        return f"{first} ({self.interpolation}), centre crop of {self.height}x{self.width} px"

    def crop(self, image: Image, name: str = "") -> Image:
        """Exactly the pixels that the model is shown, as an RGB picture of H × W; `name` is for the error's sentence.

        Raises UnreadableImage for a picture smaller than one patch.
        """
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional as v2

        if image.height < self.patch_size[0] or image.width < self.patch_size[1]:
            patch = f"{self.patch_size[0]}x{self.patch_size[1]}"
            raise UnreadableImage(
                name, f"its {image.height}x{image.width} pixels are smaller than one patch of {patch}"
            )
        height, width = self._resized(image.height, image.width)
        if height * width > LONGEST_ASPECT * min(height, width) ** 2:
            return self._crop_of_a_ribbon(image, height, width)
        mode = InterpolationMode(self.interpolation)
        resized = v2.resize(image, [height, width], interpolation=mode, antialias=True)
        cropped: Image = v2.center_crop(resized, [self.height, self.width])
        return cropped

    def __call__(self, image: Image, name: str = "") -> Tensor:
        """The normalised crop, float32 [3 H W]. Raises UnreadableImage as `crop` does."""
        import torch
        from torchvision.transforms.v2 import functional as v2

        pixels = v2.to_dtype(v2.pil_to_tensor(self.crop(image, name)), torch.float32, scale=True)
        normalised: Tensor = v2.normalize(pixels, list(self.mean), list(self.std))
        return normalised

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after the resize, rounded as torchvision (square) and timm (other shapes) round them."""
        if not self.keep_aspect:
            return self.scale
        if self.scale[0] == self.scale[1]:
            short = self.scale[0]
            long = int(short * max(height, width) / min(height, width))
            return (short, long) if height <= width else (long, short)
        ratio = min(height / self.scale[0], width / self.scale[1])
        return round(height / ratio), round(width / ratio)

    def _crop_of_a_ribbon(self, image: Image, height: int, width: int) -> Image:
        """Resize and crop in one step: a picture of 20 × 50000 would otherwise become one of 256 × 640000."""
        from PIL.Image import Resampling

        top, left = round((height - self.height) / 2.0), round((width - self.width) / 2.0)
        down, right = image.height / height, image.width / width
        box = (left * right, top * down, (left + self.width) * right, (top + self.height) * down)
        box = (box[0], box[1], min(box[2], float(image.width)), min(box[3], float(image.height)))
        return image.resize((self.width, self.height), Resampling[self.interpolation.upper()], box=box)
