"""A ViT whose weights are set by hand, so that what each head does is known: one exact NOP, one broadcast.

Channels of the residual stream: 0 flags [CLS], 1 is one for every token, 2 to 9 hold what a patch shows, 10 to 17 hold
what attention has written. Norms are identities and MLPs add nothing, so everything is linear after the softmax.

Block 0, head 0 averages the patches into every token (uniform attention): [CLS] then knows the image.
Block 1, head 0 (NOP): every query attends to [CLS], whose value is read from channels 2 to 9, which [CLS] has empty.
Block 1, head 1 (broadcast): every query attends to [CLS], whose value is PAYLOAD, plus a little of the image.
All other heads have no values and attend uniformly.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import sinklab

WIDTH, HEADS, DIM, SIDE, PATCH = 32, 2, 8, 32, 8
PAYLOAD = torch.tensor([3.0, -2.0, 1.0, 0.5, 0.0, 2.0, -1.0, 1.5])
GAIN = 12.0
"""Every query's logit for [CLS] is GAIN²/√DIM = 50.9: what is left for 16 other keys is below 1e-20."""


class Attention(nn.Module):
    """timm's parameter names, one SDPA call."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.Identity(), nn.Identity(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + 0 * self.norm2(x)


class Planted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, pixels: Tensor) -> Tensor:
        shown = self.patches(pixels).flatten(2).transpose(1, 2)  # [B 16 8]
        x = shown.new_zeros(len(shown), 1 + shown.shape[1], WIDTH)
        x[:, 0, 0], x[..., 1], x[:, 1:, 2 : 2 + DIM] = 1.0, 1.0, shown
        return self.blocks(x)


@torch.no_grad()
def planted(seed: int = 0) -> sinklab.Model:
    """The model as a handle."""
    torch.manual_seed(seed)
    model = Planted().eval().requires_grad_(False)
    for block in model.blocks:
        for parameter in block.parameters():
            parameter.zero_()
    first, second = (block.attn for block in model.blocks)
    eye = torch.eye(DIM)
    value(first, 0)[:, 2 : 2 + DIM] = eye
    first.proj.weight[18 : 18 + DIM, :DIM] = 0.05 * eye  # the image's mean, in channels that no value but one reads
    for head in (0, 1):
        rows(second, 0, head)[0, 1] = GAIN  # q: the same for every token
        rows(second, 1, head)[0, 0] = GAIN  # k: [CLS] alone
    value(second, 0)[:, 2 : 2 + DIM] = eye  # [CLS] shows nothing here: an exact NOP
    value(second, 1)[:, 0] = PAYLOAD
    value(second, 1)[:, 18 : 18 + DIM] = eye
    value(second, 1)[:, 2 : 2 + DIM] = 0.5 * eye
    second.proj.weight[10 : 10 + DIM, :DIM] = eye
    second.proj.weight[10 : 10 + DIM, DIM:] = eye
    tokens = sinklab.TokenMap(prefix=("cls",), patch_size=(PATCH, PATCH))
    return sinklab.attach(model, tokens=tokens, name="planted")


def rows(attention: Attention, part: int, head: int) -> Tensor:
    """Rows of W_Q (0), W_K (1) or W_V (2) of one head, [DIM WIDTH], as a view."""
    first = (part * HEADS + head) * DIM
    return attention.qkv.weight[first : first + DIM]


def value(attention: Attention, head: int) -> Tensor:
    return rows(attention, 2, head)


def photographs(folder: Path, number: int) -> Path:
    """Small pictures of smooth noise, each its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        noise = np.random.default_rng(index).uniform(0, 255, (5, 5, 3)).astype("uint8")
        Image.fromarray(noise).resize((40, 40), Image.Resampling.BICUBIC).save(folder / f"picture-{index:02d}.png")
    return folder
