"""Queries: messages of a queue, offsets by time, messages by key or physical offset. All answers
lie below the confirmed end (R28). Origin: Java `DefaultMessageStore`, `ConsumeQueueStore`,
`IndexService`."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.layout import (
    FILLER_SIZE,
    HOST_V4_SIZE,
    HOST_V6_SIZE,
    RECORD_V4,
    record_layout,
)
from batonmq.protocol.properties import find_property
from batonmq.protocol.records.codec import RecordHead
from batonmq.protocol.sysflag import BORN_HOST_V6
from batonmq.store.appender import Appender
from batonmq.store.consume_queue import Boundary
from batonmq.store.dispatch import LogDispatcher
from batonmq.store.log_scan import check_record
from batonmq.store.reader import GetMessageResult, GetMessageStatus, StoredQueueReader, Wanted
from batonmq.store.store_files import StoreFiles

log = logging.getLogger(__name__)

_HEAD_MIN: Final = RECORD_V4.size
ANSWER_BYTES_MAX: Final = 15 << 20  # of records: with a header they fit into a frame of 16 MiB
_read_sys_flag = RECORD_V4.only("sys_flag").unpack_from
_read_store_ms = RECORD_V4.only("store_ms").unpack_from
_read_store_ms_v6 = record_layout(HOST_V6_SIZE, HOST_V4_SIZE).only("store_ms").unpack_from


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Records that have a key, oldest first, and how far the index reaches."""

    parts: list[memoryview]
    index_last_update_timestamp: int
    index_last_update_phyoffset: int


class StoreQueries:
    """Read access to the visible part of a store."""

    def __init__(
        self,
        files: StoreFiles,
        dispatcher: LogDispatcher,
        appender: Appender,
        on_bad_record: Callable[[CorruptLogError], None],
    ) -> None:
        self._files = files
        self._log = files.log
        self._queues = dispatcher.queues
        self._index = files.index
        self._dispatcher = dispatcher
        self._appender = appender
        self._on_bad_record = on_bad_record
        self._reader = StoredQueueReader(
            files.log, files.config, dispatcher.verified, on_bad_record
        )
        self._config = files.config

    def topics(self) -> set[str]:
        return self._files.consume_queues.topics()

    # One queue.

    def get_message(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_num: int,
        max_bytes: int | None = None,
        wanted: frozenset[int] | None = None,
        matches: Callable[[bytes], bool] | None = None,
    ) -> GetMessageResult:
        """Messages of a queue from `offset` on, see `Wanted`; `wanted`: hashes of tags. Raises
        CorruptLogError if the first record fails its CRC: it is never served."""
        queue = self._queues.get(topic, queue_id)
        if queue is None or queue.handler is not None:
            return GetMessageResult(GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0)
        minimum = queue.consume_queue.min_offset
        maximum = queue.consume_queue.max_offset
        if minimum <= offset < maximum:
            asked = Wanted(max_num, max_bytes, wanted, matches)
            found = self._reader.read(queue, offset, asked)
            found.suggest_pulling_from_slave = self._reader.is_on_disk_only(
                found.behind_bytes, on_slave=not self._appender.is_masters
            )
            return found
        status, next_offset = self._outside(offset, minimum, maximum, queue.next_offset)
        return GetMessageResult(status, next_offset, minimum, maximum)

    def units(
        self, topic: str, queue_id: int, offset: int, count: int
    ) -> list[tuple[int, int, int]]:
        """(physical offset, size, tags code) of up to `count` visible messages from `offset` on;
        none outside the queue, fewer at a file border. Raises CorruptLogError."""
        queue = self._queues.get(topic, queue_id)
        return self._reader.checked_units(queue, offset, count) if queue is not None else []

    def phy_offset_of(self, topic: str, queue_id: int, offset: int) -> int:
        """The physical offset of a visible message; -1 if there is none. Raises CorruptLogError."""
        return next((unit[0] for unit in self.units(topic, queue_id, offset, 1)), -1)

    def raw_units(self, topic: str, queue_id: int, offset: int, count: int) -> bytes:
        """Up to `count` unchecked units from `offset` on, as in the files."""
        queue = self._queues.get(topic, queue_id)
        return queue.consume_queue.read_units(offset, count) if queue is not None else b""

    def record_at(self, phy_offset: int, size: int) -> memoryview | None:
        """The record of a unit from `units`; None if the log no longer has it, or for a filler."""
        if phy_offset < self._log.min_offset or size == FILLER_SIZE:
            return None
        return self._log.view(phy_offset, size)

    def begins_in_memory(self, topic: str, queue_id: int) -> bool:
        """Whether the queue still has its first message, probably in memory. True for a queue
        without messages."""
        if self.min_offset_in_queue(topic, queue_id) > 0:
            return False
        # Unchecked: a damaged first message must not keep its group from the messages behind it.
        queue = self._queues.get(topic, queue_id)
        first = queue.consume_queue.unit_at(0) if queue is not None else None
        return first is None or not self._reader.is_on_disk_only(
            self._log.max_offset - first[0], on_slave=not self._appender.is_masters
        )

    def _outside(
        self, offset: int, minimum: int, maximum: int, assigned: int
    ) -> tuple[GetMessageStatus, int]:
        """Status and next offset for an offset outside [minimum, maximum). A slave corrects no
        offset, since its end may lag; nor does a master between its visible end and `assigned`, the
        queue's unconfirmed end."""
        is_slave = not self._appender.is_masters
        if maximum == 0 and 0 <= offset <= assigned:
            return GetMessageStatus.NO_MESSAGE_IN_QUEUE, offset
        if offset < minimum:
            return GetMessageStatus.OFFSET_TOO_SMALL, offset if is_slave else minimum
        if offset == maximum or offset <= assigned:
            return GetMessageStatus.OFFSET_OVERFLOW_ONE, offset
        return GetMessageStatus.OFFSET_OVERFLOW_BADLY, offset if is_slave else maximum

    def max_offset_in_queue(self, topic: str, queue_id: int) -> int:
        """End (exclusive) of the visible messages; 0 for an unknown queue."""
        queue = self._queues.get(topic, queue_id)
        return queue.consume_queue.max_offset if queue is not None else 0

    def min_offset_in_queue(self, topic: str, queue_id: int) -> int:
        queue = self._queues.get(topic, queue_id)
        return queue.consume_queue.min_offset if queue is not None else 0

    def last_held(self, topic: str, below: int) -> int:
        """The highest queue below `below` of which the log has messages, confirmed or not; -1:
        none."""
        ids = self._files.consume_queues.ids_of(topic)
        # Downwards, from the last queue that ever had a record: a topic may have 65,536 queues.
        for queue_id in reversed(ids[: bisect_left(ids, below)]):
            queue = self._queues.get(topic, queue_id)
            if queue is not None and queue.next_offset > queue.consume_queue.min_offset:
                return queue_id
        return -1

    def next_offset_in_queue(self, topic: str, queue_id: int) -> int:
        """The offset of the next put, unconfirmed messages included."""
        queue = self._queues.get(topic, queue_id)
        return queue.next_offset if queue is not None else 0

    def offset_in_queue_by_time(
        self, topic: str, queue_id: int, timestamp_ms: int, boundary: Boundary = Boundary.LOWER
    ) -> int:
        """The queue offset that a store time selects; see `ConsumeQueue.offset_by_time`."""
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return 0
        return queue.consume_queue.offset_by_time(timestamp_ms, boundary, self._store_timestamp)

    def message_store_timestamp(self, topic: str, queue_id: int, offset: int) -> int:
        """Store time in ms of one message; -1 if there is none or it cannot be read."""
        queue = self._queues.get(topic, queue_id)
        try:
            unit = queue.consume_queue.unit_at(offset) if queue is not None else None
        except CorruptLogError:  # one bad page must not hide the lag of all groups
            return -1
        if unit is None or unit[1] == FILLER_SIZE:
            return -1
        return self._store_timestamp(unit[0], unit[1])

    def earliest_message_time(self, topic: str, queue_id: int) -> int:
        """Store time in ms of the oldest message of a queue; -1 if there is none."""
        return self.message_store_timestamp(
            topic, queue_id, self.min_offset_in_queue(topic, queue_id)
        )

    def _store_timestamp(self, phy_offset: int, size: int) -> int:
        """The store time in ms of a unit's record; -1 if the log no longer has it."""
        if phy_offset < self._log.min_offset:
            return -1
        head = self._log.view(phy_offset, min(size, _HEAD_MIN))
        if len(head) < _HEAD_MIN:
            return -1
        # Only the born host lies before the time.
        has_v6 = _read_sys_flag(head)[0] & BORN_HOST_V6
        store_ms: int = (_read_store_ms_v6 if has_v6 else _read_store_ms)(head)[0]
        return store_ms

    # One record.

    def look_message_by_offset(self, phy_offset: int) -> memoryview | None:
        """The record at a physical offset; None if no whole, confirmed record begins there."""
        if not self._log.min_offset <= phy_offset < self._dispatcher.offset:
            return None
        try:
            head = check_record(self._log, phy_offset)
        except CorruptLogError as error:
            log.info("no_record_at file=%s offset=%d reason=%s", *error.args)
            return None
        return self._log.view(phy_offset, head.size)

    def query_message(
        self, topic: str, key: str, max_num: int, begin_ms: int, end_ms: int
    ) -> QueryResult:
        """Messages of `topic` with this UNIQ_KEY or key in KEYS, stored in [begin_ms, end_ms]: the
        newest, at most `max_num` and 64 and what fits into an answer. Raises CorruptLogError,
        IndexFailedError."""
        wanted = min(max_num, self._config.max_msgs_num_batch)
        answer = self._index.query(topic, key, wanted, begin_ms, end_ms)
        parts: list[memoryview] = []
        space = ANSWER_BYTES_MAX
        for phy_offset in answer.phy_offsets:
            # The index is trimmed by whole files, and lags behind a log that expires.
            if not self._log.min_offset <= phy_offset < self._dispatcher.offset:
                continue
            try:
                head = check_record(self._log, phy_offset)
            except CorruptLogError as error:
                self._on_bad_record(error)
                raise
            if _has_key(head, topic, key):
                space -= head.size
                if space < 0 and parts:  # one record always fits
                    break
                parts.append(self._log.view(phy_offset, head.size))
        parts.reverse()  # as in Java: its clients take the first, the original of a repeated send
        return QueryResult(parts, answer.last_update_timestamp, answer.last_update_phy_offset)


def _has_key(head: RecordHead, topic: str, key: str) -> bool:
    """The index holds only hashes: whether the record really has the key."""
    if head.topic != topic.encode("utf-8"):
        return False
    raw = key.encode("utf-8")
    if find_property(head.properties, b"UNIQ_KEY") == raw:
        return True
    return raw in (find_property(head.properties, b"KEYS") or b"").split(b" ")
