"""Values of a config changed by texts like "steps=500", as --set gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from sinklab.errors import InputError, NotFoundError


def changed(config: Any, texts: Sequence[str], owner: str) -> Any:
    """The frozen dataclass `config` with all the values that the texts name; parts of a config in it have a dot.

    Lists are written with commas. Raises NotFoundError for a name that `owner` does not have, InputError for a value
    that does not fit.
    """
    values: dict[str, Any] = {}
    inner: dict[str, list[str]] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise InputError(f"--set is like steps=500, not {text!r}.")
        head, dot, rest = key.partition(".")
        known = [entry.name for entry in fields(config)]
        if head not in known or bool(dot) != is_dataclass(getattr(config, head)):
            names = [f"{name}." if is_dataclass(getattr(config, name)) else name for name in known]
            raise NotFoundError(f"{owner} has nothing called {key!r} to set; it has {', '.join(names)}.")
        if dot:
            inner.setdefault(head, []).append(f"{rest}={value}")
        else:
            values[key] = _read(key, getattr(config, head), value)
    values |= {head: changed(getattr(config, head), texts, f"{owner}'s {head}") for head, texts in inner.items()}
    return replace(config, **values)


def _read(key: str, present: Any, value: str) -> Any:
    try:
        if isinstance(present, bool):
            return {"true": True, "false": False}[value.lower()]
        if isinstance(present, tuple):
            return tuple(type(present[0])(item.strip()) for item in value.split(","))
        return type(present)(value)
    except (ValueError, KeyError):
        wanted = type(present[0] if isinstance(present, tuple) else present).__name__
        raise InputError(f"{key} is of type {wanted}, which {value!r} is not.") from None
