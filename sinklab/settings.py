"""What a run was asked for, as JSON: comparable, hashable, and readable years later."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

OF = {"model": "the model's", "images": "the images'"}
"""Groups of settings, and how a person says whose they are."""


def fingerprint(settings: Mapping[str, Any]) -> str:
    """SHA-256 of nested settings; neither the order of keys nor 1 written as 1.0 matters."""
    return hashlib.sha256(json.dumps(sorted(_flat(plain(settings)).items())).encode()).hexdigest()


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What changed between two nested settings, e.g. "--dtype float32 → bfloat16"; empty iff the fingerprints agree.

    Keys below "options" are written as the command line's options, those below "model" and "images" as what they are
    of, others as a path with dots; of a hash its first digits are shown.
    """
    old, new = _flat(plain(before)), _flat(plain(after))
    changed = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    return [f"{_option(key)} {_shown(old.get(key))} → {_shown(new.get(key))}" for key in changed]


def _flat(settings: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Every leaf by its path, as JSON text; whole numbers are written as integers."""
    flat: dict[tuple[str, ...], str] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, (*prefix, key))
        else:
            whole = isinstance(value, float) and value.is_integer()
            flat[(*prefix, key)] = json.dumps(int(value) if whole else value, ensure_ascii=False)
    return flat


def _shown(value: str | None) -> str:
    """A leaf as a person would write it."""
    if value is None or value == "null":
        return "(not set)"
    value = value.strip('"')
    return f"{value[:8]}…" if re.fullmatch("[0-9a-f]{32,}", value) else value


def _option(key: tuple[str, ...]) -> str:
    if key[0] == "options" and len(key) > 1:
        return "--" + "-".join(key[1:]).replace("_", "-")
    if key[0] in OF and len(key) > 1:
        return f"{OF[key[0]]} {' '.join(key[1:]).replace('_', ' ')}"
    return ".".join(key)


def plain(content: Any) -> Any:
    """The same content in JSON's own types. Raises TypeError for what has no place in JSON.

    NaN and infinity become None, NumPy's scalars and arrays numbers and lists, tuples lists, sets sorted lists, paths
    text with "/", and keys text.
    """
    if content is None or type(content) in (bool, int, str):
        return content
    if isinstance(content, str):  # a StrEnum, a NumPy string
        return str.__str__(content)
    if isinstance(content, int):
        return int(content)
    if isinstance(content, float):
        return float(content) if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {str(key): plain(value) for key, value in content.items()}
    if isinstance(content, (set, frozenset)):
        return sorted(plain(value) for value in content)
    if isinstance(content, (list, tuple)):
        return [plain(value) for value in content]
    if isinstance(content, Path):
        return content.as_posix()
    if hasattr(content, "tolist"):  # NumPy scalars and arrays, torch tensors, pandas series
        return plain(content.tolist())
    raise TypeError(f"{type(content).__name__} has no place in JSON: {content!r}")


def utc_now() -> str:
    """The time, to the second, as "2026-01-31T12:00:00Z"."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def library_versions(names: Iterable[str]) -> dict[str, str]:
    """Installed versions by distribution name; what is not installed is left out."""
    from importlib import metadata

    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
