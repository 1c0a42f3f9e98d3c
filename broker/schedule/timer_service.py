"""Delivers timed messages at the millisecond that their producers asked for. Only a master does.

The shell around `timer_queue`: it reads the units of rmq_sys_wheel_timer as they become visible,
puts what is due into the log again, and behind it, in the same turn, the progress record
(`broker.schedule.progress`). A recall (370) is a message of the same queue that names another by
its unique key.
Origin: org.apache.rocketmq.store.timer.TimerMessageStore.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from batonmq.broker.schedule import delivery
from batonmq.broker.schedule.delivery import REFUSED_MS, Delivery, DueService
from batonmq.broker.schedule.progress import DeliveryProgress, ProgressRecord
from batonmq.broker.schedule.timer_counts import TimerCounts
from batonmq.broker.schedule.timer_queue import TimerQueue
from batonmq.broker.tables.offset_clamp import queue_end
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.layout import FILLER_SIZE, UNIT
from batonmq.protocol.properties import find_property
from batonmq.protocol.recall_handle import recall_key
from batonmq.protocol.record import NewMessage, message_to_store, raw_properties, scan_record
from batonmq.protocol.topic_name import TIMER_TOPIC
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection
from batonmq.store.delay_levels import DelayLevels
from batonmq.store.errors import PutRefused

log = logging.getLogger(__name__)

QUEUE: Final = 0
COUNTED_UNITS: Final = 256
READ_UNITS: Final = 4096
"""How many units are read in one turn of the loop."""
LATE_MS: Final = 10_000
"""A message that is put now may be due before it can be seen; never so long before."""
_HASH_BITS: Final = 33
"""A tags code below is the hash of TAGS: a Java broker built the unit."""


class TimerService(DueService):
    """One for a broker, on its loop."""

    def __init__(
        self,
        path: WritePath,
        deliverer: Delivery,
        progress: DeliveryProgress,
        levels: DelayLevels,
        damaged: Callable[[str], None],
    ) -> None:
        super().__init__(path, damaged)
        self._deliverer = deliverer
        self._progress = progress
        self._levels = levels
        self._queue = TimerQueue()
        self._counts = TimerCounts()

    def begin(self) -> None:
        """This broker has become master: it goes on where its log says."""
        least = self._store.queries.min_offset_in_queue(TIMER_TOPIC, QUEUE)
        most = queue_end(self._store, TIMER_TOPIC, QUEUE)
        self._queue.begin(self._progress.timer, least, most)
        super().begin()

    def end(self) -> None:
        super().end()
        self._counts = TimerCounts()

    def arrived(self, _queue_id: int) -> None:
        """There is more in TIMER_TOPIC."""
        if self._is_running:
            self._wake_in(0)

    def delivered_until_ms(self) -> int:
        """Up to then all that was due is delivered, on every member. 0 where that is not known."""
        queue = self._queue
        if not self._is_running or not queue.is_level:
            return 0
        if not self._progress.is_confirmed(queue.progress()):
            return 0
        return min(queue.wake_ms - 1, self.now_ms() - LATE_MS)

    def __len__(self) -> int:
        """How many messages wait."""
        return len(self._queue)

    @property
    def _look_ms(self) -> int:
        return self._queue.wake_ms

    def _slice(self, now_ms: int) -> int:
        more = self._read_units()
        if more:
            self._wake_in(0)
        if not self._queue.is_level:  # what was recalled is not known yet
            return 0 if more else delivery.BLOCKED_MS
        before = self._queue.progress()
        try:
            return self._deliver_due(now_ms)
        finally:
            after = self._queue.progress()
            if after != before:
                self._note(ProgressRecord(timer=after))

    def _read_units(self) -> bool:
        """Takes in some of what is visible of the queue; whether there may be more."""
        queue, queries = self._queue, self._store.queries
        queue.skip_to(queries.min_offset_in_queue(TIMER_TOPIC, QUEUE))
        units = queries.raw_units(TIMER_TOPIC, QUEUE, queue.next_offset, READ_UNITS)
        for phy_offset, size, due_ms in UNIT.struct.iter_unpack(units):
            if due_ms >> _HASH_BITS in (0, -1):
                due_ms = self._due_of_record(phy_offset, size)
            waits = queue.seen(abs(due_ms))
            if due_ms < 0 and waits:
                record = queries.record_at(phy_offset, size)
                if record is not None:
                    key = find_property(raw_properties(record), b"TIMER_DEL_UNIQKEY")
                    queue.recalled(key or b"")
        return bool(units)

    def _due_of_record(self, phy_offset: int, size: int) -> int:
        """What the unit of a Java broker does not say; 0, which is due, for no record."""
        record = self._store.queries.record_at(phy_offset, size)
        head = scan_record(record) if record is not None and size != FILLER_SIZE else None
        if head is None:
            return 0
        due_ms = self._levels.tags_code(TIMER_TOPIC, head.properties, head.store_timestamp)
        return due_ms if due_ms >> _HASH_BITS not in (0, -1) else 0

    # How many wait.

    async def metrics(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """61: how many messages wait, by topic; what is due now is left out. The first question
        reads all that waits, a slice in a turn, the next ones what came since."""
        while self._is_running and self._count_slice():  # noqa: ASYNC110  it does a slice
            await asyncio.sleep(0)
        body = self._counts.encode(self._path.gate.master_epoch)
        return RemotingCommand.response_to(request, body=body)

    def _count_slice(self) -> bool:
        counts, queue, queries = self._counts, self._queue, self._store.queries
        least = queries.min_offset_in_queue(TIMER_TOPIC, QUEUE)
        begin = max(counts.next_offset, queue.progress().from_offset, least)
        room = min(COUNTED_UNITS, queue.next_offset - begin)
        units = queries.units(TIMER_TOPIC, QUEUE, begin, room) if room > 0 else []
        for offset, (phy_offset, size, due_ms) in enumerate(units, begin):
            if due_ms >> _HASH_BITS in (0, -1):
                due_ms = self._due_of_record(phy_offset, size)
            counts.next_offset = offset + 1
            if queue.waits(offset, abs(due_ms)):
                record = queries.record_at(phy_offset, size)
                if record is not None:
                    counts.add(raw_properties(record), 1, self.now_ms())
        return bool(units)

    def _deliver_due(self, now_ms: int) -> int:
        queue = self._queue
        for _ in range(delivery.SLICE):
            offset = queue.next_due(now_ms)
            if offset is None:
                break
            message = self._message_at(offset)
            properties = message.properties if message is not None else None
            try:
                if message is not None and not self._deliver(message, now_ms):
                    return REFUSED_MS
            except PutRefused as error:
                log.warning("timed_message_waits offset=%d reason=%s", offset, error)
                return REFUSED_MS
            if queue.done() and offset < self._counts.next_offset:
                if properties is None:
                    self._counts = TimerCounts()  # nobody knows of which topic it was
                else:
                    self._counts.add(properties, -1, now_ms)
        return 0

    def _message_at(self, offset: int) -> NewMessage | None:
        """None if the log has it no more. Raises CorruptLogError."""
        queries = self._store.queries
        units = queries.units(TIMER_TOPIC, QUEUE, offset, 1)
        record = queries.record_at(units[0][0], units[0][1]) if units else None
        return message_to_store(record) if record is not None else None

    def _deliver(self, message: NewMessage, now_ms: int) -> bool:
        """False if the message has to wait. Raises PutRefused."""
        key = find_property(message.properties, b"TIMER_DEL_UNIQKEY")
        if key is not None:
            self._queue.recall_over(key)
            return True
        topic = find_property(message.properties, b"REAL_TOPIC") or b""
        if self._queue.is_recalled(recall_key(topic, message.uniq_key or b"")):
            return True
        message.properties = b"%b\x02TIMER_DEQUEUE_MS\x01%d\x02" % (
            message.properties.rstrip(b"\x02"),
            now_ms,
        )
        return self._deliverer.deliver(message)
