"""Deletions of topics and groups, and positions of consumers in queues that are gone (R39)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from batonmq.epoch.entry import EpochEntry
from batonmq.runtime.clock import boot_ms

_DELETED_TOPICS_MAX: Final = 4096
_DELETIONS_MAX: Final = 1 << 16


@dataclass(slots=True)
class Deletions:
    """Those that this replica has carried out. `end`: where the last one ends in the log; `topics`:
    where the last one of each topic does.

    A start may read deletions again that the loaded file counts: `loaded_end` is the `end` in it,
    `loaded_epoch` the highest masterEpoch that it knows, and `epochs` gives those of the log."""

    end: int = 0
    topics: dict[str, int] = field(default_factory=dict)
    loaded_end: int = 0
    loaded_epoch: int = 0
    epochs: Callable[[], Iterable[EpochEntry]] = tuple

    def note_topic(self, topic: str, record_end: int) -> None:
        self.topics.pop(topic, None)
        # Popped before, so that it moves to the end: beyond the limit the oldest deletion goes.
        self.topics[topic] = record_end
        if len(self.topics) > _DELETIONS_MAX:
            del self.topics[next(iter(self.topics))]

    def since(self, topic: str, offset: int) -> bool:
        """Whether the topic was deleted by a record that ends behind this place of the log."""
        return bool(self.topics) and offset < self.topics.get(topic, 0)

    def in_loaded_file(self, record_end: int) -> bool:
        """Whether the loaded file has what that record left, and what was made since. Not if a
        newer master than the file knows wrote it: bytes may have been cut there."""
        newer = [each.start_offset for each in self.epochs() if each.epoch > self.loaded_epoch]
        return record_end <= min([self.loaded_end, *newer])

    def opened(self, confirmed: int, log_end: int) -> None:
        """The log was read. Any confirmed record may have been a deletion, also of those that
        expired. What comes behind `log_end` is new, whatever the file counts: it may have outlived
        bytes that a power failure took from the log."""
        self.end = confirmed
        self.loaded_end = min(self.loaded_end, log_end)

    def log_ends(self, end: int) -> None:
        """The log was cut there: a deletion behind it has not happened (R44)."""
        self.topics = {topic: at for topic, at in self.topics.items() if at <= end}
        self.end = min(self.end, end)
        self.loaded_end = min(self.loaded_end, end)


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
