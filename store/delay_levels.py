"""The delay levels of a broker, and what a unit of a consume queue carries beside its position.

A unit's tags code is the hash of the message's TAGS. In the queues of DUE_TOPICS it is when the
message is due, in ms since the epoch, negative for one that recalls another: whoever waits for it
reads units only. (Java has the hash
in the timer's queue, and never reads it.) Pure. Origin: Java
`ScheduleMessageService.parseDelayLevel`, `CommitLog.checkMessageAndReturnSize`.
"""

from __future__ import annotations

from typing import Final

from batonmq.protocol.properties import find_property
from batonmq.protocol.tags import tags_code
from batonmq.protocol.topic_name import SCHEDULE_TOPIC, TIMER_TOPIC

_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_UNKNOWN_LEVEL_MS: Final = 1_000


class DelayLevels:
    """Level n (from 1) of a list like `1s 5s 10m`; levels above the last count as the last."""

    def __init__(self, text: str) -> None:
        """Raises ValueError for a list without a level, and for a word that is no number with s, m,
        h or d behind it."""
        self._delays_ms = [_delay_ms(word) for word in text.split()]
        if not self._delays_ms:
            raise ValueError("messageDelayLevel holds no delay; allowed is a list such as 1s 5s 2h")

    def __len__(self) -> int:
        """The last level."""
        return len(self._delays_ms)

    def delay_ms(self, level: int) -> int:
        """How long a message of this level waits."""
        level = min(level, len(self._delays_ms))
        return self._delays_ms[level - 1] if level > 0 else _UNKNOWN_LEVEL_MS

    def deliver_at(self, level: int, store_timestamp: int) -> int:
        """The due time in ms since the epoch of a message stored at `store_timestamp`."""
        return store_timestamp + self.delay_ms(level)

    def tags_code(self, topic: str, properties: bytes, store_timestamp: int) -> int:
        """What the unit of a record carries, from the record's topic, raw properties and time."""
        if topic == SCHEDULE_TOPIC:
            level = find_property(properties, b"DELAY")
            if level is not None and level.isdigit() and int(level) > 0:
                return self.deliver_at(int(level), store_timestamp)
        elif topic == TIMER_TOPIC:
            out_ms = find_property(properties, b"TIMER_OUT_MS")
            if out_ms is not None and out_ms.isdigit():
                is_recall = find_property(properties, b"TIMER_DEL_UNIQKEY") is not None
                return -int(out_ms) if is_recall else int(out_ms)
        return tags_code(find_property(properties, b"TAGS"))


def _delay_ms(word: str) -> int:
    unit = _UNITS_MS.get(word[-1])
    if unit is None or not word[:-1].isdecimal() or not word.isascii():
        raise ValueError(f"messageDelayLevel holds {word!r}, which is no delay such as 10s or 2h")
    return int(word[:-1]) * unit
