"""The vision transformer under study: one network, whose parts may be left out.

    x = [CLS; registers; patches] + positions
    h = LN₁(x)
    o = ls1(attn(h))                       one softmax attention a block, gated or not (`models.attention`)
    o_g = ls3(pathway(h))                  the global pathway, where there is one (`models.pathway`)
    x ← x + DropPath(o + o_g)
    x ← x + DropPath(ls2(mlp(LN₂(x))))
    tokens = LN(x) after the last block

Parameters have the names that timm gives them, so that the plain form exchanges weights with timm
(`models.vit_file`). Letters: B batch, N tokens (CLS, R registers, P patches), C model dim, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sinklab.errors import InputError
from sinklab.models.attention import Attention, OutputGate
from sinklab.models.pathway import EPSILON, GlobalPathway
from sinklab.models.tokens import TokenMap
from sinklab.models.vit_sizes import SIZES

INIT_STD = 0.02
UPDATES = ("gated", "ungated")

__all__ = ["SIZES", "Block", "DropPath", "LayerScale", "ViT", "ViTShape", "moments", "shares"]


@dataclass(frozen=True, kw_only=True)
class ViTShape:
    """What a network is made of; two equal shapes exchange weights. Raises InputError for what cannot be."""

    image: int = 224
    """Side of the square input in pixels; other sizes resample the position table."""
    patch: int = 16
    dim: int = 384
    """C."""
    depth: int = 12
    heads: int = 6
    mlp_ratio: float = 4.0
    registers: int = 0
    """R, between CLS and the patches."""
    gate: str = "none"
    """G1 output gate: none, elementwise or headwise."""
    pathway: str = "none"
    """Global pathway's gate: none (no pathway), learned, hier or uniform."""
    state_dim: int = 64
    """d_g of the pathway."""
    layer_scale: float | None = 1e-4
    """Where ls1 and ls2 begin; None leaves them out."""
    pathway_scale: float | None = None
    """Where ls3 begins; None leaves it out."""
    drop_path: float = 0.0
    """Rate in the last block, rising linearly from 0 in the first."""
    qkv_bias: bool = False
    norm_eps: float = 1e-5
    init_std: float = 0.02
    """Of the first weights of all matrices; tokens and positions begin with 0.02."""
    kernel: str = "softmax"
    """The attention's kernel; see `models.attention.KERNELS`."""
    spectral: bool = False
    """σReparam on the weights of queries and keys."""

    def __post_init__(self) -> None:
        for name in ("image", "patch", "dim", "depth", "heads", "state_dim"):
            if getattr(self, name) < 1:
                raise InputError(f"A vision transformer's {name} is at least 1, not {getattr(self, name)}.")
        if self.image % self.patch:
            raise InputError(f"Patches of {self.patch} pixels do not tile an image of {self.image}.")
        if self.registers < 0 or not 0 <= self.drop_path < 1:
            raise InputError(
                f"Registers are 0 or more and drop_path lies in [0, 1), not {self.registers} and {self.drop_path}."
            )

    @property
    def grid(self) -> int:
        """Patches along a side."""
        return self.image // self.patch


class LayerScale(nn.Module):
    """γ ⊙ update, γ [C]."""

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.gamma = nn.Parameter(torch.full((dim,), float(start)))

    def forward(self, update: Tensor) -> Tensor:
        return update * self.gamma


class DropPath(nn.Module):
    """In training, leaves an image's update out at the given rate and scales it up otherwise."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, *updates: Tensor) -> tuple[Tensor, ...]:
        """Updates [B N C], kept or left out together: one draw an image."""
        if not self.training or self.rate == 0:
            return updates
        kept = updates[0].new_empty(updates[0].shape[0], 1, 1).bernoulli_(1 - self.rate) / (1 - self.rate)
        return tuple(update * kept for update in updates)


class Mlp(nn.Module):
    """[B N C] → [B N C]."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, h: Tensor) -> Tensor:
        update: Tensor = self.fc2(self.act(self.fc1(h)))
        return update


class PatchEmbed(nn.Module):
    """Pixels [B 3 H W] → [B P C]; pixels beyond the last whole patch are not seen."""

    def __init__(self, patch: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch, stride=patch)

    def forward(self, pixels: Tensor) -> Tensor:
        x: Tensor = self.proj(pixels)
        return x.flatten(2).transpose(1, 2)


class Block(nn.Module):
    """One layer: the residual stream [B N C] in, and out."""

    def __init__(self, shape: ViTShape, drop_path: float) -> None:
        super().__init__()
        dim, eps, start = shape.dim, shape.norm_eps, shape.layer_scale
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = Attention(
            dim,
            shape.heads,
            qkv_bias=shape.qkv_bias,
            gate=shape.gate,
            kernel=shape.kernel,
            spectral=shape.spectral,
        )
        self.ls1 = nn.Identity() if start is None else LayerScale(dim, start)
        self.after_attention = nn.Identity()  # the stream with the attention's update and nothing else yet
        self.pathway: GlobalPathway | None = None
        self.ls3: nn.Module = nn.Identity()
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, int(dim * shape.mlp_ratio))
        self.ls2 = nn.Identity() if start is None else LayerScale(dim, start)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor, measure: str | None = None) -> Any:
        """The stream after this layer; with `measure` also the `moments` of attention's update ("gated": as it is
        added, before DropPath; "ungated": the same without the output gate)."""
        h = self.norm1(x)
        o, ungated = self.attn.with_ungated(h) if measure == "ungated" else ((o := self.attn(h)), o)
        o = self.ls1(o)
        if self.pathway is None:
            (kept,) = self.drop_path1(o)
            x = self.after_attention(x + kept)
        else:
            kept, kept_global = self.drop_path1(o, self.ls3(self.pathway(h)))
            x = self.after_attention(x + kept) + kept_global
        (kept,) = self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        x = x + kept
        if measure is None:
            return x
        return x, moments(self.ls1(ungated) if measure == "ungated" else o)


def moments(update: Tensor) -> Tensor:
    """E(ō²) and E(o²) of an update [B N C], as [2] in float32; ō is the mean over tokens (Eq. 5)."""
    o = update.float()
    return torch.stack([o.mean(1).square().mean(), o.square().mean()])


def shares(measured: Tensor) -> Tensor:
    """Moments [L 2] → each layer's common-mode share E(ō²)/E(o²), in [0, 1]."""
    return measured[:, 0] / (measured[:, 1] + EPSILON)


class ViT(nn.Module):
    """Pixels [B 3 H W] → tokens [B N C] after the final norm: CLS, registers, patches row by row."""

    def __init__(self, shape: ViTShape) -> None:
        """Weights are drawn from torch's own state: those that all variants have come first, so that variants of one
        seed begin alike."""
        super().__init__()
        seed = int(torch.randint(2**62, (), device="cpu"))  # before anything that only some variants have is made
        self.shape = shape
        self.checkpointing = False
        """Keep no activations of the blocks for backward but compute them again: less memory, more time."""
        self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + shape.registers + shape.grid**2, shape.dim))
        self.patch_embed = PatchEmbed(shape.patch, shape.dim)
        last = max(shape.depth - 1, 1)
        self.blocks = nn.ModuleList(Block(shape, shape.drop_path * i / last) for i in range(shape.depth))
        self.norm = nn.LayerNorm(shape.dim, eps=shape.norm_eps)
        self.register_tokens = nn.Parameter(torch.zeros(1, shape.registers, shape.dim)) if shape.registers else None
        self._draw(seed)
        if shape.pathway != "none":
            for block in self.blocks:
                assert isinstance(block, Block)
                block.pathway = GlobalPathway(shape.dim, shape.state_dim, gate=shape.pathway)
                if shape.pathway_scale is not None:
                    block.ls3 = LayerScale(shape.dim, shape.pathway_scale)

    def _draw(self, seed: int) -> None:
        """First weights; what all variants have comes before what some have, from a generator of its own."""
        where, before = self.pos_embed.device, 1 + self.shape.registers
        generator = None if where.type == "meta" else torch.Generator(where).manual_seed(seed)

        def draw(weight: Tensor, std: float = INIT_STD) -> None:
            nn.init.trunc_normal_(weight, std=std, generator=generator)

        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and not isinstance(module, OutputGate):
                draw(module.weight, self.shape.init_std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        with torch.no_grad():
            for part in (self.cls_token, self.pos_embed[:, :1], self.pos_embed[:, before:]):
                draw(part)
            if self.register_tokens is not None:
                draw(self.register_tokens)
                draw(self.pos_embed[:, 1:before])

    @property
    def tokens(self) -> TokenMap:
        """Which token is what."""
        prefix = ("cls",) + ("register",) * self.shape.registers
        return TokenMap(prefix=prefix, patch_size=(self.shape.patch, self.shape.patch))

    def embed(self, pixels: Tensor) -> Tensor:
        """The stream before the first block [B N C]."""
        rows, columns = self.tokens.grid(*pixels.shape[-2:])
        patches = self.patch_embed(pixels)
        prefix = [self.cls_token] if self.register_tokens is None else [self.cls_token, self.register_tokens]
        begun = [part.expand(len(patches), -1, -1) for part in prefix]
        return torch.cat([*begun, patches], dim=1) + self.positions(rows, columns)

    def positions(self, rows: int, columns: int) -> Tensor:
        """The position table [1 N C], its patches' part resampled (bicubic, antialiased) for another grid."""
        side, before = self.shape.grid, 1 + self.shape.registers
        if (rows, columns) == (side, side):
            return self.pos_embed
        table = self.pos_embed[:, before:].float().unflatten(1, (side, side)).permute(0, 3, 1, 2)
        table = F.interpolate(table, (rows, columns), mode="bicubic", antialias=True)
        resampled = table.flatten(2).transpose(1, 2).to(self.pos_embed.dtype)
        return torch.cat([self.pos_embed[:, :before], resampled], dim=1)

    def forward(self, pixels: Tensor, measure: str | None = None) -> Any:
        """Tokens [B N C]; with `measure` ("gated" or "ungated") also every layer's `moments` [L 2]."""
        if measure is not None and measure not in UPDATES:
            raise InputError(f"The update to measure is one of {', '.join(UPDATES)}, not {measure!r}.")
        x = self.embed(pixels)
        measured = []
        for block in self.blocks:
            if self.checkpointing and self.training:
                x = checkpoint(block, x, measure, use_reentrant=False)
            else:
                x = block(x) if measure is None else block(x, measure)
            if measure is not None:
                x, found = x
                measured.append(found)
        x = self.norm(x)
        return x if measure is None else (x, torch.stack(measured))
