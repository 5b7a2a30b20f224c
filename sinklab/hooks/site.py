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

from sinklab.errors import NotFoundError
from sinklab.hooks.phase import Phase
from sinklab.hooks.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sinklab.hooks.eager import EagerParts

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
class AttentionParts:
    """What a locator says of one attention module. `register` takes a function that returns one."""

    heads: int
    """H, the number of query heads."""
    projection: nn.Module
    """The output projection W_O: a Linear of shape [C, H·D]."""
    kv_heads: int | None = None
    """K, the number of key/value heads; H when not given."""
    query_weight: Callable[[], Tensor] | None = None
    """() → [H·D, C], the rows of W_Q; None hides the spectrum of Θ."""
    key_weight: Callable[[], Tensor] | None = None
    """() → [K·D, C]."""
    head_scale: Callable[[], Tensor] | None = None
    """() → [H], a factor a head between the attention and W_O (OpenCLIP's scale_heads)."""
    after: str | None = None
    """What stands between the attention and W_O and is not linear: "gate", "norm"; None for nothing."""
    gate: nn.Module | None = None
    """A module whose output, [B H Q D] or [B H Q 1], multiplies z before W_O; None without one, or where a gate's
    output is of another shape."""
    stand_in: bool = False
    """True for `nn.MultiheadAttention`, which never calls SDPA visibly."""
    output: Callable[[], Tensor] | None = None
    """() → W_O as [C, H·D], where the projection does not hold it so (Conv1D)."""
    caller: str | None = None
    """The part of the module that makes the call, where W_O is outside of that; None for the module itself."""
    second_norm: nn.Module | None = None
    """Where the residual stream with the update passes, if it is none of the block's norms."""
    eager: EagerParts | None = None
    """For an attention that makes no call: where its steps can be seen."""
    phase: Phase | None = None
    """Of an attention whose values are phases; its projection is then what takes G and gives it back."""


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


def _describe(module: nn.Module) -> tuple[AttentionParts | None, bool]:
    for kind in type(module).__mro__:  # the most specific class that was registered
        if kind in _registered:
            return _registered[kind](module), True
    from sinklab.hooks.language import LOCATORS as LANGUAGE
    from sinklab.hooks.locators import LOCATORS

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
