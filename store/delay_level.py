"""When a message of a delay level is due, as the consume queues of SCHEDULE_TOPIC_XXXX hold it.

Origin: Java `ScheduleMessageService.parseDelayLevel`, `computeDeliverTimestamp`.
"""

from __future__ import annotations

from typing import Final

_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_UNKNOWN_LEVEL_MS: Final = 1_000


class DelayLevels:
    """Level n (from 1) of a list like `1s 5s 10m`; levels above the last count as the last."""

    def __init__(self, text: str) -> None:
        """Raises ValueError for a word that is no number with s, m, h or d behind it."""
        self._delays_ms = [_delay_ms(word) for word in text.split()]

    def deliver_at(self, level: int, store_timestamp: int) -> int:
        """The due time in ms since the epoch of a message stored at `store_timestamp`."""
        level = min(level, len(self._delays_ms))
        delay_ms = self._delays_ms[level - 1] if level > 0 else _UNKNOWN_LEVEL_MS
        return store_timestamp + delay_ms


def _delay_ms(word: str) -> int:
    unit = _UNITS_MS.get(word[-1])
    if unit is None or not word[:-1].isdigit():
        raise ValueError(f"messageDelayLevel holds {word!r}, which is no delay such as 10s or 2h")
    return int(word[:-1]) * unit
