"""Taking a run up again: what is there must still be true, and what could not be used before is tried once more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sinklab.config import CONFIG
from sinklab.data.images import UnreadableImage, content_digest
from sinklab.errors import InputError, NotFoundError, printable
from sinklab.parts import forget_batches, read_parts
from sinklab.run import RESULTS, noun_in
from sinklab.sinks.classify import SinkDefinition
from sinklab.sinks.rule import SinkRule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sinklab.data.input_list import InputList, InputRef, View
    from sinklab.run import Run
    from sinklab.sinks.options import ScanOptions

NEEDED = ("model", "images", "definition")
"""What a finished run's run.json holds, beside its rule, for those who read its tables."""
READERS = 8
"""Threads that read files: hashing and reading leave Python's lock free."""


def go_on(run: Run, images: InputList, transform: View, options: ScanOptions) -> None:
    """Before the first batch of a resumed run, on rank 0: `check_unchanged`, then `retry_skipped`."""
    check_unchanged(run, images)
    retry_skipped(run, images, transform, options)


def check_unchanged(run: Run, images: InputList) -> None:
    """Raises InputError, naming images, unless every image that was measured still has the bytes that were measured.

    Where the files lie, and their times, do not matter: a run and its images may be moved or copied.
    """
    measured = [entry for part in run.parts() for entry in part.images]
    now = _digests(images[index] for index, _ in measured)
    changed = [images[index].id for (index, digest), found in zip(measured, now, strict=True) if digest != found]
    if changed:
        names = printable(", ".join(sorted(changed)[:3])) + (
            f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        )
        raise InputError(
            f"{len(changed)} of the {images.noun}s that the run {run.path} has measured hold other bytes now: {names}. "
            "Put the earlier ones back, or measure afresh with --overwrite."
        )


def retry_skipped(run: Run, images: InputList, transform: View, options: ScanOptions) -> None:
    """Try the images that could not be used; a batch in which that ends otherwise now is forgotten, to be done anew.

    So the table becomes that of a run which finds the images as they are now. Raises UnreadableImage for one that
    still cannot be used if the images have to be good (`strict_images`).
    """
    for part in run.parts():
        again = set()
        for batch, name, reason in part.skipped:
            first = batch * options.batch_size
            refs = (images[i] for i in range(first, min(first + options.batch_size, len(images))))
            ref = next((ref for ref in refs if ref.id == name), None)
            if ref is None or _outcome(ref, transform, options.strict_images) != reason:
                again.add(batch)
        if again:
            forget_batches(part, again, options.batch_size)
            from sinklab.sinks.phase import PARTS as PHASE_PARTS  # loads torch, which reading a run does without

            for beside in read_parts(run.path / PHASE_PARTS, run.config["fingerprint"]):
                if again & set(beside.batches):
                    forget_batches(beside, again, options.batch_size)


def require_spared(images: InputList, output: Path) -> None:
    """Raises InputError if an image is one of the results that overwriting the run in `output` would remove."""
    folder = output.resolve()
    for ref in images:
        path = Path(ref.path)
        if ref.path and path.is_relative_to(folder) and path.relative_to(folder).parts[0] in RESULTS:
            raise InputError(
                f"The {images.noun} {ref.id} is a result of the run {output}, which --overwrite removes: choose "
                "others, or another folder for the run."
            )


def require_whole(run: Run) -> None:
    """Raises InputError if batches of a finished run are gone; a run that does not say its number of images passes."""
    count, size = (_setting(run, *path) for path in (("images", "count"), ("options", "batch_size")))
    if count is None or not size:
        return
    missing = sorted(set(range(-(-count // size))) - run.done_batches())
    if missing:
        lost = sum(min(size, count - batch * size) for batch in missing)
        raise InputError(
            f"The run {run.path} is called complete, but its parts lack {lost} of {count} {noun_in(run.path)}s "
            f"(the first is number {missing[0] * size} of the list): go on with --resume to measure them again."
        )


def require_readable(run: Run) -> None:
    """Raises InputError unless run.json names the rule and the definition that its tables were made under."""
    where, rule = run.path / CONFIG, run.config.get("rule", {})
    missing = [name for name in SinkRule.__dataclass_fields__ if name not in rule]
    missing = [f"rule.{name}" for name in missing] + [name for name in NEEDED if name not in run.config]
    if missing:
        raise InputError(f"{where} is damaged: it lacks {', '.join(missing)}.")
    try:
        SinkRule.from_dict(rule)
        SinkDefinition.from_saved(run.config["definition"])
    except TypeError as error:
        raise InputError(f"{where} is damaged: a threshold of its rule is no number.") from error
    except (InputError, NotFoundError) as error:
        raise InputError(f"{where} is damaged: {error}") from error


def _setting(run: Run, group: str, name: str) -> int | None:
    """A whole number among the run's settings, or None."""
    own = run.config.get("settings", {}).get(group)
    value = own.get(name) if isinstance(own, dict) else None
    return value if isinstance(value, int) else None


def _outcome(ref: InputRef, transform: View, strict: bool) -> str | None:
    """Why an image cannot be used, or None if it can."""
    try:
        transform.of(ref.content(), ref.id)
    except UnreadableImage as error:
        if strict:
            raise
        return error.reason
    return None


def _digests(refs: Iterable[InputRef]) -> list[str | None]:
    """`content_digest` of each image, None for one that cannot be read."""
    from concurrent.futures import ThreadPoolExecutor

    def digest(ref: InputRef) -> str | None:
        try:
            return content_digest(ref.content())
        except UnreadableImage:
            return None

    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(digest, refs))
