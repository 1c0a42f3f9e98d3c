"""The clock of the HA shells: milliseconds that go on while the machine sleeps (R8)."""

from __future__ import annotations

import time


def boot_ms() -> int:
    """CLOCK_BOOTTIME in ms: never set back, and a suspended machine cannot miss a deadline."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class ByteRate:
    """Bytes of the last full second, from a growing total."""

    def __init__(self) -> None:
        self._since_ms = 0
        self._total = 0
        self._per_second = 0

    def sample(self, total: int, now_ms: int) -> int:
        """To be called now and then with the total so far; returns bytes per second."""
        elapsed_ms = now_ms - self._since_ms
        if elapsed_ms >= 1_000:
            self._per_second = (total - self._total) * 1_000 // elapsed_ms
            self._since_ms, self._total = now_ms, total
        return self._per_second


__all__ = ["ByteRate", "boot_ms"]
