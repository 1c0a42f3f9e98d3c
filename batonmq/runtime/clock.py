"""The clocks of a process. Cores get their time passed in; shells read it here. `boot_ms` is for
deadlines: CLOCK_BOOTTIME is never set back and counts while the machine sleeps (R8). `wall_ms` is
only stored in messages and shown to people."""

import time
from typing import Final

UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
"""The units of a time span as people write it: `10m`."""


def boot_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000
