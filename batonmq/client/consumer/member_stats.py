"""Statistics of a consumer for GET_CONSUMER_RUNNING_INFO (307): rates and times of the last minute,
by topic. Pure.

Origin: ConsumerStatsManager and ConsumeStatus in Java; as there, one sample every 10 s.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

SLOT_MS: Final = 10_000
_MINUTE: Final = 6
_HOUR: Final = 360


@dataclass(slots=True)
class _Slot:
    """Counts of 10 s. `failed` and `done` count messages, `calls` listener calls."""

    number: int
    pulls: int = 0
    pulled: int = 0
    pull_ms: int = 0
    calls: int = 0
    done: int = 0
    failed: int = 0
    call_ms: int = 0


class MemberStats:
    """Times are in ms, `now_ms` of a monotonic clock."""

    def __init__(self) -> None:
        self._topics: dict[str, deque[_Slot]] = {}

    def pulled(self, topic: str, messages: int, took_ms: int, now_ms: int) -> None:
        slot = self._slot(topic, now_ms)
        slot.pulls += 1
        slot.pulled += messages
        slot.pull_ms += took_ms

    def consumed(
        self, topic: str, messages: int, took_ms: int, now_ms: int, *, failed: bool
    ) -> None:
        slot = self._slot(topic, now_ms)
        slot.calls += 1
        slot.call_ms += took_ms
        if failed:
            slot.failed += messages
        else:
            slot.done += messages

    def shown(self, now_ms: int) -> dict[str, dict[str, float | int]]:
        """Topic -> Java's ConsumeStatus: messages per second, ms per pull and per listener call in
        the last minute; messages that failed in the last hour."""
        return {topic: self._shown(slots, now_ms) for topic, slots in self._topics.items()}

    def _slot(self, topic: str, now_ms: int) -> _Slot:
        slots = self._topics.setdefault(topic, deque(maxlen=_HOUR))
        # Only slots with traffic are kept, so readers compare numbers, not positions.
        number = now_ms // SLOT_MS
        if not slots or slots[-1].number != number:
            slots.append(_Slot(number))
        return slots[-1]

    def _shown(self, slots: deque[_Slot], now_ms: int) -> dict[str, float | int]:
        number = now_ms // SLOT_MS
        minute = [slot for slot in slots if slot.number > number - _MINUTE]
        seconds = (_MINUTE * SLOT_MS) / 1000

        def total(name: str) -> int:
            return sum(getattr(slot, name) for slot in minute)

        return {
            "consumeFailedMsgs": sum(s.failed for s in slots if s.number > number - _HOUR),
            "consumeFailedTPS": total("failed") / seconds,
            "consumeOKTPS": total("done") / seconds,
            "consumeRT": total("call_ms") / max(1, total("calls")),
            "pullRT": total("pull_ms") / max(1, total("pulls")),
            "pullTPS": total("pulled") / seconds,
        }
