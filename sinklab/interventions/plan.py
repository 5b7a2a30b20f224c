"""A plan of edits as a file, JSON or TOML: a list under the name `edits`, each with edit, layer, head, and at."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from sinklab.errors import InputError, NotFoundError
from sinklab.interventions.edit import Edit


def read_plan(path: str | Path) -> list[Edit]:
    """The edits of a .json or .toml file. Raises NotFoundError and InputError with the place of what is wrong.

    JSON may also be the bare list. In TOML each edit is an [[edits]] table.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no plan {path}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The plan {path} cannot be read: {error}.") from error
    try:
        content: Any = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except ValueError as error:
        kind = "TOML" if path.suffix.lower() == ".toml" else "JSON"
        raise InputError(f"The plan {path} is not {kind}: {error}.") from error
    written = content.get("edits") if isinstance(content, dict) else content
    if not isinstance(written, list) or not written:
        raise InputError(f"The plan {path} has no list of edits under the name edits.")
    edits = []
    for number, one in enumerate(written):
        try:
            edits.append(Edit.from_dict(one))
        except InputError as error:
            raise InputError(f"Edit {number} of the plan {path}: {error}") from error
    return edits


def plan_text(edits: list[Edit]) -> str:
    """The plan as JSON, which `read_plan` reads back."""
    return json.dumps({"edits": [edit.as_dict() for edit in edits]}, indent=2) + "\n"
