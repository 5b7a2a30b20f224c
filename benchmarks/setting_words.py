"""What docs/settings.md says of every value that `--set` changes, read from the config dataclasses' sources."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from typing import Any

from toy_words import markdown

NAMED = ("variant", "size", "name", "model")
"""Fields that a config's name sets, and not `--set`."""


def vit_settings() -> str:
    """Key, the paper's ViT-L, `-tiny`, what it is."""
    from sinklab.training.vit_config import ViTConfig, make_config

    return _table(
        ViTConfig, {"`baseline-L`": make_config("baseline-L"), "`baseline-tiny`": make_config("baseline-tiny")}
    )


def lm_settings() -> str:
    """Key, the large budget, the tiny one, what it is."""
    from sinklab.training.lm_config import LMConfig, make_lm_config

    return _table(LMConfig, {f"`{name}`": make_lm_config(name) for name in ("phase-5m", "phase-1m", "phase-tiny")})


def toy_settings() -> str:
    """Key, what each task has of it (paper / laptop), what it is; those of one task after those that all have."""
    from sinklab.training.toy_config import KINDS, TrainConfig, make_config

    held = {kind: [make_config(kind, name) for name in ("paper", "laptop")] for kind in KINDS}
    words, rows, shared = _words(TrainConfig), [], [entry.name for entry in fields(TrainConfig)]
    for name in shared:
        told = [[_value(getattr(config, name)) for config in pair] for pair in held.values()]
        rows.append([f"`{name}`", *(" / ".join(dict.fromkeys(pair)) for pair in told), words[name]])
    parts = ["`paper` / `laptop`, or one value where they have the same:"]
    parts.append(markdown(["key", *(f"`{kind}`" for kind in KINDS), "what it is"], rows))
    before = set(shared)
    for kind in ("nop-branch", "broadcast", "pathway"):
        configs = dict(zip(("`paper`", "`laptop`"), held[kind], strict=True))
        own = [entry.name for entry in fields(KINDS[kind]) if entry.name not in before]
        before |= set(own) if kind == "broadcast" else set()  # a pathway's config has a broadcast's values too
        also = ", beside those of `broadcast`" if kind == "pathway" else ""
        parts += [f"Of `{kind}` alone{also}:", _table(KINDS[kind], configs, own)]
    return "\n\n".join(parts)


def _words(kind: type[Any]) -> dict[str, str]:
    words: dict[str, str] = {}
    for parent in reversed(kind.__mro__[:-1]):
        words |= field_words(parent)
    return words


def _table(kind: type[Any], configs: dict[str, Any], names: list[str] | None = None) -> str:
    words = _words(kind)
    shown = names or [entry.name for entry in fields(kind)]
    rows = [
        [f"`{name}`", *(_value(getattr(config, name)) for config in configs.values()), words[name]]
        for name in shown
        if name not in NAMED
    ]
    return markdown(["key", *configs, "what it is"], rows)


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        if len(value) > 8:
            return f"{len(value)} from {_value(value[0])} to {_value(value[-1])}"
        return ", ".join(_value(one) for one in value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def field_words(kind: type[Any]) -> dict[str, str]:
    """Field → the string that stands below it in the class's source."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for entry, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[entry.target.id] = " ".join(str(after.value.value).split()).replace("|", "\\|")
    return found
