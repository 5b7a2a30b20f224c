"""The pictures that a training validated on: what its files keep of them, and how they are found again.

A training keeps its sources as they were written, the folder that they were written in, and a hash of the list that
they stood for; so they are found from another folder, and others under the same names are not taken for them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sinklab.data.drawn_images import drawn_images
from sinklab.data.image_tables import ImageTable, table_files
from sinklab.data.input_list import InputList
from sinklab.data.labelled import Photographs
from sinklab.data.procedural import ProceduralImages
from sinklab.data.sources import find_images
from sinklab.data.table_images import table_images
from sinklab.errors import InputError, NotFoundError

ASK = "Give images after the model."


def where_found(pictures: object, *, count: int, learned_from: bool = False) -> dict[str, Any]:
    """What a JSON file keeps of the first `count` pictures of a training's set; `found_again` reads it.

    `learned_from` says that they are those of the training, which had no others to validate on. Of a set that neither
    was drawn nor lies in files, nothing is known but that.
    """
    if isinstance(pictures, ProceduralImages):
        return {**asdict(pictures), "kind": "procedural"}
    if not isinstance(pictures, (Photographs, ImageTable)):
        return {"kind": "unknown"}
    return {
        "kind": "tables" if isinstance(pictures, ImageTable) else "files",
        "sources": list(pictures.sources),
        "folder": os.getcwd(),
        "images": len(pictures),
        "count": min(count, len(pictures)),
        "learned_from": learned_from,
        "sha256": _hash(pictures) if isinstance(pictures, ImageTable) else pictures.images.sha256,
    }


def found_again(saved: Mapping[str, Any], name: str) -> InputList:
    """The pictures that `where_found` told of, with a note that says which they are; `name` is the model's.

    Raises NotFoundError where they are no longer there, and InputError where others are, or nothing is known of them.
    """
    if saved.get("kind", "procedural") == "procedural":
        drawn = drawn_images(saved)
        return replace(drawn, notes=(f"No images were named: {drawn.sources[0]}, as its training validated on.",))
    if saved["kind"] not in ("files", "tables"):
        raise InputError(f"{name} was trained on images that its model.json does not name. {ASK}")
    given, count, whole = ", ".join(map(str, saved["sources"])), int(saved["count"]), int(saved["images"])
    whose = f"that {name} {'learned from and ' if saved.get('learned_from') else ''}was validated on"
    where = f"{given}, as written in {saved['folder']}" if saved.get("folder") else given
    found = _found(saved)
    if found is None:
        raise NotFoundError(f"The images {whose} ({where}) are no longer there. {ASK}")
    listed, sha256 = found
    if sha256 != saved["sha256"]:
        raise InputError(
            f"The images {whose} ({where}) are not the same any longer: it had {whole}, and there are {len(listed)}, "
            f"or some were changed or renamed. {ASK}"
        )
    part = f"the first {count} of {whole}" if count < whole else f"all {whole}"
    role = "validated on, which it learned from, too" if saved.get("learned_from") else "validated on"
    note = f"No images were named: {part} images of {given}, as its training {role}."
    return replace(listed, refs=listed.refs[:count], notes=(note, *listed.notes))


def _found(saved: Mapping[str, Any]) -> tuple[InputList, str] | None:
    """The whole list and its hash: from the folder that the sources were written in or, else, from this one."""
    for folder in dict.fromkeys([str(saved.get("folder") or os.getcwd()), os.getcwd()]):
        sources = [_within(folder, str(source)) for source in saved["sources"]]
        try:
            if saved["kind"] == "files":
                listed = find_images(sources)
                return listed, listed.sha256
            files = [path for source in sources for path in table_files(source) if path.is_file()]
            table = ImageTable(files, sources=sources)
            return table_images(table), _hash(table)
        except NotFoundError:
            continue
    return None


def _within(folder: str, source: str) -> str:
    """A source as it reads from any folder."""
    if source == "demo":
        return source
    mark, path = ("@", source[1:]) if source.startswith("@") else ("", source)
    return mark + os.path.join(folder, os.path.expanduser(path))


def _hash(table: ImageTable) -> str:
    """Of the files' names and sizes."""
    sizes = [(Path(path).name, Path(path).stat().st_size) for path in table.files]
    return hashlib.sha256(f"{sizes}".encode()).hexdigest()
