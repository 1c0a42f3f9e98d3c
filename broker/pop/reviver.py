"""Messages that were popped and not acknowledged in time: they go into a retry topic."""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from batonmq.broker.config import BrokerConfig
from batonmq.broker.pop.pop_positions import PopPositions
from batonmq.broker.pop.pop_table import CheckPoint, Key, Popped
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.numbers import INT_MAX
from batonmq.protocol.properties import PROPERTIES_SIZE_MAX, RETRY_TOPIC, with_properties
from batonmq.protocol.records.codec import NewMessage, message_to_store
from batonmq.protocol.topic_name import (
    RETRY_PREFIX,
    dlq_topic,
    is_file_name,
    pop_retry_topics,
    retry_topic,
)
from batonmq.store.message_store import MessageStore

log = logging.getLogger(__name__)

QUEUE: Final = 0
STRANDED_A_TURN: Final = 32
_FIRST_POP_TIME: Final = b"1ST_POP_TIME\x01"
_HANDLE_MAX: Final = 192
"""Size of the property POP_CK without the broker's name, and of the CRC after it."""

CarriedOut = Callable[[str, Callable[[], bool]], bool]


class Reviver:
    """Delivers messages again that were not acknowledged in time: puts them into retry topics.

    With enableRetryTopicV2 that is `%RETRY%group+topic`, else `%RETRY%group_topic`, unless another
    (group, topic) could have the same name (R46). For a group that was set to PULL it is
    `%RETRY%group`, since stock consumers do not read names with `+`. `carried_out` sets aside
    messages that can never be put (R54).
    """

    def __init__(
        self, path: WritePath, topics: TopicService, config: BrokerConfig, carried_out: CarriedOut
    ) -> None:
        self._path = path
        self._store = path.store
        self._topics = topics
        self._host = config.store_host
        self._retry_v2 = config.enable_retry_topic_v2
        self._carried_out = carried_out
        self._properties_max = PROPERTIES_SIZE_MAX - _HANDLE_MAX - len(config.broker_name.encode())

    def revive(self, point: CheckPoint, done: list[int]) -> None:
        """Delivers the messages of a due pop again. Appends the settled offsets to `done`; the
        others wait. Raises PutRefused, CorruptLogError."""
        # The caller puts the record that settles them after these copies, in the same turn: a
        # master that dies in between delivers a message twice, and loses none.
        group, topic, _ = point.key
        # An unconfirmed deletion may be cut, so the messages must wait (R39).
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
            what = f"message {offset} of {topic} for group {group}"
            if message is None or self._carried_out(what, partial(self._put, point, message)):
                done.append(offset)

    def _is_there(self, point: CheckPoint) -> bool:
        """Whether the queue still has exactly those messages, and the group exists."""
        group, topic, queue_id = point.key
        if topic not in self._topics.topics or self._topics.groups.get(group) is None:
            return False
        at = self._store.queries.phy_offset_of(topic, queue_id, point.offsets[-1])
        return at >= 0 and at == point.last_phy

    def _message(self, point: CheckPoint, offset: int) -> NewMessage | None:
        """None if the log no longer has it."""
        _, topic, queue_id = point.key
        units = self._store.queries.units(topic, queue_id, offset, 1)
        record = self._store.queries.record_at(units[0][0], units[0][1]) if units else None
        return None if record is None else message_to_store(record)

    def _retry_topic(self, group: str, topic: str) -> str:
        """A name that no other (group, topic) has. If the name would be too long (a pop from before
        such pairs were refused), the dead-letter queue."""
        v2, v1 = pop_retry_topics(group, topic)
        if not is_file_name(v2):
            return dlq_topic(group)
        taken = "_" in group or "_" in topic or f"{group}_{topic}" in self._topics.groups
        if not (self._retry_v2 or taken):
            return v1
        return retry_topic(group) if pulls(self._topics, group, topic) else v2

    def _put(self, point: CheckPoint, message: NewMessage) -> bool:
        """Returns False while the topic is not writable. Raises PutRefused, and
        BrokerRefusal(INVALID_PARAMETER) if its name would be too long (R54)."""
        group, topic, _ = point.key
        real = topic.removeprefix(retry_topic_v2(group, ""))
        failed = point.due > 0  # 0: moved by `StrandedRetries`, not failed by a consumer
        try:
            limit = self._topics.group(group, writable=True).retry_max_times
            # A retried message also carries a handle: without space for it, a dead letter. Java
            # leaves dead letters to its clients, some of which drop the message.
            fits = len(message.properties) <= self._properties_max
            if (failed and message.reconsume_times >= limit) or not fits:
                message.topic = dlq_topic(group)
            elif not real.startswith(RETRY_PREFIX):
                message.topic = self._retry_topic(group, real)
                # Stock consumers take the topic of such a message from RETRY_TOPIC.
                if message.topic == retry_topic(group):
                    known = {RETRY_TOPIC.encode(): real.encode()}
                    message.properties = with_properties(message.properties, known)
            self._topics.of_group(message.topic, 1)
        except BrokerRefusal as error:
            if error.code == ResponseCode.INVALID_PARAMETER:  # R54: it never succeeds: set it aside
                raise
            log.warning("popped_message_waits group=%s topic=%s reason=%s", group, topic, error)
            return False
        message.queue_id = QUEUE
        message.reconsume_times = min(message.reconsume_times + failed, INT_MAX)
        message.born_host = self._host
        if _FIRST_POP_TIME not in message.properties:
            tail = b"" if message.properties[-1:] in (b"", b"\x02") else b"\x02"
            time = b"%b%b%d\x02" % (tail, _FIRST_POP_TIME, point.pop_time)
            if len(message.properties) + len(time) <= self._properties_max:
                message.properties += time
        self._store.appender.put_message(message, stored=True)
        self._path.schedule_flush()
        return True


def retry_topic_v2(group: str, topic: str) -> str:
    """POP's retry topic, which stock consumers that pull do not read."""
    return f"{RETRY_PREFIX}{group}+{topic}"


def pulls(topics: TopicService, group: str, topic: str) -> bool:
    """Whether an operator has set the group to PULL (SET_MESSAGE_REQUEST_MODE, 401)."""
    mode = topics.request_modes.get(topic, group)
    return mode is not None and mode.mode == "PULL"


class StrandedRetries:
    """Moves the messages in `%RETRY%group+topic` of groups that were set to PULL: it pops them
    without a consumer, due at once, and so `Reviver` puts them into `%RETRY%group`."""

    def __init__(self, store: MessageStore, topics: TopicService, positions: PopPositions) -> None:
        self._store = store
        self._topics = topics
        self._positions = positions
        self._keys: deque[Key] = deque()
        self._pop_time = 0

    def find(self) -> None:
        """Looks for such groups when a mastership begins."""
        self._keys.clear()
        modes = self._topics.request_modes.wrapper().message_request_mode_map
        for topic, groups in modes.items():
            for group in groups:
                self.add(group, topic)

    def add(self, group: str, topic: str) -> None:
        name = retry_topic_v2(group, topic)
        if name in self._topics.topics and pulls(self._topics, group, topic):
            self._keys.append((group, name, QUEUE))

    def next(self, now_ms: int) -> Popped | None:
        queries = self._store.queries
        while self._keys:
            key = self._keys[0]
            begin = max(self._positions.next_of(key), queries.min_offset_in_queue(*key[1:]))
            units = queries.units(*key[1:], begin, STRANDED_A_TURN)
            if not units or key[1] in self._store.deleting_topics:
                self._keys.popleft()
                continue
            self._pop_time = max(now_ms, self._pop_time + 1)  # pop times identify check points
            return Popped(
                key=key,
                pop_time=self._pop_time,
                due=0,
                offsets=list(range(begin, begin + len(units))),
                last_phy=units[-1][0],
                next=begin + len(units),
            )
        return None
