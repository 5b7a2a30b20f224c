"""WebDataset shards: the pictures in a plain .tar, indexed once and read by offset afterwards."""

from __future__ import annotations

import tarfile
from pathlib import Path

from sinklab.data.image_list import ImageRef, as_text
from sinklab.errors import InputError

ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".zip", ".7z", ".rar")
"""Archives whose members cannot be read at an offset; refused with a sentence."""


def index_shard(path: Path, prefix: str, extensions: frozenset[str]) -> tuple[list[ImageRef], list[str]]:
    """The pictures of one shard in the archive's own order, and notes about what was left out.

    Members that are hidden or not pictures are no concern of ours. Of two members with one name the later counts, as
    in tar itself. Links and sparse members have no bytes of their own at an offset: they are left out and noted.
    Raises InputError if the file is not a whole, uncompressed tar, with the place where it breaks off.
    """
    members: dict[str, tuple[int, int]] = {}
    left_out, again = 0, 0
    try:
        with tarfile.open(path, mode="r:") as archive:
            for member in archive:
                name = as_text(member.name.removeprefix("./"))
                if not _is_picture(name, extensions):
                    continue
                if not member.isreg() or member.issparse():
                    left_out += not member.isdir()
                    continue
                again += name in members
                members.pop(name, None)  # a later member takes the later place as well
                members[name] = (member.offset_data, member.size)
            _require_end(path, archive.offset)
    except (tarfile.TarError, EOFError) as error:
        raise InputError(
            f"{path} is not a whole, uncompressed tar archive ({error}); a compressed shard has to be unpacked first."
        ) from error
    except OSError as error:
        raise InputError(f"The shard {path} cannot be read: {error.strerror or error}.") from error
    real = str(path.resolve())
    refs = [ImageRef(f"{prefix}/{name}", real, size, offset) for name, (offset, size) in members.items()]
    notes = [f"{path.name}: {left_out} members are links or sparse files and were left out."] if left_out else []
    notes += [f"{path.name}: {again} members come twice under one name; the later one counts."] if again else []
    return refs, notes


def _require_end(path: Path, end: int) -> None:
    """Raises InputError unless two blocks of zeros, and nothing but zeros, stand from byte `end` on.

    To tarfile a damaged header, or one cut short, is the end of the archive: it stops there without a word, and all
    members behind it would be lost.
    """
    with path.open("rb") as stream:
        stream.seek(end)
        zeros = 0
        while block := stream.read(1 << 20):
            if block.strip(b"\0"):
                place = end + zeros + len(block) - len(block.lstrip(b"\0"))
                raise InputError(
                    f"The shard {path} is damaged, or holds several archives one after another: behind its last "
                    f"member that can be read, which ends at byte {end}, there is more at byte {place}. Get it anew, "
                    "or pack its images again."
                )
            zeros += len(block)
    if zeros < 2 * tarfile.BLOCKSIZE:
        raise InputError(
            f"The shard {path} is cut short: the archive's end mark (two blocks of zeros) is missing at byte {end}, "
            "so members may be lost. Get it anew, or pack its images again."
        )


def _is_picture(name: str, extensions: frozenset[str]) -> bool:
    """Whether a member's name is a picture's and no part of it is hidden."""
    parts = name.split("/")
    return Path(parts[-1]).suffix.lower() in extensions and not any(part.startswith(".") for part in parts)
