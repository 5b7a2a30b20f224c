"""`hf:` names, and Hugging Face vision models: Dinov2 with or without registers, DINOv3 ViT, ViT, and the vision halves
of CLIP and SigLIP. Language models: see `from_huggingface_lm`.

A local folder (config.json, weights, preprocessor_config.json) is read without the network. Weights are read by
`checkpoint` and handed to transformers, which brings old parameter names up to date. Attention is always "sdpa".
Letters: B batch, N tokens, C width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError
from sinklab.models import checkpoint, hub, matching, rename
from sinklab.models.describe import activation_note, activation_of, inner, provenance
from sinklab.models.from_huggingface_lm import is_language_model, load_language_model
from sinklab.models.huggingface_config import config_from, position_table, preprocessing_of, token_map
from sinklab.models.loaded import Loaded
from sinklab.models.request import Request, building, pair
from sinklab.models.saved import read_object

if TYPE_CHECKING:
    from torch import Tensor, nn

# Tensors that whole models and heads bring along, and that the tokens never meet.
_BESIDE = (
    "text_model.",
    "visual_projection.",
    "text_projection.",
    "logit_",
    "classifier.",
    "pooler.",
    "head.",
    "decoder.",
    "embeddings.mask_token",
    "embeddings.position_ids",
)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def load_huggingface(where: str, request: Request) -> Loaded:
    """`hf:REPO_OR_DIR`: a local folder if there is one of that name, else a repository of the hub or its cache."""
    folder = Path(where).expanduser()
    local = folder.is_dir()
    if not local and (folder.is_absolute() or where.startswith((".", "~"))):
        raise NotFoundError(f"There is no folder {folder}.")
    config_path = _member(folder, local, where, ("config.json",), request.offline)
    assert config_path is not None  # `_member` raises unless told that the file is optional
    settings = read_object(config_path)
    saved = request.saved(f"hf:{folder.resolve()}" if local else None)
    weights = _weights(folder, local, where, request)
    label = folder.resolve().name if local else where
    if is_language_model(settings):
        beside = folder if local else None
        return load_language_model(settings, weights, request, label=label, folder=beside, where=where, saved=saved)
    processor = _member(folder, local, where, ("preprocessor_config.json",), request.offline, optional=True)
    told = read_object(processor) if processor else None
    return from_settings(settings, weights, request, label=label, processor=told, saved=saved)


def _weights(folder: Path, local: bool, where: str, request: Request) -> Path | None:
    """The file asked for, or that of the folder or repository; None for random weights."""
    if request.weights is not None or request.random_weights:
        return request.weights
    found = _member(folder, local, where, _WEIGHTS, request.offline)
    return _all_shards(found, local, where, request.offline)


def _member(
    folder: Path, local: bool, where: str, names: tuple[str, ...], offline: bool, *, optional: bool = False
) -> Path | None:
    if not local:
        return hub.hub_file(where, names, offline=offline, optional=optional)
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None and not optional:
        raise NotFoundError(
            f"The folder {folder} has none of the files {', '.join(names)}: it is not a model's folder."
        )
    return found


def _all_shards(index: Path | None, local: bool, where: str, offline: bool) -> Path | None:
    """Fetch every shard that a remote index names, so that they lie beside it."""
    if index is not None and not local and index.name.endswith(".index.json"):
        for name in sorted(set(read_object(index).get("weight_map", {}).values())):
            hub.hub_file(where, (name,), offline=offline)
    return index


def from_settings(
    settings: dict[str, Any],
    weights: Path | None,
    request: Request,
    *,
    label: str,
    processor: dict[str, Any] | None = None,
    saved: dict[str, Any] | None = None,
) -> Loaded:
    """The model that a config.json describes, filled from `weights`, or random if there are none.

    `label` names the origin; `saved` is what the provenance keeps of the request, if not the request itself.
    """
    if is_language_model(settings):
        beside = None if weights is None else weights.parent
        return load_language_model(settings, weights, request, label=label, folder=beside, saved=saved)
    config, name = config_from(settings, request)
    try:
        preprocessing, notes = preprocessing_of(processor, config)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"The preprocessing that comes with {label} cannot be understood: {error}") from error
    with building(name, settings):  # sizes that do not go together show here, before any weights are read
        matching.on_meta(lambda: _class(name)(config, **_options(name)))
    if weights is None:
        module = request.drawn(lambda: _class(name)(config, **_options(name)))
        source, sha256, counts = request.random_source, None, None
    else:
        held = checkpoint.read(weights, allow_pickle=request.allow_pickle)
        module, report, remarks = _filled(name, config, held)
        revision = hub.revision_of(weights)
        source = f"{label} at {revision}, {held.file}" if revision else held.file
        sha256, counts = held.sha256, report.counts()
        notes += held.notes + remarks + activation_note(label, activation_of(module))
    return Loaded(
        module=matching.frozen(module),
        tokens=token_map(module),
        preprocessing=preprocessing,
        provenance=provenance(
            module,
            name=request.name,
            family="hf",
            architecture=name,
            source=source,
            sha256=sha256,
            packages=("transformers",),
            notes=notes,
            request=saved or request.saved(),
        ),
        forward=forward_huggingface,
        extra={"position_table": position_table(module), "weights": counts},
    )


def _class(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


def _options(name: str) -> dict[str, Any]:
    return {"add_pooling_layer": False} if name == "ViTModel" else {}


def _filled(
    name: str, config: Any, held: checkpoint.Checkpoint
) -> tuple[nn.Module, matching.KeyReport, tuple[str, ...]]:
    """The model with the checkpoint in it; raises InputError with the report if anything is missing or left over."""
    state, outside, notes = _spelling(name, held)
    matching.require_floats({key: value for key, value in state.items() if not key.endswith("position_ids")}, held.file)
    module, found = pretrained(_class(name), config, state, held.dtype, **_options(name))
    report = key_report(module.state_dict(), found, held, outside, _BESIDE)
    matching.require_fit(report, file=held.file, architecture=name, advice="Does config.json belong to these weights?")
    if any(key == "embeddings.mask_token" for key in found["missing_keys"]):
        notes += ("the training mask token is not in the file and unused",)
    return module, report, notes


def pretrained(
    kind: Any, config: Any, state: Mapping[str, Tensor], dtype: Any, **options: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """transformers' model of a class with these tensors in it, and what it says of their names; without its chatter."""
    import transformers

    level, bar = (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        module, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            dtype=dtype,
            attn_implementation="sdpa",
            ignore_mismatched_sizes=True,  # they are put into the report, with everything else
            output_loading_info=True,
            **options,
        )
    finally:
        transformers.logging.set_verbosity(level)
        if bar:
            transformers.logging.enable_progress_bar()
    return module, found


def _spelling(name: str, held: checkpoint.Checkpoint) -> tuple[dict[str, Tensor], tuple[str, ...], tuple[str, ...]]:
    """The tensors without the file's prefix, Meta's or timm's DINOv2 names brought to Hugging Face's; the names left
    outside the prefix; notes."""
    state, outside, _ = rename.without_prefix(held.state, held.file)
    if name == "DINOv3ViTModel":  # a bare state_dict has this prefix, which transformers takes for a wrapper's
        return {key.removeprefix("model."): value for key, value in state.items()}, outside, ()
    if "patch_embed.proj.weight" not in state or not name.startswith(("Dinov2", "ViT")):
        return state, outside, ()
    notes = ("names brought from Meta's or timm's spelling to Hugging Face's",)
    return rename.huggingface_from_hub(rename.joined_chunks(state)), outside, notes


def key_report(
    names: Iterable[str],
    found: Mapping[str, Any],
    held: checkpoint.Checkpoint,
    outside: tuple[str, ...],
    spared: tuple[str, ...],
) -> matching.KeyReport:
    """What became of every name; those left over that begin with one of `spared` are left aside."""
    mismatched = {key: (tuple(model), tuple(file)) for key, file, model in found["mismatched_keys"]}
    missing = {key for key in found["missing_keys"] if not key.startswith("embeddings.mask_token")}
    loaded = [key for key in names if key not in missing and key not in mismatched]
    surplus = sorted(found["unexpected_keys"])
    beside = tuple(key for key in surplus if spared and key.startswith(spared))
    return matching.KeyReport(
        matched=tuple(key for key in loaded if key in held.state),
        renamed=tuple(key for key in loaded if key not in held.state),
        missing=tuple(sorted(missing)),
        unexpected=tuple(key for key in surplus if key not in beside),
        mismatched=tuple((key, *mismatched[key]) for key in sorted(mismatched)),
        ignored=outside + beside,
    )


def forward_huggingface(module: nn.Module, pixels: Tensor) -> Tensor:
    """pixels [B 3 H W] → tokens [B N C] after the final norm.

    That is `last_hidden_state`, except for CLIP, which norms its CLS token alone: here all its tokens are.
    Sizes other than the position table's are asked for with `interpolate_pos_encoding` where the model takes it.
    """
    network: Any = inner(module)
    embeddings = network.embeddings
    embed = getattr(embeddings, "patch_embeddings", None) or embeddings.patch_embedding
    parameters = inspect.signature(type(network).forward).parameters
    options = {}
    if tuple(pixels.shape[-2:]) != pair(network.config.image_size) and "interpolate_pos_encoding" in parameters:
        options["interpolate_pos_encoding"] = True
    weight = next(embed.parameters())
    tokens = module(pixel_values=pixels.to(weight.dtype), **options).last_hidden_state
    return network.post_layernorm(tokens) if network.config.model_type == "clip_vision_model" else tokens
