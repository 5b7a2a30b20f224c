"""What each step of a vision transformer's training is shown: pictures in a shuffled order, as views with labels.

Batch b of a training is the same pictures with the same views whoever asks for it and whenever: the order of an epoch
follows from seed and epoch, a view from seed, epoch and picture. So the position in the images is the batch's number,
and a training that is resumed, or goes on with another number of ranks or workers, sees what it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from sinklab.data.decode import UnreadableImage
from sinklab.data.images import start_method
from sinklab.data.shelter import answer_late, sheltered
from sinklab.data.transform import ImageTransform
from sinklab.errors import InputError
from sinklab.models.describe import IMAGENET
from sinklab.training.distributed import Ranks
from sinklab.training.views import Views, ViewShape, view_seed

if TYPE_CHECKING:
    from sinklab.training.vit_config import ViTConfig

TRIES = 64
"""Unreadable pictures in a row after which a training stops: then it is not a few damaged files."""


class Pictures(Protocol):
    """What can be trained on: `data.procedural` or `data.labelled`."""

    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def sha256(self) -> str: ...
    def __len__(self) -> int: ...
    def label(self, index: int) -> int: ...
    def picture(self, index: int) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One rank's part of one batch."""

    number: int
    """Of the batch, counted over the whole training."""
    pictures: Any
    """Views [b V 3 S S]; before they are made, a list of uint8 pictures."""
    labels: Tensor
    """int64 [b], −1 for none."""
    seeds: tuple[int, ...]
    """Of each picture's views."""
    skipped: tuple[str, ...]
    """Pictures that could not be read, and for which the next ones stand in."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which pictures a batch consists of. Raises InputError for too few, or for shares that do not come out even."""

    images: int
    step: int
    """Images in an optimisation step, over all ranks."""
    seed: int
    parts: int = 1
    """Batches in a step."""
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.images < self.step:
            raise InputError(
                f"There are {self.images} training images, fewer than one batch of {self.step}: give more images or a "
                "smaller batch (--set batch=…)."
            )
        if self.step % (self.parts * self.world):
            shares = f"{self.world} ranks × {self.parts} accumulated" if self.parts > 1 else f"{self.world} ranks"
            raise InputError(
                f"A batch of {self.step} images does not divide evenly among {shares}: give a --set batch=… that is a "
                f"multiple of {self.parts * self.world}."
            )

    @property
    def per_epoch(self) -> int:
        """Steps in an epoch; the images left over come in another epoch's order."""
        return self.images // self.step

    def positions(self, number: int) -> tuple[int, list[int]]:
        """The epoch of a batch, and the pictures of this rank's share of it."""
        step, part = divmod(number, self.parts)
        epoch, place = divmod(step, self.per_epoch)
        share = self.step // (self.parts * self.world)
        first = place * self.step + (part * self.world + self.rank) * share
        return epoch, _shuffled(self.images, self.seed, epoch)[first : first + share].tolist()


@lru_cache(maxsize=2)
def _shuffled(images: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(images, generator=torch.Generator().manual_seed(view_seed("order", seed, epoch)))


class Parts:
    """Batch number → `Shown`; picklable, so that it can travel to a worker."""

    def __init__(self, images: Pictures, order: Order, shape: ViewShape, *, make_views: bool) -> None:
        self.images, self.order, self.make_views = images, order, make_views
        self.views = Views(shape)

    def __getitem__(self, number: int) -> Shown:
        epoch, positions = self.order.positions(number)
        pictures, labels, seeds, skipped = [], [], [], []
        for position in positions:
            index, picture, missed = readable(self.images, position)
            skipped += missed
            seed = view_seed(self.order.seed, epoch, position)
            pictures.append(self.views(picture, seed) if self.make_views else picture)
            labels.append(self.images.label(index))
            seeds.append(seed)
        return Shown(
            number=number,
            pictures=torch.stack(pictures) if self.make_views else pictures,
            labels=torch.tensor(labels),
            seeds=tuple(seeds),
            skipped=tuple(skipped),
        )


def readable(images: Pictures, position: int) -> tuple[int, Tensor, list[str]]:
    """The picture at a position or, if it cannot be read, the next that can: its index, pixels, and those missed."""
    missed: list[str] = []
    for index in (number % len(images) for number in range(position, position + min(TRIES, len(images)))):
        try:
            return index, images.picture(index), missed
        except UnreadableImage as error:
            missed.append(error.image)
    raise InputError(f"{len(missed)} images in a row cannot be read, {missed[0]} the first: the training stops.")


class Feed:
    """Batch number → views and labels on the training's device. Ask for the numbers in order: others cost a restart."""

    def __init__(
        self,
        images: Pictures,
        config: ViTConfig,
        seed: int,
        *,
        batches: int,
        ranks: Ranks | None = None,
        workers: int = 0,
        device: str = "cpu",
    ) -> None:
        """`batches` is how many there are in the whole training. With `workers` these processes read the images. Views
        are made on the training's device, so that they do not depend on workers; on a CPU by the workers."""
        ranks = ranks or Ranks()
        self.order = Order(
            images=len(images),
            step=config.batch,
            seed=seed,
            parts=config.accumulate,
            rank=ranks.rank,
            world=ranks.world,
        )
        shape = ViewShape(
            count=config.views,
            size=config.image,
            crop=config.crop,
            jitter=config.jitter,
            blur_kernel=config.blur_kernel,
            blur_sigma=config.blur_sigma,
            solarize=config.solarize,
        )
        self.device, self.workers, self.batches = torch.device(device), workers, batches
        self.skipped: set[str] = set()
        """Pictures that this rank could not read so far, and those of all ranks before the checkpoint."""
        self._ranks = ranks
        self._parts = Parts(images, self.order, shape, make_views=self.device.type == "cpu")
        self._stream: Iterator[Shown] | None = None
        self._next = -1

    def __call__(self, number: int) -> Shown:
        shown = self._parts[number] if self.workers == 0 else self._from_workers(number)
        self.skipped |= set(shown.skipped)
        if isinstance(shown.pictures, list):
            views = [
                self._parts.views(picture.to(self.device), seed)
                for picture, seed in zip(shown.pictures, shown.seeds, strict=True)
            ]
            pictures = torch.stack(views)
        else:
            pictures = shown.pictures.to(self.device, non_blocking=True)
        return Shown(
            number=number,
            pictures=pictures,
            labels=shown.labels.to(self.device),
            seeds=shown.seeds,
            skipped=shown.skipped,
        )

    def remembered(self) -> list[str]:
        """The names of the pictures that no rank could read so far, sorted; all ranks call this together."""
        return sorted({name for names in self._ranks.gathered(sorted(self.skipped)) for name in names})

    def remind(self, remembered: list[str]) -> None:
        """Go on from a checkpoint that has these."""
        self.skipped |= set(remembered)

    def _from_workers(self, number: int) -> Shown:
        if self._stream is None or number != self._next:
            self.close()
            with sheltered():
                self._stream, self._next = iter(self._loader(number)), number
        self._next += 1
        return next(self._stream)

    def close(self) -> None:
        """End the workers, if there are any; another number starts them again."""
        end = getattr(self._stream, "_shutdown_workers", None)
        self._stream = None
        if end is not None:  # an error may hold on to the stream for longer, and with it to its processes
            end()

    def _loader(self, first: int) -> Any:
        from torch.utils.data import DataLoader

        return DataLoader(
            self._parts,  # type: ignore[arg-type]  # anything with __getitem__ is a map-style data set
            batch_size=None,
            sampler=range(first, self.batches),
            num_workers=self.workers,
            collate_fn=_as_it_is,
            prefetch_factor=2,
            worker_init_fn=_one_thread,
            multiprocessing_context=start_method(),
        )


def _as_it_is(shown: Any) -> Any:
    return shown


def _one_thread(worker: int) -> None:
    """Of each worker; and signals are answered by the parent."""
    torch.set_num_threads(1)
    answer_late()


def fixed_view(size: int) -> ImageTransform:
    """How pictures are shown when the model is measured: short side to size · 256/224, centre crop."""
    return ImageTransform.paper(size, interpolation="bicubic", mean=IMAGENET[0], std=IMAGENET[1])


def shown_fixed(picture: Tensor, size: int) -> Tensor:
    """The normalised centre crop [3 S S] of a picture."""
    from torchvision.transforms.v2 import functional as v2

    return fixed_view(size)(v2.to_pil_image(picture))


def measured(images: Pictures, positions: list[int], size: int) -> tuple[Tensor, Tensor, list[str]]:
    """Normalised centre crops [n 3 S S] and labels [n] of those pictures that can be read, and the others' names."""
    crops, labels, missed = [], [], []
    for position in positions:
        try:
            crops.append(shown_fixed(images.picture(position), size))
            labels.append(images.label(position))
        except UnreadableImage as error:
            missed.append(error.image)
    pixels = torch.stack(crops) if crops else torch.zeros(0, 3, size, size)
    return pixels, torch.tensor(labels, dtype=torch.long), missed
