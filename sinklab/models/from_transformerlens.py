"""TransformerLens bridges: `tlens:NAME`, and objects in memory.

A bridge computes attention step by step between hook points, where sinklab reads it (`hooks.eager`); the numbers are
those of the same model under `hf:`, which is faster. Weights are read as `hf:` reads them and never folded or centred.
Letters: B batch, N tokens, C width, V vocabulary.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError
from sinklab.models.describe import inner, provenance
from sinklab.models.from_huggingface_lm import WINDOW, Described, token_map
from sinklab.models.loaded import Loaded, SequenceInput
from sinklab.models.request import quiet
from sinklab.models.tokenizer import read_tokenizer, text_tokenizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sinklab.models.request import Request

FOLDED = (
    "this bridge runs in compatibility mode: its weights are folded and centred, and value norms and ratios are not "
    "those of the model as published"
)


def load_lens(name: str, request: Request) -> Loaded:
    """`tlens:NAME`: a local folder, a repository, or one of TransformerLens's own names for one ("gpt2-small").

    Raises NotFoundError without TransformerLens, or where the files cannot be had, and InputError for a model that is
    no language model, or whose attention a bridge does not show.
    """
    try:
        from transformer_lens.model_bridge import TransformerBridge
        from transformer_lens.supported_models import get_official_model_name
    except ImportError as error:
        raise NotFoundError('tlens:NAME needs TransformerLens: pip install "sinklab[lens]" first.') from error
    from pathlib import Path

    from sinklab.models.from_huggingface import load_huggingface

    local = Path(name).expanduser().is_dir()
    if not local:
        with suppress(ValueError):  # not a name of TransformerLens's own: a repository's
            name = get_official_model_name(name)
    held = load_huggingface(name, request)
    if held.sequences is None:
        raise InputError(f"{request.name} is a vision model: ask for hf:{name} instead.")
    folder = Path(name).expanduser() if local else None
    tokenizer = read_tokenizer(folder, name, offline=request.offline)
    if tokenizer is None:
        raise InputError(f"A TransformerLens bridge needs a tokenizer, and {name} has none: ask for hf:{name} instead.")
    whole: Any = held.module
    if held.classify is None:
        raise InputError(
            f"A TransformerLens bridge needs a language model's head, and {name} has none: ask for hf:{name}."
        )
    whole.set_attn_implementation("eager")
    dtype = next(whole.parameters()).dtype
    try:
        with quiet("transformer_lens", "root"):
            bridge = TransformerBridge.boot_transformers(
                name, hf_model=whole, tokenizer=tokenizer, device="cpu", dtype=dtype
            )
    except (OSError, ValueError, RuntimeError, KeyError, NotImplementedError) as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(
            f"TransformerLens cannot bridge {name}: {said.rstrip('.')}. Ask for hf:{name} instead."
        ) from error
    bridge.eval().requires_grad_(False)
    known = describe(bridge, tokenizer, name=name)
    saved = held.provenance.request
    return replace(
        held,
        module=bridge,
        tokens=known.tokens,
        sequences=known.sequences,
        forward=known.forward,
        classify=known.classify,
        provenance=provenance(
            bridge,
            name=request.name,
            family="tlens",
            architecture=f"{type(bridge).__name__} of {held.provenance.architecture}",
            source=held.provenance.source,
            sha256=held.provenance.sha256,
            packages=("transformer_lens", "transformers"),
            notes=tuple(dict.fromkeys((*held.provenance.notes, *known.notes))),
            request={**saved, "name": f"tlens:{str(saved['name']).partition(':')[2]}"},
        ),
    )


def describe(module: nn.Module, tokenizer: Any | None, *, name: str) -> Described:
    """Tokens, windows and way of calling of a bridge; its own tokenizer is used unless another is given.

    Raises InputError for a bridge that has no blocks, final norm and unembedding of a language model.
    """
    bridge: Any = inner(module)
    parts = ("blocks", "ln_final", "unembed", "cfg")
    if any(not hasattr(bridge, part) for part in parts):
        raise InputError(
            f"{type(bridge).__name__} is not a TransformerLens bridge of a language model with {', '.join(parts[:3])}: "
            "load the model as hf:REPO_OR_DIR."
        )
    config, tokenizer = bridge.cfg, tokenizer or bridge.tokenizer
    reads = None
    if tokenizer is not None:
        reads = text_tokenizer(tokenizer, name=name, vocabulary=int(config.d_vocab), masked=False)
    tokens, notes = token_map(False, reads)
    folded = bool(getattr(bridge, "compatibility_mode", False))
    return Described(
        tokens=tokens,
        sequences=SequenceInput(tokens=min(WINDOW, int(config.n_ctx)), ids=int(config.d_vocab), tokenizer=reads),
        forward=forward_lens,
        classify=classify_lens,
        notes=(*notes, FOLDED) if folded else notes,
    )


def forward_lens(module: nn.Module, ids: Tensor) -> Tensor:
    """Token ids [B N] → tokens [B N C] after the final norm, as they pass it on the way to the logits."""
    bridge: Any = inner(module)
    passed: list[Tensor] = []
    handle = bridge.ln_final.register_forward_hook(lambda norm, args, result: passed.append(result))
    try:
        bridge(ids)
    finally:
        handle.remove()
    return passed[-1]


def classify_lens(module: nn.Module, final: Tensor) -> Tensor:
    """Final tokens [B N C] → logits [B N V]."""
    bridge: Any = inner(module)
    logits: Tensor = bridge.unembed(final)
    return logits
