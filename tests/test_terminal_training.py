"""A line of progress is written over where it stands: it never reaches the terminal's last column."""

from __future__ import annotations

import io
import os
import pty
import struct
import sys
from fcntl import ioctl
from termios import TIOCSWINSZ

import pytest

from sinklab.terminal_training import fitted, training

NAMES = ["seed-0/gated-global-penalty-registers-tiny", "seed-1/gated-global-penalty-registers-tiny"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [10, 24, 40, 60, 74, 80, 200])
def test_no_line_of_progress_fills_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "stderr", screen)
    with training(NAMES, "validation", "bits a byte") as tell:
        for name in NAMES:
            for step in (9_999, 10_000):
                tell(name, step, 10_000, 12.3456, {"one": 1.5}, 123456.0)
    drawn = screen.getvalue().replace("\x1b[K", "").replace("\n", "\r").split("\r")
    assert sum(map(bool, drawn)) == 4
    assert max(map(len, drawn)) < width
    if width == 200:
        assert f"1/2 {NAMES[0]}  step 9999/10000  loss 12.3456 bits a byte" in screen.getvalue()
        assert "123456 s left" in screen.getvalue()


def test_the_terminal_asked_for_its_width_is_the_one_that_progress_is_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    own, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(theirs, "w") as screen, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", screen)
        with training(NAMES) as tell:
            tell(NAMES[0], 3, 16, 12.3456, {}, 12.0)
    drawn = os.read(own, 4096).decode()
    os.close(own)
    line = drawn.partition("\x1b")[0].strip()
    assert 50 < len(line) < 60 and line.endswith("registers-tiny  step 3/16  loss 12.3456  12 s left")


def test_what_is_said_between_trainings_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with training(NAMES) as tell:
        for name in NAMES:
            tell(name, 10, 10, 1.0, {}, None)
            print("note", file=screen)
    assert [line.strip("\x1b[K\r")[:4] for line in screen.getvalue().split("\n")] == [
        "1/2 ",
        "note",
        "2/2 ",
        "note",
        "",
    ]


def test_a_name_is_shortened_before_anything_is_left_out() -> None:
    told = ["step 3/16", "loss 1.0000", "12 s left"]
    assert fitted("1/2 ", "seed-0/baseline-tiny", told, 80) == (
        "1/2 seed-0/baseline-tiny  step 3/16  loss 1.0000  12 s left"
    )
    assert fitted("1/2 ", "seed-0/baseline-tiny", told, 53) == "1/2 …baseline-tiny  step 3/16  loss 1.0000  12 s left"
    assert fitted("", "seed-0/baseline-tiny", told, 24) == "…aseline-tiny  step 3/16"
