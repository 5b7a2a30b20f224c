"""sinklab: what is an attention sink computing — nothing (NOP), or something shared (broadcast)?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinklab.data.images import find_images
    from sinklab.diagnosis import Diagnosis, diagnose, open_run
    from sinklab.errors import InputError, NotFoundError
    from sinklab.handle import Model, attach, load
    from sinklab.hooks import site as sites
    from sinklab.hooks.cache import run_with_cache
    from sinklab.hooks.manager import HookManager, Reader
    from sinklab.hooks.proof import prove
    from sinklab.hooks.site import AttentionParts
    from sinklab.interventions.edit import Edit
    from sinklab.models.loaded import Preprocessing
    from sinklab.models.tokens import TokenMap
    from sinklab.patching import patch
    from sinklab.sinks.classify import SinkDefinition
    from sinklab.sinks.rule import SinkRule

# Public names and where they live: torch and the model libraries load when a name is first used, not before.
_HOMES = {
    "AttentionParts": "sinklab.hooks.site",
    "Diagnosis": "sinklab.diagnosis",
    "Edit": "sinklab.interventions.edit",
    "HookManager": "sinklab.hooks.manager",
    "InputError": "sinklab.errors",
    "Model": "sinklab.handle",
    "NotFoundError": "sinklab.errors",
    "Preprocessing": "sinklab.models.loaded",
    "Reader": "sinklab.hooks.manager",
    "SinkDefinition": "sinklab.sinks.classify",
    "SinkRule": "sinklab.sinks.rule",
    "TokenMap": "sinklab.models.tokens",
    "attach": "sinklab.handle",
    "diagnose": "sinklab.diagnosis",
    "find_images": "sinklab.data.images",
    "load": "sinklab.handle",
    "open_run": "sinklab.diagnosis",
    "patch": "sinklab.patching",
    "prove": "sinklab.hooks.proof",
    "run_with_cache": "sinklab.hooks.cache",
    "sites": "sinklab.hooks.site",
}
__all__ = [
    "AttentionParts",
    "Diagnosis",
    "Edit",
    "HookManager",
    "InputError",
    "Model",
    "NotFoundError",
    "Preprocessing",
    "Reader",
    "SinkDefinition",
    "SinkRule",
    "TokenMap",
    "attach",
    "diagnose",
    "find_images",
    "load",
    "open_run",
    "patch",
    "prove",
    "run_with_cache",
    "sites",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sinklab' has no attribute {name!r}")
    module = import_module(_HOMES[name])
    value = module if name == "sites" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
