"""timm's plain vision transformers: `VisionTransformer` (DINOv2, DeiT, CLIP and SigLIP towers), `Eva` (EVA, DINOv3),
`Beit` and their kin, from timm's own weights, from a local file, or random.

Models are built so that other input sizes work without touching the weights (`dynamic_img_size`) where the class
allows it. Letters: B batch, N tokens, C width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError
from sinklab.models import checkpoint, hub, matching
from sinklab.models.describe import activation_note, activation_of, inner, provenance
from sinklab.models.loaded import Loaded, Preprocessing
from sinklab.models.request import Request, building, close_matches
from sinklab.models.timm_weights import assemble
from sinklab.models.tokens import TokenMap

if TYPE_CHECKING:
    from torch import Tensor, nn

PLAIN_MODULES = ("vision_transformer", "eva", "beit", "deit", "vision_transformer_hybrid", "vision_transformer_relpos")
"""The modules of timm.models whose networks are a row of plain ViT blocks over one unchanging token sequence."""


def load_timm(name: str, request: Request) -> Loaded:
    """`timm:NAME`: from `request.weights`, else random if asked, else timm's own weights from the hub or its cache."""
    full = known_architecture(name)
    if request.random_weights:
        return random_timm(name, request, family="timm")
    notes: tuple[str, ...] = ()
    if request.weights is None:
        path, label = _hub_weights(full, request.offline), full
    else:
        path, label = request.weights, name
        if name != full:
            notes = (f"preprocessing assumed: that of timm's {full}, as the weights come without",)
    held = checkpoint.read(path, allow_pickle=request.allow_pickle)
    revision = hub.revision_of(path)
    source = f"{hub.repository_of(path)} at {revision}, {held.file}" if revision else held.file
    return timm_from_checkpoint(label, held, request, family="timm", source=source, notes=notes)


def random_timm(architecture: str, request: Request, *, family: str) -> Loaded:
    """The architecture with weights drawn from `request.seed`."""
    kwargs: dict[str, Any] = {"num_classes": 0, **request.kwargs}
    if request.image_size:
        kwargs["img_size"] = request.image_size
    require_plain_blocks(matching.on_meta(lambda: build(architecture, kwargs)), architecture)
    module = request.drawn(lambda: build(architecture, kwargs))
    return _loaded(module, architecture, request, family=family, source=request.random_source)


def timm_from_checkpoint(
    architecture: str,
    held: checkpoint.Checkpoint,
    request: Request,
    *,
    family: str,
    source: str,
    notes: tuple[str, ...] = (),
) -> Loaded:
    """The architecture filled from a checkpoint that fits it whole; raises InputError with a report otherwise."""
    blueprint = matching.on_meta(lambda: build(architecture, request.kwargs))
    require_plain_blocks(blueprint, architecture)
    assembled = assemble(lambda kwargs: build(architecture, kwargs), request.kwargs, blueprint, held, architecture)
    notes += assembled.notes + activation_note(f"{architecture} {held.file}", activation_of(assembled.module))
    return _loaded(
        assembled.module,
        architecture,
        request,
        family=family,
        source=source,
        sha256=held.sha256,
        counts=assembled.report.counts(),
        notes=notes,
    )


def known_architecture(name: str) -> str:
    """The full name (architecture and tag, timm's first if none is given); raises NotFoundError with close matches, or
    InputError if it names a network without plain ViT blocks."""
    import timm
    from timm.models import get_pretrained_cfg, model_entrypoint

    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise NotFoundError(f"timm has no model {architecture!r}.{close_matches(architecture, timm.list_models())}")
    if model_entrypoint(architecture).__module__.rpartition(".")[2] not in PLAIN_MODULES:
        raise InputError(_not_plain(architecture))
    try:
        config = get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError:
        config = None
    if config is None and tag:
        tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
        raise NotFoundError(
            f"timm's {architecture} has no weights tagged {tag!r}; its tags: {', '.join(tags) or 'none'}."
        )
    return f"{architecture}.{config.tag}" if config is not None and config.tag else architecture


def _not_plain(name: str) -> str:
    return (
        f"{name} has no plain ViT blocks (one softmax self-attention per block, over the same tokens throughout): "
        "what fits is a timm ViT, DeiT, DINOv2, DINOv3, EVA, BEiT, or a CLIP or SigLIP tower."
    )


def require_plain_blocks(module: nn.Module, name: str) -> None:
    """Raise InputError unless the module is a row of blocks with one softmax attention each over an image's patches."""
    from timm.layers import DiffAttention

    if hasattr(module, "blocks") and not hasattr(module, "patch_embed"):  # NaFlexViT
        raise InputError(
            f"{name} takes sequences of patches of any shape, so a token's place in the image cannot be known: build "
            "the ordinary vision transformer of the same weights."
        )
    homes = {cls.__module__.rpartition(".")[2] for cls in type(module).__mro__ if cls.__module__.startswith("timm.")}
    if not homes & set(PLAIN_MODULES):  # XCiT attends over channels, CaiT mixes the heads, under the same names
        raise InputError(_not_plain(name))

    blocks = getattr(module, "blocks", None)
    attentions = [getattr(block, "attn", None) for block in blocks] if blocks is not None else []
    plain = bool(attentions) and all(
        hasattr(attention, "qkv") or hasattr(attention, "q_proj") for attention in attentions
    )
    if not plain or not hasattr(module, "num_prefix_tokens") or isinstance(attentions[0], DiffAttention):
        raise InputError(_not_plain(name))


def build(architecture: str, kwargs: dict[str, Any]) -> nn.Module:
    """The bare architecture, taking any input size where its class can; raises InputError for unknown options."""
    import timm

    with building(architecture, kwargs):
        try:
            return timm.create_model(architecture, pretrained=False, **{"dynamic_img_size": True, **kwargs})
        except TypeError as error:
            if "dynamic_img_size" not in str(error):
                raise
        return timm.create_model(architecture, pretrained=False, **kwargs)


def _hub_weights(architecture: str, offline: bool) -> Path:
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg(architecture)
    if config is None or not config.hf_hub_id:
        raise NotFoundError(
            f"timm knows no weights for {architecture}: name a file with weights=… (command line: --weights FILE), "
            "or ask for random weights (--random-weights)."
        )
    named = config.hf_hub_filename
    names: tuple[str, ...] = ("model.safetensors", "pytorch_model.bin")
    if named:
        names = (named.replace("pytorch_model.bin", "model.safetensors"), named) if named.endswith(".bin") else (named,)
    path = hub.hub_file(config.hf_hub_id, names, offline=offline)
    assert path is not None  # only an optional file can be absent
    return path


def _loaded(
    module: nn.Module,
    architecture: str,
    request: Request,
    *,
    family: str,
    source: str,
    sha256: str | None = None,
    counts: dict[str, int] | None = None,
    notes: tuple[str, ...] = (),
) -> Loaded:
    preprocessing, remarks = preprocessing_of(module)
    return Loaded(
        module=matching.frozen(module),
        tokens=token_map(module),
        preprocessing=preprocessing,
        provenance=provenance(
            module,
            name=request.name,
            family=family,
            architecture=architecture,
            source=source,
            sha256=sha256,
            packages=("timm",),
            notes=remarks + notes,
            request=request.saved(),
        ),
        forward=forward_timm,
        classify=classifier(module),
        fixed_size=fixed_size(module),
        extra={"position_table": position_table(module), "weights": counts},
    )


def patch_size(module: nn.Module) -> tuple[int, int]:
    """Height and width in pixels of what becomes one token."""
    embed: Any = module.patch_embed
    height, width = embed.feat_ratio(as_scalar=False) if hasattr(embed, "feat_ratio") else embed.patch_size
    return int(height), int(width)


def token_map(module: nn.Module) -> TokenMap:
    """CLS first, then registers, then patches; DeiT's distillation token is a second class token."""
    network: Any = module
    classes = sum(getattr(network, name, None) is not None for name in ("cls_token", "dist_token"))
    registers = network.num_prefix_tokens - classes
    return TokenMap(prefix=("cls",) * classes + ("register",) * registers, patch_size=patch_size(module))


def fixed_size(module: nn.Module) -> tuple[int, int] | None:
    """The one input size the module takes, or None if it takes any number of whole patches."""
    network: Any = module
    if getattr(network, "dynamic_img_size", False):
        return None
    height, width = network.patch_embed.img_size
    return int(height), int(width)


def position_table(module: nn.Module) -> dict[str, Any] | None:
    """Grid of the learned absolute positions and how the module resizes them; None without such a table."""
    network: Any = module
    if getattr(network, "pos_embed", None) is None:
        return None
    resize = "bicubic with antialias (timm)" if getattr(network, "dynamic_img_size", False) else "none: one size only"
    return {"grid": [int(side) for side in network.patch_embed.grid_size], "resize": resize}


def preprocessing_of(module: nn.Module) -> tuple[Preprocessing, tuple[str, ...]]:
    """From the module's own `pretrained_cfg`, and a note for whatever had to be assumed."""
    network: Any = module
    config = dict(getattr(network, "pretrained_cfg", None) or {})
    notes = []
    if not {"mean", "std"} <= config.keys():
        notes.append("preprocessing assumed: ImageNet mean and standard deviation, bicubic")
    interpolation = config.get("interpolation") or "bicubic"
    if interpolation not in ("nearest", "bilinear", "bicubic", "lanczos"):
        notes.append(f"preprocessing: interpolation {interpolation!r} replaced by bicubic")
        interpolation = "bicubic"
    mode = config.get("crop_mode") or "center"
    if mode not in ("center", "squash"):
        notes.append(f"preprocessing: crop mode {mode!r} replaced by a centre crop")
        mode = "center"
    from sinklab.models.describe import IMAGENET

    size = network.patch_embed.img_size or config.get("input_size", (3, 224, 224))[1:]
    preprocessing = Preprocessing(
        mean=tuple(config.get("mean", IMAGENET[0])),
        std=tuple(config.get("std", IMAGENET[1])),
        interpolation=interpolation,
        size=(int(size[0]), int(size[1])),
        crop_fraction=float(config.get("crop_pct") or 1.0),
        crop_mode=mode,
    )
    return preprocessing, tuple(notes)


def forward_timm(module: nn.Module, pixels: Tensor) -> Tensor:
    """pixels [B 3 H W] → tokens [B N C] after the final norm (or before the pooled one, where that is the only norm).

    Pixels beyond the last whole patch are left out, as the other families' convolutions do.
    """
    network: Any = inner(module)
    weight = next(network.patch_embed.parameters())
    if getattr(network, "dynamic_img_size", False):
        height, width = patch_size(network)
        pixels = pixels[..., : pixels.shape[-2] // height * height, : pixels.shape[-1] // width * width]
    return network.forward_features(pixels.to(weight.dtype))


def classifier(module: nn.Module) -> Callable[[nn.Module, Tensor], Tensor] | None:
    """Tokens → logits by timm's own head; None for a model without one."""
    from torch import nn

    head = getattr(inner(module), "head", None)
    return None if head is None or isinstance(head, nn.Identity) else classify_timm


def classify_timm(module: nn.Module, tokens: Tensor) -> Tensor:
    """Final tokens [B N C] → logits [B classes]: pooling, the pooled norm and the linear head."""
    network: Any = inner(module)
    return network.forward_head(tokens)
