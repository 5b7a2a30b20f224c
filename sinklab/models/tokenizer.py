"""The tokenizer that comes with a language model: text → token ids, and what stands round a window of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.models import hub

if TYPE_CHECKING:
    from collections.abc import Sequence

FILES = ("tokenizer.json", "tokenizer_config.json")
SPELLINGS = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model")
"""What else may be needed where there is no tokenizer.json, or beside it."""


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """How one model reads text."""

    name: str
    """Of the model that it came with, for sentences."""
    encode: Callable[[str], Sequence[int]]
    """Text → ids, with nothing put before or after."""
    before: tuple[int, ...]
    """Ids at the start of every window: a beginning of sequence, or [CLS]."""
    after: tuple[int, ...]
    """Ids at its end: [SEP]."""
    unknown: int | None
    """The id of what the vocabulary lacks; None where every text can be spelled."""
    vocabulary: int
    """How many ids the model has a vector for."""


def read_tokenizer(folder: Path | None, where: str, *, offline: bool) -> Any | None:
    """transformers' tokenizer from a local folder, or from a repository if there is none; None if there are no files.

    Nothing but data is read: a tokenizer that is code of its own is refused with a sentence.
    """
    if folder is None:
        found = [hub.hub_file(where, (name,), offline=offline, optional=True) for name in FILES]
        if found[0] is None:
            found += [hub.hub_file(where, (name,), offline=offline, optional=True) for name in SPELLINGS]
        folder = next((path.parent for path in found if path is not None), None)
        if folder is None:
            return None
    elif not any((folder / name).is_file() for name in (*FILES, *SPELLINGS)):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each family's reader has errors of its own
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(f"The tokenizer that comes with {where} cannot be read: {said.rstrip('.')}.") from error


def text_tokenizer(tokenizer: Any, *, name: str, vocabulary: int, masked: bool) -> TextTokenizer:
    """From transformers' tokenizer, for a model with so many token vectors; `masked` for BERT and its relatives."""

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    first, last = ("cls_token_id", "sep_token_id") if masked else ("bos_token_id", "")
    unknown = getattr(tokenizer, "unk_token_id", None)
    before = _ids(getattr(tokenizer, first, None))
    return TextTokenizer(
        name=name,
        encode=encode,
        before=before,
        after=_ids(getattr(tokenizer, last, None)) if last else (),
        unknown=None if unknown in before else unknown,  # GPT-2 has one token for everything special
        vocabulary=vocabulary,
    )


def _ids(number: int | None) -> tuple[int, ...]:
    return () if number is None else (int(number),)
