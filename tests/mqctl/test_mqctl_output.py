"""Tables: plain columns through a pipe, drawn and coloured on a terminal, NO_COLOR honoured."""

import os
import pty
import sys
from contextlib import suppress

import pytest

from batonmq.mqctl.output import BAD, GOOD, Cell, Output, when


def on_terminal(**environ: str) -> str:
    """What a table and a line look like on a terminal."""
    ours, theirs = pty.openpty()
    with pytest.MonkeyPatch.context() as patch, open(theirs, "w") as terminal:
        for name in ("NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm", **environ}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdout", terminal)
        out = Output(as_json=False)
        out.table(["Two Words", "N"], [[Cell.of("[red]x", GOOD), 1], [None, 20]])
        out.line("bad news", style=BAD)
    shown = b""
    with suppress(OSError):  # EIO: the other end is closed, and all was read
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    return shown.decode()


def test_a_pipe_gets_one_row_a_line_and_one_word_a_heading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Output(as_json=False).table(["Two Words", "N"], [[Cell.of("[red]x", GOOD), 1], ["y", None]])
    assert capsys.readouterr().out == "Two_Words  N\n[red]x     1\ny\n"


def test_a_terminal_gets_colour_unless_no_color_is_set() -> None:
    shown = on_terminal()
    assert "\033[32m[red]x" in shown, "green, and brackets are text"
    assert "Two Words" in shown
    plain = on_terminal(NO_COLOR="1")
    assert "\033[32m" not in plain
    assert "\033[31m" not in plain
    assert "[red]x" in plain and "bad news" in plain


def test_json_is_one_document_and_compact_ones_are_one_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = Output(as_json=True)
    out.document({"ü": [1]})
    assert capsys.readouterr().out == '{\n  "ü": [\n    1\n  ]\n}\n'
    out.compact = True
    out.document({"a": 1})
    out.document({"a": 2})
    assert capsys.readouterr().out == '{"a": 1}\n{"a": 2}\n'


def test_a_time_that_is_not_known_is_empty() -> None:
    assert when(0) == ""
    assert when(1_700_000_000_123).endswith(".123")
