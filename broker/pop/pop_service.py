"""The master's records of messages in flight: written, read again by a new master, revived when
due.

The shell around `pop_table`. Each change is a record of rmq_sys_BATON_POP, applied when it is put
and answered when it is confirmed. A new master first reads the records from the offset of
CID_RMQ_SYS_REVIVE_GROUP on. Slaves fetch this offset together with those of the groups, so these
records contain all pops that the groups' offsets do not. The oldest check points are written again
from time to time, so that a new master has few records to read. Origin: Java `PopReviveService`.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from batonmq.broker.config import BrokerConfig
from batonmq.broker.pop.pop_positions import PopPositions
from batonmq.broker.pop.pop_table import (
    ORDER_KEPT_MS,
    Acked,
    CheckPoint,
    Key,
    Popped,
    PopRecord,
    PopTable,
    PutOff,
)
from batonmq.broker.pop.reviver import QUEUE, Reviver, StrandedRetries, pulls
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write import log_features
from batonmq.broker.write.log_features import LogFeature
from batonmq.broker.write.pending_acks import Outcome
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal, RemoteProtocolError
from batonmq.protocol.records.codec import NewMessage, message_to_store
from batonmq.protocol.topic_name import POP_TOPIC
from batonmq.store.errors import PutRefused

log = logging.getLogger(__name__)

PROGRESS_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"
READ_RECORDS: Final = 256
"""Records read in one turn of the loop."""
POSITIONS_A_TURN: Final = 256
REVIVES_A_TURN: Final = 8
"""Check points revived in one turn, each of at most 32 messages."""
SPAN_MIN: Final = 16_384
"""Records that a new master may have to read however little is in flight."""
WAITS_MS: Final = 1000
"""Pause before a message that could not be revived is tried again."""


class PopService(LogFeature):
    """One per broker. `read_again` is called when held requests of a group's queue, or of any
    (None), may find messages."""

    def __init__(
        self,
        path: WritePath,
        topics: TopicService,
        offsets: ConsumerOffsetManager,
        config: BrokerConfig,
    ) -> None:
        super().__init__(path)
        self._topics = topics
        self._offsets = offsets
        self._reviver = Reviver(path, topics, config, self._carried_out)
        self._config = config
        self.read_again: Callable[[Key | None], None] = lambda key: None
        self.positions = PopPositions(offsets)
        self._stranded = StrandedRetries(path.store, topics, self.positions)
        self.table = PopTable()
        self.is_loaded = False
        self._load_to = 0
        self._wakes_at = 0
        self._waits: deque[int] = deque()
        self._mark: tuple[int, int] | None = None

    @property
    def in_flight_max(self) -> int:
        return self._config.pop_in_flight_max

    def _continue(self) -> None:
        least, self._load_to = self._range_of(POP_TOPIC, QUEUE)
        start = max(self._offsets.query(PROGRESS_GROUP, POP_TOPIC, QUEUE), least)
        self.table = PopTable(min(start, self._load_to))
        self.table.collects = True
        self._wakes_at = 0

    def _forget(self) -> None:
        self.is_loaded = False
        self.table = PopTable()
        self.positions.clear()
        self._waits.clear()
        self._mark = None

    # Changes.

    def require_master(self) -> None:
        """Raises BrokerRefusal unless this broker is a master that has read what is in flight."""
        self._path.gate.require_open()
        self._path.hold.require_inactive()
        if not self.is_loaded:
            remark = "this master still reads what is in flight: ask again in a moment"
            raise BrokerRefusal(ResponseCode.SERVICE_NOT_AVAILABLE, remark)

    def put(self, record: PopRecord) -> int:
        """Puts and applies a record; returns its end offset. Raises PutRefused."""
        result = self._store.appender.put_message(
            NewMessage(POP_TOPIC, QUEUE, record.encode(), b"", 0, None, None, 0, bytes(8))
        )
        self._path.schedule_flush()
        # At once, not when confirmed: an orderly pop must block its queue for the next request.
        self.table.apply(record, result.queue_offset)
        wake_ms = self.table.wake_ms
        if wake_ms < self._wakes_at:
            self._wakes_at = wake_ms
            self._wake_in(max(0, wake_ms - self.now_ms()))
        return result.end_offset

    def when_confirmed(
        self,
        end_offset: int,
        moves: Iterable[tuple[Key, int]],
        outcome: Outcome = lambda code, remark: None,
    ) -> None:
        """Calls `outcome` once, with code 0 when all below `end_offset` is confirmed. Until then
        the progress is not moved past it. `moves`: queues, and where their groups then continue.
        """
        waits = self._waits
        waits.append(end_offset)
        taken = [(key, self.positions.take(key, offset), offset) for key, offset in moves]

        def done(code: int, remark: str) -> None:
            if waits:
                waits.popleft()
            for key, one, offset in taken:
                self.positions.confirmed(key, one, offset, ok=code == 0)
            outcome(code, remark)

        self._path.acks.add_waiter(end_offset, self._path.clock_ms(), done)

    def reset(self, group: str, topic: str, queue_id: int) -> None:
        """An operator has reset a group in a queue. Raises PutRefused."""
        self.positions.forget((group, topic, queue_id))
        if self.is_loaded and self._path.gate.refusal is None:
            self.put(PopRecord(reset=[(group, topic, queue_id)]))
            self.read_again((group, topic, queue_id))

    def pulls_again(self, group: str, topic: str) -> None:
        """The group was set to PULL: moves its messages out of POP's retry topic."""
        if self.is_loaded and pulls(self._topics, group, topic):
            self._stranded.add(group, topic)
            self._wake_in(0)

    # Work of the timer.

    @property
    def _next_due_ms(self) -> int:
        return self.table.wake_ms

    def _slice(self, now_ms: int) -> int:
        if not self.is_loaded and not self._load_slice():
            visible_end = self._store.queries.max_offset_in_queue(POP_TOPIC, QUEUE)
            return 0 if self.table.next_record < visible_end else log_features.BLOCKED_MS
        try:
            for _ in range(REVIVES_A_TURN):
                point = self.table.next_due(now_ms)
                if point is None:
                    break
                self._come_due(point, now_ms)
            self._write_oldest_again()
            if (popped := self._stranded.next(now_ms)) is not None:
                end = self.put(PopRecord(popped=[popped]))
                self.when_confirmed(end, [(popped.key, popped.next)])
        except (PutRefused, BrokerRefusal) as error:
            log.warning("popped_message_waits reason=%s", error)
            return log_features.REFUSED_MS
        finally:
            self._wakes_at = min(self.table.wake_ms, now_ms + log_features.MAX_PAUSE_MS)
            self._keep_progress()
        return 0

    def _load_slice(self) -> bool:
        """Reads a slice of the records, then commits a slice of the positions; returns whether all
        is done. Raises CorruptLogError."""
        table, queries = self.table, self._store.queries
        least = queries.min_offset_in_queue(POP_TOPIC, QUEUE)  # records may have expired since
        table.next_record = max(table.next_record, min(least, self._load_to))
        if table.next_record < self._load_to:
            for phy, size, _ in queries.units(POP_TOPIC, QUEUE, table.next_record, READ_RECORDS):
                record = queries.record_at(phy, size)
                table.apply(_readable(record), table.next_record)
            return False
        for _ in range(POSITIONS_A_TURN):
            if not table.positions:
                table.collects = False
                self.is_loaded = True
                self._stranded.find()
                self.read_again(None)
                return True
            key, position = table.positions.popitem()
            group, topic, queue_id = key
            at = queries.phy_offset_of(topic, queue_id, position.last_offset)
            # In a topic that was created again the offset has another message (R39).
            is_there = at >= 0 and at == position.last_phy
            if self._offsets.resets.runs(*key):
                continue  # the reset is newer than these pops (R56)
            if is_there and position.next_offset > self._offsets.query(*key):
                self._offsets.commit(group, topic, queue_id, position.next_offset)
        return False

    def _come_due(self, point: CheckPoint, now_ms: int) -> None:
        """Revives a due pop. Raises PutRefused, BrokerRefusal, CorruptLogError; then it stays
        due."""
        # Orderly pops are not revived: once visible, the next pop of the queue gets the messages
        # again.
        if point.order:
            visible_at = point.visible_at()
            if now_ms >= visible_at + ORDER_KEPT_MS:
                self.table.forget(point)
            elif now_ms >= visible_at:
                self.table.wake(point, visible_at + ORDER_KEPT_MS)
                self.read_again(point.key)
            else:
                self.table.wake(point, visible_at)
            return
        done: list[int] = []
        try:
            self._reviver.revive(point, done)
        finally:
            # After an exception, too: what is already in the retry topic must not be put again.
            if done:
                self.put(PopRecord(acked=[_acked(point, done)]))
            if point.open:
                self.table.wake(point, now_ms + WAITS_MS)

    def _write_oldest_again(self) -> None:
        """Writes the oldest check points again, so that a new master has few records to read."""
        table = self.table
        for _ in range(REVIVES_A_TURN):
            if table.next_record - table.oldest_record <= max(SPAN_MIN, 4 * len(table)):
                return
            for point in table.of_oldest_record():
                self.put(self._again(point))

    def _again(self, point: CheckPoint) -> PopRecord:
        offsets, last_phy = point.offsets, point.last_phy
        # Orderly pops keep all their offsets, since acks are checked against them.
        if not point.order:
            offsets = sorted(point.open)
            last_phy = self._store.queries.phy_offset_of(*point.key[1:], offsets[-1])
        popped = Popped(
            key=point.key,
            pop_time=point.pop_time,
            due=point.due,
            offsets=offsets,
            last_phy=last_phy,
            order=point.order,
            attempt=point.attempt,
        )
        closed = [offset for offset in offsets if offset not in point.open]
        return PopRecord(
            popped=[popped],
            acked=[_acked(point, closed)] if closed else [],
            put_off=[
                PutOff(key=point.key, pop_time=point.pop_time, offset=offset, visible=visible)
                for offset, visible in point.visible.items()
            ],
        )

    def _keep_progress(self) -> None:
        """Moves the offset from which a new master reads (R30)."""
        # Only once all records before it are confirmed and the groups' offsets are committed: a new
        # master knows pops before it by these offsets alone.
        if self._mark is not None:
            oldest, end = self._mark
            # The mark is from an earlier slice: all that the log had then must be confirmed.
            if self._store.confirm_offset < end or (self._waits and self._waits[0] <= end):
                return
            self._offsets.commit(PROGRESS_GROUP, POP_TOPIC, QUEUE, oldest)
        self._mark = self.table.oldest_record, self._store.appender.end


def _acked(point: CheckPoint, offsets: list[int]) -> Acked:
    return Acked(key=point.key, pop_time=point.pop_time, offsets=offsets)


def _readable(record: memoryview | None) -> PopRecord:
    """An unreadable record is logged and skipped, so that the records after it count (R54)."""
    if record is None:
        return PopRecord()
    try:
        return PopRecord.decode(message_to_store(record).body)
    except RemoteProtocolError as exc:
        log.error("pop_record_skipped reason=%s", exc)
        return PopRecord()
