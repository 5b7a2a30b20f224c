"""Language models built from their configs, and read back from files: NAME.safetensors and NAME.json beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError
from sinklab.models.lm_config import Config, KuramotoConfig, config_from

if TYPE_CHECKING:
    from sinklab.models.kuramoto import Kuramoto
    from sinklab.models.transformer import Transformer

FORMAT = "sinklab-lm-1"
SHIPPED = Path(__file__).parents[1] / "assets" / "lm"
NAMES = ("phase-tiny", "transformer-tiny")


def shipped_lm(name: str) -> Path:
    """The .safetensors file of a model that comes with sinklab. Raises NotFoundError for any other name."""
    if name not in NAMES:
        raise NotFoundError(f"There is no language model {name!r}; {', '.join(NAMES)} come with sinklab.")
    return SHIPPED / f"{name}.safetensors"


def build_lm(config: Config, symbols: int) -> Kuramoto | Transformer:
    """The model of a config over so many symbols, with first weights from torch's own random state."""
    if isinstance(config, KuramotoConfig):
        from sinklab.models.kuramoto import Kuramoto

        return Kuramoto(config, symbols)
    from sinklab.models.transformer import Transformer

    return Transformer(config, symbols)


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedLM:
    """A language model read from its file, in evaluation mode."""

    model: Kuramoto | Transformer
    symbols: bytes
    """The bytes that tokens stand for: token i is symbols[i]."""
    context: int
    """Tokens that it was trained to look back on."""
    saved: dict[str, Any]
    """The whole content of the .json."""


def read_lm(path: str | Path) -> SavedLM:
    """A trained language model.

    Raises NotFoundError if a file is missing, InputError if they are not a language model or do not fit each other.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    for needed in (path, path.with_suffix(".json")):
        if not needed.is_file():
            raise NotFoundError(f"A trained language model is a .safetensors file and a .json: there is no {needed}.")
    try:
        saved: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if saved["format"] != FORMAT:
            raise ValueError(f"its format is {saved['format']!r}, not {FORMAT!r}")
        symbols = bytes(saved["symbols"])
        model = build_lm(config_from(saved["family"], saved["model"]), len(symbols))
        model.load_state_dict(load_file(path))
        context = int(saved["config"]["context"])
    except (SafetensorError, RuntimeError, KeyError, ValueError, TypeError, LookupError) as error:
        said = str(error).rstrip(".")
        raise InputError(f"{path} and its .json are not a trained language model: {said}.") from error
    return SavedLM(model=model.eval(), symbols=symbols, context=context, saved=saved)
