"""Gives what was not acknowledged in time to its group again, or to the dead letters.

The copy goes into the POP retry topic of group and topic, with a higher reconsume count; behind it,
in the same turn, comes the record that ends the flight of the first one. So a master that dies in
between leaves a message that comes twice, and never one that is lost. Java leaves dead letters to
its clients, of which some forget the message; here a message that came back `retryMaxTimes` times
becomes one. Origin: Java `PopReviveService`.
"""

from __future__ import annotations

import logging
from typing import Final

from batonmq.broker.pop.pop_table import CheckPoint
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.record import NewMessage, message_to_store
from batonmq.protocol.topic_name import RETRY_PREFIX, dlq_topic, pop_retry_topics

log = logging.getLogger(__name__)

QUEUE: Final = 0
_FIRST_POP_TIME: Final = b"1ST_POP_TIME\x01"


class Reviver:
    """`retry_v2`: the topic of failed messages is named `%RETRY%group+topic`, not `..group_topic`
    (enableRetryTopicV2)."""

    def __init__(
        self, path: WritePath, topics: TopicService, store_host: bytes, *, retry_v2: bool
    ) -> None:
        self._path = path
        self._store = path.store
        self._topics = topics
        self._host = store_host
        self._retry_v2 = retry_v2

    def revive(self, point: CheckPoint, done: list[int]) -> None:
        """Appends to `done` the open offsets that are settled; the others have to wait. Raises
        PutRefused, BrokerRefusal where a topic may not be written, CorruptLogError."""
        group, topic, _ = point.key
        if topic in self._store.deleting_topics:
            return
        if not self._is_there(point):
            log.warning(
                "popped_messages_gone group=%s topic=%s n=%d", group, topic, len(point.open)
            )
            done += sorted(point.open)
            return
        for offset in sorted(point.open):
            message = self._message(point, offset)
            if message is not None:
                self._put(point, message)
            done.append(offset)

    def _is_there(self, point: CheckPoint) -> bool:
        """Whether the queue still has those very messages, and the group is there."""
        group, topic, queue_id = point.key
        if topic not in self._topics.topics or self._topics.groups.get(group) is None:
            return False
        last = self._store.queries.units(topic, queue_id, point.offsets[-1], 1)
        return bool(last) and last[0][0] == point.last_phy

    def _message(self, point: CheckPoint, offset: int) -> NewMessage | None:
        """None for one that the log has no more."""
        _, topic, queue_id = point.key
        units = self._store.queries.units(topic, queue_id, offset, 1)
        record = self._store.queries.record_at(units[0][0], units[0][1]) if units else None
        return None if record is None else message_to_store(record)

    def _put(self, point: CheckPoint, message: NewMessage) -> None:
        group, topic, _ = point.key
        limit = self._topics.group(group, writable=True).retry_max_times
        if message.reconsume_times >= limit:
            message.topic = dlq_topic(group)
        elif not topic.startswith(RETRY_PREFIX):
            message.topic = pop_retry_topics(group, topic)[0 if self._retry_v2 else 1]
        self._topics.of_group(message.topic, 1)
        message.queue_id = QUEUE
        message.reconsume_times += 1
        message.born_host = self._host
        if _FIRST_POP_TIME not in message.properties:
            tail = b"" if message.properties[-1:] in (b"", b"\x02") else b"\x02"
            message.properties += b"%b%b%d\x02" % (tail, _FIRST_POP_TIME, point.pop_time)
        self._store.appender.put_message(message)
        self._path.schedule_flush()
