"""Comparison of values in SQL92 expressions, as in RocketMQ's `ComparisonExpression`. Pure.

A property is text (UTF-8 bytes); a literal is text, a whole number of 32 or 64 bits, a double or a
boolean. Text is converted to the type of the other side. If that fails, ValueError is raised, and
the message does not pass whatever the rest of the expression says.
"""

import enum
import math
import re
from collections.abc import Callable
from typing import Any, Final

Matches = Callable[[bytes], bool]
"""Returns whether a message passes, given its property string with a byte 2 before and after it."""

INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1

_WHOLE: Final = re.compile(r"[+-]?\d+")
_DOUBLE: Final = re.compile(
    r"[+-]?(?:NaN|Infinity|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fFdD]?)"
)
_HEX_DOUBLE: Final = re.compile(
    r"[+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+[fFdD]?"
)
# The characters that Java's Double.valueOf trims: all up to the blank.
_TRIMMED: Final = "".join(map(chr, range(33)))


class SqlError(ValueError):
    """An invalid filter expression; the text says where and why."""


class ValueKind(enum.Enum):
    """The type of an operand, if it is not null."""

    TEXT = "text"
    INT = "int"
    LONG = "long"
    DOUBLE = "double"
    BOOLEAN = "boolean"
    NOTHING = "nothing"
    """Always null: minus before something other than a number."""

    @property
    def is_number(self) -> bool:
        return self in (ValueKind.INT, ValueKind.LONG, ValueKind.DOUBLE)


def to_int(text: bytes) -> int:
    """Java `Integer.valueOf`. Raises ValueError."""
    return _whole(text, INT_MAX)


def to_long(text: bytes) -> int:
    """Java `Long.valueOf`. Raises ValueError."""
    return _whole(text, LONG_MAX)


def _whole(text: bytes, most: int) -> int:
    shown = text.decode("utf-8", "replace")
    # 64 characters: leading zeros are legal, and Python takes long for thousands of digits.
    if _WHOLE.fullmatch(shown) is None or len(shown) > 64:
        raise ValueError(f"{shown!r} is no whole number")
    value = int(shown)
    if not -most - 1 <= value <= most:
        raise ValueError(f"{shown} is out of range")
    return value


def to_double(text: bytes) -> float:
    """Java `Double.valueOf`. Raises ValueError."""
    shown = text.decode("utf-8", "replace").strip(_TRIMMED)
    if _DOUBLE.fullmatch(shown):
        return float(shown.rstrip("fFdD") if shown[-1] in "fFdD" else shown)
    if _HEX_DOUBLE.fullmatch(shown):
        return float.fromhex(shown.rstrip("fFdD") if shown[-1] in "fFdD" else shown)
    raise ValueError(f"{shown!r} is no number")


def to_boolean(text: bytes) -> bool:
    """Java `Boolean.valueOf`: everything but "true" is false."""
    return text.lower() == b"true"


def compare_doubles(left: float, right: float) -> int:
    """Java `Double.compareTo`: NaN equals itself and is above all, -0.0 is below 0.0."""
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) - math.isnan(right)
    if left == right == 0.0:
        return int(math.copysign(1, left) - math.copysign(1, right))
    return (left > right) - (left < right)


def compare_texts(left: bytes, right: bytes) -> int:
    """Compares two texts as doubles. Raises ValueError."""
    return compare_doubles(to_double(left), to_double(right))


_FROM_TEXT: Final = {
    ValueKind.INT: to_int,
    ValueKind.LONG: to_long,
    ValueKind.DOUBLE: to_double,
    ValueKind.BOOLEAN: to_boolean,
}


def compare(left: Any, left_kind: ValueKind, right: Any, right_kind: ValueKind) -> int:
    """The sign of `left` - `right`, none of them null. Raises ValueError."""
    if left_kind is not right_kind:
        if left_kind is ValueKind.BOOLEAN:
            if right_kind is ValueKind.TEXT:
                raise ValueError("a boolean before a text: RocketMQ cannot compare them")
            return -1
        if left_kind is ValueKind.TEXT:
            left, left_kind = _FROM_TEXT[right_kind](left), right_kind
        elif right_kind is ValueKind.TEXT:
            right = _FROM_TEXT[left_kind](right)
        elif right_kind is ValueKind.BOOLEAN:
            return -1
    if ValueKind.DOUBLE in (left_kind, right_kind):
        return compare_doubles(float(left), float(right))
    return int((left > right) - (left < right))


def equal(left: Any, left_kind: ValueKind, right: Any, right_kind: ValueKind) -> bool | None:
    """`left = right`, either of which may be null (None). Raises ValueError."""
    if left is None:
        return True if right is None else None
    if right is None:
        return False
    return compare(left, left_kind, right, right_kind) == 0
