"""Numbers as people read them: durations, sizes, counts, times; and ticks for logarithmic axes.

Free of Spark.
"""

import html
from datetime import UTC, datetime, timedelta
from typing import Final

DAY_MS: Final = 86_400_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
UNKNOWN: Final = "–"
_LARGE_UNITS: Final = (
    (60_000, "min", 1_000, "s", 3_600_000),
    (3_600_000, "h", 60_000, "min", 86_400_000),
    (86_400_000, "d", 3_600_000, "h", float("inf")),
)
#: Where an axis of durations may have ticks, ms; where a logarithmic one has them.
ROUND_MS: Final = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 60_000,
    120_000, 300_000, 600_000, 1_200_000, 1_800_000, 3_600_000, 7_200_000, 18_000_000, 36_000_000,
    86_400_000,
)  # fmt: skip
DURATION_TICKS_MS: Final = (
    1, 10, 100, 1_000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 86_400_000, 864_000_000,
    8_640_000_000,
)  # fmt: skip
#: Where a logarithmic axis of sizes has ticks, bytes.
SIZE_TICKS: Final = tuple(1 << bits for bits in range(0, 41, 2))


def duration_text(ms: float | None) -> str:
    """`850 ms`, `1.23 s`, `3 min 20 s`, `2 h 5 min`, `12 d 3 h`; a dash if unknown."""
    if ms is None:
        return UNKNOWN
    if ms < 0:
        return f"-{duration_text(-ms)}"
    if ms < 1_000:
        return f"{ms:.0f} ms"
    if ms < 60_000:
        digits = 0 if ms % 1_000 == 0 else 2 if ms < 10_000 else 1
        return f"{ms / 1_000:.{digits}f} s"
    unit, name, smaller, its_name, _ = next(each for each in _LARGE_UNITS if ms < each[-1])
    whole, rest = divmod(int(ms), unit)
    small = rest // smaller
    return f"{count_text(whole)} {name}" + (f" {small} {its_name}" if small else "")


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
    return UNKNOWN if ms is None else plot_time(ms).removesuffix(".000")


def plot_time(ms: int) -> str:
    """A time as plotly takes it: without a zone, so every browser shows it as it is, in UTC."""
    return (_EPOCH + timedelta(milliseconds=ms)).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def plot_text(text: object) -> str:
    """Text from data inside a picture: plotly takes tags for markup, so none may be left."""
    return html.escape(str(text), quote=False)
