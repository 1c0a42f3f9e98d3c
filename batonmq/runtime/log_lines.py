"""One line of the log for each record, whatever names clients and peers send. A line break in a
name would forge a line, an escape sequence would command the terminal. So control characters are
escaped as Python does, and lines of a traceback are indented."""

import logging
import re
from typing import Final

_CONTROL: Final = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff]")
_INDENT: Final = "    "


def on_one_line(text: str) -> str:
    """`text` with control characters and lone surrogates escaped."""
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class LineFormatter(logging.Formatter):
    """For every handler of a server."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = on_one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei) -> str:  # type: ignore[no-untyped-def]
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(_INDENT + on_one_line(line) for line in text.split("\n"))
