"""open_clip's registries: architectures, tags and files by name, and the preprocessing that goes with a tag."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from sinklab.errors import InputError, NotFoundError
from sinklab.models import hub
from sinklab.models.describe import CLIP
from sinklab.models.loaded import Preprocessing
from sinklab.models.request import Request, close_matches, pair


def split_name(rest: str) -> tuple[str, str]:
    """("ViT-B-16", "laion2b_s34b_b88k") from "ViT-B-16/laion2b_s34b_b88k"; "ViT-B/16" is understood as "ViT-B-16"."""
    import open_clip

    known = set(open_clip.list_models())
    parts = rest.split("/")
    for count in range(len(parts), 0, -1):
        architecture = "-".join(parts[:count])
        if architecture in known:
            return architecture, "/".join(parts[count:])
    raise NotFoundError(f"open_clip has no model {parts[0]!r}.{close_matches(parts[0], sorted(known))}")


def config_of(architecture: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """What builds the vision tower: `embed_dim`, `vision_cfg`, `quick_gelu`, with a sidecar's changes applied."""
    import open_clip

    config: dict[str, Any] = deepcopy(open_clip.get_model_config(architecture)) or {}
    changes = overrides.get("vision_cfg", {})
    if not isinstance(changes, dict):
        raise InputError(f"vision_cfg in a sidecar's kwargs is a JSON object, not {changes!r}.")
    vision = {**config["vision_cfg"], **changes}
    if vision.get("timm_model_name"):
        vision["timm_model_pretrained"] = False  # never fetched behind the user's back
    return {
        "embed_dim": overrides.get("embed_dim", config["embed_dim"]),
        "vision_cfg": vision,
        "quick_gelu": overrides.get("quick_gelu", config.get("quick_gelu", False)),
    }


def tag_or_file(architecture: str, tail: str, request: Request) -> tuple[str, Path | None]:
    """The tag, or the file, that holds the weights; ("", None) for random ones. Raises for anything else."""
    from open_clip import is_pretrained_cfg, list_pretrained_tags_by_model

    tags = list_pretrained_tags_by_model(architecture)
    if tail and is_pretrained_cfg(architecture, tail) and request.weights is None:
        if request.random_weights:
            raise InputError(f"{request.name} names weights ({tail}), and random weights were asked for: choose one.")
        return tail, None
    if tail and request.weights is not None:
        raise InputError(f"{request.name} names weights ({tail}), and so does weights={request.weights}: choose one.")
    path = request.weights or (Path(tail).expanduser() if tail else None)
    if path is not None and not path.is_file():
        raise NotFoundError(
            f"{architecture} has no weights tagged {tail or path.name!r}, and there is no such file; its tags: "
            f"{', '.join(tags) or 'none'}."
        )
    if path is None and not request.random_weights:
        raise InputError(
            f"openclip:{architecture} needs weights: openclip:{architecture}/TAG with one of "
            f"{', '.join(tags) or '(no tags known)'}; or /FILE; or random weights (--random-weights)."
        )
    return "", path


def registry(architecture: str, tag: str) -> dict[str, Any]:
    """open_clip's own record of a tag: where its weights are, preprocessing, whether trained with QuickGELU."""
    from open_clip.pretrained import get_pretrained_cfg

    return dict(get_pretrained_cfg(architecture, tag))


def hub_weights(architecture: str, tag: str, offline: bool) -> Path:
    """The weights of a tag, from the local cache or the hub."""
    repository, _, name = registry(architecture, tag).get("hf_hub", "").rpartition("/")
    if not repository:
        raise NotFoundError(
            f"The weights {architecture}/{tag} are not on the model hub: download them and name the file, "
            f"openclip:{architecture}/FILE."
        )
    default = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
    safe = (name.rsplit(".", 1)[0] + ".safetensors",) if name.endswith((".bin", ".pth", ".pt")) else ()
    path = hub.hub_file(repository, (*safe, name) if name else default, offline=offline)
    assert path is not None  # only an optional file can be absent
    return path


def preprocessing_of_tag(architecture: str, tag: str) -> tuple[Preprocessing, tuple[str, ...]]:
    """The preprocessing of a tag; without a tag, that of the architecture's first, and a note that says so."""
    from open_clip import list_pretrained_tags_by_model

    source = tag or next(iter(list_pretrained_tags_by_model(architecture)), "")
    preprocessing, notes = preprocessing_from(registry(architecture, source) if source else {})
    if not tag:
        whose = f"that of the tag {source}" if source else "CLIP's own"
        notes = (f"preprocessing assumed: {whose}, as the weights come without", *notes)
    return preprocessing, notes


def preprocessing_from(config: dict[str, Any]) -> tuple[Preprocessing, tuple[str, ...]]:
    """From open_clip's fields mean, std, interpolation, resize_mode and size; CLIP's own for those that are absent."""
    mode = config.get("resize_mode", "shortest")
    known = mode in ("shortest", "squash")
    preprocessing = Preprocessing(
        mean=tuple(config.get("mean", CLIP[0])),
        std=tuple(config.get("std", CLIP[1])),
        interpolation=config.get("interpolation", "bicubic"),
        size=pair(config.get("size", 224)),
        crop_mode="squash" if mode == "squash" else "center",
    )
    return preprocessing, () if known else (f"preprocessing: resize mode {mode!r} replaced by a centre crop",)
