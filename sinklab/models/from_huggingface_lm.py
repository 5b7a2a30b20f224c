"""Hugging Face language models: GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma; BERT, RoBERTa, DistilBERT.

Their tokens are ids of the tokenizer that comes with them, in windows of a text. Attention is "sdpa", weights are read
by `checkpoint` and loaded whole. Letters: B batch, N tokens, C width, V vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.models import checkpoint, hub, matching
from sinklab.models.describe import inner, provenance
from sinklab.models.loaded import Loaded, SequenceInput
from sinklab.models.request import DEFAULT_SIDE, Request, building
from sinklab.models.tokenizer import read_tokenizer, text_tokenizer
from sinklab.models.tokens import TokenMap

if TYPE_CHECKING:
    from torch import Tensor, nn

WINDOW = 256
"""Tokens of a window, where the model takes as many."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One model_type of config.json."""

    whole: str
    """transformers' class with the language model's head."""
    config: str
    head: str
    """The head's own module in it: final tokens [B N C] → logits [B N V]."""
    masked: bool = False
    """True for models that see the whole window and fill in what is masked."""


def _causal(name: str) -> Kind:
    return Kind(whole=f"{name}ForCausalLM", config=f"{name}Config", head="lm_head")


KINDS = {
    "gpt2": Kind(whole="GPT2LMHeadModel", config="GPT2Config", head="lm_head"),
    "llama": _causal("Llama"),
    "mistral": _causal("Mistral"),
    "qwen2": _causal("Qwen2"),
    "qwen3": _causal("Qwen3"),
    "gemma": _causal("Gemma"),
    "bert": Kind(whole="BertForMaskedLM", config="BertConfig", head="cls", masked=True),
    "roberta": Kind(whole="RobertaForMaskedLM", config="RobertaConfig", head="lm_head", masked=True),
    "distilbert": Kind(whole="DistilBertForMaskedLM", config="DistilBertConfig", head="vocab_projector", masked=True),
}
# What files hold beside the weights: masks and frequencies as buffers, poolers and other tasks' heads.
_BESIDE = re.compile(
    r"(^|\.)(attn\.(bias|masked_bias)|rotary_emb\.inv_freq|embeddings\.position_ids)$"
    r"|(^|\.)pooler\.|^cls\.seq_relationship\."
)
_HEADS = ("lm_head.", "cls.predictions.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector.")


def is_language_model(settings: dict[str, Any]) -> bool:
    """Whether a config.json is of a language model that can be read here."""
    kind = settings.get("model_type")
    return isinstance(kind, str) and kind in KINDS


def load_language_model(
    settings: dict[str, Any],
    weights: Path | None,
    request: Request,
    *,
    label: str,
    folder: Path | None = None,
    where: str | None = None,
    saved: dict[str, Any] | None = None,
) -> Loaded:
    """The model that a config.json describes, filled from `weights`, or random if there are none.

    The tokenizer is that in `folder`, or of the repository `where`; `label` names the origin.
    """
    if request.image_size not in (None, (DEFAULT_SIDE, DEFAULT_SIDE)):
        raise InputError(f"{label} is a language model: it takes no image size.")
    kind, config = _config(settings)
    notes: tuple[str, ...] = ()
    if weights is None:
        module: Any = request.drawn(lambda: _class(kind.whole)(config))
        source, sha256, counts = request.random_source, None, None
    else:
        with building(kind.whole, settings):
            matching.on_meta(lambda: _class(kind.whole)(config))
        held = checkpoint.read(weights, allow_pickle=request.allow_pickle)
        module, report, remarks = _filled(kind, config, held)
        revision = hub.revision_of(weights)
        source = f"{label} at {revision}, {held.file}" if revision else held.file
        sha256, counts, notes = held.sha256, report.counts(), held.notes + remarks
    known = folder is not None or where is not None
    tokenizer = read_tokenizer(folder, where or label, offline=request.offline) if known else None
    loaded = describe(matching.frozen(module), tokenizer, name=label)
    return Loaded(
        module=module,
        preprocessing=None,
        provenance=provenance(
            module,
            name=request.name,
            family="hf",
            architecture=type(module).__name__,
            source=source,
            sha256=sha256,
            packages=("transformers",),
            notes=notes + loaded.notes,
            request=saved or request.saved(),
        ),
        tokens=loaded.tokens,
        forward=loaded.forward,
        classify=loaded.classify,
        sequences=loaded.sequences,
        extra={"weights": counts},
    )


def _class(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


def _config(settings: dict[str, Any]) -> tuple[Kind, Any]:
    kind = KINDS[settings["model_type"]]
    if settings.get("quantization_config"):
        raise InputError(
            f"The config.json says that its weights are quantized ({settings['quantization_config']}): values and "
            "projections cannot be read from such weights. Load the model's plain ones."
        )
    left = ("model_type", "dtype", "torch_dtype", "attn_implementation", "use_cache")
    options = {key: value for key, value in settings.items() if key not in left}
    with building(kind.config, options):
        config = _class(kind.config)(**options, attn_implementation="sdpa")
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise InputError(f"{kind.whole} with cross-attention attends to two sequences: it cannot be read.")
    config.use_cache = False  # every window is read once, from its beginning
    return kind, config


def _filled(kind: Kind, config: Any, held: checkpoint.Checkpoint) -> tuple[Any, matching.KeyReport, tuple[str, ...]]:
    """The model with the checkpoint in it, without its head if the file has none; InputError with a report if more
    is missing, or anything is left over."""
    from sinklab.models.from_huggingface import key_report, pretrained

    state = {name: value for name, value in held.state.items() if not _BESIDE.search(name)}
    matching.require_floats(state, held.file)
    module, found = pretrained(_class(kind.whole), config, state, held.dtype)
    headless = any(name.startswith(_HEADS) for name in found["missing_keys"])
    found["missing_keys"] = {name for name in found["missing_keys"] if not name.startswith(_HEADS)}
    outside = tuple(name for name in held.state if name not in state)
    names = [name for name in module.state_dict() if not (headless and name.startswith(_HEADS))]
    report = key_report(names, found, held, outside, ())
    matching.require_fit(
        report, file=held.file, architecture=kind.whole, advice="Does config.json belong to these weights?"
    )
    if not headless:
        return module, report, ()
    return module.base_model, report, ("the file holds no language model's head: next tokens are not predicted",)


@dataclass(frozen=True, kw_only=True)
class Described:
    """What is known of a language model's class."""

    tokens: TokenMap
    sequences: SequenceInput
    forward: Any
    classify: Any
    notes: tuple[str, ...]


def kind_of(network: Any) -> Kind | None:
    """Of a module in memory: a known class with its head, its bare model, or another task's model round that."""
    settings = getattr(network, "config", None)
    return KINDS.get(getattr(settings, "model_type", ""))


def describe(module: nn.Module, tokenizer: Any | None, *, name: str) -> Described:
    """Tokens, windows and way of calling of a module whose `kind_of` is known."""
    network: Any = inner(module)
    kind, config = kind_of(network), network.config
    assert kind is not None
    reads, rows = None, int(network.get_input_embeddings().weight.shape[0])
    if tokenizer is not None:
        reads = text_tokenizer(tokenizer, name=name, vocabulary=rows, masked=kind.masked)
    tokens, notes = token_map(kind.masked, reads)
    return Described(
        tokens=tokens,
        sequences=SequenceInput(
            tokens=min(WINDOW, _positions(config)), ids=rows, tokenizer=reads, predicts_next=not kind.masked
        ),
        forward=forward_language,
        classify=_classifier(kind, network),
        notes=notes,
    )


def token_map(masked: bool, reads: Any | None) -> tuple[TokenMap, tuple[str, ...]]:
    """The first token is told apart, also where the tokenizer puts nothing before the text; and a note on that."""
    if masked and reads is not None:
        return TokenMap.sequence(("special",) * len(reads.before), ordinary="text", suffix=_suffix(reads.after)), ()
    if masked:
        return TokenMap.sequence(("special",), ordinary="text", suffix=("special",)), ()
    notes: tuple[str, ...] = ()
    if reads is not None and not reads.before:
        notes = (
            "the tokenizer has no token for a beginning of sequence: the first token of every window is counted as bos",
        )
    return TokenMap.sequence(("bos",), ordinary="text"), notes


def _suffix(after: tuple[int, ...]) -> tuple[str, ...]:
    return ("special",) * len(after)


def _positions(config: Any) -> int:
    """The longest sequence; RoBERTa's positions begin after that of its padding."""
    most = int(config.max_position_embeddings)
    if config.model_type != "roberta":
        return most
    if config.pad_token_id is None:
        raise InputError("RoBERTa's positions begin after that of its padding: its config.json lacks pad_token_id.")
    return most - int(config.pad_token_id) - 1


def _classifier(kind: Kind, network: Any) -> Any:
    if type(network).__name__ != kind.whole:
        return None
    return classify_distilbert if kind.head == "vocab_projector" else _Head(kind.head)


@dataclass(frozen=True)
class _Head:
    """(module, final tokens [B N C]) → logits [B N V]."""

    name: str

    def __call__(self, module: nn.Module, final: Tensor) -> Tensor:
        logits: Tensor = getattr(inner(module), self.name)(final)
        return logits


def classify_distilbert(module: nn.Module, final: Tensor) -> Tensor:
    """Final tokens [B N C] → logits [B N V]: DistilBERT's head is not a module of its own."""
    network: Any = inner(module)
    logits: Tensor = network.vocab_projector(
        network.vocab_layer_norm(network.activation(network.vocab_transform(final)))
    )
    return logits


def forward_language(module: nn.Module, ids: Tensor) -> Tensor:
    """Token ids [B N] → tokens [B N C] after the last norm."""
    network: Any = inner(module)
    core = network.base_model
    options = {} if KINDS[network.config.model_type].masked else {"use_cache": False}
    tokens: Tensor = core(input_ids=ids, **options).last_hidden_state
    return tokens
