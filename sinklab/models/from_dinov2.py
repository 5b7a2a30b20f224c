"""Meta's DINOv2 files (`dinov2_vits14_pretrain.pth` and kin) in timm's architecture of the same network.

Meta's spelling, chunked blocks and the prefixes of its training code are understood; see `rename`. At the size of the
position table (518 px) the two implementations agree to rounding. At other sizes they resize the table differently:
Meta's models without registers use bicubic interpolation without antialias and a scale offset by 0.1 of a patch,
timm's use antialias and none.
"""

from __future__ import annotations

import re

from sinklab.errors import InputError, NotFoundError
from sinklab.models import checkpoint
from sinklab.models.from_timm import random_timm, timm_from_checkpoint
from sinklab.models.loaded import Loaded
from sinklab.models.request import Request, close_matches

_SIZES = {"s": "small", "b": "base", "l": "large", "g": "giant"}

RESIZE_NOTE = (
    "positions resized as timm does: at other sizes than 518 px Meta's own code, without antialias, differs slightly"
)


def dinov2_names() -> tuple[str, ...]:
    """vits14, vits14_reg, …: the names after `dinov2:`."""
    return tuple(f"vit{size}14{registers}" for size in _SIZES for registers in ("", "_reg"))


def load_dinov2(name: str, request: Request) -> Loaded:
    """`dinov2:NAME` from `request.weights`, or random if asked."""
    match = re.fullmatch(r"vit([sblg])14(_reg)?", name)
    if not match:
        known = dinov2_names()
        raise NotFoundError(f"There is no DINOv2 {name!r}; the names: {', '.join(known)}.{close_matches(name, known)}")
    kind = "patch14_reg4_dinov2" if match[2] else "patch14_dinov2"
    architecture = f"vit_{_SIZES[match[1]]}_{kind}.lvd142m"
    if request.random_weights:
        return random_timm(architecture, request, family="dinov2")
    if request.weights is None:
        file = f"dinov2_vit{match[1]}14_{'reg4_' if match[2] else ''}pretrain.pth"
        raise InputError(
            f"dinov2:{name} needs Meta's weights file, e.g. weights={file!r} (command line: --weights {file}); "
            f"timm:{architecture} fetches the same weights from the model hub."
        )
    held = checkpoint.read(request.weights, allow_pickle=request.allow_pickle)
    notes = () if match[2] else (RESIZE_NOTE,)
    return timm_from_checkpoint(architecture, held, request, family="dinov2", source=held.file, notes=notes)
