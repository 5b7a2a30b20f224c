"""What models see: named pictures in, batches of normalised pixels out; or any other list of inputs with a view.

    images = find_images(["photos/", "shards/{000..009}.tar"])
    transform = ImageTransform.paper(224, interpolation="bicubic", mean=(.5, .5, .5), std=(.5, .5, .5))
    for batch in batches(images, transform, batch_size=32, workers=4): ...

The batch is the unit of work: batch b holds the pictures b·B to (b+1)·B − 1 of the list, whoever computes it. Ranks and
workers share out whole batches, so no result depends on how many of them there are.
Letters: B batch size, n pictures of a batch that could be read, H height, W width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sinklab.data.decode import UnreadableImage, content_digest, content_of, open_image
from sinklab.data.image_list import ImageList, ImageRef
from sinklab.data.input_list import InputList, InputRef, View
from sinklab.data.shelter import answer_at_once
from sinklab.data.sources import DEMO_PHOTOGRAPHS, demo_photographs, find_images
from sinklab.data.transform import ImageTransform
from sinklab.errors import InputError

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from torch import Tensor

__all__ = [
    "DEMO_PHOTOGRAPHS",
    "Batch",
    "ImageList",
    "ImageRef",
    "ImageTransform",
    "UnreadableImage",
    "batch_numbers",
    "batches",
    "content_digest",
    "content_of",
    "demo_photographs",
    "find_images",
    "open_image",
]

AHEAD = 2
"""Batches that are decoded ahead of the one in use, by the thread or by each worker."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The readable inputs of one stretch of the list; there may be none."""

    number: int
    """b; the batch covers positions b·B to (b+1)·B − 1 of the list."""
    indices: list[int]
    """Positions in the whole list, n of them."""
    ids: list[str]
    pixels: Tensor
    """float32 [n 3 H W] of pictures; [n N C], or int64 [n N], of sequences."""
    skipped: list[tuple[str, str]]
    """(id, reason) of the pictures that could not be used."""
    digests: list[str] = field(default_factory=list)
    """`content_digest` of each of the n pictures."""

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory (torch's DataLoader calls this)."""
        return replace(self, pixels=self.pixels.pin_memory())


@dataclass(frozen=True)
class _Loader:
    """Reads one batch by its number; picklable, so that it can travel to a worker."""

    refs: Sequence[InputRef]
    transform: View
    batch_size: int
    strict: bool

    def __getitem__(self, number: int) -> Batch | UnreadableImage:
        """The batch; or, if `strict`, the first error in it, returned and not raised to keep its sentence whole."""
        import torch

        first = number * self.batch_size
        indices: list[int] = []
        pixels: list[Tensor] = []
        skipped: list[tuple[str, str]] = []
        digests: list[str] = []
        for index, ref in enumerate(self.refs[first : first + self.batch_size], first):
            try:
                content = ref.content()
                pixels.append(self.transform.of(content, ref.id))
                indices.append(index)
                digests.append(content_digest(content))
            except UnreadableImage as error:
                if self.strict:
                    return UnreadableImage(error.image, error.reason)
                skipped.append((ref.id, error.reason))
        return Batch(
            number=number,
            indices=indices,
            ids=[self.refs[index].id for index in indices],
            pixels=torch.stack(pixels) if pixels else torch.empty(0, *self.transform.shape),
            skipped=skipped,
            digests=digests,
        )


def batch_numbers(
    images: int, *, batch_size: int, rank: int = 0, world: int = 1, skip_batches: AbstractSet[int] = frozenset()
) -> list[int]:
    """The numbers of the batches that one rank has to compute: every `world`-th one, less those already done."""
    if batch_size < 1:
        raise InputError(f"A batch holds at least one input, not {batch_size}.")
    if not 0 <= rank < world:
        raise InputError(f"Rank {rank} does not exist in a world of {world}.")
    return [number for number in range(rank, -(-images // batch_size), world) if number not in skip_batches]


def batches(
    images: InputList,
    transform: View,
    *,
    batch_size: int,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    skip_batches: AbstractSet[int] = frozenset(),
    strict: bool = False,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """The batches of one rank, in order of their numbers, decoded ahead of their use.

    `workers` 0 reads in one thread beside the caller's; more are processes of torch's DataLoader. These are started
    from a fork server (where there is one), never forked from this process, whose torch threads a fork would break:
    a script that asks for workers needs the usual `if __name__ == "__main__":`.
    Pictures that cannot be used are listed in `Batch.skipped`; with `strict` the first one raises UnreadableImage.
    """
    import torch

    if workers < 0:
        raise InputError(f"The number of workers is 0 or more, not {workers}.")
    numbers = batch_numbers(len(images), batch_size=batch_size, rank=rank, world=world, skip_batches=skip_batches)
    loader = _Loader(images.refs, transform, batch_size, strict)
    pin_memory = pin_memory and torch.cuda.is_available()
    read = _in_workers if workers and numbers else _in_a_thread
    return _checked(read(loader, numbers, workers, pin_memory))


def _checked(results: Generator[Batch | UnreadableImage]) -> Iterator[Batch]:
    """Raise what `strict` found; leaving the loop early closes the reader at once, its thread or processes with it."""
    with closing(results):
        for result in results:
            if isinstance(result, UnreadableImage):
                raise result
            yield result


def _in_a_thread(
    loader: _Loader, numbers: Sequence[int], workers: int, pin_memory: bool
) -> Generator[Batch | UnreadableImage]:
    """Read in one thread: decoding leaves Python's lock free, so the model is not kept waiting."""
    from concurrent.futures import Future, ThreadPoolExecutor

    def read(number: int) -> Batch | UnreadableImage:
        result = loader[number]
        return result.pin_memory() if pin_memory and isinstance(result, Batch) else result

    pool = ThreadPoolExecutor(1, thread_name_prefix="sinklab-images")
    waiting: deque[Future[Batch | UnreadableImage]] = deque()
    try:
        for number in numbers:
            waiting.append(pool.submit(read, number))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_workers(
    loader: _Loader, numbers: Sequence[int], workers: int, pin_memory: bool
) -> Generator[Batch | UnreadableImage]:
    """Read in processes; a worker takes whole batches, and torch hands them out in order."""
    from torch.utils.data import DataLoader

    loaded: DataLoader[Batch | UnreadableImage] = DataLoader(
        loader,  # type: ignore[arg-type]  # anything with __getitem__ is a map-style data set
        batch_size=None,
        sampler=numbers,
        num_workers=min(workers, len(numbers)),
        collate_fn=_as_it_is,  # type: ignore[arg-type]  # without batching it is given one item, not a list
        pin_memory=pin_memory,
        prefetch_factor=AHEAD,
        multiprocessing_context=start_method(),
        worker_init_fn=_leave_interrupts_to_the_parent,
    )
    try:
        yield from loaded
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise InputError(
            "A process that reads images died: most often the machine (or its shared memory, /dev/shm) is full, or a "
            'script has no `if __name__ == "__main__":`. Use fewer workers, a smaller batch, or no workers.'
        ) from error


def start_method() -> BaseContext:
    """A fork server that has the libraries loaded already: workers start at once. Elsewhere "spawn"."""
    from torch import multiprocessing

    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.data", "torchvision.transforms.v2", __name__])
    return context


def _as_it_is(result: Batch | UnreadableImage) -> Batch | UnreadableImage:
    return result


def _leave_interrupts_to_the_parent(worker: int) -> None:
    """Ctrl-C reaches every process of the terminal; only the parent answers it."""
    answer_at_once()
