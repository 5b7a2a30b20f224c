"""Text as bytes: splits that cover everything once, batches that depend on seed and step alone, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sinklab.data.text import SPLITS, Text, Windows, open_text
from sinklab.data.text_sequences import text_sequences
from sinklab.errors import InputError, NotFoundError

CONTENT = bytes(range(97, 123)) * 40  # 1040 bytes of 26 letters


@pytest.fixture
def text(tmp_path: Path) -> Text:
    (tmp_path / "letters.txt").write_bytes(CONTENT)
    return open_text(tmp_path / "letters.txt")


def test_splits_are_ninety_five_five_and_cover_every_byte_once(text: Text) -> None:
    assert [text.length(split) for split in SPLITS] == [936, 52, 52]
    covered = [place for first, end in text.splits.values() for place in range(first, end)]
    assert covered == list(range(len(CONTENT)))


def test_shares_may_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    split = open_text(tmp_path / "a", shares=(2, 1, 1))
    assert [split.length(name) for name in SPLITS] == [520, 260, 260]


def test_tokens_number_the_bytes_that_occur_or_are_the_bytes_themselves(text: Text, tmp_path: Path) -> None:
    assert text.symbols == bytes(range(97, 123))
    assert text.tokens(1, 3).tolist() == [1, 2, 3]
    assert text.decode(text.tokens(5, 30)) == CONTENT[5:35]
    assert torch.equal(text.encode(b"abz"), torch.tensor([0, 1, 25]))
    every = open_text(tmp_path / "letters.txt", vocabulary="bytes")
    assert len(every.symbols) == 256 and every.tokens(1, 3).tolist() == [98, 99, 100]


def test_a_byte_without_a_symbol_is_refused_by_its_number(text: Text) -> None:
    with pytest.raises(InputError, match="The byte 33 is none of the 26 symbols"):
        text.encode(b"a!")
    with pytest.raises(InputError, match=r"has 25 different bytes .* no symbol for \(98 “b”, .*first is byte 1 of"):
        text.numbered_by(b"a!")
    assert text.numbered_by(bytes(range(256))).tokens(0, 2).tolist() == [97, 98]


def test_a_byte_without_a_symbol_is_shown_in_its_character_with_advice_that_fits(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("abc·d×\x07".encode())
    held = open_text(tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"\(7, 151 in “×”, 183 in “·”; the first is byte 4 of.*--vocabulary bytes"):
        held.numbered_by(b"abcd\xc2\xc3")
    with pytest.raises(InputError, match="has 1 byte that .* know the bytes of Python's library source only") as told:
        held.numbered_by(b"abcd\xc2\xc3\x97\x07", shipped=True)
    assert "--vocabulary" not in str(told.value)


def test_a_batch_depends_on_seed_and_step_alone(text: Text) -> None:
    one = text.batch(0, 7, 8, 16)
    text.batch(0, 3, 8, 16)
    assert one.shape == (8, 17) and one.dtype == torch.int64
    assert torch.equal(one, text.batch(0, 7, 8, 16))
    assert not torch.equal(one, text.batch(1, 7, 8, 16)) and not torch.equal(one, text.batch(0, 8, 8, 16))


def test_shares_of_a_batch_are_the_batch(text: Text) -> None:
    whole = text.batch(0, 0, 7, 16)
    shares = [text.batch(0, 0, 7, 16, slice(rank, None, 3)) for rank in range(3)]
    assert torch.equal(torch.stack([shares[i % 3][i // 3] for i in range(7)]), whole)


def test_batches_come_from_the_training_split_and_reach_its_last_byte(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes([1] * 89 + [2] + [3] * 10))
    found = open_text(tmp_path / "a", vocabulary="bytes").batch(0, 0, 2000, 8)
    assert found.max() == 2 and (found[:, -1] == 2).any() and not (found[:, :-1] == 2).any()


def test_windows_do_not_overlap_and_stay_in_their_split(text: Text) -> None:
    windows = text.windows("validation", 16)
    assert windows == [(f"validation/0000{i}", 936 + 16 * i) for i in range(3)]
    listed = Windows(text=text, split="validation", length=16)
    assert listed.ids == [name for name, _ in windows] and len(listed) == 3
    assert text.decode(torch.cat(list(listed))) == CONTENT[936 : 936 + 48]


def test_fewer_windows_are_spread_over_the_split(text: Text) -> None:
    assert Windows(text=text, split="train", length=100, limit=3).ids == ["train/00000", "train/00003", "train/00006"]
    with pytest.raises(InputError, match="no window of 100 fits"):
        Windows(text=text, split="test", length=100)


def test_the_whole_of_a_short_text_is_read_unless_its_splits_were_given(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(CONTENT)
    found = text_sequences(open_text(tmp_path / "a.txt"), 16, whole=True)
    assert [ref.id for ref in found][:2] == ["text/00000", "text/00001"] and len(found) == 1040 // 16
    assert b"".join(ref.content() for ref in found) == CONTENT
    assert found.notes == ("the whole text is read: its validation split holds 3 windows (of 65 in all, 65 are read).",)
    few = text_sequences(open_text(tmp_path / "a.txt"), 16, whole=True, limit=3)
    assert [ref.id for ref in few] == [f"validation/0000{i}" for i in range(3)]
    assert few.notes == ("all 3 windows of the validation split are read; that split is 5 % of the text.",)
    (tmp_path / "a.txt").rename(tmp_path / "train.txt")
    for name in ("valid.txt", "test.txt"):
        (tmp_path / name).write_bytes(CONTENT[:40])
    assert len(text_sequences(open_text(tmp_path), 16, whole=True)) == 2


def test_a_folder_is_its_files_in_order_of_their_names_and_hidden_ones_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, content in (("c.txt", "three"), ("a.txt", "one"), ("b/x.txt", "two"), (".hidden", "no")):
        (tmp_path / name).write_text(content)
    joined = open_text(tmp_path)
    assert bytes(joined.content) == b"onetwothree"
    assert joined.name == tmp_path.name


def test_a_folder_of_three_named_files_has_its_splits_given(tmp_path: Path) -> None:
    for name, content in (("train.txt", "a" * 10), ("valid.txt", "b" * 6), ("test.txt", "c" * 4)):
        (tmp_path / name).write_text(content)
    given = open_text(tmp_path)
    assert [given.length(split) for split in SPLITS] == [10, 6, 4]
    assert given.decode(given.tokens(*given.splits["validation"])[:6]) == b"bbbbbb"


def test_the_standard_library_is_the_same_every_time_and_mostly_python() -> None:
    one, two = open_text("stdlib"), open_text("stdlib")
    assert one.sha256 == two.sha256 and len(one.content) > 1_000_000
    assert bytes(one.content).count(b"import ") > 1000
    assert isinstance(one.content, np.memmap)


def test_enwik8_has_its_own_splits_and_its_length_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "enwik8"
    with path.open("wb") as stream:  # a file with a hole, which takes no room
        stream.write(b"ab")
        stream.truncate(100_000_000)
    full = open_text(f"enwik8={path}")
    assert [full.length(split) for split in SPLITS] == [90_000_000, 5_000_000, 5_000_000]
    with path.open("r+b") as stream:
        stream.truncate(99_999_999)
    with pytest.raises(InputError, match="enwik8 has 100,000,000 bytes; .* has 99,999,999"):
        open_text(f"enwik8={path}")


def test_bytes_that_are_no_text_are_read_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"ab\0c" * 30)
    held = open_text(tmp_path / "b")
    assert held.notes == ("b is not plain text: 30 of its bytes are 0. It is read as bytes all the same.",)
    assert held.symbols == b"\0abc"


def test_what_cannot_be_a_text_is_refused_with_a_sentence(tmp_path: Path, text: Text) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for source, kind, sentence in (
        (tmp_path / "nowhere", NotFoundError, "There is no text .*nowhere: --text takes stdlib"),
        (tmp_path / "empty", InputError, "empty is empty"),
        (tmp_path / "folder", InputError, "holds no files"),
        (f"enwik8={tmp_path / 'nowhere'}", NotFoundError, "There is no text"),
    ):
        with pytest.raises(kind, match=sentence):
            open_text(source)
    with pytest.raises(InputError, match="The validation split of letters.txt has 52 bytes, but sequences of 52"):
        text.require(52)
    text.require(51)
    with pytest.raises(NotFoundError, match="there is no split 'dev'"):
        text.length("dev")
    with pytest.raises(InputError, match="three positive shares"):
        open_text("stdlib", shares=(90, 10))
