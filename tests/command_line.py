"""What the tests of the command share: a tiny checkpoint, small pictures, and the command in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32}
PICTURE = 32  # --size, pixels: a grid of 2x2 patches


def tiny_state(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Weights of the tiny ViT, with queries and keys large enough that heads differ and some sink."""
    import timm
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state: dict[str, Any] = timm.create_model("vit_tiny_patch16_224", **{**TINY, **changes}).state_dict()
        for name, value in state.items():
            if name.endswith("qkv.weight"):
                value.copy_(torch.randn_like(value) * 0.5)
    return state


def write_checkpoint(folder: Path, state: dict[str, Any] | None = None, **kwargs: Any) -> Path:
    """A checkpoint file that loads by its path, its sidecar beside it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tiny_state() if state is None else state, folder / "tiny.safetensors")
    told = {"model": "timm:vit_tiny_patch16_224", "kwargs": {**TINY, **kwargs}}
    (folder / "tiny.json").write_text(json.dumps(told))
    return folder / "tiny.safetensors"


def write_pictures(folder: Path, count: int, side: int = 40) -> Path:
    """Small pictures of smooth colours that all differ."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        coarse = np.random.default_rng(i).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((side + i % 7, side), Image.Resampling.BICUBIC).save(folder / f"{i:03d}.png")
    return folder


def environment(**more: str) -> dict[str, str]:
    """One thread a process, so that sums are taken in one order; nothing of torchrun's left over."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "COLUMNS")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | more


def sinklab(*words: object, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command as a user calls it, from start to end."""
    command = [sys.executable, "-m", "sinklab", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env or environment(), **options)


def in_process(*words: object) -> subprocess.CompletedProcess[str]:
    """The same command, one thread too, without the seconds that a new interpreter and torch take."""
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    import torch
    import typer.main

    from sinklab import terminal
    from sinklab.cli import app

    said, complained = StringIO(), StringIO()
    code: int | str | None = 0
    threads, show = torch.get_num_threads(), warnings.showwarning
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), redirect_stdout(said), redirect_stderr(complained):
            warnings.simplefilter("default")
            terminal.warnings_as_lines()
            typer.main.get_command(app).main([str(word) for word in words], prog_name="sinklab")
    except SystemExit as end:
        code = end.code
    finally:
        torch.set_num_threads(threads)
        warnings.showwarning = show
    return subprocess.CompletedProcess(
        [str(word) for word in words], int(code or 0), said.getvalue(), complained.getvalue()
    )
