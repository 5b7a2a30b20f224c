"""Files that are whole or absent, and folders that one program at a time writes into."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from sinklab.errors import InputError


class WriteError(OSError, InputError):
    """A file could not be written; nothing of it is left behind, and its message is a sentence."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.errno = number


def write_error(path: Path, error: OSError) -> WriteError:
    """The sentence for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason = "the disk is full (or your quota is used up)"
    elif error.errno == errno.EFBIG:
        reason = "the file would be larger than this system allows"
    else:
        reason = error.strerror or str(error)
    return WriteError(f"{path} cannot be written: {reason}. What was written before is whole.", error.errno)


@contextmanager
def atomically(path: Path) -> Iterator[BinaryIO]:
    """Write a file in one step: a stream to a temporary name, then fsync, rename, fsync of the folder.

    Whoever reads `path`, at any moment and after any kill or power cut, finds the old content, or the new, or none.
    An exception in the block leaves the old content. Raises WriteError where the system refuses.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        _sync(path.parent)
    except WriteError:
        raise
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        _remove(temporary)


def require_csv(path: Path | None) -> None:
    """Raises InputError unless `path` is None, or a name that ends in .csv in a folder that exists."""
    if path is None:
        return
    if path.suffix != ".csv":
        raise InputError(f"--output is a .csv file, not {path}.")
    if path.is_dir():
        raise InputError(f"--output is a file, and {path} is a folder.")
    if not path.parent.is_dir():
        raise InputError(f"--output {path} cannot be written: there is no folder {path.parent}.")


def is_leftover(name: str) -> bool:
    """Whether a file's name is that of a temporary file, or of a lock."""
    return name.startswith(".") and (".tmp-" in name or name.startswith(".lock-"))


def remove_temporaries(folder: Path) -> None:
    """Remove what killed processes left half-written. The caller holds the folder's lock."""
    for path in folder.rglob(".*.tmp-*"):
        _remove(path)


class FolderLock:
    """This process is the one that writes as `rank` into a folder, until `release` or until it ends, however it ends.

    Rank 0 also makes sure that no other rank of an earlier run is still at work. Where the file system knows no locks
    there is a warning and no lock.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        """Raises InputError if another process holds the lock, WriteError if the folder cannot be written into."""
        self._held: int | None = None
        mine = folder / f".lock-{rank:03d}"
        others = sorted(set(folder.glob(".lock-*")) - {mine}) if rank == 0 else []
        for path in [*others, mine]:
            handle = _lock(path)
            if path == mine:
                self._held = handle
            elif handle is not None:
                os.close(handle)

    def release(self) -> None:
        """Let others write; harmless when repeated."""
        if self._held is not None:
            os.close(self._held)  # closing the file gives its lock up
            self._held = None


def _lock(path: Path) -> int | None:
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise write_error(path, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except BlockingIOError as error:
        os.close(handle)
        raise InputError(
            f"Another process is writing into {path.parent}: wait for it, stop it, or choose another folder."
        ) from error
    except OSError as error:
        os.close(handle)
        warnings.warn(
            f"{path.parent} lies on a file system without locks ({error.strerror}): see to it that no other process "
            "writes there.",
            stacklevel=4,
        )
        return None


def _sync(folder: Path) -> None:
    """Make a rename last through a power cut, where folders can be synchronised."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    with suppress(OSError):  # some network file systems refuse; the rename itself has happened
        os.fsync(handle)
    os.close(handle)


def _remove(path: Path) -> None:
    with suppress(OSError):  # the folder went away or became read-only: nothing that could still be tidied
        path.unlink(missing_ok=True)
