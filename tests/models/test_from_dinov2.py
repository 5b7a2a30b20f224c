"""Meta's DINOv2 files, in every spelling met in the wild, against a plain forward pass written from the network's
definition."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.errors import InputError, NotFoundError
from sinklab.models.from_dinov2 import load_dinov2
from sinklab.models.load import load
from sinklab.models.loaded import Loaded
from sinklab.models.request import Request

State = dict[str, Tensor]


def meta_state(
    *, width: int, depth: int, grid: int, registers: int = 0, swiglu: bool = False, patch: int = 14, seed: int = 0
) -> State:
    """Random weights in Meta's spelling; LayerScale near 1, so that a wrong attention shows in the output."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.05) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    state = {
        "cls_token": draw(1, 1, width),
        "mask_token": draw(1, width),
        "pos_embed": draw(1, 1 + grid * grid, width, scale=0.5),
        "patch_embed.proj.weight": draw(width, 3, patch, patch),
        "patch_embed.proj.bias": draw(width),
        "norm.weight": 1 + draw(width),
        "norm.bias": draw(width),
    }
    if registers:
        state["register_tokens"] = draw(1, registers, width, scale=0.5)
    hidden = (int(width * 4 * 2 / 3) + 7) // 8 * 8 if swiglu else 4 * width
    linears = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
    linears |= (
        {"mlp.w12": (2 * hidden, width), "mlp.w3": (width, hidden)}
        if swiglu
        else {"mlp.fc1": (hidden, width), "mlp.fc2": (width, hidden)}
    )
    for block in range(depth):
        for name, shape in linears.items():
            state[f"blocks.{block}.{name}.weight"] = draw(*shape, scale=0.7 / math.sqrt(shape[1]))
            state[f"blocks.{block}.{name}.bias"] = draw(shape[0])
        for name in ("norm1", "norm2"):
            state[f"blocks.{block}.{name}.weight"] = 1 + draw(width)
            state[f"blocks.{block}.{name}.bias"] = draw(width)
        for name in ("ls1", "ls2"):
            state[f"blocks.{block}.{name}.gamma"] = 1 + draw(width, scale=0.2)
    return state


def plain_forward(state: State, pixels: Tensor, heads: int) -> Tensor:
    """The network by its definition, in float64: tokens, positions, pre-norm blocks with LayerScale, final norm."""
    held = {name: value.double() for name, value in state.items()}
    width = held["norm.weight"].shape[0]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (width,), held[f"{name}.weight"], held[f"{name}.bias"], eps=1e-6)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ held[f"{name}.weight"].T + held[f"{name}.bias"]

    patch = held["patch_embed.proj.weight"].shape[-1]
    grid = F.conv2d(pixels.double(), held["patch_embed.proj.weight"], held["patch_embed.proj.bias"], stride=patch)
    rows, columns = grid.shape[-2:]
    positions, side = held["pos_embed"], math.isqrt(held["pos_embed"].shape[1] - 1)
    if (rows, columns) != (side, side):  # the register models' way
        table = positions[:, 1:].reshape(1, side, side, width).permute(0, 3, 1, 2)
        table = F.interpolate(table.float(), size=(rows, columns), mode="bicubic", antialias=True).double()
        positions = torch.cat([positions[:, :1], table.flatten(2).transpose(1, 2)], dim=1)
    tokens = grid.flatten(2).transpose(1, 2) + positions[:, 1:]  # [B rows·columns C]
    first = (held["cls_token"] + positions[:, :1]).expand(len(tokens), -1, -1)
    between = [held["register_tokens"].expand(len(tokens), -1, -1)] if "register_tokens" in held else []
    x = torch.cat([first, *between, tokens], dim=1)
    depth = len({name.split(".")[1] for name in held if name.startswith("blocks.")})
    for block in (f"blocks.{number}" for number in range(depth)):
        batch, count, _ = x.shape
        qkv = linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv").view(batch, count, 3, heads, width // heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        pattern = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(width // heads), dim=-1)
        update = linear((pattern @ v).transpose(1, 2).reshape(batch, count, width), f"{block}.attn.proj")
        x = x + held[f"{block}.ls1.gamma"] * update
        y = norm(x, f"{block}.norm2")
        if f"{block}.mlp.w12.weight" in held:
            gate, value = linear(y, f"{block}.mlp.w12").chunk(2, dim=-1)
            y = linear(F.silu(gate) * value, f"{block}.mlp.w3")
        else:
            y = linear(F.gelu(linear(y, f"{block}.mlp.fc1")), f"{block}.mlp.fc2")
        x = x + held[f"{block}.ls2.gamma"] * y
    return norm(x, "norm")


def prefixed(prefix: str) -> Callable[[State], State]:
    return lambda state: {prefix + name: value for name, value in state.items()}


def chunked(through: bool) -> Callable[[State], State]:
    """Meta's block chunks of two, the index inside running through all chunks or starting anew in each."""

    def place(match: re.Match[str]) -> str:
        number = int(match[1])
        return f"blocks.{number // 2}.{number if through else number % 2}."

    return lambda state: {re.sub(r"^blocks\.(\d+)\.", place, name): value for name, value in state.items()}


def with_training_parts(state: State) -> State:
    rest = {"teacher.dino_head.mlp.0.weight": torch.zeros(2, 2), "student.backbone.cls_token": torch.zeros(1, 1, 2)}
    student = prefixed("student.backbone.")({name: value + 1 for name, value in state.items()})
    return {**rest, **student, **prefixed("teacher.backbone.")(state)}


SPELLINGS: dict[str, Callable[[State], object]] = {
    "plain": lambda state: state,
    "module": prefixed("module."),
    "backbone": prefixed("backbone."),
    "teacher.backbone": prefixed("teacher.backbone."),
    "another prefix": prefixed("net.encoder.0."),
    "chunked through": chunked(True),
    "chunked anew": chunked(False),
    "chunked and prefixed": lambda state: prefixed("teacher.backbone.")(chunked(True)(state)),
    "nested teacher": lambda state: {"teacher": prefixed("backbone.")(state), "iteration": 7},
    "nested state_dict": lambda state: {"state_dict": prefixed("module.")(state)},
    "teacher beside student": lambda state: {"model": with_training_parts(state)},
    "without mask token": lambda state: {name: value for name, value in state.items() if name != "mask_token"},
}

# name after dinov2: → the tiny network built under it
KINDS = {
    "vits14": {"width": 32, "depth": 4, "grid": 3},
    "vits14_reg": {"width": 32, "depth": 4, "grid": 3, "registers": 4},
    "vitg14": {"width": 48, "depth": 4, "grid": 3, "swiglu": True},
    "vitg14_reg": {"width": 48, "depth": 4, "grid": 3, "registers": 4, "swiglu": True},
}


def tiny(path: Path, kind: str, payload: object) -> Loaded:
    """Load a tiny network of that kind from a checkpoint with a sidecar."""
    torch.save(payload, path)
    options = {"embed_dim": KINDS[kind]["width"], "depth": KINDS[kind]["depth"], "num_heads": 2}
    if KINDS[kind].get("swiglu"):
        options["mlp_ratio"] = 256 / 48  # timm counts gate and value together: 2 · 128 hidden
    path.with_suffix(".json").write_text(json.dumps({"model": f"dinov2:{kind}", "kwargs": options}))
    return load(str(path), offline=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_that_of_the_definition(tmp_path: Path, kind: str) -> None:
    state = meta_state(**KINDS[kind])
    loaded = tiny(tmp_path / "w.pth", kind, state)
    pixels = torch.randn(2, 3, 42, 42)
    tokens = loaded.forward(loaded.module, pixels)
    assert torch.allclose(tokens.double(), plain_forward(state, pixels, heads=2), atol=1e-4)
    assert tokens.shape[1] == loaded.tokens.tokens(42, 42) == 10 + KINDS[kind].get("registers", 0)


def test_register_models_resize_positions_as_meta_does(tmp_path: Path) -> None:
    state = meta_state(**KINDS["vits14_reg"])
    loaded = tiny(tmp_path / "w.pth", "vits14_reg", state)
    pixels = torch.randn(1, 3, 28, 84)
    expected = plain_forward(state, pixels, heads=2)
    assert torch.allclose(loaded.forward(loaded.module, pixels).double(), expected, atol=1e-4)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", ["vits14", "vitg14_reg"])
def test_every_spelling_gives_the_same_network(tmp_path: Path, kind: str, spelling: str) -> None:
    state = meta_state(**KINDS[kind])
    loaded = tiny(tmp_path / "w.pth", kind, SPELLINGS[spelling](state))
    pixels = torch.randn(1, 3, 42, 42)
    assert torch.allclose(
        loaded.forward(loaded.module, pixels).double(), plain_forward(state, pixels, heads=2), atol=1e-4
    )


def test_a_full_vits14_loads_at_the_grid_of_its_file(tmp_path: Path) -> None:
    state = meta_state(width=384, depth=12, grid=16)
    torch.save({"teacher": prefixed("backbone.")(chunked(True)(state))}, tmp_path / "w.pth")
    loaded = load("dinov2:vits14", weights=tmp_path / "w.pth", offline=True)
    assert loaded.extra["position_table"]["grid"] == [16, 16]
    assert loaded.preprocessing.size == (224, 224)
    assert any("224x224" in note for note in loaded.provenance.notes)
    assert torch.equal(loaded.module.get_parameter("pos_embed"), state["pos_embed"])
    pixels = torch.randn(1, 3, 224, 224)
    tokens = loaded.forward(loaded.module, pixels)
    assert torch.allclose(tokens.double(), plain_forward(state, pixels, heads=6), atol=2e-4)
    assert loaded.provenance.parameters == sum(value.numel() for value in state.values()) - 384  # the mask token


@pytest.mark.parametrize(
    ("kind", "file"),
    [("vits14", "vits14_reg"), ("vits14_reg", "vits14"), ("vitg14", "vits14")],
)
def test_the_checkpoint_of_another_kind_is_refused(tmp_path: Path, kind: str, file: str) -> None:
    with pytest.raises(InputError) as caught:
        tiny(tmp_path / "w.pth", kind, meta_state(**KINDS[file]))
    assert "nothing was loaded" in str(caught.value)
    assert "missing" in str(caught.value)


def test_a_missing_block_is_reported_and_nothing_loaded(tmp_path: Path) -> None:
    state = meta_state(**KINDS["vits14"])
    del state["blocks.2.attn.qkv.weight"]
    with pytest.raises(InputError, match=r"missing +1  blocks\.2\.attn\.qkv\.weight"):
        tiny(tmp_path / "w.pth", "vits14", state)


def test_two_networks_in_one_file_are_refused(tmp_path: Path) -> None:
    state = meta_state(**KINDS["vits14"])
    with pytest.raises(InputError, match=r"'left\.', 'right\.'"):
        tiny(tmp_path / "w.pth", "vits14", {**prefixed("left.")(state), **prefixed("right.")(state)})


def test_random_weights_only_when_asked() -> None:
    with pytest.raises(InputError, match=r"dinov2_vits14_reg4_pretrain\.pth"):
        load("dinov2:vits14_reg")
    request = Request(name="x", random_weights=True, kwargs={"embed_dim": 32, "depth": 2, "num_heads": 2})
    assert load_dinov2("vits14_reg", request).tokens.prefix == ("cls",) + ("register",) * 4


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(NotFoundError, match="vitg14_reg"):
        load("dinov2:vits16")
