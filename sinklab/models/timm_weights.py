"""Fit a checkpoint to one of timm's ViT classes: names, classifier, final norm, and the position table's own grid.

The architecture is built to the checkpoint (its number of classes, its grid), never the checkpoint to the architecture.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sinklab.models import matching, rename
from sinklab.models.checkpoint import Checkpoint
from sinklab.models.matching import KeyReport
from sinklab.models.request import quiet

if TYPE_CHECKING:
    from torch import Tensor, nn

Build = Callable[[dict[str, Any]], "nn.Module"]

_HEADS = ("head.", "head_dist.", "fc_norm.", "attn_pool.")
"""What follows the tokens we read: never part of `forward_features`, so a checkpoint may lack it or have more of it."""


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A filled module and what was done to fill it."""

    module: nn.Module
    report: KeyReport
    notes: tuple[str, ...]


def assemble(
    build: Build, kwargs: dict[str, Any], blueprint: nn.Module, held: Checkpoint, architecture: str
) -> Assembled:
    """Build the architecture to the checkpoint and fill it; raises InputError with the key report if it does not fit.

    `blueprint` is what `build(kwargs)` makes, on the meta device.
    """
    state, outside, notes = to_timm(held, blueprint)
    options, absent, report = _fit(build, kwargs, blueprint, state, held, outside)
    if not report.fits:
        for converted, dropped in _by_timm(build, kwargs, blueprint, held):
            attempt = _fit(build, kwargs, blueprint, converted, held, dropped)
            if attempt[2].fits:
                state, (options, absent, report) = converted, attempt
                notes = ("names brought to timm's by timm's own converter",)
                break
    matching.require_fit(report, file=held.file, architecture=architecture, advice=_advice(report))
    module = matching.fill(lambda: _without(build(options), absent), state, held.dtype, held.file)
    if absent:
        notes += (f"left out, as the weights have none: {', '.join(name.rstrip('.') for name in absent)}",)
    if "img_size" in options and "img_size" not in kwargs:
        height, width = options["img_size"]
        notes += (f"built for {height}x{width} pixels, the size of the weights' position table",)
    return Assembled(module=module, report=report, notes=held.notes + notes)


def to_timm(held: Checkpoint, blueprint: nn.Module) -> tuple[dict[str, Tensor], tuple[str, ...], tuple[str, ...]]:
    """The checkpoint's tensors under timm's names, the names set aside, and notes.

    Prefixes, chunks, the hub's and Hugging Face's spellings of a DINOv2 are understood.
    """
    state, outside, prefix = rename.without_prefix(held.state, held.file)
    notes: tuple[str, ...] = (f"prefix {prefix!r} taken off the names",) if prefix else ()
    state = rename.joined_chunks(state)
    if rename.is_huggingface(state):
        state = rename.hub_from_huggingface(state)
    had_registers = "register_tokens" in state
    state, aside = rename.timm_from_hub(state)
    if had_registers:
        notes += ("cls_token holds the sum of the class token and its position, as timm keeps it",)
    return state, outside + aside, notes


def _fit(
    build: Build,
    kwargs: dict[str, Any],
    blueprint: nn.Module,
    state: Mapping[str, Tensor],
    held: Checkpoint,
    outside: tuple[str, ...],
) -> tuple[dict[str, Any], tuple[str, ...], KeyReport]:
    options = {**_options_from(blueprint, state, kwargs), **kwargs}
    expected = matching.on_meta(lambda: build(options)).state_dict() if options != kwargs else blueprint.state_dict()
    absent = tuple(
        part
        for part in _HEADS
        if any(name.startswith(part) for name in expected) and not any(name.startswith(part) for name in state)
    )
    needed = {name: value for name, value in expected.items() if not name.startswith(absent or ("\0",))}
    report = matching.compare(needed, state, held.state, ignored=outside, optional=_HEADS)
    return options, absent, report


def _options_from(blueprint: nn.Module, state: Mapping[str, Tensor], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Constructor options that the checkpoint decides: classes, place of the final norm, grid."""
    from torch import nn

    network: Any = blueprint
    options: dict[str, Any] = {"num_classes": 0}
    if {"head.weight", "head.bias"} <= state.keys():
        options["num_classes"] = state["head.weight"].shape[0]
    pooled, plain = "fc_norm.weight" in state, "norm.weight" in state
    moved = pooled == isinstance(network.fc_norm, nn.Identity) and plain == isinstance(network.norm, nn.Identity)
    if moved and pooled != plain:
        eva = type(network).__name__ == "Eva"
        options |= {"use_fc_norm": pooled, "use_post_transformer_norm": plain} if eva else {"fc_norm": pooled}
    if "pos_embed" in state and "img_size" not in kwargs:
        options |= _size_from(network, state["pos_embed"].shape[-2])
    return options


def _size_from(network: Any, length: int, *, foreign: bool = False) -> dict[str, Any]:
    """{"img_size": …} if a table of `length` positions belongs to another square grid than the network's, else {}.

    A `foreign` table may hold another number of prefix positions than timm's.
    """
    if getattr(network, "pos_embed", None) is None or network.patch_embed.grid_size is None:
        return {}
    own = 0 if network.no_embed_class else network.num_prefix_tokens
    patches = [length - prefix for prefix in ((own, 1, 0) if foreign else (own,))]
    rows, columns = network.patch_embed.grid_size
    if rows * columns in patches:
        return {}
    side = next((math.isqrt(count) for count in patches if count > 0 and math.isqrt(count) ** 2 == count), None)
    if side is None:
        return {}
    embed = network.patch_embed
    height, width = embed.feat_ratio(as_scalar=False) if hasattr(embed, "feat_ratio") else embed.patch_size
    return {"img_size": (side * height, side * width)}


def _by_timm(
    build: Build, kwargs: dict[str, Any], blueprint: nn.Module, held: Checkpoint
) -> list[tuple[dict[str, Tensor], tuple[str, ...]]]:
    """What timm's own converter makes of the checkpoint (OpenAI, OpenCLIP, DINOv3, BEiT … spellings), if it can.

    The converter resizes position tables and patch kernels to the network it is shown, so it is shown one of the
    checkpoint's own size, and what it resized nevertheless is put back and fails the comparison of shapes.
    """
    convert = getattr(import_module(type(blueprint).__module__), "checkpoint_filter_fn", None)
    if convert is None:
        return []
    positions = [value for name, value in held.state.items() if name.endswith(("pos_embed", "positional_embedding"))]
    positions = [value for value in positions if value.shape[-1] == getattr(blueprint, "embed_dim", 0)]
    if positions and "img_size" not in kwargs:
        size = _size_from(blueprint, positions[0].shape[-2], foreign=True)
        blueprint = matching.on_meta(lambda: build({**kwargs, **size})) if size else blueprint
    plain = rename.joined_chunks(rename.without_prefix(held.state, held.file)[0])
    results = []
    for state in (plain, dict(held.state)):
        storages = {value.untyped_storage().data_ptr() for value in state.values()}
        try:
            with quiet("timm"), redirect_stdout(io.StringIO()):
                converted = dict(convert(dict(state), blueprint))
        except (LookupError, AttributeError, RuntimeError, ValueError, TypeError, AssertionError):
            # a converter that meets names it does not know fails in its own ways; the first report then stands
            continue
        for name in ("pos_embed", "patch_embed.proj.weight"):
            if name in converted and converted[name].untyped_storage().data_ptr() not in storages:
                converted.pop(name)
        used = {value.untyped_storage().data_ptr() for value in converted.values()}
        dropped = [name for name, value in held.state.items() if value.untyped_storage().data_ptr() not in used]
        results.append((converted, tuple(dropped)))
    return results


def _without(module: nn.Module, parts: tuple[str, ...]) -> nn.Module:
    """The module with those parts after the tokens replaced by nothing."""
    from torch import nn

    network: Any = module
    if "attn_pool." in parts:
        network.reset_classifier(0, global_pool="")
    for part in parts:
        if part != "attn_pool.":
            setattr(network, part.rstrip("."), nn.Identity())
    return module


def _advice(report: KeyReport) -> str:
    if [name for name, _, _ in report.mismatched] == ["pos_embed"]:
        return "A position table that is not square needs its size said: a sidecar config with kwargs img_size [h, w]."
    return "Is it the checkpoint of this architecture (width, depth, patch size, registers)?"
