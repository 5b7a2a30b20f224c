"""Weights of the vision transformer: as sinklab's own files, from and to timm, and from the paper's checkpoints.

sinklab's own are NAME.safetensors with the weights and NAME.json with what made them: "format", "shape" (`ViTShape`),
and what the training adds. Weights that begin with `probe.` are the online probe's (LayerNorm, Linear).

| timm | sinklab |
|---|---|
| `reg_token` | `register_tokens` |
| everything but the head | the same name |

| the paper's checkpoints | sinklab |
|---|---|
| `backbone.` before every name | nothing |
| `attn.gate_proj.*` | `attn.gate.*` |
| `gp.w_P.weight`, `gp.W_VG.weight`, `gp.W_OG.weight` | `pathway.pool`, `pathway.value`, `pathway.out` |
| `gp.gate.*` | `pathway.recipient.*` |
| projector, probe, and whatever else does not begin with `backbone.` | left out, and reported |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sinklab.models.vit import ViT, ViTShape

FORMAT = "sinklab-vit-1"
PROBE = "probe."
WRAPPERS = ("module.", "_orig_mod.")
RENAMED = (
    ("attn.gate_proj.", "attn.gate."),
    ("gp.w_P.", "pathway.pool."),
    ("gp.W_VG.", "pathway.value."),
    ("gp.W_OG.", "pathway.out."),
    ("gp.gate.", "pathway.recipient."),
    ("reg_token", "register_tokens"),
)
HEAD_DIM = {384: 64, 768: 64, 1024: 64, 1536: 96}
"""Of the paper's widths; a checkpoint does not say how many heads share its weights."""


class HeadsNotTold(InputError):
    """The weights leave open how many heads there are."""


@dataclass(frozen=True, kw_only=True)
class KeyReport:
    """What became of every name in a checkpoint."""

    taken: dict[str, str]
    """Name there → name here."""
    left_out: tuple[str, ...]
    """Names that belong to no part of the backbone (projector, probe, optimizer)."""

    def sentence(self) -> str:
        """In words, for a run's notes."""
        renamed = sum(there.removeprefix("backbone.") != here for there, here in self.taken.items())
        more = f"; left out: {', '.join(self.left_out[:6])}{' …' if len(self.left_out) > 6 else ''}"
        return f"{len(self.taken)} weights taken, {renamed} of them renamed{more if self.left_out else ''}"


def from_authors(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], KeyReport]:
    """The backbone's weights of one of the paper's checkpoints under sinklab's names, and what became of every key.

    Raises InputError if there is no backbone in it, or if two of its keys would be one here.
    """
    taken: dict[str, str] = {}
    weights: dict[str, Tensor] = {}
    left_out: list[str] = []
    bare = {name: bare_name(name) for name in state}
    inside = any(name.startswith("backbone.") for name in bare.values())
    for there, name in bare.items():
        if inside and not name.startswith("backbone.") or name.startswith(("head.", "fc_norm.")):
            left_out.append(there)
            continue
        here = _renamed(name.removeprefix("backbone."))
        if here in weights:
            raise InputError(f"Two weights of the checkpoint are both {here} here; one of them is {there}.")
        taken[there], weights[here] = here, state[there]
    if "blocks.0.attn.qkv.weight" not in weights:
        some = ", ".join(list(state)[:4]) or "nothing"
        raise InputError(
            f"The checkpoint holds no vision transformer: backbone.blocks.0.attn.qkv.weight is not in it, but {some} …"
        )
    return weights, KeyReport(taken=taken, left_out=tuple(left_out))


def bare_name(name: str) -> str:
    """A weight's name without what DDP and torch.compile put before it."""
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name


def _renamed(name: str) -> str:
    for there, here in RENAMED:
        if there in name:
            return name.replace(there, here)
    return name


def shape_of(weights: Mapping[str, Tensor], *, heads: int | None = None) -> ViTShape:
    """The shape that weights under sinklab's names belong to.

    `heads` is needed for widths other than the paper's, and where there is no headwise gate that tells. Numbers that
    leave no trace in weights (drop path, where LayerScale began) keep their defaults. Raises InputError for weights
    that are not of a vision transformer, or whose image is not square.
    """
    from sinklab.models.vit import ViTShape

    try:
        dim, _, patch, _ = weights["patch_embed.proj.weight"].shape
        registers = weights["register_tokens"].shape[1] if "register_tokens" in weights else 0
        side = round((weights["pos_embed"].shape[1] - 1 - registers) ** 0.5)
        hidden = weights["blocks.0.mlp.fc1.weight"].shape[0]
    except KeyError as error:
        raise InputError(f"The weights are not of a vision transformer of this kind: {error} is missing.") from error
    except (ValueError, IndexError) as error:
        raise InputError(f"The weights are not of a vision transformer of this kind: {error}.") from error
    if side**2 != weights["pos_embed"].shape[1] - 1 - registers:
        raise InputError(f"The position table of {weights['pos_embed'].shape[1]} tokens is not of a square image.")
    pathway, state_dim = _pathway(weights)
    gate_rows = weights["blocks.0.attn.gate.weight"].shape[0] if "blocks.0.attn.gate.weight" in weights else 0
    if heads is None and gate_rows not in (0, dim):
        heads = gate_rows
    if heads is None and dim not in HEAD_DIM:
        raise HeadsNotTold(f"How many heads a width of {dim} is shared by cannot be told from the weights: give heads.")
    depth = 1 + max(int(found[1]) for name in weights if (found := re.match(r"blocks\.(\d+)\.", name)))
    return ViTShape(
        image=side * patch,
        patch=patch,
        dim=dim,
        depth=depth,
        heads=dim // HEAD_DIM[dim] if heads is None else heads,
        mlp_ratio=hidden / dim,
        registers=registers,
        gate="none" if not gate_rows else "elementwise" if gate_rows == dim else "headwise",
        pathway=pathway,
        state_dim=state_dim,
        layer_scale=1e-4 if "blocks.0.ls1.gamma" in weights else None,
        pathway_scale=1.0 if "blocks.0.ls3.gamma" in weights else None,
        qkv_bias="blocks.0.attn.qkv.bias" in weights,
    )


def _pathway(weights: Mapping[str, Tensor]) -> tuple[str, int]:
    """The kind of the first block's global pathway and the size of its state. Raises InputError for half of one."""
    first = "blocks.0.pathway."
    own = {name.removeprefix(first): value for name, value in weights.items() if name.startswith(first)}
    if not own:
        return "none", 64
    missing = [name for name in ("pool.weight", "value.weight", "out.weight") if name not in own]
    if missing:
        raise InputError(
            f"The weights have a global pathway ({first}{next(iter(own))}), but not all of it: missing: "
            f"{', '.join(first + name for name in missing)}."
        )
    recipient = own.get("recipient.weight")
    kind = "uniform" if recipient is None else {1: "learned", 3: "hier"}.get(recipient.shape[0])
    if kind is None:
        raise InputError(
            f"{first}recipient.weight has {len(own['recipient.weight'])} rows; a pathway's gate has 1 (learned) or 3 "
            "(hier)."
        )
    return kind, own["value.weight"].shape[0]


def load_into(model: ViT, weights: Mapping[str, Tensor], source: str = "") -> None:
    """Fill the model whole; `source` is the file that the weights are of.

    Raises InputError with every name that is missing, unknown, or of another shape.
    """
    own = model.state_dict()
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    wrong = [
        f"{key} {list(weights[key].shape)} for {list(own[key].shape)}"
        for key in own.keys() & weights.keys()
        if own[key].shape != weights[key].shape
    ]
    told = [
        f"{words}: {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
        for words, names in (("missing", missing), ("unknown", unknown), ("of another shape", sorted(wrong)))
        if names
    ]
    if told:
        whose = f"The weights of {source}" if source else "The weights"
        raise InputError(f"{whose} do not fit the model whole. {'; '.join(told)}.")
    model.load_state_dict(weights)


def to_timm(model: ViT) -> dict[str, Tensor]:
    """The weights under timm's names, for a `VisionTransformer` of the same numbers without a head.

    Raises InputError for a network with parts that timm's has not (gate, pathway, another kernel).
    """
    shape = model.shape
    if (shape.gate, shape.pathway, shape.kernel, shape.spectral) != ("none", "none", "softmax", False):
        raise InputError("timm's vision transformer has no output gate, pathway or other kernel: it is the plain form.")
    return {name.replace("register_tokens", "reg_token"): value for name, value in model.state_dict().items()}


def timm_arguments(shape: ViTShape) -> dict[str, Any]:
    """What `timm.create_model("vit_large_patch16_224", …)` or `VisionTransformer` needs to be this network."""
    from functools import partial

    from torch import nn

    return {
        "img_size": shape.image,
        "patch_size": shape.patch,
        "embed_dim": shape.dim,
        "depth": shape.depth,
        "num_heads": shape.heads,
        "mlp_ratio": shape.mlp_ratio,
        "reg_tokens": shape.registers,
        "qkv_bias": shape.qkv_bias,
        "init_values": shape.layer_scale,
        "drop_path_rate": shape.drop_path,
        "norm_layer": partial(nn.LayerNorm, eps=shape.norm_eps),
        "num_classes": 0,
    }


def shape_from(saved: Mapping[str, Any]) -> ViTShape:
    """The shape that was saved as JSON. Raises InputError where fields are missing or unknown."""
    from sinklab.models.vit import ViTShape

    known = {entry.name for entry in fields(ViTShape)}
    if known != saved.keys():
        raise InputError(f"The saved shape differs from this version's in {', '.join(sorted(known ^ saved.keys()))}.")
    return ViTShape(**saved)


def described(shape: ViTShape) -> dict[str, Any]:
    """The beginning of a model's .json."""
    return {"format": FORMAT, "shape": asdict(shape)}


def read_vit(path: str | Path) -> tuple[ViT, dict[str, Any]]:
    """A trained model in evaluation mode from its .safetensors file, and the content of its .json.

    Raises NotFoundError if a file is missing, InputError if they are not of this kind or do not fit each other.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from sinklab.models.vit import ViT

    path = Path(path)
    for needed in (path, path.with_suffix(".json")):
        if not needed.is_file():
            raise NotFoundError(
                f"A trained vision transformer is a .safetensors file and a .json: there is no {needed}."
            )
    try:
        saved: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if saved["format"] != FORMAT:
            raise ValueError(f"its format is {saved['format']!r}, not {FORMAT!r}")
        model = ViT(shape_from(saved["shape"]))
        held = load_file(path)
        load_into(model, {name: value for name, value in held.items() if not name.startswith(PROBE)}, str(path.name))
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise InputError(f"{path} and its .json are not a trained vision transformer: {error}") from error
    return model.eval(), saved


def read_probe(path: str | Path) -> nn.Module | None:
    """The online probe saved with a trained model, CLS [B C] → logits [B classes]; None where there is none."""
    from safetensors.torch import load_file
    from torch import nn

    held = {name.removeprefix(PROBE): value for name, value in load_file(path).items() if name.startswith(PROBE)}
    if not held:
        return None
    classes, dim = held["1.weight"].shape
    probe = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))
    probe.load_state_dict(held)
    return probe.eval().requires_grad_(False)
