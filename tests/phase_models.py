"""Tiny Kuramoto models with random weights, and their handles: what the tests of phase layers share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sinklab.handle import Model
from sinklab.hooks.site import find_sites
from sinklab.models.kuramoto import Kuramoto
from sinklab.models.lm_config import KuramotoConfig

SYMBOLS = 11


def kuramoto(seed: int = 0, dtype: torch.dtype = torch.float64, shake: float = 0.3, **changes: Any) -> Kuramoto:
    """A model with no parameter at a special value."""
    shape: dict[str, Any] = {"phases": 6, "layers": 2, "hidden": 8, "heads": 2} | changes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Kuramoto(KuramotoConfig(**shape), SYMBOLS)
        for parameter in module.parameters():
            parameter.data.add_(shake * torch.randn_like(parameter))
    return module.to(dtype).eval().requires_grad_(False)


def ids(batch: int = 2, tokens: int = 13, seed: int = 1) -> Tensor:
    """Token ids [B N]."""
    return torch.randint(0, SYMBOLS, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def handle(module: Kuramoto, tokens: int = 13) -> Model:
    """As `sinklab.load` gives it, without a file."""
    from sinklab.models.describe import provenance
    from sinklab.models.from_training import _final, _readout
    from sinklab.models.loaded import Loaded, SequenceInput
    from sinklab.models.tokens import TokenMap

    loaded = Loaded(
        module=module,
        tokens=TokenMap.sequence(("bos",), ordinary="text"),
        preprocessing=None,
        provenance=provenance(module, name="tiny", family="lm", architecture="Kuramoto", source="random", sha256=None),
        forward=_final,
        classify=_readout,
        sequences=SequenceInput(tokens=tokens, vocabulary=tuple(range(97, 97 + SYMBOLS)), together=2, batch_size=4),
    )
    return Model(loaded=loaded, sites=tuple(find_sites(module)))
