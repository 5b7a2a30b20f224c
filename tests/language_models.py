"""Tiny language models of Hugging Face's classes with random weights, and tokenizers made here: nothing is fetched.

Weights are drawn large enough that heads attend sharply, as in `families`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

WIDTH, LAYERS, HEADS, POSITIONS, SYMBOLS = 32, 2, 4, 32, 48
SENTENCE = "the cat sat on a mat and looked at one dog that ran away from two birds in old trees while rain fell"
WORDS = SENTENCE.split()
TEXT = " ".join(Random(0).choices(WORDS, k=4000))
"""Words in an order of no meaning."""
_SIZE = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 48}
_BERT = {**_SIZE, "vocab_size": SYMBOLS, "max_position_embeddings": POSITIONS}
_GROUPED = {**_BERT, "num_key_value_heads": 2, "head_dim": 12}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": SYMBOLS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_BERT, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _GROUPED),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _GROUPED),
    "bert": ("BertForMaskedLM", "BertConfig", _BERT),
    "roberta": (
        "RobertaForMaskedLM",
        "RobertaConfig",
        {**_BERT, "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1},
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": SYMBOLS,
            "dim": WIDTH,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "hidden_dim": 48,
            "max_position_embeddings": POSITIONS,
        },
    ),
}
"""model_type → class, configuration's class, and its sizes."""
CAUSAL = tuple(kind for kind, (name, _, _) in MODELS.items() if name.endswith(("CausalLM", "HeadModel")))


def build(kind: str, attention: str = "sdpa", **options: Any) -> Any:
    """The model of a model_type, in eval mode; the same weights whatever its attention's implementation."""
    import transformers

    name, config, sizes = MODELS[kind]
    settings = getattr(transformers, config)(
        **{"bos_token_id": 0, "eos_token_id": 0, **sizes, **options}, attn_implementation=attention
    )
    torch.manual_seed(0)
    model = getattr(transformers, name)(settings).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for key, value in model.named_parameters():
        if value.dim() == 2 and "embed" not in key and "wte" not in key:
            value.copy_(torch.randn(value.shape, generator=generator) * 1.4 / value.shape[1] ** 0.5)
        elif value.dim() == 2:
            value.copy_(torch.randn(value.shape, generator=generator))
        elif key.endswith("bias"):
            value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
        else:
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    return model


@cache
def model(kind: str) -> Any:
    """The same, shared: leave it as it is."""
    return build(kind)


def core(kind: str) -> Any:
    """The model without its head, as a plain module whose only result is the final tokens."""
    return build(kind, use_cache=False).base_model


def ids(batch: int = 2, tokens: int = 14, seed: int = 1) -> torch.Tensor:
    """Token ids [batch tokens]; none is a special one of these models."""
    return torch.randint(4, SYMBOLS, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def tokenizer(*, masked: bool = False, bos: bool = True, more: int = 0) -> Any:
    """A tokenizer of whole words: with [CLS] and [SEP] if `masked`, with <s> if `bos`; `more` words of no use."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[CLS]", "[SEP]", "[MASK]"] if masked else ["<s>"] if bos else []
    words = [*special, "[UNK]", *dict.fromkeys(WORDS), *(f"word{i}" for i in range(more))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"} if masked else {}
    named |= {"bos_token": "<s>"} if bos and not masked else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", **named)


def save(folder: Path, kind: str, **of_tokenizer: Any) -> Path:
    """A folder as Hugging Face saves a model with its tokenizer."""
    build(kind).save_pretrained(folder)
    of_tokenizer.setdefault("masked", kind not in CAUSAL)
    tokenizer(**of_tokenizer).save_pretrained(folder)
    return folder


def save_text(folder: Path) -> Path:
    """A text file whose validation split holds several windows."""
    path = folder / "words.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path
