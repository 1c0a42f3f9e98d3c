"""Formats each log record as one line. Names from clients and peers could contain line breaks,
which forge lines, or terminal escape sequences. So control characters are escaped as in Python, and
lines of a traceback are indented. With `logFormat: json` a line is a JSON object."""

import json
import logging
import re
from typing import Final

from batonmq.runtime.clock import boot_s

LINES_MAX: Final = 30
INTERVAL_S: Final = 10.0
LINE_MAX: Final = 16 << 10
"""Characters of one line: names from strangers may have megabytes (R58)."""
UNLIMITED: Final = {"is_unlimited": True}
"""`extra` of a log call whose lines are all kept."""
_CONTROL: Final = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff]")
_INDENT: Final = "    "


def _cut(text: str) -> str:
    if len(text) <= LINE_MAX:
        return text
    return f"{text[:LINE_MAX]} (cut, of {len(text)} characters)"


def on_one_line(text: str) -> str:
    """`text`, cut at LINE_MAX, with control characters and lone surrogates escaped."""
    text = _cut(text)
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class LineLimit(logging.Filter):
    """Passes LINES_MAX lines of one log call in INTERVAL_S. The first line after that says how many
    were left out. Without it a stranger, who costs a line with each frame, fills the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "is_unlimited", False):
            return True
        now_s, call = boot_s(), (record.pathname, record.lineno)
        began_s, count = self._seen.get(call, (now_s, 0))
        if now_s - began_s < INTERVAL_S or record.levelno <= logging.DEBUG:
            self._seen[call] = (began_s, count + 1)
            return count < LINES_MAX or record.levelno <= logging.DEBUG
        self._seen[call] = (now_s, 1)
        if count > LINES_MAX and not record.args:  # a text without arguments may hold a %
            record.msg = f"{record.msg} left_out={count - LINES_MAX}"
        elif count > LINES_MAX and isinstance(record.args, tuple):
            record.msg = f"{record.msg} left_out=%d"
            record.args = (*record.args, count - LINES_MAX)
        return True


class LineFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = on_one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei) -> str:  # type: ignore[no-untyped-def]
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(_INDENT + on_one_line(line) for line in text.split("\n"))


_FIELD: Final = re.compile(r"(\w+)=(%[-0-9.]*[a-z])|%[-0-9.]*[a-z]")
_EVENT: Final = re.compile(r"[a-z][a-z0-9_]*(?= |$)")


class JsonFormatter(LineFormatter):
    """`time`, `level`, `logger`, `message`; for a message such as `master_opened log_end=%d` also
    `event` and its fields, numbers as numbers. A traceback is a text in `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        message = _cut(record.getMessage())
        found: dict[str, object] = {
            "time": f"{self.formatTime(record, self.datefmt)}.{record.msecs:03.0f}",
            "level": record.levelname,
            "logger": record.name,
            "message": message,
        }
        if event := _EVENT.match(message):
            found["event"] = event[0]
        found |= {key: value for key, value in _fields(record) if key not in found}
        if record.exc_info:
            found["exception"] = _cut(logging.Formatter.formatException(self, record.exc_info))
        return json.dumps(found, ensure_ascii=True)


def _fields(record: logging.LogRecord) -> list[tuple[str, object]]:
    """The pairs of `key=%s` and its argument; none where the text is no such template."""
    places = [match[1] for match in _FIELD.finditer(str(record.msg).replace("%%", ""))]
    values = record.args if isinstance(record.args, tuple) else ()
    if len(places) != len(values):
        return []
    return [
        (key, value if isinstance(value, bool | int | float) else _cut(str(value)))
        for key, value in zip(places, values, strict=True)
        if key
    ]
