"""What can be asked of a store: messages of a queue, offsets by time, messages by key or place.

Every answer lies below the confirmed end (R28). Origin: Java `DefaultMessageStore`,
`ConsumeQueueStore`, `IndexService`.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from typing import Final

from protocol.errors import CorruptLogError
from protocol.properties import find_property
from protocol.record import RecordHead
from protocol.sysflag import BORN_HOST_V6
from store.appender import Appender
from store.commit_log import CommitLog
from store.config import StoreConfig
from store.consume_queue import FILLER_SIZE, Boundary
from store.dispatch import Dispatcher
from store.index_service import IndexService
from store.queue_table import QueueTable
from store.read_result import GetMessageResult, GetMessageStatus
from store.reader import QueueReader
from store.reader_checks import VerifiedRecords, check_record

log = logging.getLogger(__name__)

_SYS_FLAG_AT: Final = 36
_STORE_TIMESTAMP_AT: Final = 56  # with a born host of 8 bytes
_HEAD_MAX: Final = 88
_I32: Final = struct.Struct(">i")
_I64: Final = struct.Struct(">q")


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Records that have a key, newest first, and how far the index reaches."""

    parts: list[memoryview]
    index_last_update_timestamp: int
    index_last_update_phyoffset: int


class StoreQueries:
    """Read access to the visible part of a store."""

    def __init__(
        self,
        commit_log: CommitLog,
        queues: QueueTable,
        index: IndexService,
        dispatcher: Dispatcher,
        appender: Appender,
        verified: VerifiedRecords,
        config: StoreConfig,
    ) -> None:
        self._log = commit_log
        self._queues = queues
        self._index = index
        self._dispatcher = dispatcher
        self._appender = appender
        self._verified = verified
        self._reader = QueueReader(commit_log, config, verified)
        self._query_max = config.max_msgs_num_batch

    # --- one queue ---

    def get_message(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_num: int,
        max_bytes: int | None = None,
        wanted: frozenset[int] | None = None,
    ) -> GetMessageResult:
        """Messages of a queue from `offset` on, whose tag hash is in `wanted` (None: all).

        At most `max_num`, and from the second on at most `max_bytes` (None: the store's limits).
        Raises CorruptLogError, with file and offset, if the record to be returned first fails its
        CRC: it is never served.
        """
        queue = self._queues.get(topic, queue_id)
        if queue is None or queue.handler is not None:
            return GetMessageResult(GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0)
        minimum = queue.consume_queue.min_offset
        maximum = queue.consume_queue.max_offset
        if minimum <= offset < maximum:
            return self._reader.read(queue, offset, max_num, max_bytes, wanted)
        status, next_offset = self._outside(offset, minimum, maximum, queue.next_offset)
        return GetMessageResult(status, next_offset, minimum, maximum)

    def _outside(
        self, offset: int, minimum: int, maximum: int, assigned: int
    ) -> tuple[GetMessageStatus, int]:
        """Status and next offset for an offset outside [minimum, maximum).

        A slave does not correct: its end may lag. Nor does a master between its visible end and
        `assigned`, the end of its log in this queue: a client there is ahead of confirmOffset only.
        """
        is_slave = self._appender.refusal is not None
        if maximum == 0 and offset <= assigned:
            return GetMessageStatus.NO_MESSAGE_IN_QUEUE, offset if is_slave else min(
                offset, assigned
            )
        if offset < minimum:
            return GetMessageStatus.OFFSET_TOO_SMALL, offset if is_slave else minimum
        if offset == maximum or offset <= assigned:
            return GetMessageStatus.OFFSET_OVERFLOW_ONE, offset
        return GetMessageStatus.OFFSET_OVERFLOW_BADLY, offset if is_slave else maximum

    def queue_ids(self, topic: str) -> list[int]:
        """Ids of the queues of a topic that have ever had a message."""
        return sorted(
            queue.queue_id
            for queue in self._queues.queues.values()
            if queue.topic == topic and queue.handler is None
        )

    def max_offset_in_queue(self, topic: str, queue_id: int) -> int:
        """End (exclusive) of the visible messages; 0 for an unknown queue."""
        queue = self._queues.get(topic, queue_id)
        return queue.consume_queue.max_offset if queue is not None else 0

    def min_offset_in_queue(self, topic: str, queue_id: int) -> int:
        queue = self._queues.get(topic, queue_id)
        return queue.consume_queue.min_offset if queue is not None else 0

    def next_offset_in_queue(self, topic: str, queue_id: int) -> int:
        """The offset of the next put: a master's end of the log in this queue, unconfirmed too."""
        queue = self._queues.get(topic, queue_id)
        return queue.next_offset if queue is not None else 0

    def offset_in_queue_by_time(
        self,
        topic: str,
        queue_id: int,
        timestamp_ms: int,
        boundary: Boundary = Boundary.LOWER,
    ) -> int:
        """The queue offset that stands for a store time; see `ConsumeQueue.offset_by_time`."""
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return 0
        return queue.consume_queue.offset_by_time(timestamp_ms, boundary, self._store_timestamp)

    def message_store_timestamp(self, topic: str, queue_id: int, offset: int) -> int:
        """Store time in ms of one message, -1 if there is none."""
        queue = self._queues.get(topic, queue_id)
        unit = queue.consume_queue.unit_at(offset) if queue is not None else None
        if unit is None or unit[1] == FILLER_SIZE:
            return -1
        return self._store_timestamp(unit[0], unit[1])

    def earliest_message_time(self, topic: str, queue_id: int) -> int:
        """Store time in ms of the oldest message of a queue, -1 if there is none."""
        return self.message_store_timestamp(
            topic, queue_id, self.min_offset_in_queue(topic, queue_id)
        )

    def _store_timestamp(self, phy_offset: int, size: int) -> int:
        """The store time in ms of a record that a queue points to, -1 if the log has it no more."""
        if phy_offset < self._log.min_offset:
            return -1
        head = self._log.view(phy_offset, min(size, _HEAD_MAX))
        if len(head) < _HEAD_MAX:
            return -1
        sys_flag: int = _I32.unpack_from(head, _SYS_FLAG_AT)[0]
        shift = 12 if sys_flag & BORN_HOST_V6 else 0
        timestamp: int = _I64.unpack_from(head, _STORE_TIMESTAMP_AT + shift)[0]
        return timestamp

    # --- one record ---

    def look_message_by_offset(self, phy_offset: int) -> memoryview | None:
        """The record at a physical offset; None if no whole, confirmed record begins there."""
        if not self._log.min_offset <= phy_offset < self._dispatcher.offset:
            return None
        try:
            head = check_record(self._log, phy_offset)
        except CorruptLogError as error:
            log.info("no_record_at file=%s offset=%d what=%s", *error.args)
            return None
        return self._log.view(phy_offset, head.size)

    def query_message(
        self, topic: str, key: str, max_num: int, begin_ms: int, end_ms: int
    ) -> QueryResult:
        """Messages of `topic` with this UNIQ_KEY or key in KEYS, stored in [begin_ms, end_ms].

        Newest first, at most `max_num` and 64. Raises CorruptLogError.
        """
        wanted = min(max_num, self._query_max)
        answer = self._index.query(topic, key, wanted, begin_ms, end_ms)
        parts: list[memoryview] = []
        for phy_offset in answer.phy_offsets:
            if not self._log.min_offset <= phy_offset < self._dispatcher.offset:
                continue
            head = check_record(self._log, phy_offset)
            if _has_key(head, topic, key):
                parts.append(self._log.view(phy_offset, head.size))
        return QueryResult(parts, answer.last_update_timestamp, answer.last_update_phy_offset)


def _has_key(head: RecordHead, topic: str, key: str) -> bool:
    """Whether the record really has the key: the index knows only hashes."""
    if head.topic != topic.encode("utf-8"):
        return False
    raw = key.encode("utf-8")
    if find_property(head.properties, b"UNIQ_KEY") == raw:
        return True
    return raw in (find_property(head.properties, b"KEYS") or b"").split(b" ")
