"""The state of a training in one safetensors file: weights, optimizer, generators, and the step. No pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinklab.atomic import atomically
from sinklab.errors import InputError

if TYPE_CHECKING:
    from sinklab.training.loop import Recipe

FORMAT = "sinklab-training-1"


def save_checkpoint(path: Path, recipe: Recipe, step: int) -> None:
    """Write the state after `step` steps; a reader finds the old file or the new one. Raises WriteError.

    All ranks have to call it: a sharded state is gathered, and the first rank writes.
    """
    from safetensors.torch import save

    state = recipe.optimizer.state_dict()
    tensors = {f"model.{name}": value for name, value in recipe.model.state_dict().items()}
    numbers: dict[str, dict[str, Any]] = {}
    for index, held in state["state"].items():
        for name, value in held.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
            else:
                numbers.setdefault(str(index), {})[name] = value
    for name, generator in recipe.generators.items():
        tensors[f"generator.{name}"] = generator.get_state()
    about = {
        "format": FORMAT,
        "step": step,
        "fingerprint": recipe.fingerprint,
        "groups": state["param_groups"],
        "numbers": numbers,
        **({} if recipe.memory is None else {"memory": recipe.memory.remembered()}),
    }
    # every tensor a copy of its own: safetensors refuses tensors that share memory, as tied weights do
    gathered = {name: whole(value).cpu().clone().contiguous() for name, value in tensors.items()}
    if recipe.ranks.first:
        with atomically(path) as stream:
            stream.write(save(gathered, metadata={"sinklab": json.dumps(about)}))
    recipe.ranks.wait()  # no rank reads, or ends, before the file is there


def whole(value: Tensor) -> Tensor:
    """A tensor itself, or gathered from all ranks if it is sharded over them; without gradients."""
    full = getattr(value, "full_tensor", None)
    return value.detach() if full is None else full().detach()


def load_checkpoint(path: Path, recipe: Recipe) -> int:
    """Put the state back into the recipe's model, optimizer and generators; returns the steps done.

    Raises InputError for a file that is damaged, foreign, or of a recipe with other settings.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["sinklab"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        if about["format"] != FORMAT:
            raise KeyError(about["format"])
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise InputError(
            f"{path} is not a whole checkpoint of a sinklab training ({type(error).__name__}): move it away and start "
            "again."
        ) from error
    if about["fingerprint"] != recipe.fingerprint:
        raise InputError(
            f"{path} was written by a training with other settings: give the same settings, or another folder."
        )
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "generator": {}}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        parts[kind][rest] = value
    own = recipe.model.state_dict()
    recipe.model.load_state_dict({name: _like(value, own.get(name)) for name, value in parts["model"].items()})
    held = _optimizer_state(about, parts["optimizer"])
    trained = [parameter for group in recipe.optimizer.param_groups for parameter in group["params"]]
    for index, entries in held["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.shape == trained[index].shape:
                entries[name] = _like(value, trained[index])
    recipe.optimizer.load_state_dict(held)
    for name, generator in recipe.generators.items():
        generator.set_state(parts["generator"][name])
    if recipe.memory is not None and "memory" in about:
        recipe.memory.remind(about["memory"])
    return int(about["step"])


def _like(value: Tensor, present: Tensor | None) -> Tensor:
    """The value, sharded over the ranks as the one it stands for is."""
    if present is None or not hasattr(present, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh: Any = present.device_mesh
    return distribute_tensor(value.to(present.device), mesh, present.placements)  # type: ignore[attr-defined]


def _optimizer_state(about: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {int(index): dict(held) for index, held in about["numbers"].items()}
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    groups = [{**group, "betas": tuple(group["betas"])} if "betas" in group else group for group in about["groups"]]
    return {"state": state, "param_groups": groups}


def save_model(
    path: Path,
    model: torch.nn.Module,
    config: dict[str, Any],
    *,
    writes: bool = True,
    beside: Mapping[str, torch.nn.Module | None] | None = None,
) -> None:
    """The weights alone as safetensors, and beside them, as .json, the config that made them. Raises WriteError.

    `beside`: other modules whose weights go into the same file, their names after the key and a point.
    All ranks have to call it, the ones that do not write with `writes` False.
    """
    from safetensors.torch import save

    from sinklab.settings import plain

    named = dict(model.state_dict())
    for key, other in (beside or {}).items():
        named |= {f"{key}.{name}": value for name, value in ({} if other is None else other.state_dict()).items()}
    weights = {name: whole(value).cpu().clone().contiguous() for name, value in named.items()}
    if not writes:
        return
    with atomically(path) as stream:
        stream.write(save(weights))
    with atomically(path.with_suffix(".json")) as stream:
        stream.write((json.dumps(plain(config), indent=2, ensure_ascii=False) + "\n").encode())
