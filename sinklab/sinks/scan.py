"""Model × images → the head table, batch by batch; nothing is kept but the rows.

Letters: B batch, L layers, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sinklab.data.images import Batch, UnreadableImage, batch_numbers, batches
from sinklab.errors import InputError, printable
from sinklab.hooks.manager import HookManager
from sinklab.hooks.proof import Proof, prove
from sinklab.sinks.reader import StatisticsReader
from sinklab.sinks.table import GATED, head_schema

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from sinklab.data.input_list import InputList, View
    from sinklab.handle import Model
    from sinklab.hooks.site import Site
    from sinklab.models.tokens import TokenMap
    from sinklab.run import Run
    from sinklab.sinks.options import ScanOptions
    from sinklab.sinks.ranks import Ranks

Progress = Callable[[int, int], None]
"""(images done, images in all) of this rank."""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """What a scan took, this rank's share."""

    images: int
    seconds: float
    model_seconds: float
    """Forward passes with their statistics; the rest is waiting for images and writing."""


@contextmanager
def precision(dtype: str, device: torch.device) -> Iterator[None]:
    """Without gradients, and under autocast for bfloat16."""
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        yield


def check_input(model: Model, transform: View) -> list[str]:
    """Sentences about the input's shape worth keeping; raises InputError for one that the model cannot take."""
    said = model.check_size(transform.height, transform.width)
    return [] if said is None else [said]


def first_readable(images: InputList, transform: View, *, strict: bool) -> Tensor:
    """The pixels [1 3 H W] of the first image that can be used. Raises InputError if there is none."""
    reason = ""
    for ref in images:
        try:
            return transform.of(ref.content(), ref.id)[None]
        except UnreadableImage as error:
            if strict:
                raise
            reason = reason or f"{printable(ref.id)}: {printable(error.reason)}"
    raise InputError(f"None of the {len(images)} {images.noun}s can be used; the first: {reason}.")


def prove_attachment(model: Model, pixels: Tensor, options: ScanOptions) -> list[Proof]:
    """Proof of attachment on one image, before anything is written."""
    with precision(options.dtype, model.device):
        return prove(model, as_input(model, pixels))


def unchecked(proofs: Sequence[Proof]) -> list[str]:
    """A sentence that names the sites where the heads' updates were not compared with what the block adds."""
    unseen = [proof.name for proof in proofs if proof.update is None]
    if not unseen:
        return []
    where = f"{unseen[0]} to {unseen[-1]} ({len(unseen)} sites)" if len(unseen) > 3 else ", ".join(unseen)
    return [
        f"not checked at {where}: that the heads' updates and bias are what the block adds. Its second norm was not "
        "recognised, so the residual stream between attention and MLP could not be seen"
    ]


def rehearse(model: Model, pixels: Tensor, transform: View, options: ScanOptions) -> None:
    """One image, pixels [1 3 H W], the whole way to its rows: what a scan would stumble over is known beforehand."""
    chosen = [site for site in model.sites if options.layers is None or site.layer in options.layers]
    reader = StatisticsReader(chosen, attention=options.rule.attention, device=model.device, fast=options.fast)
    attend = reader.attend if options.fast else None
    with (
        precision(options.dtype, model.device),
        HookManager(model, reader, attend=attend, layers=options.layers) as hooks,
    ):
        hooks.run(as_input(model, pixels))
    batch = Batch(number=0, indices=[0], ids=["rehearsal"], pixels=pixels, skipped=[])
    head_rows(batch, *reader.take(), model.tokens, transform)


def as_input(model: Model, pixels: Tensor) -> Tensor:
    """Pixels, or sequences, where the model is and in its own precision; token ids stay whole numbers."""
    dtype = model.dtype if pixels.is_floating_point() else pixels.dtype
    return pixels.to(model.device, dtype, non_blocking=True)


def scan(
    model: Model,
    images: InputList,
    transform: View,
    run: Run,
    options: ScanOptions,
    ranks: Ranks,
    progress: Progress | None = None,
) -> Timings:
    """Write this rank's parts of the head table and, where values are phases, of what attention does to them.

    Batches that lie in parts already are left out. Raises InputError for an unreadable image under `strict_images` and
    for a token map that is not the model's, WriteError when the disk is full. Batches finished before an error are
    kept.
    """
    from sinklab.sinks.phase import gather_phase

    timings = scan_heads(model, images, transform, run, options, ranks, progress)
    gather_phase(model, images, transform, run, options, ranks)
    return timings


def scan_heads(
    model: Model,
    images: InputList,
    transform: View,
    run: Run,
    options: ScanOptions,
    ranks: Ranks,
    progress: Progress | None = None,
) -> Timings:
    """The head table's part of `scan`."""
    done = run.done_batches()
    share: dict[str, Any] = {"batch_size": options.batch_size, "rank": ranks.rank, "world": ranks.world}
    todo = batch_numbers(len(images), skip_batches=done, **share)
    every = batch_numbers(len(images), **share)
    size = [min(options.batch_size, len(images) - number * options.batch_size) for number in every]
    total = sum(size)
    finished = total - sum(n for number, n in zip(every, size, strict=True) if number in set(todo))
    chosen = [site for site in model.sites if options.layers is None or site.layer in options.layers]
    reader = StatisticsReader(chosen, attention=options.rule.attention, device=model.device, fast=options.fast)
    attend = reader.attend if options.fast else None
    started, busy, seen = perf_counter(), 0.0, 0
    if progress is not None:
        progress(finished, total)
    if not todo:
        return Timings(images=0, seconds=0.0, model_seconds=0.0)
    pin = model.device.type == "cuda"
    stream = batches(
        images,
        transform,
        workers=options.workers if images.noun == "image" else 0,  # sequences are read in no time
        skip_batches=done,
        strict=options.strict_images,
        pin_memory=pin,
        **share,
    )
    with (
        run.part_writer(ranks.rank, schema=head_schema(more_columns(chosen))) as parts,
        precision(options.dtype, model.device),
        HookManager(model, reader, attend=attend, layers=options.layers) as hooks,
    ):
        for batch in stream:
            frame = None
            if batch.ids:
                before = perf_counter()
                hooks.run(as_input(model, batch.pixels))
                frame = head_rows(batch, *reader.take(), model.tokens, transform)
                busy += perf_counter() - before
            parts.add(batch.number, frame, batch.skipped, zip(batch.indices, batch.digests, strict=True))
            seen += len(batch.ids)
            finished += len(batch.ids) + len(batch.skipped)
            if progress is not None:
                progress(finished, total)
        if not seen:  # every image of this rank's share was unreadable: the manager must not call that a failure
            hooks.expect_nothing()
    return Timings(images=seen, seconds=perf_counter() - started, model_seconds=busy)


def head_rows(
    batch: Batch,
    layers: list[int],
    found: dict[str, Tensor],
    tokens: list[int],
    token_map: TokenMap,
    transform: View,
) -> pd.DataFrame:
    """The rows of one batch, image by image, layer by layer, head by head."""
    import pandas as pd

    for count in set(tokens):
        token_map.check(count, transform.height, transform.width)
    shape = found["sink_index"].shape  # [B L H]
    image, layer, head = (axis.reshape(-1) for axis in np.indices(shape))
    sink = found["sink_index"].numpy().reshape(-1)
    number = max(tokens)  # N, which the check found to be that of every layer
    ordinary = token_map.ordinary_among(number)
    _, columns = token_map.grid(transform.height, transform.width)
    kinds = np.array([*(token_map.kind(index, number) for index in range(number)), "none"])  # −1 is the last
    patch = np.where((sink >= ordinary.start) & (sink < ordinary.stop), sink - ordinary.start, -1)
    frame = {
        "image": np.array(batch.ids, dtype=object)[image],
        "image_index": np.array(batch.indices)[image],
        "layer": np.array(layers)[layer],
        "head": head,
        "tokens": np.array(tokens)[layer],
        "sink_kind": kinds[sink],
        "sink_row": np.where(patch >= 0, patch // columns, -1),
        "sink_column": np.where(patch >= 0, patch % columns, -1),
        **{name: values.numpy().reshape(-1) for name, values in found.items()},
    }
    more = [name for name in GATED if name in frame]
    return pd.DataFrame({name: frame[name] for name in head_schema(more).names})


def more_columns(sites: Sequence[Site]) -> tuple[str, ...]:
    """Columns of the head table that these layers have beside those of all models."""
    return GATED if any(site.parts.gate is not None for site in sites) else ()
