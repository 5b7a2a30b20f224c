"""A model already in memory: read its token map, preprocessing and way of calling off the module itself.

The module is handed on as it is: not copied, not unwrapped, its mode and gradients untouched. Wrappers of
torch.compile, DDP and FSDP are looked through when the module is inspected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.models.describe import IMAGENET, inner, provenance
from sinklab.models.loaded import Loaded, Preprocessing, SequenceInput
from sinklab.models.tokens import TokenMap

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sinklab.models.from_huggingface_lm import Described

Forward = Callable[["nn.Module", "Tensor"], "Tensor"]
Classify = Callable[["nn.Module", "Tensor"], "Tensor"]


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What is known of a module's class."""

    module: nn.Module
    packages: tuple[str, ...] = ()
    tokens: TokenMap | None = None
    preprocessing: Preprocessing | None = None
    forward: Forward
    classify: Classify | None = None
    fixed_size: tuple[int, int] | None = None
    position_table: dict[str, Any] | None = None
    sequences: SequenceInput | None = None
    notes: tuple[str, ...] = ()


def attached(
    module: nn.Module,
    *,
    tokens: TokenMap | None,
    preprocessing: Preprocessing | None,
    name: str,
    tokenizer: Any | None = None,
) -> Loaded:
    """The module with its token map: given, or inferred for timm, open_clip, Hugging Face, TransformerLens, Meta's and
    sinklab's own.

    Of a whole CLIP the vision tower is taken, of a classifier its backbone. Language models read text with the
    `tokenizer` (transformers'). Raises InputError for a class that is not known if no token map is given.
    """
    from torch import nn

    if not isinstance(module, nn.Module):
        raise InputError(f"A torch.nn.Module can be attached, not {type(module).__name__}.")
    family = _recognise(module, tokenizer) or _Family(module=module, forward=forward_plain)
    tokens = tokens or family.tokens
    if tokens is None:
        raise InputError(
            f"{type(inner(module)).__name__} is not a class whose tokens sinklab knows: give them, e.g. "
            "tokens=TokenMap(prefix=('cls',), patch_size=(16, 16))."
        )
    notes = family.notes
    if family.sequences is not None and preprocessing is not None:
        raise InputError(f"{type(inner(module)).__name__} reads token ids: it has no preprocessing of images.")
    if tokenizer is not None and family.sequences is None:
        raise InputError(f"{type(inner(module)).__name__} is no known language model: it takes no tokenizer.")
    if preprocessing is None and family.sequences is None:
        preprocessing = family.preprocessing
        if preprocessing is None:
            notes += ("preprocessing assumed: ImageNet mean and standard deviation, 224 pixels, bicubic",)
            preprocessing = Preprocessing(mean=IMAGENET[0], std=IMAGENET[1], interpolation="bicubic", size=(224, 224))
        if family.fixed_size:
            preprocessing = replace(preprocessing, size=family.fixed_size)
    elif preprocessing is not None:
        notes = tuple(note for note in notes if not note.startswith("preprocessing"))
    return Loaded(
        module=family.module,
        tokens=tokens,
        preprocessing=preprocessing,
        provenance=provenance(
            family.module,
            name=name,
            family="attached",
            architecture=type(inner(family.module)).__name__,
            source="attached from memory",
            packages=family.packages,
            notes=notes,
        ),
        forward=family.forward,
        classify=family.classify,
        sequences=family.sequences,
        fixed_size=family.fixed_size,
        extra={"position_table": family.position_table, "weights": None},
    )


def _recognise(module: nn.Module, tokenizer: Any | None = None) -> _Family | None:
    network = inner(module)
    origin = {cls.__module__.partition(".")[0] for cls in type(network).__mro__}
    if type(network).__module__ == "sinklab.models.vit":
        return _own(module)
    if "transformer_lens" in origin:
        return _lens(module, tokenizer)
    if "transformers" in origin:
        return _language(module, tokenizer) or _huggingface(module)
    if "open_clip" in origin:
        return _openclip(module)
    if "timm" in origin:
        return _timm(module)
    if hasattr(network, "forward_features") and hasattr(network, "num_register_tokens"):
        return _meta(module)
    return None


def _own(module: nn.Module) -> _Family:
    """sinklab's own vision transformer."""
    network: Any = inner(module)
    side, grid = network.shape.image, network.shape.grid
    return _Family(
        module=module,
        tokens=network.tokens,
        preprocessing=Preprocessing(mean=IMAGENET[0], std=IMAGENET[1], interpolation="bicubic", size=(side, side)),
        forward=forward_plain,
        position_table={"grid": [grid, grid], "resize": "bicubic with antialias"},
    )


def _language(module: nn.Module, tokenizer: Any | None) -> _Family | None:
    """A Hugging Face language model, whole or bare."""
    from sinklab.models import from_huggingface_lm

    if from_huggingface_lm.kind_of(inner(module)) is None:
        return None
    known = from_huggingface_lm.describe(module, tokenizer, name=type(inner(module)).__name__)
    return _of_text(module, known, ("transformers",))


def _lens(module: nn.Module, tokenizer: Any | None) -> _Family:
    """A TransformerLens bridge, with its own tokenizer unless another is given."""
    from sinklab.models import from_transformerlens

    known = from_transformerlens.describe(module, tokenizer, name=type(inner(module)).__name__)
    return _of_text(module, known, ("transformer_lens", "transformers"))


def _of_text(module: nn.Module, known: Described, packages: tuple[str, ...]) -> _Family:
    return _Family(
        module=module,
        packages=packages,
        tokens=known.tokens,
        forward=known.forward,
        classify=known.classify,
        sequences=known.sequences,
        notes=known.notes,
    )


def _timm(module: nn.Module) -> _Family:
    from sinklab.models import from_timm

    network = inner(module)
    from_timm.require_plain_blocks(network, type(network).__name__)
    preprocessing, notes = from_timm.preprocessing_of(network)
    return _Family(
        module=module,
        packages=("timm",),
        tokens=from_timm.token_map(network),
        preprocessing=preprocessing,
        forward=from_timm.forward_timm,
        classify=from_timm.classifier(network),
        fixed_size=from_timm.fixed_size(network),
        position_table=from_timm.position_table(network),
        notes=notes,
    )


def _openclip(module: nn.Module) -> _Family:
    from sinklab.models import from_openclip

    network: Any = inner(module)
    whole = hasattr(network, "visual")
    tower = network.visual if whole else network
    from_openclip.require_plain_tower(tower, type(network).__name__)
    preprocessing, notes = from_openclip.preprocessing_of_model(network)
    return _Family(
        module=tower if whole else module,
        packages=("open_clip_torch", "timm"),
        tokens=from_openclip.token_map(tower),
        preprocessing=preprocessing,
        forward=from_openclip.forward_openclip,
        fixed_size=from_openclip.fixed_size(tower),
        position_table=from_openclip.position_table(tower),
        notes=notes,
    )


def _huggingface(module: nn.Module) -> _Family:
    from sinklab.models import from_huggingface, huggingface_config

    network: Any = inner(module)
    known = huggingface_config.known_classes()
    # `base_model` of a known class may be a part of it (DINOv3's is its encoder), so the module itself comes first.
    within = (network, getattr(network, "vision_model", None), getattr(network, "base_model", None))
    tower = next((part for part in within if type(part).__name__ in known), None)
    if tower is None:
        raise InputError(
            f"{type(network).__name__} is not a vision model that sinklab knows; those are "
            f"{', '.join(sorted(known))}, whole or inside a classifier or CLIP."
        )
    preprocessing, notes = huggingface_config.preprocessing_of(None, tower.config)
    return _Family(
        module=module if tower is network else tower,
        packages=("transformers",),
        tokens=huggingface_config.token_map(tower),
        preprocessing=preprocessing,
        forward=from_huggingface.forward_huggingface,
        position_table=huggingface_config.position_table(tower),
        notes=notes,
    )


def _meta(module: nn.Module) -> _Family:
    """Meta's own DINOv2 class, as torch.hub hands it out."""
    network: Any = inner(module)
    patch = network.patch_size
    side = int(patch) if isinstance(patch, int) else int(patch[0])
    tokens = TokenMap(prefix=("cls",) + ("register",) * network.num_register_tokens, patch_size=(side, side))
    return _Family(module=module, tokens=tokens, forward=forward_meta)


def forward_meta(module: nn.Module, pixels: Tensor) -> Tensor:
    """pixels [B 3 H W] → tokens [B N C] from the dictionary of parts that Meta's classes return."""
    import torch

    network: Any = inner(module)
    parts = network.forward_features(pixels)
    tokens = [parts["x_norm_clstoken"].unsqueeze(1), parts["x_norm_regtokens"], parts["x_norm_patchtokens"]]
    return torch.cat(tokens, dim=1)


def forward_plain(module: nn.Module, pixels: Tensor) -> Tensor:
    """What a module of an unknown class returns: its tensor, the first of its tuple, or its `last_hidden_state`."""
    returned: Any = module(pixels)
    returned = getattr(returned, "last_hidden_state", returned)
    return returned[0] if isinstance(returned, tuple | list) else returned
