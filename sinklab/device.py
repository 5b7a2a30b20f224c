"""Where a model runs: what --device means on this machine, and how run.json names it."""

from __future__ import annotations

from typing import Any

from sinklab.errors import InputError


def pick_device(name: str, local_rank: int = 0) -> str:
    """A torch device from --device; "auto" prefers CUDA, then MPS, then the CPU. InputError if it is not there."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda", "mps"):
        raise InputError(f"--device is auto, cpu, cuda, cuda:N or mps, not {name!r}.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda was asked for, but torch sees no CUDA device here.")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise InputError("--device mps was asked for, but torch sees no MPS device here.")
    if name == "cuda":
        return f"cuda:{local_rank}"
    try:
        index = torch.device(name).index or 0
    except RuntimeError as error:
        raise InputError(f"--device is auto, cpu, cuda, cuda:N or mps, not {name!r}.") from error
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise InputError(f"--device {name} does not exist: torch sees {torch.cuda.device_count()} CUDA devices.")
    return name


def device_name(device: Any) -> str:
    """A torch device in words: which GPU, or which CPU with how many threads."""
    import platform

    import torch

    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu ({platform.machine()}, {threads} thread{'' if threads == 1 else 's'})"
    return str(device)
