"""How many timed messages wait for which topic, as 61 tells it. Kept only once it was asked for.

A recall counts as one message less, and as one more when it is due, together with the message that
it took back. Pure. Origin: org.apache.rocketmq.store.timer.TimerMetrics.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from batonmq.protocol.bodies import DataVersion, TimerMetricsSerializeWrapper
from batonmq.protocol.properties import REAL_TOPIC, TIMER_DEL_UNIQKEY, find_property

_REAL_TOPIC: Final = REAL_TOPIC.encode()
_RECALLS: Final = TIMER_DEL_UNIQKEY.encode()


class TimerCounts:
    """Of one mastership. Counted is what lies below `next_offset` of the timer's queue."""

    def __init__(self) -> None:
        self.next_offset = 0
        self._counts: Counter[str] = Counter()
        self._changes = 0
        self._changed_ms: dict[str, int] = {}

    def add(self, properties: bytes, count: int, now_ms: int) -> None:
        """A message with these properties waits (1), or does not any more (-1)."""
        topic = (find_property(properties, _REAL_TOPIC) or b"").decode("utf-8", "replace")
        is_recall = find_property(properties, _RECALLS) is not None
        self._counts[topic] += -count if is_recall else count
        self._changed_ms[topic] = now_ms
        self._changes += 1

    def encode(self, master_epoch: int) -> bytes:
        """The body: {"dataVersion", "timingCount": topic -> {"count", "timeStamp"}}."""
        found = {
            topic: {"count": count, "timeStamp": self._changed_ms[topic]}
            for topic, count in sorted(self._counts.items())
            if count > 0
        }
        version = DataVersion(
            counter=self._changes,
            state_version=master_epoch,
            timestamp=max(self._changed_ms.values(), default=0),
        )
        return TimerMetricsSerializeWrapper(data_version=version, timing_count=found).encode()
