"""Where a model attends: one `Site` a layer, found by the names of its parts and never by the name of its class.

Libraries rename and flatten their classes, but the parameters of a checkpoint keep their names; so a locator
recognises an attention module by what hangs on it (`qkv` and `proj`, `in_proj_weight`, `q_proj … o_proj`) and a
block by its two norms. A user's own attention class joins with `register`.

Letters: C model dim, H query heads, K key/value heads, D head dim (of values).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.attention_parts import AttentionParts as AttentionParts
from sinklab.hooks.phase import phase_of
from sinklab.hooks.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

# The two norms of a pre-norm block, then where its attention LayerScale may be: the first path that exists is used.
BLOCK_NORMS = (
    ("norm1", "after_attention"),  # sinklab's own blocks say where the attention's update, and no more, has been added
    ("norm1", "norm2"),  # timm, DINOv2, DINOv3, Hugging Face Dinov2
    ("ln_1", "ln_2"),  # OpenCLIP, GPT-2
    ("layernorm_before", "layernorm_after"),  # Hugging Face ViT
    ("layer_norm1", "layer_norm2"),  # Hugging Face CLIP and SigLIP
    ("input_layernorm", "post_attention_layernorm"),  # Hugging Face Llama and its relatives
    ("sa_layer_norm", "sa_layer_norm"),  # DistilBERT norms after the update has been added, so the norm sees both
)
LAYER_SCALES = ("ls1.gamma", "ls_1.gamma", "gamma_1", "layer_scale1.lambda1", "lambda_1")


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """One attention layer of one model.

    `layer` counts from 0 in the order of the model's own modules; `name` and `block` are module paths as
    `named_modules` gives them.
    """

    layer: int
    name: str
    block: str
    attention: nn.Module = field(repr=False)
    block_module: nn.Module = field(repr=False)
    second_norm: nn.Module | None = field(repr=False)
    """Its input is the residual stream between attention and MLP (resid_mid)."""
    layer_scale: Tensor | None = field(repr=False)
    """γ [C], or None."""
    tokens_first: bool = field(default=False, repr=False)
    """True if the block's tensors run [token batch C] instead of [batch token C]."""
    parts: AttentionParts = field(repr=False)

    @property
    def heads(self) -> int:
        """H."""
        return self.parts.heads

    @property
    def kv_heads(self) -> int:
        """K; a query head h reads key/value head h // (H / K)."""
        return self.parts.kv_heads or self.parts.heads

    @property
    def axis(self) -> str:
        """What a sink's size is measured by: its "value", or its "contribution" where all values have one norm."""
        return "value" if self.parts.phase is None else "contribution"

    @property
    def head_dim(self) -> int:
        """D of the values, from the shape of W_O: H·D need not be the model's width."""
        if self.parts.phase is not None:
            return self.parts.phase.head_dim
        return int(_output(self.parts).shape[1]) // self.parts.heads

    @property
    def projection_dtype(self) -> Any:
        """The weights' own floating point type."""
        return self.parts.phase.dtype if self.parts.phase is not None else _output(self.parts).dtype

    def output_weight(self) -> Tensor:
        """Γ W_O as [H, C, D] in float64: head h adds z_h @ output_weight[h].T to the residual stream (sinks.md 1).

        Where values are phases: to G [2k], which is not what is added to the stream.
        """
        if self.parts.phase is not None:
            return self.parts.phase.places()
        weight = _output(self.parts).detach().double()
        weight = weight.reshape(weight.shape[0], self.heads, -1).transpose(0, 1)  # [H, C, D]
        if self.parts.head_scale is not None:
            weight = weight * self.parts.head_scale().detach().double().reshape(-1, 1, 1)
        if self.layer_scale is not None:
            weight = weight * self.layer_scale.detach().double()[None, :, None]
        return weight

    def output_bias(self) -> Tensor | None:
        """Γ b_O [C] in float64, or None: the part of the update that no head owns."""
        bias = getattr(self.parts.projection, "bias", None)
        if bias is None:
            return None
        bias = bias.detach().double()
        return bias if self.layer_scale is None else bias * self.layer_scale.detach().double()


def _output(parts: AttentionParts) -> Tensor:
    """W_O as [C, H·D]."""
    projection: Any = parts.projection
    weight: Tensor = projection.weight if parts.output is None else parts.output()
    return weight


Locator = Callable[[Any], "AttentionParts | None"]
_registered: dict[type, Locator] = {}


def register(attention: type, describe: Locator) -> None:
    """Teach sinklab a user's own attention class.

    Args:
        attention: the class. It must call `torch.nn.functional.scaled_dot_product_attention` once a forward.
        describe: module → `AttentionParts` (heads, projection, and what else is known).

    The block round it is found by its two norms or, failing that, taken to be the parent module. A subclass is taken
    for its parent unless it is registered too. Registering a class again replaces what was said before.
    """
    _registered[attention] = describe


def _rows(weight: Tensor, part: int, parts: int = 3) -> Callable[[], Tensor]:
    size = weight.shape[0] // parts
    return lambda: weight[part * size : (part + 1) * size]


def _separate(module: Any, query: Any, key: Any, projection: Any, heads: int, after: str | None) -> AttentionParts:
    head_dim = query.weight.shape[0] // heads
    return AttentionParts(
        heads=heads,
        kv_heads=key.weight.shape[0] // head_dim,
        projection=projection,
        query_weight=lambda: query.weight,
        key_weight=lambda: key.weight,
        after=after,
    )


def _after(module: Any) -> str | None:
    """What acts on z before W_O in timm's attention: `norm` (scale_norm) or `gate`; both are read before they act."""
    if getattr(module, "gate", None) is not None:
        return "gate"
    inner = getattr(module, "norm", None) or getattr(module, "ln_inner", None)
    return None if inner is None or type(inner).__name__ == "Identity" else "norm"


def _timm(module: Any) -> AttentionParts | None:
    projection: Any = getattr(module, "proj", None)
    heads = getattr(module, "num_heads", None)
    if heads is None or getattr(projection, "weight", None) is None:
        return None
    qkv: Any = getattr(module, "qkv", None)
    if getattr(qkv, "weight", None) is not None:
        return AttentionParts(
            heads=heads,
            projection=projection,
            query_weight=_rows(qkv.weight, 0),
            key_weight=_rows(qkv.weight, 1),
            after=_after(module),
            gate=module.gate if getattr(getattr(module, "gate", None), "multiplies_z", False) else None,
        )
    if getattr(module, "q_proj", None) is not None and getattr(module, "k_proj", None) is not None:
        return _separate(module, module.q_proj, module.k_proj, projection, heads, _after(module))
    return None


def _in_proj(module: Any) -> AttentionParts | None:
    """`nn.MultiheadAttention` and OpenCLIP's own Attention share these parameter names."""
    projection: Any = getattr(module, "out_proj", None)
    heads = getattr(module, "num_heads", None)
    if heads is None or getattr(projection, "weight", None) is None or not hasattr(module, "in_proj_weight"):
        return None
    from torch import nn

    if getattr(module, "logit_scale", None) is not None:
        raise InputError(
            "Scaled cosine attention never calls scaled_dot_product_attention: sinklab cannot read this model. "
            "Build the tower without scaled_cosine."
        )
    weight = module.in_proj_weight
    scale = getattr(module, "head_scale", None)
    return AttentionParts(
        heads=heads,
        projection=projection,
        query_weight=_rows(weight, 0) if weight is not None else lambda: module.q_proj_weight,
        key_weight=_rows(weight, 1) if weight is not None else lambda: module.k_proj_weight,
        head_scale=None if scale is None else lambda: module.head_scale,
        after=_after(module),
        stand_in=isinstance(module, nn.MultiheadAttention),
    )


def _hugging_face(module: Any) -> AttentionParts | None:
    projection = getattr(module, "o_proj", None) or getattr(module, "out_proj", None)
    query, key = getattr(module, "q_proj", None), getattr(module, "k_proj", None)
    if projection is None or query is None or key is None or getattr(query, "weight", None) is None:
        return None
    head_dim = getattr(module, "head_dim", None)
    heads = getattr(module, "num_heads", None) or getattr(module, "num_attention_heads", None)
    heads = heads or (query.weight.shape[0] // head_dim if head_dim else None)
    return None if heads is None else _separate(module, query, key, projection, heads, None)


def _hugging_face_old(module: Any) -> AttentionParts | None:
    """transformers before the flattening: `attention.attention.query`, `attention.output.dense`."""
    inner: Any = getattr(module, "attention", None)
    dense: Any = getattr(getattr(module, "output", None), "dense", None)
    if dense is None or getattr(inner, "query", None) is None:
        return None
    return _separate(module, inner.query, inner.key, dense, inner.num_attention_heads, None)


def _phases(module: Any) -> AttentionParts | None:
    """Kuramoto attention: no weight stands between z and G."""
    phase = phase_of(module)
    return None if phase is None else AttentionParts(heads=phase.heads, projection=phase.read, phase=phase)


LOCATORS: tuple[Locator, ...] = (_phases, _hugging_face_old, _in_proj, _timm, _hugging_face)


def _describe(module: nn.Module) -> tuple[AttentionParts | None, bool]:
    for kind in type(module).__mro__:  # the most specific class that was registered
        if kind in _registered:
            return _registered[kind](module), True
    from sinklab.hooks.language import LOCATORS as LANGUAGE

    for locator in (*LANGUAGE, *LOCATORS):
        parts = locator(module)
        if parts is not None:
            return parts, False
    return None, False


def _lookup(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _second_norm(block: nn.Module) -> nn.Module | None:
    children = dict(block.named_children())
    return next((children[second] for first, second in BLOCK_NORMS if first in children and second in children), None)


def find_sites(model: nn.Module) -> list[Site]:
    """Every attention layer of a model, in order; wrappers (DDP, FSDP, torch.compile) are looked through.

    An attention module counts only inside a block with two norms (or if its class was registered): pooling
    heads are not layers. Raises NotFoundError if there is none, with what was looked for.
    """
    module = unwrap(model)
    modules = dict(module.named_modules())
    sites: list[Site] = []
    inside: str | None = None
    tokens_first = {name for name, child in modules.items() if getattr(child, "batch_first", True) is False}
    for name, child in modules.items():
        if not name or (inside is not None and name.startswith(inside)):
            continue
        parts, own = _describe(child)
        if parts is None:
            continue
        block = name.rpartition(".")[0]
        norm = parts.second_norm or _second_norm(modules[block])
        if norm is None and not own:
            continue
        inside = name + "."
        if parts.caller is not None:
            name, child = f"{name}.{parts.caller}", getattr(child, parts.caller)
        scale = next((g for g in (_lookup(modules[block], path) for path in LAYER_SCALES) if g is not None), None)
        sites.append(
            Site(
                layer=len(sites),
                name=name,
                block=block,
                attention=child,
                block_module=modules[block],
                second_norm=norm,
                layer_scale=scale,
                tokens_first=any(f"{name}.".startswith(f"{outer}.") for outer in tokens_first),
                parts=parts,
            )
        )
    if not sites:
        raise NotFoundError(
            f"No attention layer was found in {type(module).__name__}: sinklab looks for blocks with two norms that "
            "hold an attention with qkv/proj (timm), in_proj_weight/out_proj (OpenCLIP, nn.MultiheadAttention) or "
            "q_proj/k_proj/v_proj/o_proj, c_attn/c_proj or attention.self (Hugging Face). Teach it another class with "
            "sinklab.sites.register(...)."
        )
    return sites
