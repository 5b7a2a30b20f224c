"""Turn what a user names (files, folders, lists, patterns, shards, "demo") into one ordered list of pictures."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from sinklab.data.folders import file_ref, is_run, pictures, runs_note
from sinklab.data.image_list import ImageList, ImageRef, as_text
from sinklab.data.shards import ARCHIVES
from sinklab.errors import InputError, NotFoundError

DEMO_PHOTOGRAPHS = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "moon.png",
    "motorcycle_left.png",
    "rocket.jpg",
)
"""The photographs of things as they look in scikit-image's wheel: no drawings, no microscopy, no scanned text, and one
of the two nearly equal motorcycles."""

MOST_PATHS = 100_000
"""How many paths one brace pattern may stand for."""

PATTERN_MARKS = "{*?["
INTEGER_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)")


@dataclass
class _Source:
    """The pictures of one source, with ids relative to it, before sources are told apart."""

    label: tuple[str, ...]
    """Names of the folders down to the one that ids are relative to; their tail tells two sources apart."""
    refs: list[ImageRef]
    notes: list[str] = field(default_factory=list)

    def ids(self, depth: int) -> list[str]:
        """The ids with the last `depth` names of the label before them."""
        before = "".join(f"{name}/" for name in self.label[-depth:]) if depth else ""
        return [before + ref.id for ref in self.refs]


def find_images(sources: Sequence[str | Path] | str | Path, *, limit: int | None = None, seed: int = 0) -> ImageList:
    """The pictures that `sources` name, in the order of the sources.

    | source | stands for |
    |---|---|
    | a file | itself, if it is a picture; its id is its name |
    | a folder | every picture in it at any depth, sorted by id; not hidden names, and not sinklab's own runs |
    | `@list.txt` | one picture a line, relative to the list's folder, in its order; blank and # lines do not count |
    | `shard.tar` | its pictures in the archive's order; ids are `shard.tar/member.jpg` |
    | `shards/{000..009}.tar`, `photos/*.jpg` | all that matches; ids are relative to the last folder without pattern |
    | `demo` | the photographs in scikit-image (a folder of that name is `./demo`) |

    The lines of a list end in \\n or \\r\\n and in nothing else; spaces round a name belong to it where a file is so
    named, and are left out otherwise.
    Links are followed, each folder is entered once, and a file reached twice is counted once, under its first id. Where
    two sources would give one id to two pictures, the ids of both sources begin with their folder's name (and as many
    folders above it as needed). `limit` and `seed`: see `ImageList.sample`.
    Raises NotFoundError where nothing is found, InputError where something found cannot be used.
    """
    given = [sources] if isinstance(sources, (str, Path)) else list(sources)
    if not given:
        raise InputError('No images were named: give files, folders, @list.txt, .tar shards, or the word "demo".')
    found = [_resolve(str(source)) for source in given]
    notes = [note for source in found for note in source.notes]
    repeated = _drop_repeated(found)
    if repeated:
        notes.append(f"{repeated} images were given more than once and are counted once.")
    if _tell_apart(found):
        notes.append("Sources hold images of the same name: their ids begin with the folder's name.")
    refs = tuple(ref for source in found for ref in source.refs)
    listed = ImageList(refs=refs, sources=tuple(str(source) for source in given), notes=tuple(notes))
    return listed.sample(limit, seed=seed)


def demo_photographs() -> ImageList:
    """The photographs in the installed scikit-image: nothing is downloaded, and scikit-image is not imported.

    Raises NotFoundError if scikit-image, or every one of its photographs, is missing.
    """
    return find_images(["demo"])


def _resolve(given: str) -> _Source:
    """One source as the user wrote it."""
    if not given.strip() or given == "@":
        raise InputError(
            f"{given!r} names no images (an unset variable?): give files, folders, @list.txt, .tar shards, or demo; "
            "the present folder is a single dot."
        )
    if given == "demo":
        return _demo()
    if given.startswith("@"):
        return _listed(Path(given[1:]).expanduser())
    if "://" in given or given.startswith("pipe:"):
        raise InputError(f"{given} is not on this machine: sinklab reads local files, so download the images first.")
    path = Path(given).expanduser()
    if not os.path.lexists(path) and any(mark in given for mark in PATTERN_MARKS):
        return _matched(str(path))
    root = path if path.is_dir() else path.parent
    return _Source(_label(root), *pictures(path, root))


def _demo() -> _Source:
    """The photographs in scikit-image's wheel."""
    spec = find_spec("skimage")  # finds the folder without running the package
    folders = list(spec.submodule_search_locations or []) if spec else []
    paths = [Path(folder, "data", name) for folder in folders for name in DEMO_PHOTOGRAPHS]
    refs = [ref for path in paths if path.is_file() and (ref := file_ref(str(path), path.name))]
    if not refs:
        raise NotFoundError(
            'The demo photographs come with scikit-image, which is not installed: pip install "sinklab[demo]".'
        )
    shadowed = os.path.isdir("demo")
    return _Source(("demo",), refs, ['"demo" means the demo photographs; the folder is ./demo.'] if shadowed else [])


def _listed(path: Path) -> _Source:
    """The pictures of a list file, in its own order; ids are relative to its folder, or to the folder they share."""
    try:
        lines = [line.removesuffix("\r") for line in path.read_bytes().decode("utf-8-sig").split("\n")]
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no list file {path}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The list file {path} cannot be read as UTF-8 text: {error}.") from error
    folder = os.path.abspath(path.parent)
    rows = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")]
    named = [(n, os.path.abspath(os.path.join(folder, _as_named(folder, line)))) for n, line in rows]
    if not named:
        raise NotFoundError(f"The list file {path} names no images ({len(lines)} lines, all blank or comments).")
    inside = all(picture.startswith(folder + "/") for _, picture in named)
    root = Path(folder if inside else os.path.commonpath([os.path.dirname(picture) for _, picture in named]))
    refs: list[ImageRef] = []
    for number, picture in named:
        if os.path.isdir(picture) or picture.lower().endswith((".tar", *ARCHIVES)):
            raise InputError(f"{path}, line {number}: {picture} is not an image; a list holds one image a line.")
        try:
            refs += pictures(Path(picture), root)[0]
        except (NotFoundError, InputError) as error:
            raise type(error)(f"{path}, line {number}: {error}") from error
    return _Source(_label(root), refs)


def _as_named(folder: str, line: str) -> str:
    """A line of a list as a name: as it stands if there is such a file, else without the spaces round it."""
    return line if os.path.lexists(os.path.join(folder, line)) else line.strip()


def _matched(pattern: str) -> _Source:
    """Everything that a brace or glob pattern names: in the order of the braces, matches of a glob sorted."""
    from braceexpand import braceexpand

    ranges = [abs(int(last) - int(first)) for first, last in INTEGER_RANGE.findall(pattern)]
    if max(ranges, default=0) >= MOST_PATHS:  # braceexpand writes a whole range out before it gives the first path
        raise InputError(f"The pattern {pattern} stands for more than {MOST_PATHS} paths.")
    try:
        expanded = list(islice(braceexpand(pattern), MOST_PATHS + 1))
    except ValueError as error:
        raise InputError(f"The pattern {pattern} has braces that do not match: {error}.") from error
    if len(expanded) > MOST_PATHS:
        raise InputError(f"The pattern {pattern} stands for more than {MOST_PATHS} paths.")
    parts = Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if any(mark in part for mark in PATTERN_MARKS))
    root = Path(*parts[:fixed])
    source, runs = _Source(_label(root), []), set[str]()
    for path in expanded:
        matches = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
        if not matches:
            whole = f", which is part of {pattern}." if len(expanded) > 1 else "."
            raise NotFoundError(f"Nothing matches {path}{whole}")
        for match in matches:
            run = _run_above(match, root)
            if run is not None:
                runs.add(os.path.relpath(run, root))
                continue
            refs, notes = pictures(Path(match), root)
            source.refs += refs
            source.notes += notes
    if runs and not source.refs:
        raise NotFoundError(f"Nothing but sinklab's own runs matches {pattern}.")
    source.notes += runs_note(sorted(as_text(run) for run in runs), root)
    return source


def _run_above(match: str, root: Path) -> Path | None:
    """The folder of a sinklab run that a match is, or lies in, below the pattern's own folder."""
    inside = Path(os.path.relpath(match, root))
    return next((root / folder for folder in (inside, *inside.parents[:-1]) if is_run(str(root / folder))), None)


def _drop_repeated(found: list[_Source]) -> int:
    """Keep the first reference to each picture only; how many were dropped."""
    seen: set[tuple[str, int | None]] = set()
    dropped = 0
    for source in found:
        kept = []
        for ref in source.refs:
            if (ref.path, ref.offset) not in seen:
                seen.add((ref.path, ref.offset))
                kept.append(ref)
        dropped += len(source.refs) - len(kept)
        source.refs = kept
    return dropped


def _tell_apart(found: list[_Source]) -> bool:
    """Prefix the ids of sources that clash with the tail of their folder's path; whether any did."""
    depths = [0] * len(found)
    while clashing := _clashing(found, depths):
        growing = [i for i in clashing if depths[i] < len(found[i].label)]
        if not growing:
            name = found[min(clashing)].refs[0].id
            raise InputError(f"Different images would share an id (one is {name}): give their common folder instead.")
        for i in growing:
            depths[i] += 1
    for source, depth in zip(found, depths, strict=True):
        if depth:
            ids = source.ids(depth)
            source.refs = [replace(ref, id=name) for ref, name in zip(source.refs, ids, strict=True)]
    for source in found:
        if len(set(source.ids(0))) < len(source.refs):  # names that are not UTF-8 can fall together as text
            raise InputError(f"Two images below {'/'.join(source.label)} have names that read the same as text.")
    return any(depths)


def _clashing(found: list[_Source], depths: list[int]) -> set[int]:
    """Positions of the sources that hold an id which is not theirs alone."""
    owner: dict[str, int] = {}
    clashing: set[int] = set()
    for i, source in enumerate(found):
        for name in source.ids(depths[i]):
            if owner.setdefault(name, i) != i:
                clashing |= {i, owner[name]}
    return clashing


def _label(folder: Path) -> tuple[str, ...]:
    return tuple(as_text(part) for part in Path(os.path.abspath(folder)).parts[1:])
