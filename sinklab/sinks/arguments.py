"""What callers give `diagnose` from Python, checked in words before anything is read, loaded or written."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError

if TYPE_CHECKING:
    from sinklab.handle import Model

WHOLE = {"batch_size": "inputs at once", "workers": "processes", "limit": "inputs", "seed": "a seed"}


def require_arguments(*, images: Any, layers: Any, size: Any, **numbers: Any) -> None:
    """Raise InputError for what is of the wrong kind; whether a number fits is for `ScanOptions` to say."""
    for name, value in numbers.items():
        if value is not None and not _is_whole(value):
            raise InputError(f"{name} is a whole number ({WHOLE[name]}), not {value!r}.")
    if size != "native" and not _is_whole(size):
        raise InputError(
            f"size is one whole number, the side of a square crop in pixels, or 'native' for the model's own "
            f"evaluation size, not {size!r}."
        )
    if layers is not None:
        _require_layers(layers)
    _require_images(images)


def require_precision(model: Model, dtype: str) -> None:
    """Raise InputError where autocast to bfloat16 would meet weights of another half precision."""
    kind = str(model.dtype).removeprefix("torch.")
    if dtype == "bfloat16" and kind not in ("float32", "bfloat16"):
        raise InputError(
            f"dtype 'bfloat16' runs a float32 or bfloat16 model under autocast, and the parameters of {model.name} are "
            f"{kind}: convert them first (module.float()), or measure them as they are with dtype 'float32'."
        )


def _is_whole(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return not hasattr(value, "dim")  # a tensor of one number is still a tensor


def _require_layers(layers: Any) -> None:
    if isinstance(layers, str):  # as the command takes them, "0,5,7-9"
        return
    if not isinstance(layers, Iterable) or not all(_is_whole(layer) for layer in layers):
        raise InputError(f"layers is a list of layer numbers from 0, like [0, 5, 7], not {layers!r}.")
    if not len(list(layers)):
        raise InputError("layers is an empty list: name at least one layer, or leave it out for all.")


def _require_images(images: Any) -> None:
    from sinklab.data.input_list import InputList

    if images is None or isinstance(images, (str, Path, InputList)):
        return
    wanted = "images are files, folders, @list.txt or .tar shards (a path or several), 'demo', or an ImageList"
    if hasattr(images, "shape") or not isinstance(images, Iterable):
        hint = (
            "; pixels already in memory are run with HookManager(model, reader).run(pixels) or run_with_cache"
            if hasattr(images, "shape") or hasattr(images, "getpixel")
            else ""
        )
        raise InputError(f"{wanted}, not {_kind(images)}{hint}.")
    strange = next((one for one in images if not isinstance(one, (str, Path))), None)
    if strange is not None:
        raise InputError(f"{wanted}, not a {type(images).__name__} with {_kind(strange)} in it.")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
