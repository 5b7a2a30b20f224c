"""What a run was asked for, as JSON: comparable, hashable, and readable years later."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sinklab.errors import InputError

LARGEST_SEED = 2**31 - 1
"""Tables, and the generators of every library, hold it."""
MOST_SEEDS = 10_000
LARGEST_SIZE = 1 << 20
"""Of a tensor's side: three of them multiplied are still a number of bytes."""
LARGEST_COUNT = 10**9
LARGEST_NUMBER = 1e9
"""Of a config's numbers: two of them multiplied are still a number in single precision."""
COUNTS = ("steps", "_every", "epochs", "sample", "windows", "procedural", "_images", "_batches")
"""Ends of the names of what is counted one after the other and no tensor's side."""
DEEPEST_MODEL = 1000
PICTURES = ("training images", "validation images")
OF = {"model": "the model's", "images": "the inputs'"}
"""Groups of settings, and how a person says whose they are."""


def asked_dtype(config: Mapping[str, Any]) -> str:
    """The `dtype` that a diagnosed run's model was run under, from its run.json; "dtype" there is what it computed in.

    They differ for a model that was handed over in another precision.
    """
    options = config.get("settings", {}).get("options")
    asked = options.get("dtype") if isinstance(options, Mapping) else None
    return str(asked if asked is not None else config["dtype"])


def fingerprint(settings: Mapping[str, Any]) -> str:
    """SHA-256 of nested settings; neither the order of keys nor 1 written as 1.0 matters."""
    return hashlib.sha256(json.dumps(sorted(_flat(plain(settings)).items())).encode()).hexdigest()


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What changed between two nested settings, e.g. "--dtype float32 → bfloat16"; empty iff the fingerprints agree.

    Keys below "options" are written as the command line's options, those below "model" and "images" as what they are
    of, others as a path with dots; of a hash its first digits are shown. Of a group of groups ("configs") whose names
    differ these are told, and nothing of what is in one of both only; pairs of hashes below "images" are of pictures to
    train and to validate on.
    """
    told, gone = _exchanged(plain(before), plain(after))
    old, new = _flat(plain(before)), _flat(plain(after))
    for key in dict.fromkeys([*old, *new]):
        one, other = old.get(key), new.get(key)
        if one == other or not gone.isdisjoint(key[1:2]):
            continue
        pairs = list(zip(_hashes(key, one), _hashes(key, other), PICTURES, strict=False))
        if pairs:
            told += [f"other {noun} ({a[:8]}… → {b[:8]}…)" for a, b, noun in pairs if a != b]
        else:
            told.append(f"{_option(key)} {_shown(one)} → {_shown(other)}")
    return list(dict.fromkeys(told))


def _exchanged(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[str], set[str]]:
    """Of every group of groups in both settings whose names differ, the names; and all that are in one of both only."""
    told, gone = list[str](), set[str]()
    for key, old in before.items():
        new = after.get(key)
        if isinstance(new, dict) and _are_groups(old) and _are_groups(new) and old.keys() != new.keys():
            told.append(f"{key} {', '.join(old)} → {', '.join(new)}")
            gone |= old.keys() ^ new.keys()
    return told, gone


def _are_groups(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(each, dict) for each in value.values())


def _hashes(key: tuple[str, ...], value: str | None) -> list[str]:
    """The pair of hashes that a leaf below "images" is; [] for any other leaf."""
    found = re.fullmatch(r'\["([0-9a-f]{32,})", "([0-9a-f]{32,})"\]', value or "")
    return [*found.groups()] if found and key[0] == "images" else []


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
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{24,}\b", r"\1…", value.strip('"'))


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


def require_text(words: str | Path, what: str) -> None:
    """Raises InputError for a name with bytes that are no UTF-8: no JSON, page or table could tell of it."""
    try:
        str(words).encode()
    except UnicodeEncodeError as error:
        shown = str(words).encode("utf-8", "backslashreplace").decode()
        raise InputError(
            f"{what} {shown} has bytes in its name that are not UTF-8, and no file of a run could name it: rename it, "
            "or give it a link with another name."
        ) from error


def utc_now() -> str:
    """The time, to the second, as "2026-01-31T12:00:00Z"."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def safe_name(model: str) -> str:
    """A folder's name for the runs of a model, from the model's own: the part after the last slash, without `timm:`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model.removeprefix("timm:").rstrip("/").rpartition("/")[2] or model)
    return name.strip("-.") or "run"


def layer_numbers(layers: str | Iterable[int] | None) -> tuple[int, ...] | None:
    """Layers as sorted numbers, from numbers or from text like "1-23" or "0,5,7-9"; None for all.

    Raises InputError for anything else.
    """
    if layers is None:
        return None
    if not isinstance(layers, str):
        try:
            return tuple(sorted({number.__index__() for number in layers}))
        except (TypeError, AttributeError) as error:
            raise InputError(f"Layers are whole numbers like [0, 5], or text like '1-23', not {layers!r}.") from error
    found: set[int] = set()
    for part in layers.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"--layers is like 1-23 or 0,5,7-9, not {layers!r}.")
        found |= {*range(int(match[1]), int(match[2] or match[1]) + 1)}
    return tuple(sorted(found))


def library_versions(names: Iterable[str]) -> dict[str, str]:
    """Installed versions by distribution name; what is not installed is left out, but for sinklab itself."""
    from importlib import metadata

    found: dict[str, str] = {}
    for name in names:
        own = checkout_version() if name == "sinklab" else None
        try:
            found[name] = own or metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def checkout_version(package: Path = Path(__file__).parent) -> str | None:
    """The version in the pyproject.toml beside the package, where it is run from a checkout; else None.

    It comes before an installed version, which may be an older one than the code that runs.
    """
    import tomllib

    try:
        project = tomllib.loads((package.parent / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return None
    version = project.get("version") if project.get("name") == "sinklab" else None
    return version if isinstance(version, str) else None


def seed_numbers(text: str) -> list[int]:
    """Seeds from text like "0-4" or "0,2,5". Raises InputError for anything else."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,100})\s*(?:-\s*(\d{1,100})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"--seeds is like 0-4 or 0,2,5, not {text!r}.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last > LARGEST_SEED:
            raise InputError(f"A seed is a number from 0 to {LARGEST_SEED}, not {last}.")
        if last - first >= MOST_SEEDS:
            raise InputError(f"--seeds {part.strip()} are {last - first + 1:,} seeds; the most is {MOST_SEEDS:,}.")
        numbers += range(first, last + 1)
    require_seeds(numbers)
    return numbers


def require_seeds(seeds: Sequence[int]) -> None:
    """Raises InputError unless these are one or more different seeds."""
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise InputError(f"Seeds are different numbers from 0 on; {list(seeds)} was given.")
    if max(seeds) > LARGEST_SEED:
        raise InputError(f"A seed is a number from 0 to {LARGEST_SEED}, not {max(seeds)}.")


def require_numbers(config: Any, may_be_zero: Collection[str] = ()) -> None:
    """Raises InputError unless every number in a dataclass is finite and not absurd, and every whole one at least 1.

    Whole numbers in `may_be_zero` start at 0.
    """
    for entry in fields(config):
        value = getattr(config, entry.name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, float) and not math.isfinite(one):
                raise InputError(f"{entry.name} is a finite number, not {one}.")
            if isinstance(one, float) and abs(one) > LARGEST_NUMBER:
                raise InputError(f"{entry.name} is at most {LARGEST_NUMBER:g}; {one:g} was given.")
            if not isinstance(one, int) or isinstance(one, bool):
                continue
            least = int(entry.name not in may_be_zero)
            if one < least:
                raise InputError(f"{entry.name} is a number from {least} on; {one} was given.")
            if one > (most := _largest(entry.name)):
                raise InputError(f"{entry.name} is at most {most:,}; {one} was given.")


def _largest(name: str) -> int:
    if name in ("layers", "depth"):
        return DEEPEST_MODEL
    return LARGEST_COUNT if name.endswith(COUNTS) else LARGEST_SIZE
