"""Deletions of topics and groups, and offsets of consumers in queues that are gone (R39)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from batonmq.epoch.entry import EpochEntry
from batonmq.protocol.topic_name import GROUP_LENGTH_MAX
from batonmq.runtime.clock import boot_ms

_DELETED_TOPICS_MAX: Final = 4096
_DELETIONS_MAX: Final = 1 << 16
_BEGUN_MAX: Final = 1 << 17


@dataclass(slots=True)
class Deletions:
    """Deletions that this replica has carried out. `end`: the log offset at which the record of the
    last one ends; `topics`: the same for each topic.

    A start may read the record of a deletion again that is in the loaded file already. `loaded_end`
    is the `end` in the file, `loaded_epoch` the highest masterEpoch in it; `epochs` returns those
    of the log.
    """

    end: int = 0
    topics: dict[str, int] = field(default_factory=dict)
    loaded_end: int = 0
    loaded_epoch: int = 0
    epochs: Callable[[], Iterable[EpochEntry]] = tuple

    def note_topic(self, topic: str, record_end: int) -> None:
        self.topics.pop(topic, None)
        # Popped before, so that it moves to the end: beyond the limit the oldest deletions go.
        self.topics[topic] = record_end
        if len(self.topics) > _DELETIONS_MAX:
            # Many at once: to find the first key, a dict looks at the places of all that left.
            for oldest in list(islice(self.topics, 1 + _DELETIONS_MAX // 64)):
                del self.topics[oldest]

    def since(self, topic: str, offset: int) -> bool:
        """Whether the topic was deleted by a record that ends after this offset of the log."""
        return bool(self.topics) and offset < self.topics.get(topic, 0)

    def counts(self, record_end: int, end: int, epoch: int) -> bool:
        """Whether a table that has the effects of the log up to `end`, as masters up to `epoch`
        wrote it, has the effect of the record that ends at `record_end`."""
        # Not if a newer master wrote that record: another one may have been cut from its place.
        newer = (each.start_offset for each in self.epochs() if each.epoch > epoch)
        return record_end <= min([end, *newer])

    def opened(self, confirmed: int, log_end: int) -> None:
        """The log was read: it is confirmed up to `confirmed` and ends at `log_end`."""
        # Any confirmed record may have been a deletion, even if it has expired. What comes after
        # `log_end` is new: a power failure may have taken bytes of which the file has the effects.
        self.end = confirmed
        self.loaded_end = min(self.loaded_end, log_end)

    def log_ends(self, end: int) -> None:
        """The log was cut at `end`: a deletion after it has not happened (R44)."""
        self.topics = {topic: at for topic, at in self.topics.items() if at <= end}
        self.end = min(self.end, end)
        self.loaded_end = min(self.loaded_end, end)


@dataclass(slots=True)
class Received:
    """The offsets that the master sent last. They have the effects of the log up to `end`, as
    masters up to `epoch` wrote it. `lacks`: the queues, by key, that only this replica's table
    has."""

    table: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    end: int = 0
    epoch: int = 0
    lacks: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def loaded(
        cls, table: Mapping[str, dict[int, int]], end: int, epoch: int, lacks: dict[str, list[int]]
    ) -> Received:
        """From a file: the log may now show a deletion that the master had carried out before it
        sent its table."""
        sent = dict(zip(table, map(dict, table.values()), strict=True))
        for key, queue_ids in lacks.items():
            offsets = sent.pop(key, {})
            if left := {q: at for q, at in offsets.items() if q not in queue_ids}:
                sent[key] = left
        return cls(sent, end, epoch, lacks)


class OldPositions:
    """Deleted topics whose consumers may still have offsets in queues that are gone (R39): they
    keep running while the topic is deleted and created again.

    In the new queues a group's offset does not count until the group has begun there: it asked
    where to begin, is at the first message, or has committed. This ends `KEPT_MS` after the first
    use of the new topic. The newest 4096 topics are kept, also over a restart.
    """

    KEPT_MS = 3_600_000

    def __init__(self, clock_ms: Callable[[], int] = boot_ms) -> None:
        self._clock_ms = clock_ms
        self._topics: dict[str, _Renewed] = {}
        self._begun = 0  # of all topics

    def deleted(self, topic: str) -> None:
        self._drop(topic)
        # Dropped before, so that it moves to the end: beyond the limit the oldest goes.
        self._topics[topic] = _Renewed()
        if len(self._topics) > _DELETED_TOPICS_MAX:
            self._drop(next(iter(self._topics)))

    def _drop(self, topic: str) -> None:
        if (gone := self._topics.pop(topic, None)) is not None:
            self._begun -= len(gone.begun)

    def __contains__(self, topic: str) -> bool:
        return topic in self._topics

    def begins(self, group: str, topic: str, queue_id: int) -> None:
        """The group asks where it begins in the queue, or knows it."""
        renewed, place = self._topics.get(topic), (group, queue_id)
        # R58: clients choose the names.
        if renewed is None or place in renewed.begun or len(group) > GROUP_LENGTH_MAX:
            return
        if self._begun >= _BEGUN_MAX:
            # Groups of that topic that have not committed get its messages from the first on.
            most = max(self._topics.values(), key=lambda one: len(one.begun))
            self._begun -= len(most.begun)
            most.begun.clear()
        renewed.begun.add(place)
        self._begun += 1

    def is_old(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether an offset of the group in this queue may be one of a deleted queue."""
        renewed = self._topics.get(topic)
        if renewed is None or (group, queue_id) in renewed.begun:
            return False
        now_ms = self._clock_ms()
        # From the first use, because the topic may be created again long after its deletion.
        if renewed.until_ms is None:
            renewed.until_ms = now_ms + self.KEPT_MS
        elif now_ms >= renewed.until_ms:
            self._drop(topic)
            return False
        return True


@dataclass(slots=True)
class _Renewed:
    begun: set[tuple[str, int]] = field(default_factory=set)
    until_ms: int | None = None
