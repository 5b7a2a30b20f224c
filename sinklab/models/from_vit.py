"""sinklab's own vision transformers as models to be looked at: members of a training run, and the paper's checkpoints.

A member is model.safetensors with model.json beside it. One of the paper's checkpoints is known by its names
(`models.vit_file`); it needs no sidecar config, but may have one, {"model": "vit", "kwargs": {"heads": 16}}, whose
kwargs are fields of `ViTShape` that the weights do not tell.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.models.loaded import Loaded, Preprocessing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch import Tensor, nn

    from sinklab.models.request import Request
    from sinklab.models.vit import ViT

SIDECAR = "vit"
"""What a sidecar config calls the architecture."""
CROP = 224 / 256
"""The evaluation crop's share of the resized short side, in training as in the paper."""
MARKS = ("attn.gate_proj.", "gp.w_P.", "ls3.gamma")
"""Parts of names that no other library's vision transformer has."""


def load_member(path: Path, saved_request: dict[str, Any], *, name: str) -> Loaded:
    """A vision transformer of a training run, with the online probe as its classifier if that was saved.

    It is shown pictures as its training's validation showed them, and those of the validation are what it is diagnosed
    on unless others are named.
    """
    from sinklab.models.checkpoint import sha256_of
    from sinklab.models.describe import provenance
    from sinklab.models.vit_file import read_probe, read_vit

    module, about = read_vit(path)
    probe = read_probe(path)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    seen = about.get("preprocessing") or {}
    pictures = about.get("pictures")
    labelled = about.get("classes") or []
    return Loaded(
        module=module,
        tokens=module.tokens,
        preprocessing=_preprocessing(module, **_shown(seen)),
        provenance=provenance(
            module,
            name=name,
            family="vit",
            architecture=f"ViT ({about.get('arm', 'own')})",
            source=f"trained by sinklab, seed {about.get('seed')}, {about.get('step')} steps",
            sha256=sha256_of(path),
            request=saved_request,
        ),
        forward=_final_tokens,
        classify=None if probe is None else _probed(probe),
        usual_size=module.shape.image,
        pictures=pictures if isinstance(pictures, dict) else {"kind": "unknown"},
        extra={"variant": about.get("arm"), "classes": list(labelled)},
    )


def is_authors(names: Iterable[str]) -> bool:
    """Whether a checkpoint's names are those of the paper's own checkpoints."""
    from sinklab.models.vit_file import bare_name

    bare = [bare_name(name) for name in names]
    return "backbone.blocks.0.attn.qkv.weight" in bare or (
        "blocks.0.attn.qkv.weight" in bare and any(mark in name for name in bare for mark in MARKS)
    )


def from_authors_file(path: Path, request: Request) -> Loaded | None:
    """One of the paper's checkpoints without a sidecar config; None for any other file."""
    from sinklab.models.checkpoint import read

    try:
        held = read(path, allow_pickle=request.allow_pickle)
    except InputError:
        return None  # whatever it is, it needs a sidecar config that says so
    return load_authors(path, request, {}) if is_authors(held.state) else None


def load_authors(path: Path, request: Request, changes: dict[str, Any]) -> Loaded:
    """One of the paper's checkpoints, with fields of its shape that a sidecar config sets.

    Raises InputError for names that do not fit the network whole, with all of them, and where the number of heads has
    to be told.
    """
    from sinklab.models.checkpoint import read
    from sinklab.models.describe import provenance
    from sinklab.models.vit import ViT
    from sinklab.models.vit_file import HeadsNotTold, from_authors, load_into, shape_of

    _require_fields(changes, path.with_suffix(".json"))
    held = read(path, allow_pickle=request.allow_pickle)
    weights, report = from_authors(held.state)
    try:
        shape = shape_of(weights, heads=changes.get("heads"))
        module = ViT(replace(shape, **changes)).to(held.dtype)
    except HeadsNotTold as error:
        hint = f'A sidecar {path.stem}.json says it: {{"model": "{SIDECAR}", "kwargs": {{"heads": 16}}}}.'
        raise InputError(f"{path.name}: {error} {hint}") from error
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from error
    load_into(module, weights, path.name)
    for parameter in module.eval().parameters():
        parameter.requires_grad_(False)
    notes = (
        f"{path.name}: {report.sentence()}",
        f"{module.shape.heads} heads "
        + ("as its sidecar says" if "heads" in changes else "as the paper's of this width have"),
        "preprocessing assumed: ImageNet's mean and deviation, bicubic",
    )
    return Loaded(
        module=module,
        tokens=module.tokens,
        preprocessing=_preprocessing(module),
        provenance=provenance(
            module,
            name=path.stem,
            family="vit",
            architecture=_variant(module),
            source=held.file,
            sha256=held.sha256,
            notes=(*notes, *held.notes),
            request={**request.saved(), "name": str(path.resolve()), "weights": None},
        ),
        forward=_final_tokens,
        usual_size=module.shape.image,
    )


def _require_fields(changes: dict[str, Any], sidecar: Path) -> None:
    """Raises InputError unless a sidecar's kwargs are fields of `ViTShape`, with values of their kind."""
    from sinklab.models.vit import ViTShape

    usual = asdict(ViTShape())
    unknown = [name for name in changes if name not in usual]
    if unknown:
        raise InputError(
            f"{sidecar} has the kwargs {', '.join(unknown)}, which no vision transformer has; what fits is "
            f"{', '.join(usual)}."
        )
    for name, value in changes.items():
        kind = type(usual[name])
        may_be = (float, int, type(None)) if name.endswith("_scale") else (float, int) if kind is float else (kind,)
        if type(value) not in may_be:
            raise InputError(f"{sidecar}: {name} is {value!r}, which is not of the type {may_be[0].__name__}.")


def _shown(saved: dict[str, Any]) -> dict[str, Any]:
    """Mean, deviation and interpolation as they were saved."""
    known: dict[str, Any] = {name: saved[name] for name in ("mean", "std", "interpolation") if name in saved}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}


def _preprocessing(module: ViT, **saved: Any) -> Preprocessing:
    from sinklab.models.describe import IMAGENET

    side = module.shape.image
    plain = {"mean": IMAGENET[0], "std": IMAGENET[1], "interpolation": "bicubic"}
    return Preprocessing(**{**plain, **saved}, size=(side, side), crop_fraction=CROP)


def _variant(module: ViT) -> str:
    """ "ViT, 24 blocks of width 1024, elementwise gate, learned pathway, 4 registers"."""
    shape = module.shape
    parts = [f"ViT, {shape.depth} blocks of width {shape.dim}"]
    parts += [f"{shape.gate} gate"] if shape.gate != "none" else []
    parts += [f"{shape.pathway} pathway"] if shape.pathway != "none" else []
    parts += [f"{shape.registers} registers"] if shape.registers else []
    return ", ".join(parts)


def _final_tokens(module: nn.Module, pixels: Tensor) -> Tensor:
    """Pixels [B 3 H W] → tokens [B N C] after the final norm."""
    tokens: Tensor = module(pixels)
    return tokens


def _probed(probe: nn.Module) -> Callable[[nn.Module, Tensor], Tensor]:
    def classify(module: nn.Module, tokens: Tensor) -> Tensor:
        """[B N C] → logits [B classes] of the CLS token."""
        logits: Tensor = probe.to(tokens.device)(tokens[:, 0].float())
        return logits

    return classify
