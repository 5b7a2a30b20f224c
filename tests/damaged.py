"""A finished run with one file gone, or with other content."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def damaged(run: Path, to: Path, name: str, content: object) -> Path:
    """A copy of the run in `to`: the file `name` removed for None, rewritten for text, or with these keys changed."""
    shutil.copytree(run, to)
    path = to / name
    if content is None:
        path.unlink()
    elif isinstance(content, str):
        path.write_text(content)
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | content))  # type: ignore[operator]
    return to
