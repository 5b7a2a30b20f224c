"""Two gloo processes train what one would: with DDP and with FSDP2, and what either saved the other goes on with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from sinklab.data.labelled import photographs
from sinklab.data.procedural import ProceduralImages
from sinklab.run import Run
from sinklab.training.loop import METRICS, Progress, read_metrics
from sinklab.training.vit import train_vit
from sinklab.training.vit_config import ViTConfig, make_config
from sinklab.watching import sink_scores

IMAGES = ProceduralImages(count=12, size=16)
ROOT = Path(__file__).parents[2]


def config() -> ViTConfig:
    return replace(
        make_config("gated-global-penalty-registers-tiny"),
        **{"image": 16, "dim": 12, "depth": 3, "heads": 2, "views": 2, "projector_hidden": 8, "projector_dim": 4},
        **{"slices": 16, "batch": 4, "epochs": 2, "warmup_epochs": 0.5, "score_images": 4},
        **{"record_every": 1, "score_every": 2, "checkpoint_every": 2, "lr": 1e-3, "accumulate": 2},
    )


class Killed(Exception):
    """Stands for a kill in the middle of a training."""


def work(root: Path) -> None:
    """What each of two ranks does: a DDP training, an FSDP2 one, the rest of one that a single process began, and one
    on photographs."""
    ports = os.environ["PORTS"].split(",")
    for port, (name, options) in zip(
        ports,
        [("ddp", {}), ("fsdp", {"shard": True}), ("begun", {"resume": True, "shard": True})],
        strict=False,
    ):
        os.environ["MASTER_PORT"] = port
        train_vit(root / name, [config()], IMAGES, score=sink_scores, **options)
        # with gloo's threads alive the interpreter may abort as it ends; FSDP2 keeps its group for good
        assert name != "ddp" or not Path("/proc").is_dir() or "gloo" not in " ".join(threads()), threads()
    os.environ["MASTER_PORT"] = ports[-1]
    train_vit(root / "photographed", [config()], photographs(root / "photos"))


def threads() -> list[str]:
    """The names of this process's threads, where the system tells them."""
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def free_ports(count: int) -> str:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(server.getsockname()[1]) for server in held]
    for server in held:
        server.close()
    return ",".join(ports)


def two_ranks(root: Path) -> None:
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "PORTS": free_ports(4)}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    program = f"import pathlib, test_vit_ranks as t; t.work(pathlib.Path({str(root)!r}))"
    ranks = [
        subprocess.Popen([sys.executable, "-c", program], env={**shared, "RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=300)
        assert rank.returncode == 0, said.decode()


def test_ranks_train_what_one_process_trains(tmp_path: Path) -> None:
    def kill(name: str, state: Progress) -> None:
        if state.step == 3:
            raise Killed

    train_vit(tmp_path / "one", [config()], IMAGES, score=sink_scores)
    with pytest.raises(Killed):
        train_vit(tmp_path / "begun", [config()], IMAGES, score=sink_scores, progress=kill)
    (tmp_path / "photos").mkdir()
    for number in range(12):
        Image.new("RGB", (20, 20), (20 * number, 0, 0)).save(tmp_path / f"photos/{number:02d}.png")
    broken = [f"{number:02d}.png" for number in (1, 2, 5, 7, 8, 11)]
    for name in broken:
        (tmp_path / "photos" / name).write_bytes(b"damaged")
    two_ranks(tmp_path)
    member = f"training/seed-0/{config().name}"
    curve = read_metrics(tmp_path / "one" / member / METRICS)
    assert {"relaxed_nop", "strict_broadcast", "max_inflow_2"} <= curve[-1].keys()
    weights = load_file(tmp_path / "one" / member / "model.safetensors")
    for name in ("ddp", "fsdp", "begun"):
        told = read_metrics(tmp_path / name / member / METRICS)
        assert [line["step"] for line in told] == [line["step"] for line in curve]
        for mine, theirs in zip(told, curve, strict=True):
            assert {k: mine[k] for k in mine} == pytest.approx(theirs, rel=1e-3, abs=1e-5), name
        same: dict[str, Any] = load_file(tmp_path / name / member / "model.safetensors")
        assert same.keys() == weights.keys()
        gap = max(float((same[key] - weights[key]).abs().max()) for key in weights)
        assert gap < 2e-3, name  # AdamW's first steps are of the size lr whatever a gradient's last digits say
        assert torch.isfinite(same["norm.weight"]).all()
    assert Run.open(tmp_path / "photographed").config["unreadable"] == {f"seed-0/{config().name}": broken}
    assert "Begun by 1 processes and gone on with by 2" in Run.open(tmp_path / "begun").config["notes"][0]
