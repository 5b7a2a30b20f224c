"""Trained controlled models as files: NAME.safetensors with the weights, NAME.json with what made them.

| shipped name | what it is |
|---|---|
| `nop` | the adaptive-NOP head, block-output form |
| `broadcast` | the two-layer broadcast model |
| `pathway-penalty` | the same with a global pathway, trained with the broadcast penalty |
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from sinklab.models.toy import ToyModel

FORMAT = "sinklab-toy-1"
SHIPPED = Path(__file__).parents[1] / "assets" / "toy"
NAMES = ("nop", "broadcast", "pathway-penalty")


def shipped_toy(name: str) -> Path:
    """The .safetensors file of a model that comes with sinklab. Raises NotFoundError for any other name."""
    if name not in NAMES:
        raise NotFoundError(f"There is no controlled model {name!r}; {', '.join(NAMES)} come with sinklab.")
    return SHIPPED / f"{name}.safetensors"


def read_toy(path: str | Path) -> tuple[ToyModel, dict[str, Any]]:
    """The model in evaluation mode, and the content of its .json: kind, arm, seed, config, task's signature.

    Raises NotFoundError if a file is missing, InputError if they are not a controlled model or do not fit each other.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from sinklab.models.toy import build_toy

    path = Path(path)
    for needed in (path, path.with_suffix(".json")):
        if not needed.is_file():
            raise NotFoundError(f"A trained controlled model is a .safetensors file and a .json: there is no {needed}.")
    try:
        saved: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if saved["format"] != FORMAT:
            raise ValueError(f"its format is {saved['format']!r}, not {FORMAT!r}")
        _require_task(saved)
        model = build_toy(saved["kind"], saved["arm"], saved["config"])
        model.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError, KeyError, ValueError, TypeError, LookupError) as error:
        said = str(error).rstrip(".")
        raise InputError(f"{path} and its .json are not a trained controlled model: {said}.") from error
    return model.eval(), saved


def _require_task(saved: dict[str, Any]) -> None:
    """Raise ValueError, KeyError or TypeError unless the file says which task the model was trained on."""
    numbers = {"seed": saved["seed"]} | {name: saved["config"][name] for name in ("tokens", "dim", "steps")}
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(f"its {name} is {json.dumps(number)}, which is no whole number")
    signature = saved["signature"]
    if not isinstance(signature, list) or not all(isinstance(number, (int, float)) for number in signature):
        raise ValueError("its signature is no list of numbers")
