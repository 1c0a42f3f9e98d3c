"""Numbers as people read them: durations, sizes, counts, times; and ticks for logarithmic axes.

Free of Spark.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND: Final = 1_000
_MINUTE: Final = 60 * _SECOND
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR
UNKNOWN: Final = "–"

#: Where a logarithmic axis of durations has ticks, ms.
DURATION_TICKS_MS: Final = (
    1, 10, 100, _SECOND, 10 * _SECOND, _MINUTE, 10 * _MINUTE, _HOUR, 10 * _HOUR, _DAY, 10 * _DAY,
    100 * _DAY,
)  # fmt: skip
#: Where a logarithmic axis of sizes has ticks, bytes.
SIZE_TICKS: Final = tuple(1 << bits for bits in range(0, 41, 2))


def percentile(values: Sequence[int], part: float) -> int | None:
    """The least of the values that so large a part of them does not exceed; None without any."""
    return sorted(values)[max(0, ceil(part * len(values)) - 1)] if values else None


def duration_text(ms: float | None) -> str:
    """`850 ms`, `1.23 s`, `3 min 20 s`, `2 h 5 min`, `12 d 3 h`; a dash if unknown."""
    if ms is None:
        return UNKNOWN
    if ms < 0:
        return f"-{duration_text(-ms)}"
    if ms < _SECOND:
        return f"{ms:.0f} ms"
    if ms % _SECOND == 0 and ms < _MINUTE:
        return f"{ms / _SECOND:.0f} s"
    if ms < 10 * _SECOND:
        return f"{ms / _SECOND:.2f} s"
    if ms < _MINUTE:
        return f"{ms / _SECOND:.1f} s"
    for unit, name, smaller, its_name in (
        (_MINUTE, "min", _SECOND, "s"),
        (_HOUR, "h", _MINUTE, "min"),
        (_DAY, "d", _HOUR, "h"),
    ):
        if ms < {_MINUTE: _HOUR, _HOUR: _DAY}.get(unit, float("inf")):
            whole, rest = divmod(int(ms), unit)
            small = rest // smaller
            return f"{count_text(whole)} {name} {small} {its_name}" if small else f"{whole} {name}"
    raise AssertionError("days have no end")


def bytes_text(size: float | None) -> str:
    """`512 B`, `1.5 KiB`, `12 GiB`; a dash if unknown."""
    if size is None:
        return UNKNOWN
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" or abs(value) >= 100 or value == int(value) else 1
    return f"{value:,.{digits}f} {unit}"


def count_text(number: float | None) -> str:
    """`1,234`, from ten millions on `12.3 million`; a dash if unknown."""
    if number is None:
        return UNKNOWN
    if abs(number) >= 10_000_000_000:
        return f"{number / 1e9:,.1f} billion"
    if abs(number) >= 10_000_000:
        return f"{number / 1e6:,.1f} million"
    return f"{number:,.0f}"


def counted(number: int, one: str, many: str = "") -> str:
    """`1 group`, `3 groups`, `no groups`."""
    words = one if number == 1 else many or f"{one}s"
    return f"{'no' if number == 0 else count_text(number)} {words}"


def rate_text(per_second: float | None) -> str:
    if per_second is None:
        return UNKNOWN
    digits = 0 if per_second >= 100 else 1 if per_second >= 1 else 3
    return f"{per_second:,.{digits}f}/s"


def moment_text(ms: int | None) -> str:
    """`2026-11-21 10:03:11.250`, in UTC; without the fraction where it is zero."""
    if ms is None:
        return UNKNOWN
    at = _EPOCH + timedelta(milliseconds=ms)
    text = at.strftime("%Y-%m-%d %H:%M:%S")
    return f"{text}.{ms % 1000:03d}" if ms % 1000 else text


def plot_time(ms: int) -> str:
    """A time as plotly takes it: without a zone, so every browser shows it as it is, in UTC."""
    return (_EPOCH + timedelta(milliseconds=ms)).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def plot_text(text: object) -> str:
    """Text from data inside a picture: plotly takes tags for markup, so none may be left."""
    return html.escape(str(text), quote=False)
