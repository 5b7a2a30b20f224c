"""The pictures of one path: a file, a folder at any depth, or a shard."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sinklab.data.image_list import ImageRef, as_text
from sinklab.data.shards import ARCHIVES, index_shard
from sinklab.errors import InputError, NotFoundError, printable

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
"""What counts as a picture inside folders and shards, in any case. (The format itself is read from the content.)"""

KINDS = "JPEG, PNG, WebP, BMP, TIFF and GIF"


def pictures(path: Path, root: Path) -> tuple[list[ImageRef], list[str]]:
    """The pictures of one existing file, folder or shard, with ids relative to `root`; and notes.

    A file that was named outright may have any extension, as long as it begins like a picture.
    Raises NotFoundError where nothing is found, InputError where something found cannot be used.
    """
    name = as_text(Path(os.path.relpath(path, root)).as_posix())
    lowered = path.name.lower()
    if path.is_dir():
        refs, notes = scan(path, "" if name == "." else f"{name}/")
        if not refs:
            raise NotFoundError(" ".join([_nothing_in(path), *notes]))
    elif not os.path.lexists(path):
        raise NotFoundError(f"There is no file or folder {path}.")
    elif lowered.endswith(ARCHIVES):
        raise InputError(
            f"{path} cannot be read member by member where it lies: unpack it, into a folder or into a plain .tar."
        )
    elif lowered.endswith(".tar"):
        refs, notes = index_shard(path, name, EXTENSIONS)
        if not refs:
            raise NotFoundError(f"The shard {path} holds no images ({KINDS}).")
    else:
        ref = file_ref(str(path), name)
        if ref is None or not (path.suffix.lower() in EXTENSIONS or _begins_like_a_picture(path)):
            raise InputError(f"{path} is not an image: sinklab takes {KINDS}, folders, @list.txt and .tar shards.")
        refs, notes = [ref], []
    return refs, notes


def scan(folder: Path, prefix: str) -> tuple[list[ImageRef], list[str]]:
    """Every picture below `folder`, sorted by id codepoint by codepoint, ids beginning with `prefix`; and notes.

    Folders of sinklab's runs are left out, and noted: their figures and crops are not the user's images.

    Linked folders are entered after all real ones and every folder only once, so that a link never takes a picture's
    own id away, and a loop ends. A link to a folder that holds `folder` itself is not followed.
    """
    top = os.path.realpath(folder)
    waiting, links, entered = [(top, prefix)], list[tuple[str, str]](), set[str]()
    refs: list[ImageRef] = []
    runs: list[str] = []
    while waiting or links:
        if not waiting:
            links.sort(key=lambda link: link[1], reverse=True)
        where, prefix = waiting.pop() if waiting else links.pop()
        if where in entered or top.startswith(where.rstrip("/") + "/"):
            continue
        entered.add(where)
        if is_run(where):
            runs.append(prefix.rstrip("/") or ".")
            continue
        for entry in _entries(where):
            name, linked = prefix + as_text(entry.name), entry.is_symlink()
            if linked and os.path.isdir(entry.path):
                links.append((os.path.realpath(entry.path), f"{name}/"))
            elif entry.is_dir(follow_symlinks=False):
                waiting.append((entry.path, f"{name}/"))
            elif os.path.splitext(name)[1].lower() in EXTENSIONS:
                ref = file_ref(entry.path, name, real=not linked)
                refs += [ref] if ref else []
    return sorted(refs, key=lambda ref: ref.id), runs_note(sorted(runs), folder)


def is_run(folder: str) -> bool:
    """Whether a folder is one of sinklab's runs, finished or not: its run.json says so, even a damaged one."""
    try:
        with open(os.path.join(folder, "run.json"), "rb") as stream:
            start = stream.read(1 << 16)
    except (OSError, ValueError):
        return False
    return b'"schema_version"' in start and b'"sinklab"' in start


def runs_note(runs: list[str], folder: Path | str) -> list[str]:
    """The sentence about runs that were left out of the images below a folder; none if there were none."""
    if not runs:
        return []
    more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
    return [f"Left out of {folder}, as sinklab's own runs: {printable(', '.join(runs[:3]))}{more}."]


def file_ref(path: str, name: str, *, real: bool = False) -> ImageRef | None:
    """A reference to a file, or None for what is no regular file (a pipe would wait for ever when opened).

    `real` says that the path is known to be absolute and free of links.
    """
    path = path if real else os.path.realpath(path)
    try:
        status = os.stat(path)
    except OSError:  # a link into nowhere: kept, so that it is listed among the pictures that could not be read
        return ImageRef(name, path, -1)
    return ImageRef(name, path, status.st_size) if stat.S_ISREG(status.st_mode) else None


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """What lies in a folder and is not hidden."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise InputError(f"The folder {folder} cannot be read: {error.strerror or error}.") from error


def _begins_like_a_picture(path: Path) -> bool:
    from sinklab.data.decode import is_picture

    return is_picture(path)


def _nothing_in(folder: Path) -> str:
    shards = sum(1 for entry in _entries(str(folder)) if entry.name.endswith(".tar"))
    hint = f" It holds {shards} .tar shards: name them as '{folder}/*.tar'." if shards else ""
    return f"The folder {folder} holds no images ({KINDS}).{hint}"
