"""Windows of token ids: cut from a text that is tokenised once, and the same whatever else is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sinklab.data import text_tokens
from sinklab.data.text import open_text
from sinklab.data.text_tokens import Reading, token_sequences
from sinklab.errors import InputError


def letters(written: str) -> list[int]:
    """A tokenizer whose ids are the characters' numbers."""
    return [ord(letter) for letter in written]


def reading(**changes: Any) -> Reading:
    given = {"name": "m", "encode": letters, "length": 8, "before": (1,), "after": (2,), "unknown": None}
    return Reading(**{**given, "vocabulary": 2000, **changes})


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {number} says é\n" for number in range(600)), encoding="utf-8")
    return path


def ids(ref: Any) -> list[int]:
    return np.frombuffer(ref.content(), dtype="int64").tolist()


def test_each_window_stands_between_its_special_tokens(written: Path) -> None:
    found = token_sequences(open_text(written), reading())
    content = open_text(written)
    first, end = content.splits["validation"]
    text = content.content[first:end].tobytes().decode("utf-8", errors="replace").strip("\ufffd")
    assert [ref.id for ref in found][:2] == ["validation/00000", "validation/00001"]
    assert all(ids(ref)[0] == 1 and ids(ref)[-1] == 2 and len(ids(ref)) == 8 for ref in found)
    inside = [number for ref in found for number in ids(ref)[1:-1]]
    assert inside == letters(text)[: len(inside)] and len(text) - len(inside) < 6


def test_fewer_windows_are_some_of_the_same(written: Path) -> None:
    every = {ref.id: ids(ref) for ref in token_sequences(open_text(written), reading())}
    few = {ref.id: ids(ref) for ref in token_sequences(open_text(written), reading(), limit=5)}
    assert len(few) == 5 and few.items() <= every.items()


def test_a_text_is_tokenised_in_pieces_that_cut_no_character(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [ids(ref) for ref in token_sequences(open_text(written), reading(), split="train")]
    for size in (7, 64):
        monkeypatch.setattr(text_tokens, "PIECE", size)
        assert [ids(ref) for ref in token_sequences(open_text(written), reading(), split="train")] == whole


def test_of_a_short_text_all_of_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz")
    found = token_sequences(open_text(path), reading())
    assert [ref.id for ref in found] == [f"text/{number:05d}" for number in range(4)]
    assert "the whole text is read: its validation split holds 0 windows" in " ".join(found.notes)
    with pytest.raises(InputError, match="no window of 98 fits"):
        token_sequences(open_text(path), reading(length=100))


def test_the_whole_text_is_read_where_its_split_holds_fewer_windows_than_asked_for(written: Path) -> None:
    text = open_text(written)
    held = len(token_sequences(text, reading()))
    assert held >= 64
    assert {ref.id.split("/")[0] for ref in token_sequences(text, reading(), limit=held)} == {"validation"}
    more = token_sequences(text, reading(), limit=held + 1)
    assert len(more) == held + 1 and {ref.id.split("/")[0] for ref in more} == {"text"}
    assert f"its validation split holds {held} windows" in " ".join(more.notes)


def test_ids_that_the_model_has_no_vector_for_are_refused(written: Path) -> None:
    with pytest.raises(InputError, match="gives lines.txt the id 233, and the model has vectors for 128 ids"):
        token_sequences(open_text(written), reading(vocabulary=128))


def test_a_text_that_the_tokenizer_does_not_know_is_refused_or_noted(written: Path) -> None:
    lost = reading(encode=lambda written: [7 if letter != "l" else 8 for letter in written], unknown=7)
    with pytest.raises(InputError, match=r"9\d% of the tokens of lines.txt are unknown"):
        token_sequences(open_text(written), lost)
    some = reading(encode=lambda written: [7 if letter == "é" else 8 for letter in written], unknown=7)
    assert "unknown to the tokenizer" in " ".join(token_sequences(open_text(written), some).notes)


def test_a_tokenizer_that_adds_nothing_round_a_window_is_read(written: Path) -> None:
    """GPT-2's and Qwen's own tokenizers have no token for the beginning."""
    from sinklab.data.text_tokens import _require_vocabulary

    assert _require_vocabulary(np.array([1, 2]), "text", reading(before=(), after=())) == []


def test_bytes_that_are_no_utf8_are_counted_and_a_text_of_nothing_else_is_refused(tmp_path: Path) -> None:
    lines = [f"line {number}: caf\xe9 and \ufffd\n" for number in range(600)]
    latin = tmp_path / "latin1.txt"  # é is one byte there, and no character of UTF-8; \ufffd is its own
    latin.write_bytes(b"".join(line.encode().replace(b"\xc3\xa9", b"\xe9") for line in lines))
    read = reading(vocabulary=70_000)
    (note,) = [note for note in token_sequences(open_text(latin), read).notes if "not UTF-8" in note]
    first, end = open_text(latin).splits["validation"]
    assert f"at {open_text(latin).content[first:end].tobytes().count(0xE9)} places" in note
    (tmp_path / "fine.txt").write_text("".join(lines), encoding="utf-8")
    assert not any("not UTF-8" in note for note in token_sequences(open_text(tmp_path / "fine.txt"), read).notes)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfd" * 3000)
    with pytest.raises(InputError, match="is not UTF-8 text: a tokenizer reads nothing else"):
        token_sequences(open_text(tmp_path / "bad.txt"), read)
