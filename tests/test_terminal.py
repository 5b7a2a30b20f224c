"""What is said where: results and complaints apart, tables that fit, errors as sentences."""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest

from sinklab import terminal
from sinklab.errors import InputError, NotFoundError, printable
from sinklab.models.load import describe_names

NAMES = [[row["name"], row["loads"], row["example"]] for row in describe_names()]
NUMBERS = [[f"blocks.{i}.attn", "1", "6", "64", "2e-07", "", "float32"] for i in range(3)]
ALLOCATOR = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def drawn(
    monkeypatch: pytest.MonkeyPatch, width: int, columns: list[str], rows: list[list[str]], **options: tuple[str, ...]
) -> str:
    screen = Screen()
    for name, value in (("COLUMNS", str(width)), ("LINES", "50"), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", screen)
    terminal.table("Title", columns, rows, **options)
    return screen.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(
    ("columns", "rows"),
    [(["name", "loads", "example"], NAMES), (["site", "fired", "heads", "dim", "|Δ|", "note", "dtype"], NUMBERS)],
    ids=["names", "numbers"],
)
def test_a_table_fits_the_terminal_and_loses_no_word(
    width: int, columns: list[str], rows: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", drawn(monkeypatch, width, columns, rows))
    assert all(len(line.rstrip()) <= width or len(line.split()) == 1 for line in text.splitlines())
    shown, meant = Counter(text), Counter("".join(cell for row in rows for cell in row))
    assert all(shown[letter] >= number for letter, number in meant.items() if letter != " ")


@pytest.mark.parametrize("width", [20, 40, 80, 100, 120, 200])
def test_no_name_that_is_copied_is_ever_broken(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.strip() for line in drawn(monkeypatch, width, ["name", "loads", "example"], NAMES).splitlines()]
    for name, _, example in NAMES:
        assert any(line.startswith(name) for line in lines) and any(line.endswith(example) for line in lines)


def test_brackets_in_a_table_are_not_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "openclip:ARCH[/TAG or FILE]" in drawn(monkeypatch, 200, ["name", "loads", "example"], NAMES)


@pytest.mark.parametrize("width", [20, 40, 80, 100, 200])
def test_a_name_to_be_copied_stands_in_one_piece_on_a_line_at_any_width(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = drawn(monkeypatch, width, ["name", "loads", "example"], NAMES)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    for name, _, example in NAMES:
        assert any(line.startswith(name) for line in lines) and any(line.rstrip().endswith(example) for line in lines)
    whole = {cell for row in NAMES for cell in row}
    assert all(len(line.rstrip()) <= width or " " not in line.strip() or line.strip() in whole for line in lines)


def test_a_remark_is_one_line_said_once_however_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        terminal.warnings_as_lines()
        terminal.note("the table is resized")
        warnings.warn("the table is resized", stacklevel=1)
        warnings.warn("three images are blank", stacklevel=1)
        warnings.warn("an overflow", RuntimeWarning, stacklevel=1)
    said = ["note: the table is resized", "note: three images are blank", "warning: an overflow"]
    assert capsys.readouterr().err.splitlines() == [f"sinklab: {words}" for words in said]


def test_a_title_is_a_line_of_its_own_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.table("Numbers", ["a", "b"], [["1", "2"]], titled=True)
    assert capsys.readouterr().out == "# Numbers\na\tb\n1\t2\n"


@pytest.mark.parametrize("width", [40, 100, 200])
def test_on_a_terminal_the_doctor_says_what_its_marks_mean(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = SimpleNamespace(
        name="blocks.0.attn", fired=1, heads=4, kv_heads=2, head_dim=8, difference=0.0, row_sums=1e-16, kernel=2e-7,
        update=None, dtype="float32", note="",
    )  # fmt: skip
    drift = SimpleNamespace(column="inflow", worst=1e-7, layer=0, head=1)
    found = SimpleNamespace(
        proofs=[proof], drifts=[drift], facts={"device": "cpu"}, heads=4, moved=0, not_finite=0, verdict=lambda: "Well."
    )
    screen = Screen()
    for name, value in (("COLUMNS", str(width)), ("LINES", "50"), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", screen)
    terminal.examination(found)
    said = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert all(len(line) <= width for line in said.splitlines()) and said.endswith("\nWell.\n")
    assert "|Δout|: output attached against plain" in " ".join(said.split())


FOUND = ["6 of 72 heads sink: 2 NOP, 3 broadcast, 1 intermediate [so far].", "5 of 19 events lie near a limit."]


@pytest.mark.parametrize("width", [20, 40, 200])
def test_a_verdict_fits_the_window_and_loses_no_word(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    for name, value in (("COLUMNS", str(width)), ("LINES", "50"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", screen)
    terminal.verdict(FOUND)
    text = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert all(len(line) <= width for line in text.splitlines()) and text.split() == " ".join(FOUND).split()


def test_in_a_pipe_a_verdict_is_plain_lines_apart_from_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.verdict(FOUND)
    assert capsys.readouterr() == ("", "\n".join(FOUND) + "\n")


def test_in_a_pipe_a_table_is_tab_separated(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.table("Title", ["name", "loads", "example"], NAMES)
    said = capsys.readouterr()
    assert [line.split("\t") for line in said.out.splitlines()] == [["name", "loads", "example"], *NAMES]
    assert said.err == ""


@pytest.mark.parametrize(
    "error",
    [
        InputError("a sentence."),
        NotFoundError("a sentence."),
        FileNotFoundError("a sentence."),
        PermissionError("a sentence."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_user_can_mend_ends_in_one_line_and_code_two(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, terminal.errors_as_sentences():
        raise error
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "sinklab: a sentence.\n")


def test_running_out_of_memory_names_the_options_that_help(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), RuntimeError(ALLOCATOR)):
        with pytest.raises(SystemExit) as ended, terminal.errors_as_sentences():
            raise error
        assert ended.value.code == 2 and "--batch-size" in capsys.readouterr().err


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    with pytest.raises(AssertionError), terminal.errors_as_sentences():
        raise AssertionError("ours")


@pytest.mark.parametrize(("hint", "said"), [("Use --resume.", "stopped. Use --resume."), ("", "stopped.")])
def test_ctrl_c_says_how_to_go_on_if_there_is_a_way(hint: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, terminal.errors_as_sentences(lambda: hint):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr().err.strip() == f"sinklab: {said}"


def test_only_the_first_rank_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    terminal.say("not heard")
    assert capsys.readouterr() == ("", "")


def test_in_a_pipe_progress_is_a_line_at_the_start_and_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress() as told:
        for done in range(0, 101, 4):
            told(done, 100)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "images 0/100"
    assert last.startswith("images 100/100") and "images/s" in last


def test_a_long_scan_says_how_much_time_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 0.0, 20.0, 20.0, 20.0])
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with terminal.progress() as told:
        told(0, 40)
        told(10, 40)  # after 20 seconds: half an image a second, 30 to go
    assert capsys.readouterr().err.splitlines()[1].split() == ["images", "10/40", "0.5", "images/s", "60", "s", "left"]


def test_nothing_to_do_is_not_told_as_done_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress() as told:
        told(5, 5)
    assert capsys.readouterr().err == ""


HOSTILE = "a\x1b[31m\x07b\x9bc\r\u202ed\u2028e\x00f"


def test_nothing_that_is_printed_steers_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.say(f"two\nlines {HOSTILE}")
    with pytest.raises(SystemExit), terminal.errors_as_sentences():
        raise InputError(f"{HOSTILE}.")
    terminal.table("Title", ["name"], [[HOSTILE]])
    said = capsys.readouterr()
    shown = r"a\x1b[31m\x07b\x9bc\r\u202ed\u2028e\x00f"
    assert said.err == f"two\nlines {shown}\nsinklab: {shown}.\n"
    assert said.out == f"name\n{shown}\n"
    assert "\x1b[31m" not in drawn(monkeypatch, 200, ["name"], [[HOSTILE]])


def test_a_warning_is_one_line_whatever_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        terminal.warnings_as_lines()
        warnings.simplefilter("always")
        warnings.warn(f"a name\n{HOSTILE}", stacklevel=1)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_plain_letters_of_every_script_stay_as_they_are() -> None:
    words = "naïve ☀ été 日本語 עברית a\u00a0b"
    assert printable(words) == words


def test_a_rank_above_the_first_speaks_only_if_the_first_has_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(terminal, "time", SimpleNamespace(sleep=waited.append))
    with pytest.raises(SystemExit) as ended, terminal.errors_as_sentences():
        raise InputError("only here.")
    assert ended.value.code == 2 and waited == [terminal.FIRST_RANK_SPEAKS]
    assert capsys.readouterr().err == "sinklab: only here.\n"
