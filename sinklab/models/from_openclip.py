"""The vision towers of open_clip: its own transformer (with nn.MultiheadAttention or custom blocks) and timm trunks.

Only the vision tower is built; the text tower's weights are left in the file. Positions of open_clip's own
transformer are one fixed grid. Letters: B batch, N tokens, C width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.models import checkpoint, from_timm, matching
from sinklab.models.describe import activation_note, activation_of, inner, provenance
from sinklab.models.loaded import Loaded, Preprocessing
from sinklab.models.openclip_names import (
    config_of,
    hub_weights,
    preprocessing_from,
    preprocessing_of_tag,
    registry,
    split_name,
    tag_or_file,
)
from sinklab.models.request import Request, building, pair, quiet
from sinklab.models.tokens import TokenMap

if TYPE_CHECKING:
    from torch import Tensor, nn


def load_openclip(rest: str, request: Request) -> Loaded:
    """`openclip:ARCH`, `openclip:ARCH/TAG` or `openclip:ARCH/FILE`; `request.weights` names the file as well."""
    architecture, tail = split_name(rest)
    config = config_of(architecture, request.kwargs)
    tag, path = tag_or_file(architecture, tail, request)
    preprocessing, notes = preprocessing_of_tag(architecture, tag)
    saved = request.saved(f"openclip:{architecture}" if path else None)
    if request.random_weights:
        if request.image_size:
            config["vision_cfg"]["image_size"] = request.image_size
        module = request.drawn(lambda: build(config))
        require_plain_tower(module, architecture)
        source, sha256, counts = request.random_source, None, None
    else:
        saved["weights"] = str(path.resolve()) if path else None
        path = path or hub_weights(architecture, tag, request.offline)
        held = checkpoint.read(path, allow_pickle=request.allow_pickle)
        module, report, remarks = _filled(config, held, architecture)
        source, sha256, counts = ((f"tag {tag}, {held.file}" if tag else held.file), held.sha256, report.counts())
        notes += held.notes + remarks
        quick = registry(architecture, tag).get("quick_gelu", False) if tag else None
        notes += activation_note(tag or held.file, activation_of(module), quick)
    return Loaded(
        module=matching.frozen(module),
        tokens=token_map(module),
        preprocessing=_at_size(preprocessing, module),
        provenance=provenance(
            module,
            name=request.name,
            family="openclip",
            architecture=architecture,
            source=source,
            sha256=sha256,
            packages=("open_clip_torch", "timm"),
            notes=notes,
            request=saved,
        ),
        forward=forward_openclip,
        fixed_size=fixed_size(module),
        extra={"position_table": position_table(module), "weights": counts},
    )


def build(config: dict[str, Any]) -> nn.Module:
    """The bare vision tower of one of open_clip's configurations."""
    from open_clip.model import _build_vision_tower

    with building("open_clip's vision tower", config["vision_cfg"]), quiet("timm", "root"):
        return _build_vision_tower(config["embed_dim"], dict(config["vision_cfg"]), config["quick_gelu"])


def require_plain_tower(module: nn.Module, name: str) -> None:
    """Raise InputError unless the tower is open_clip's own transformer or a timm trunk of plain ViT blocks."""
    tower: Any = module
    if hasattr(tower, "trunk"):
        from_timm.require_plain_blocks(tower.trunk, name)
    elif not hasattr(getattr(tower, "transformer", None), "resblocks"):
        raise InputError(f"The vision tower of {name} is not a transformer: what fits is a ViT tower.")


def _filled(
    config: dict[str, Any], held: checkpoint.Checkpoint, architecture: str
) -> tuple[nn.Module, matching.KeyReport, tuple[str, ...]]:
    require_plain_tower(matching.on_meta(lambda: build(config)), architecture)
    state, outside = visual_state(held.state)
    notes = _grid_from(state, config)
    expected = matching.on_meta(lambda: build(config)).state_dict()
    report = matching.compare(expected, state, held.state, ignored=outside)
    matching.require_fit(
        report,
        file=held.file,
        architecture=architecture,
        advice="Is it a checkpoint of this architecture's full CLIP or vision tower?",
    )
    return matching.fill(lambda: build(config), state, held.dtype, held.file), report, notes


def visual_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The vision tower's tensors, from a full CLIP's or from its own; and the names of the rest."""
    for prefix in ("module.visual.", "_orig_mod.visual.", "visual.", "module."):
        held = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        if held:
            return held, tuple(name for name in state if not name.startswith(prefix))
    return dict(state), ()


def _grid_from(state: Mapping[str, Tensor], config: dict[str, Any]) -> tuple[str, ...]:
    """Set the configuration's image size to the square grid of the checkpoint's own position table."""
    vision = config["vision_cfg"]
    if "positional_embedding" not in state or vision.get("timm_model_name"):
        return ()
    patch = vision.get("patch_size", 16)
    height, width = pair(vision.get("image_size", 224))
    rows, columns = pair(patch)
    patches = state["positional_embedding"].shape[0] - 1
    side = math.isqrt(max(patches, 0))
    if (height // rows) * (width // columns) == patches or side * side != patches:
        return ()
    vision["image_size"] = (side * rows, side * columns)
    return (f"built for {side * rows}x{side * columns} pixels, the size of the weights' position table",)


def token_map(module: nn.Module) -> TokenMap:
    """One class token before the patches; a timm trunk says for itself."""
    tower: Any = module
    if hasattr(tower, "trunk"):
        return from_timm.token_map(tower.trunk)
    return TokenMap(prefix=("cls",), patch_size=pair(tower.patch_size))


def fixed_size(module: nn.Module) -> tuple[int, int] | None:
    """The tower's one input size (a timm trunk says for itself)."""
    tower: Any = module
    return from_timm.fixed_size(tower.trunk) if hasattr(tower, "trunk") else pair(tower.image_size)


def position_table(module: nn.Module) -> dict[str, Any] | None:
    """Grid of the learned positions, which open_clip never resizes as it runs."""
    tower: Any = module
    if hasattr(tower, "trunk"):
        return from_timm.position_table(tower.trunk)
    return {"grid": [int(side) for side in tower.grid_size], "resize": "none: one size only"}


def preprocessing_of_model(model: nn.Module) -> tuple[Preprocessing, tuple[str, ...]]:
    """From the `preprocess_cfg` that open_clip leaves on a model it has made; CLIP's own, with a note, without one."""
    whole: Any = model
    tower = getattr(whole, "visual", whole)
    config = getattr(tower, "preprocess_cfg", None) or {}
    preprocessing, notes = preprocessing_from(dict(config))
    if not config:
        notes = ("preprocessing assumed: CLIP's own, as the model does not say", *notes)
    return _at_size(preprocessing, tower), notes


def _at_size(preprocessing: Preprocessing, module: nn.Module) -> Preprocessing:
    from dataclasses import replace

    tower: Any = module
    size = fixed_size(module) or pair(tower.trunk.patch_embed.img_size)
    return replace(preprocessing, size=size)


def forward_openclip(module: nn.Module, pixels: Tensor) -> Tensor:
    """pixels [B 3 H W] → tokens [B N C], after `ln_post` where the tower applies it to every token.

    Towers that pool first (CoCa's attentional pool, `final_ln_after_pool`) have no norm for tokens; theirs are the
    last block's output.
    """
    tower: Any = inner(module)
    if hasattr(tower, "trunk"):
        return from_timm.forward_timm(tower.trunk, pixels)
    tokens = tower.transformer(tower._embeds(pixels.to(tower.conv1.weight.dtype)))
    if tower.attn_pool is None and not tower.final_ln_after_pool:
        tokens = tower.ln_post(tokens)
    return tokens
