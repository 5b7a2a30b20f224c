"""run.json, read and checked: a damaged or foreign one is a sentence before anything else looks at it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinklab.errors import InputError, NotFoundError
from sinklab.settings import fingerprint, library_versions, plain, utc_now

SCHEMA_VERSION = 1
CONFIG = "run.json"
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("status", "fingerprint", "dtype", "sinklab", "purpose"), (str,)),
    **dict.fromkeys(("settings", "model", "images", "options", "rule", "seeds", "versions", "timings"), (dict,)),
    "definition": (dict, str),  # runs of old hold its name alone
    "patch": (dict, type(None)),
    **dict.fromkeys(("notes", "members"), (list,)),
}
"""Fields of run.json, and what each is where it is there."""
DEEPEST = 40
"""Levels of nesting that a file of sinklab's may have."""


def read_config(path: Path, *, whole: bool = True) -> dict[str, Any]:
    """run.json of a sinklab run; `whole` asks for one whose results can be used."""
    try:
        config = read_object(path / CONFIG)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} is not a sinklab run: it has no {CONFIG}.") from error
    if not {"schema_version", "sinklab"} <= config.keys():
        raise InputError(f"{path} is not a sinklab run: its {CONFIG} was written by something else.")
    if whole and config["schema_version"] != SCHEMA_VERSION:
        raise InputError(
            f"The run {path} has schema version {config['schema_version']}; this sinklab reads {SCHEMA_VERSION}. "
            f"It was written by sinklab {config['sinklab']}."
        )
    if whole and config.get("status") == "replaced":
        raise InputError(f"The run {path} was being overwritten when that was interrupted: use --overwrite again.")
    for name, kinds in KINDS.items() if whole else ():
        if name in config and not isinstance(config[name], kinds):
            raise InputError(
                f"{path / CONFIG} is damaged: its {name!r} is {_kind_of(config[name])}, not {_kind_of(kinds[0]())}."
            )
    return config


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object of sane depth. FileNotFoundError if it is not there, else InputError."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        _require_depth(loaded, DEEPEST)
        json.dumps(loaded, ensure_ascii=False).encode()  # halves of characters could not be written again
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(loaded, dict):
        raise InputError(f"{path} was not written by sinklab: it holds {_kind_of(loaded)}, not an object.")
    return loaded


def _require_depth(value: Any, left: int) -> None:
    if left == 0:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_depth(inner, left - 1)


def _kind_of(value: Any) -> str:
    """What JSON calls a value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    named = ((dict, "an object"), (list, "a list"), (str, "text"))
    return next((words for kind, words in named if isinstance(value, kind)), "a number")


def new_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says of a run that has just begun."""
    return {
        "schema_version": SCHEMA_VERSION,
        "sinklab": own_version(),
        "status": "running",
        "created": utc_now(),
        "fingerprint": fingerprint(settings),
        "settings": plain(settings),
    }


def own_version() -> str:
    """sinklab's version."""
    return library_versions(["sinklab"]).get("sinklab", "(not installed)")
