"""Models named by a path: a checkpoint file with a sidecar config beside it, or the folder of an earlier run.

The sidecar of `weights.pth` (or `.safetensors`, …) is `weights.json`:

    {"model": "timm:vit_small_patch16_224",       which architecture; see below
     "kwargs": {"img_size": [256, 128]},          optional: the architecture's own options
     "preprocessing": {"mean": [0.5, 0.5, 0.5]}}  optional: fields of `Preprocessing` that differ

| model | kwargs |
|---|---|
| `timm:NAME` | options of `timm.create_model` |
| `openclip:ARCH` | `embed_dim`, `quick_gelu`, and `vision_cfg` fields of open_clip's configuration |
| `dinov2:NAME` | options of `timm.create_model` |
| `hf` | what config.json would hold, `model_type` included |
| `vit` | fields of `models.vit.ViTShape`, for one of the paper's checkpoints |
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sinklab.errors import InputError, NotFoundError
from sinklab.models.loaded import Loaded, Preprocessing
from sinklab.models.request import Request

_EXAMPLE = '{"model": "timm:vit_small_patch16_224"}'


def read_sidecar(path: Path) -> dict[str, Any]:
    """The sidecar config of a checkpoint file, checked; raises InputError or NotFoundError."""
    sidecar = path.with_suffix(".json")
    if not sidecar.is_file():
        raise NotFoundError(
            f"{path.name} does not say which architecture it belongs to: put a file {sidecar.name} beside it, e.g. "
            f"{_EXAMPLE}, or name the architecture and give the file as weights (timm:NAME --weights {path.name})."
        )
    held = read_object(sidecar)
    unknown = held.keys() - {"model", "kwargs", "preprocessing"}
    if not isinstance(held.get("model"), str) or unknown:
        wrong = f"unknown field {min(unknown)!r}" if unknown else 'no "model"'
        raise InputError(f"{sidecar} has {wrong}; what fits is {_EXAMPLE}, with optional kwargs and preprocessing.")
    for name in ("kwargs", "preprocessing"):
        if not isinstance(held.setdefault(name, {}), dict):
            raise InputError(f"{sidecar}: {name} must be a JSON object, not {held[name]!r}.")
    strange = held["preprocessing"].keys() - {entry.name for entry in fields(Preprocessing)}
    if strange:
        known = ", ".join(entry.name for entry in fields(Preprocessing))
        raise InputError(f"{sidecar}: preprocessing has no field {min(strange)!r}; its fields: {known}.")
    return held


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises InputError if it is anything else."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(held, dict):
        raise InputError(f"{path} holds a {type(held).__name__} where a JSON object is expected.")
    return held


def with_preprocessing(loaded: Loaded, changes: dict[str, Any], sidecar: Path) -> Loaded:
    """The same model with some fields of its preprocessing set by the sidecar; InputError for what they cannot be."""
    if not changes:
        return loaded
    told: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    if isinstance(told.get("size"), int):
        told["size"] = (told["size"], told["size"])
    try:
        assert loaded.preprocessing is not None  # a sidecar is of a vision model
        preprocessing = replace(loaded.preprocessing, **told)
    except InputError as error:
        raise InputError(f"{sidecar}: {error}") from error
    kept = tuple(note for note in loaded.provenance.notes if not note.startswith("preprocessing assumed"))
    noted = replace(loaded.provenance, notes=(*kept, f"preprocessing from the sidecar config: {', '.join(changes)}"))
    return replace(loaded, preprocessing=preprocessing, provenance=noted)


def images_come_second(images: Path, asked: Request) -> str:
    """What to type where a folder or a picture stands in the model's place."""
    with_weights = asked.weights is not None
    model = f"timm:NAME {images} --weights {asked.weights}" if with_weights else f"demo {images}"
    return f"Images come after the model: sinklab diagnose {model}."


def request_from_run(folder: Path, asked: Request) -> tuple[Request, str | None]:
    """The request that gave the model which the run in `folder` looked at, and the weights' digest then.

    Raises InputError if the folder is not such a run.
    """
    record = folder / "run.json"
    if not record.is_file():
        hint = f": for a Hugging Face folder write hf:{folder}" if (folder / "config.json").is_file() else ""
        raise InputError(f"{folder} is not a run folder, it has no run.json{hint}. {images_come_second(folder, asked)}")
    if asked.weights is not None or asked.random_weights or asked.image_size is not None:
        raise InputError(f"{folder} is a run folder and brings its own weights: give no other options with it.")
    model = read_object(record).get("model")
    if not isinstance(model, dict):
        raise InputError(f"{record} does not say which model the run looked at.")
    if model.get("family") == "attached":
        raise InputError(f"The run in {folder} looked at a module attached from memory: attach that module again.")
    saved = model.get("request")
    if not isinstance(saved, dict) or "name" not in saved:
        raise InputError(f"The run in {folder} does not record a model that can be loaded again.")
    weights = Path(saved["weights"]) if saved.get("weights") else None
    if weights is not None and not weights.is_file():
        raise NotFoundError(f"The run in {folder} looked at the weights {weights}, which are no longer there.")
    size = saved.get("image_size")
    again = replace(
        asked,
        name=saved["name"],
        weights=weights,
        random_weights=bool(saved.get("random_weights")),
        seed=int(saved.get("seed", 0)),
        image_size=(int(size[0]), int(size[1])) if size else None,
    )
    return again, model.get("sha256")


def require_same_weights(loaded: Loaded, digest: str | None, folder: Path) -> None:
    """Raise InputError if the weights are no longer those that the run looked at."""
    if digest and loaded.provenance.sha256 != digest:
        raise InputError(
            f"The weights of {loaded.provenance.name} have changed since the run in {folder} "
            f"(sha256 then {digest[:12]}…, now {str(loaded.provenance.sha256)[:12]}…)."
        )
