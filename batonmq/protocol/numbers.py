"""Whole numbers in texts of clients, records and settings, within Java's limits. Pure. Python's
int() accepts any number of digits up to 4300, `1_000` and digits of other scripts, but beyond 64
bits a number fits no field."""

from typing import Final

INT_MAX: Final = (1 << 31) - 1
LONG_MAX: Final = (1 << 63) - 1
PORT_MAX: Final = (1 << 16) - 1
_LENGTH_MAX: Final = 64
_SIGNS: Final = ("-", "+", b"-", b"+")


def whole_number(text: str | bytes, most: int = LONG_MAX) -> int | None:
    """The number, from -`most` - 1 to `most`; None for any other text, or more than
    64 characters."""
    is_digits = text.isdigit() or (text[:1] in _SIGNS and text[1:].isdigit())
    if not is_digits or not text.isascii() or len(text) > _LENGTH_MAX:
        return None
    number = int(text)
    return number if -most - 1 <= number <= most else None


def natural_number(text: str, most: int = LONG_MAX) -> int | None:
    """As `whole_number`, without a sign."""
    return whole_number(text, most) if text[:1].isdigit() else None


def host_and_port(text: str) -> tuple[str, int] | None:
    """Host and port in `host:port`; None for any other text."""
    host, _, digits = text.rpartition(":")
    port = natural_number(digits, PORT_MAX)
    return (host, port) if host and port else None
