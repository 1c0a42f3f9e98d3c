"""Positions of consumers in queues that are gone (SAFETY R39)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from batonmq.runtime.clock import boot_ms

_DELETED_TOPICS_MAX: Final = 4096


class OldPositions:
    """Consumers that run on while their topic is deleted and made again hold positions in
    queues that are gone (R39).

    Of topics that were deleted, the newest 4096, also after a restart. No position of a group
    counts in such a queue before the group has begun again in it: it asked where to begin, or is at
    the first message, or has progress there. From the first use of the topic made again this goes
    on for `KEPT_MS`.
    """

    KEPT_MS = 3_600_000

    def __init__(self, clock_ms: Callable[[], int] = boot_ms) -> None:
        self._clock_ms = clock_ms
        self._topics: dict[str, _Renewed] = {}

    def deleted(self, topic: str) -> None:
        self._topics.pop(topic, None)
        # Popped before, so that it moves to the end: beyond the limit the oldest goes.
        self._topics[topic] = _Renewed()
        if len(self._topics) > _DELETED_TOPICS_MAX:
            del self._topics[next(iter(self._topics))]

    def __contains__(self, topic: str) -> bool:
        return topic in self._topics

    def begins(self, group: str, topic: str, queue_id: int) -> None:
        """The group asks, or knows, where it begins in the queue."""
        if (renewed := self._topics.get(topic)) is not None:
            renewed.begun.add((group, queue_id))

    def is_old(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether a position of the group in this queue, which is there, may be of a queue that is
        gone."""
        renewed = self._topics.get(topic)
        if renewed is None or (group, queue_id) in renewed.begun:
            return False
        now_ms = self._clock_ms()
        if renewed.until_ms is None:
            renewed.until_ms = now_ms + self.KEPT_MS
        elif now_ms >= renewed.until_ms:
            del self._topics[topic]
            return False
        return True


@dataclass(slots=True)
class _Renewed:
    begun: set[tuple[str, int]] = field(default_factory=set)
    until_ms: int | None = None
