"""The views of LeJEPA: one picture, several random looks at it, all from one pipeline.

Random crop, colour jitter, gray, blur, solarise, flip, normalise, in that order, with torchvision's transforms. What is
drawn depends on the seed that comes with the picture and on nothing else, so that neither batches nor workers nor ranks
change a view. Letters: V views, S side in pixels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinklab.errors import InputError
from sinklab.models.describe import IMAGENET


@dataclass(frozen=True, kw_only=True)
class ViewShape:
    """What the views look like; the defaults are the paper's."""

    count: int = 4
    """V."""
    size: int = 224
    """S."""
    crop: float = 0.08
    """Smallest share of the picture's area that a crop shows; the largest is all of it."""
    jitter: float = 1.0
    """Strength: 1 is brightness, contrast and saturation by up to .8 and hue by .2, for 8 pictures in 10."""
    blur_kernel: int = 7
    blur_sigma: float = 2.0
    """The widest blur, in pixels; the narrowest is 0.1."""
    solarize: float = 0.2
    """How often; the authors' nesting makes it 0.1 in effect."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.size < 1 or not 0 < self.crop <= 1 or self.blur_kernel % 2 == 0:
            raise InputError("Views are one or more, of a positive size, with a crop in (0, 1] and an odd blur kernel.")
        if not 0 <= self.jitter <= 1 or not 0 <= self.solarize <= 1 or self.blur_sigma < 0.1:
            raise InputError("Jitter and solarize lie in [0, 1], and the widest blur is 0.1 or more.")


class Views:
    """uint8 pictures [3 H W] → views [V 3 S S], normalised float32, on the picture's device. Picklable."""

    def __init__(self, shape: ViewShape) -> None:
        self.shape = shape
        self._pipeline: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"shape": self.shape, "_pipeline": None}

    def __call__(self, picture: Tensor, seed: int) -> Tensor:
        """The same views for the same seed; torch's own random state is left as it was."""
        if self._pipeline is None:
            self._pipeline = pipeline(self.shape)
        drawing = torch.default_generator  # every transform draws its numbers from it, wherever the picture is
        before = drawing.get_state()
        try:
            drawing.manual_seed(seed)
            return torch.stack([self._pipeline(picture) for _ in range(self.shape.count)])
        finally:
            drawing.set_state(before)


def pipeline(shape: ViewShape) -> Any:
    """The transform of one view."""
    from torchvision.transforms import v2

    amount = shape.jitter
    return v2.Compose(
        [
            v2.RandomResizedCrop(shape.size, scale=(shape.crop, 1.0), antialias=True),
            v2.RandomApply([v2.ColorJitter(0.8 * amount, 0.8 * amount, 0.8 * amount, 0.2 * amount)], p=0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(shape.blur_kernel, (0.1, shape.blur_sigma))], p=0.5),
            v2.RandomSolarize(128, p=shape.solarize),
            v2.RandomHorizontalFlip(0.5),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(*map(list, IMAGENET)),
        ]
    )


def view_seed(*parts: Any) -> int:
    """A seed that follows from what it is for: run's seed, epoch, index."""
    digest = hashlib.sha256("/".join(map(str, ("sinklab views", *parts))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
