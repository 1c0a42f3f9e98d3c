"""Delivers delayed and timed messages when they are due. Only a master does.

The shells around `delay_queues` and `timer_queue`. `ScheduleMessageService` and `TimerService` read
the units that their core asks for, put due messages into the log again, and after them, in the same
turn, a progress record. A recall (RECALL_MESSAGE, 370) is a message of the timers' queue that names
another one by its unique key. Origin: org.apache.rocketmq.broker.schedule.ScheduleMessageService,
org.apache.rocketmq.store.timer.TimerMessageStore.
"""

import asyncio
import logging
from functools import partial
from typing import Final

from batonmq.broker.schedule.delay_queues import DelayQueues, Now, QueueRead
from batonmq.broker.schedule.delivery_progress import DeliveryProgress
from batonmq.broker.schedule.timer_queue import TimerCounts, TimerQueue
from batonmq.broker.tables.delay_offset import TimerProgress
from batonmq.broker.tables.offset_clamp import queue_end
from batonmq.broker.tables.topics import TopicService, readable_queue
from batonmq.broker.write.log_features import BLOCKED_MS, REFUSED_MS, LogFeature
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.layout import FILLER_SIZE, UNIT
from batonmq.protocol.message_id import recall_key
from batonmq.protocol.numbers import INT_MAX, whole_number
from batonmq.protocol.properties import find_property, without_properties
from batonmq.protocol.records.codec import (
    Buffer,
    NewMessage,
    message_to_store,
    raw_properties,
    scan_record,
)
from batonmq.protocol.topic_name import (
    PROGRESS_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TRANS_HALF_TOPIC,
)
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection
from batonmq.runtime.clock import boot_ms
from batonmq.store.config import DelayLevels
from batonmq.store.errors import PutPropertiesTooLong, PutRefused

log = logging.getLogger(__name__)

SLICE: Final = 64
"""Messages delivered in one turn of the loop."""

QUEUE: Final = 0
COUNTED_UNITS: Final = 256
READ_UNITS: Final = 4096
"""Units read in one turn of the loop."""

LATE_MS: Final = 10_000
"""A message may become visible after it is due, but never this much later."""
DAY_MS: Final = 86_400_000
_OWN: Final = (b"DELAY", b"REAL_TOPIC", b"REAL_QID", b"TIMER_OUT_MS", b"TIMER_DEQUEUE_MS")


class Delivery:
    """Puts a waiting message into its own topic."""

    def __init__(self, path: WritePath, topics: TopicService) -> None:
        self._path = path
        self._store = path.store
        self._topics = topics

    def deliver(self, message: NewMessage, stored_at: int) -> bool:
        """Delivers the message stored at the physical offset `stored_at`; returns False if it must
        wait longer. Messages of a deleted topic are dropped, even if it was created again (R39). If
        their queue is no longer readable, they are put into one that is. Raises PutRefused."""
        topic = (find_property(message.properties, b"REAL_TOPIC") or b"").decode("utf-8", "replace")
        queue_id = whole_number(find_property(message.properties, b"REAL_QID") or b"", INT_MAX)
        # An unconfirmed deletion may be undone by a failover (R39).
        if topic in self._store.deleting_topics:
            return False
        is_place = topic != TRANS_HALF_TOPIC and queue_id is not None and queue_id >= 0
        config = self._topics.get(topic)
        if not is_place or config is None or self._topics.deleted_since(topic, stored_at):
            log.warning("waiting_message_dropped topic=%s queue_id=%r", topic, queue_id)
            return True
        assert queue_id is not None
        message.topic, message.queue_id = topic, readable_queue(config, queue_id)
        try:
            result = self._store.appender.put_message(message, stored=True)
        except PutPropertiesTooLong:  # an older broker, or a Java one, left no space
            message.properties = without_properties(message.properties, _OWN)
            result = self._store.appender.put_message(message, stored=True)
        self._path.stats.put(topic, 1, result.size)
        self._path.schedule_flush()
        return True


class _DueMessages(LogFeature):
    """What delayed and timed messages have in common."""

    def __init__(
        self, path: WritePath, deliverer: Delivery, progress: DeliveryProgress, levels: DelayLevels
    ) -> None:
        super().__init__(path)
        self._deliverer = deliverer
        self._progress = progress
        self._levels = levels
        self._forget()

    def _note(self) -> None:
        """Puts the progress record after the messages of this turn (R30)."""
        record = self._progress.owed
        if record is None:
            return
        try:
            end = self._path.put_system_record(PROGRESS_TOPIC, record.encode())
        except PutRefused as error:
            # Without disk space it stays owed: a later slice puts it, even if nothing more is due.
            log.info("progress_waits reason=%s", error)
            return
        self._progress.noted(record, end)


class ScheduleMessageService(_DueMessages):
    TOPICS = (SCHEDULE_TOPIC,)

    def _continue(self) -> None:
        table, offsets = self._progress.delays, {}
        for queue_id in range(max(len(self._levels), *table, 0)):
            least, most = self._range_of(SCHEDULE_TOPIC, queue_id)
            offsets[queue_id] = min(max(table.get(queue_id + 1, 0), least), most)
        self._queues = DelayQueues(self._delay_ms, offsets)

    def _forget(self) -> None:
        self._queues = DelayQueues(self._delay_ms, {})

    def _delay_ms(self, queue_id: int) -> int:
        return self._levels.delay_ms(queue_id + 1)

    def _is_first(self, queue_id: int) -> bool:
        return self._queues.arrived(queue_id)

    @property
    def _next_due_ms(self) -> int:
        return self._queues.wake_ms

    def _slice(self, now_ms: int) -> int:
        left, pause_ms = SLICE, 0
        try:
            while left > 0 and not pause_ms:
                read = self._queues.next_read(now_ms)
                if read is None:
                    break
                count, pause_ms = self._deliver_from(read, left, now_ms)
                left -= count
                if count:
                    offset = self._queues.offset_of(read.queue_id)
                    self._progress.delivered({read.queue_id + 1: offset})
        finally:
            # After an exception, too: what was put already must not be delivered twice.
            self._note()
        return pause_ms

    def _deliver_from(self, read: QueueRead, left: int, now_ms: int) -> tuple[int, int]:
        """Returns how many messages of a queue were delivered, and the pause in ms that must
        follow."""
        queries = self._store.queries
        least = queries.min_offset_in_queue(SCHEDULE_TOPIC, read.queue_id)
        if read.offset < least:
            self._queues.skip_to(read.queue_id, least)
            return 0, 0
        units = queries.units(SCHEDULE_TOPIC, read.queue_id, read.offset, left)
        end = queries.max_offset_in_queue(SCHEDULE_TOPIC, read.queue_id)
        due_ms = [unit[2] for unit in units]
        due = self._queues.due_of(read.queue_id, due_ms, end, Now(now_ms, boot_ms()))
        count = 0
        try:
            for phy_offset, size, _ in units[:due]:
                record = queries.record_at(phy_offset, size)
                if record is not None and not self._carried_out(
                    f"message at {phy_offset} of level {read.queue_id + 1}",
                    partial(self._deliver, record, phy_offset),
                ):
                    return count, REFUSED_MS
                count += 1
        except PutRefused as error:
            log.warning("delayed_message_waits queue_id=%d reason=%s", read.queue_id, error)
            return count, REFUSED_MS
        finally:
            if count:
                self._queues.delivered(read.queue_id, count)
        return count, 0

    def _deliver(self, record: Buffer, stored_at: int) -> bool:
        return self._deliverer.deliver(message_to_store(record), stored_at)


class TimerService(_DueMessages):
    TOPICS = (TIMER_TOPIC,)

    def _continue(self) -> None:
        self._queue = TimerQueue(self._progress.timer, *self._range_of(TIMER_TOPIC, QUEUE))

    def _forget(self) -> None:
        self._queue = TimerQueue(TimerProgress(), 0, 0)
        self._counts = TimerCounts()

    def delivered_until_ms(self) -> int:
        """The time up to which all due messages are delivered, confirmed on every member, as far as
        it is known; 0 if nothing is."""
        queue = self._queue
        is_known = self._is_running and queue.is_caught_up
        if is_known and self._progress.is_confirmed(queue.progress()):
            return min(queue.wake_ms - 1, self.now_ms() - LATE_MS)
        # No message is due before it was stored; the day is for clocks that differ. A Java broker
        # that takes over walks through each second from here on: a day takes it 0.1 s, but from
        # time 0 it is half an hour at full load, without deliveries.
        first_ms = self._store.queries.earliest_message_time(TIMER_TOPIC, QUEUE)
        least, most = self._range_of(TIMER_TOPIC, QUEUE)
        if least >= most:
            first_ms = self.now_ms()
        return max(0, first_ms - DAY_MS)

    def __len__(self) -> int:
        return len(self._queue)

    def backlog(self) -> tuple[int, int]:
        """On a master: how many messages wait, and how many units are not read yet."""
        if not self._is_running:
            return 0, 0
        end = queue_end(self._store, TIMER_TOPIC, QUEUE)
        return len(self._queue), max(0, end - self._queue.next_offset)

    @property
    def _next_due_ms(self) -> int:
        return self._queue.wake_ms

    def _slice(self, now_ms: int) -> int:
        self._queue.clock_shows(now_ms)
        more = self._read_units()
        if more:
            self._wake_in(0)
        if not self._queue.is_caught_up:  # a recall may be among the unread units (R30)
            return 0 if more else BLOCKED_MS
        before = self._queue.progress()
        try:
            return self._deliver_due(now_ms)
        finally:
            after = self._queue.progress()
            if after != before:
                self._progress.delivered(timer=after)
            self._note()

    def _read_units(self) -> bool:
        """Reads a slice of the queue; returns whether there may be more."""
        queue, queries = self._queue, self._store.queries
        queue.skip_to(queries.min_offset_in_queue(TIMER_TOPIC, QUEUE))
        units = queries.raw_units(TIMER_TOPIC, QUEUE, queue.next_offset, READ_UNITS)
        for phy_offset, size, due_ms in UNIT.struct.iter_unpack(units):
            if _is_hash(due_ms):
                due_ms = self._due_of_record(phy_offset, size)
            # A negative time marks a recall.
            waits = queue.seen(abs(due_ms))
            if due_ms < 0 and waits:
                record = queries.record_at(phy_offset, size)
                if record is not None:
                    key = find_property(raw_properties(record), b"TIMER_DEL_UNIQKEY")
                    queue.recalled(key or b"")
        return bool(units)

    def _due_of_record(self, phy_offset: int, size: int) -> int:
        """The due time of a record whose unit has a hash; 0 (due at once) without a record."""
        record = self._store.queries.record_at(phy_offset, size)
        head = scan_record(record) if record is not None and size != FILLER_SIZE else None
        if head is None:
            return 0
        due_ms = self._levels.tags_code(TIMER_TOPIC, head.properties, head.store_timestamp)
        return 0 if _is_hash(due_ms) else due_ms

    # Numbers of waiting messages.

    async def metrics(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The number of waiting messages by topic, without those that are due (GET_TIMER_METRICS,
        61). The first request reads the whole queue, a slice per turn, later ones only new
        units."""
        while self._is_running and self._count_slice():  # noqa: ASYNC110  it does a slice
            await asyncio.sleep(0)
        body = self._counts.encode(self._path.gate.master_epoch)
        return RemotingCommand.response_to(request, body=body)

    def _count_slice(self) -> bool:
        counts, queue, queries = self._counts, self._queue, self._store.queries
        least = queries.min_offset_in_queue(TIMER_TOPIC, QUEUE)
        begin = max(counts.next_offset, queue.progress().from_offset, least)
        count = min(COUNTED_UNITS, queue.next_offset - begin)
        units = queries.units(TIMER_TOPIC, QUEUE, begin, count) if count > 0 else []
        for offset, (phy_offset, size, due_ms) in enumerate(units, begin):
            if _is_hash(due_ms):
                due_ms = self._due_of_record(phy_offset, size)
            counts.next_offset = offset + 1
            if queue.waits(offset, abs(due_ms)):
                record = queries.record_at(phy_offset, size)
                if record is not None:
                    counts.add(raw_properties(record), 1, self.now_ms())
        return bool(units)

    def _deliver_due(self, now_ms: int) -> int:
        queue = self._queue
        for _ in range(SLICE):
            offset = queue.next_due(now_ms)
            if offset is None:
                break
            message, stored_at = self._message_at(offset)
            properties = message.properties if message is not None else None
            try:
                if message is not None and not self._carried_out(
                    f"message {offset} of {TIMER_TOPIC}",
                    partial(self._deliver, message, stored_at, now_ms),
                ):
                    return REFUSED_MS
            except PutRefused as error:
                log.warning("timed_message_waits offset=%d reason=%s", offset, error)
                return REFUSED_MS
            if queue.done() and offset < self._counts.next_offset:
                if properties is None:
                    self._counts = TimerCounts()  # of unknown topic: count everything again
                else:
                    self._counts.add(properties, -1, now_ms)
        return 0

    def _message_at(self, offset: int) -> tuple[NewMessage | None, int]:
        """The message and its physical offset; None if it has expired. Raises CorruptLogError."""
        queries = self._store.queries
        units = queries.units(TIMER_TOPIC, QUEUE, offset, 1)
        record = queries.record_at(units[0][0], units[0][1]) if units else None
        return (message_to_store(record), units[0][0]) if record is not None else (None, 0)

    def _deliver(self, message: NewMessage, stored_at: int, now_ms: int) -> bool:
        """Returns False if the message must wait. Raises PutRefused."""
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
        return self._deliverer.deliver(message, stored_at)


def _is_hash(tags_code: int) -> bool:
    """Whether a Java broker wrote the unit: it has a hash of TAGS, the time is in the record."""
    return -(1 << 33) <= tags_code < 1 << 33
