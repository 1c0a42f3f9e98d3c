"""What is logged of a name is on one line and commands no terminal (R58)."""

import io
import logging

import pytest

from batonmq.runtime import log_lines
from batonmq.runtime.log_lines import (
    INTERVAL_S,
    LINE_MAX,
    LINES_MAX,
    JsonFormatter,
    LineFormatter,
)
from batonmq.runtime.server_main import LOG_FORMAT


@pytest.mark.parametrize(
    "name", ["a\n2026-01-01T00:00:00.000 CRITICAL forged", "\x1b[2J", "\r", "\u2028"]
)
def test_r58_a_name_forges_no_line(name: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(LOG_FORMAT, "%Y-%m-%dT%H:%M:%S"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.info("topic_changed topic=%s", name)
    try:
        raise ValueError(name)
    except ValueError:
        logger.exception("request_failed name=%s", name)
    lines = stream.getvalue().removesuffix("\n").split("\n")
    begin = [line for line in lines if not line.startswith("    ")]
    assert [line.split()[3] for line in begin] == ["topic_changed", "request_failed"]
    assert all(line.isprintable() for line in lines)


def test_r58_other_text_stays_as_it_is() -> None:
    record = logging.LogRecord("n", logging.INFO, "p", 1, "päth=%r", ("日本",), None)
    assert LineFormatter("%(message)s").format(record) == "päth='日本'"


@pytest.mark.parametrize("formatter", [LineFormatter("%(message)s"), JsonFormatter()])
def test_r58_a_line_is_cut_whatever_a_stranger_names(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("n", logging.INFO, "p", 1, "no_group name=%s", ("x" * 10**6,), None)
    line = formatter.format(record)
    assert len(line) < 3 * LINE_MAX and "(cut, of 1000" in line


def test_one_log_call_writes_a_limited_number_of_lines_and_says_how_many_it_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each bad frame of a stranger cost a line, without a limit."""
    now_s = 100.0
    monkeypatch.setattr(log_lines, "boot_s", lambda: now_s)
    lines: list[str] = []
    limit = log_lines.LineLimit()

    def write(line: int, level: int = logging.WARNING) -> None:
        record = logging.LogRecord("l", level, "f.py", line, "dropped peer=%s", ("p",), None)
        if limit.filter(record):
            lines.append(record.getMessage())

    for _ in range(LINES_MAX + 7):
        write(1)
    write(2)
    assert len(lines) == LINES_MAX + 1
    now_s += INTERVAL_S
    write(1)
    write(1)
    assert lines[-2:] == ["dropped peer=p left_out=7", "dropped peer=p"]
    whole = logging.LogRecord("l", logging.INFO, "f.py", 1, "100 %", (), None)
    vars(whole).update(log_lines.UNLIMITED)
    assert all(limit.filter(whole) for _ in range(LINES_MAX + 1)), "who changed what is all kept"
    other = logging.LogRecord("l", logging.ERROR, "f.py", 9, "100 %", (), None)
    passed = [limit.filter(other) for _ in range(LINES_MAX + 1)]
    now_s += INTERVAL_S
    assert limit.filter(other) and other.getMessage() == "100 % left_out=1" and not passed[-1]
    for _ in range(2 * LINES_MAX):
        write(3, logging.DEBUG)
    assert len(lines) == 3 * LINES_MAX + 3
