"""The two clocks of the client.

Deadlines and pauses are counted on `boot_ms` (CLOCK_BOOTTIME: it goes on while the machine sleeps
and never steps); `wall_ms` is only written into messages and shown to people.
"""

import time


def boot_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def wall_ms() -> int:
    return time.time_ns() // 1_000_000
