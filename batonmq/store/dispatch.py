"""Dispatch: what is confirmed becomes visible, in log order, exactly once.

Consume queues and index hold the records up to `offset` and none above (G4). A master queues what
dispatch needs when a record is put, so nothing is parsed again; a slave and a recovering store read
the log. Records not yet checked (`VerifiedLog`) are checked here. Repeating is harmless: existing
units and entries are skipped. A run of common records is dispatched at once (`bulk_dispatch`), with
the same bytes as record by record. Origin: Java `ReputMessageService`,
`CommitLogDispatcherBuildConsumeQueue`, `...Index`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from batonmq.protocol.properties import find_property
from batonmq.protocol.records.codec import RecordHead, raw_properties
from batonmq.protocol.records.common import quick_record
from batonmq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_MASK, TRANSACTION_ROLLBACK
from batonmq.protocol.tags import tags_code
from batonmq.store.commit_log import CommitLog
from batonmq.store.config import DelayLevels
from batonmq.store.index_service import IndexService
from batonmq.store.log_scan import (
    BULK_DISPATCH_BYTES,
    LogScanner,
    VerifiedLog,
    bulk_pays,
    fault_behind,
)
from batonmq.store.queue_table import QueueTable, StoredQueue

ArrivalListener = Callable[[str, int, int], None]
NO_UNIT: Final = -1
# From this many records on, bulk dispatch is faster.
_BULK_ROWS: Final = 32
RECENT_COMMITS: Final = 4096
_PENDING_AT_ONCE: Final = 512  # a large batch is confirmed at once (R58)
_WITHOUT_LIMIT: Final = 1 << 62
BATCH_MAX: Final = 1 << 31


class Pending(NamedTuple):
    """A record in the log that is not visible yet. `queue_offset` is NO_UNIT if it has no place in
    a queue."""

    end_offset: int
    physical_offset: int
    size: int
    queue: StoredQueue
    queue_offset: int
    tags_code: int
    keys: bytes | None
    uniq_key: bytes | None
    store_timestamp: int


class PendingBatch:
    """The records of one batch, in one queue, as one entry of `LogDispatcher.pending`: 20,000 of
    them take too long for the turn that puts them (R58)."""

    __slots__ = ("_at", "_columns", "_ends", "_queue_offset", "_store_timestamp", "queue")

    def __init__(
        self,
        queue: StoredQueue,
        queue_offset: int,
        ends: list[int],
        columns: tuple[list[int], list[bytes | None], list[bytes | None]],
        store_timestamp: int,
    ) -> None:
        """`queue_offset`: of the first; `ends`: log offsets of the bounds between records, one more
        than records; `columns`: tags codes, KEYS and UNIQ_KEYs."""
        self.queue = queue
        self._queue_offset = queue_offset
        self._ends = ends
        self._columns = columns
        self._store_timestamp = store_timestamp
        self._at = 0

    def take(self, most: int) -> list[Pending]:
        """The next `most` records, which are no longer in here; empty if none is left."""
        at, ends = self._at, self._ends
        self._at = stop = min(at + most, len(ends) - 1)
        tags, keys, uniq_keys = self._columns
        queue, first, stored_ms = self.queue, self._queue_offset, self._store_timestamp
        return [
            Pending(
                *(ends[n + 1], ends[n], ends[n + 1] - ends[n], queue, first + n),
                *(tags[n], keys[n], uniq_keys[n], stored_ms),
            )
            for n in range(at, stop)
        ]

    @property
    def is_empty(self) -> bool:
        return self._at == len(self._ends) - 1

    @property
    def next_queue_offset(self) -> int:
        """Behind the last record."""
        return self._queue_offset + len(self._ends) - 1


class RecentCommits:
    """The last RECENT_COMMITS committed transactions in the log, by prepared offset."""

    def __init__(self) -> None:
        self._commits: OrderedDict[int, int] = OrderedDict()  # to the commit's own offset

    def append(self, prepared_offset: int, offset: int) -> None:
        """The half message at `prepared_offset` was committed at `offset`."""
        self._commits[prepared_offset] = offset
        if len(self._commits) > RECENT_COMMITS:
            self._commits.popitem(last=False)

    def cut(self, offset: int) -> None:
        """The log ends at `offset`, or is dispatched again from there."""
        cut = [prepared for prepared, at in self._commits.items() if at >= offset]
        for prepared in cut:
            del self._commits[prepared]

    def __contains__(self, prepared_offset: int) -> bool:
        return prepared_offset in self._commits


def _unpack_first(pending: deque[Pending | PendingBatch]) -> Pending:
    """Puts the next records of the batch that comes first before it; the first of them."""
    batch = pending[0]
    assert isinstance(batch, PendingBatch)
    records = batch.take(_PENDING_AT_ONCE)
    if batch.is_empty:
        pending.popleft()
    pending.extendleft(reversed(records))
    return records[0]


class LogDispatcher:
    """Feeds consume queues and index up to the confirmed offset. `offset`: the end of what is
    dispatched, a record boundary. `target`: how far it may go."""

    def __init__(
        self,
        log: CommitLog,
        queues: QueueTable,
        index: IndexService | None,
        delay_levels: DelayLevels,
        verified: VerifiedLog,
        arrival_listeners: list[ArrivalListener],
        commits: RecentCommits,
    ) -> None:
        self._log = log
        self.verified = verified
        self.queues = queues
        self._index = index
        self._index_put = index.put if index is not None else lambda *_: None
        self._delay_levels = delay_levels
        self.pending: deque[Pending | PendingBatch] = deque()
        self.offset = 0
        self.target = 0
        self.has_more = False  # the last `advance` stopped at its limit, not at the end of records
        self._ends_at_deletion = self._is_behind_deletion = False
        self.last_store_timestamp = 0
        self._arrival_listeners = arrival_listeners
        self._commits = commits

    def restart_at(self, offset: int) -> None:
        """Drops what is queued; the log is read from `offset` on, a record boundary."""
        self.pending.clear()
        self._commits.cut(offset)
        self.offset = offset
        # After a cut other bytes may come there, and they are not confirmed.
        self.target = min(self.target, offset)
        self.has_more = False

    def advance(self, target: int, scan_bytes_max: int | None = None) -> int:
        """Makes all that ends at or below `target`, which never falls, visible; the new `offset`.
        With `scan_bytes_max` a call is one slice: bytes read and queued records are bounded, and it
        ends behind the deletion of a topic, which goes to disk. `offset` then stays behind, and the
        next call continues. Raises CorruptLogError."""
        self.target = target = max(target, self.target)
        self.has_more = self._is_behind_deletion = False
        # Only slices end there: a caller without a limit wants all of it now.
        self._ends_at_deletion = scan_bytes_max is not None
        touched: set[StoredQueue] = set()
        try:
            if self.pending:
                most = _WITHOUT_LIMIT if scan_bytes_max is None else _PENDING_AT_ONCE
                self._dispatch_pending(target, touched, most)
            if not self.pending and self.offset < target:
                limit = target if scan_bytes_max is None else self.offset + scan_bytes_max
                self._dispatch_log(target, limit, touched)
        finally:
            for queue in touched:
                for listener in self._arrival_listeners:
                    listener(queue.topic, queue.queue_id, queue.consume_queue.max_offset)
        return self.offset

    def _dispatch_pending(self, target: int, touched: set[StoredQueue], most: int) -> None:
        pending = self.pending
        index_put = self._index_put
        for _ in range(most):
            if not pending:
                return
            entry = pending[0]
            record = entry if type(entry) is Pending else _unpack_first(pending)
            if record[0] > target:  # not confirmed, and nothing behind it either
                return
            end, phy_offset, size, queue, queue_offset, tags, keys, uniq_key, stored_at = record
            if queue.handler is not None:
                self._dispatch_system_record(queue, phy_offset, end)
            else:
                if queue_offset != NO_UNIT:
                    # The master numbered these records itself, so the order needs no check.
                    if queue.is_gapless:
                        queue.consume_queue.append_unit(phy_offset, size, tags)
                    else:
                        queue.consume_queue.put_unit_at(queue_offset, phy_offset, size, tags)
                    touched.add(queue)
                if uniq_key is not None or keys is not None:
                    index_put(queue.topic, uniq_key, keys, phy_offset, stored_at)
            pending.popleft()
            self.offset = end
            self.last_store_timestamp = stored_at
        if pending:
            entry = pending[0]
            record = entry if type(entry) is Pending else _unpack_first(pending)
            self.has_more = record[0] <= target

    def forget_topic(self, topic: str) -> None:
        """The queues of `topic` were deleted: what is queued for them goes to new ones. Such
        messages follow the deletion in the log, with offsets that continued. A slave finds them
        there, so the new queue continues to count too."""
        self._is_behind_deletion = self._ends_at_deletion
        if all(record.queue.topic != topic for record in self.pending):
            return
        kept = [self._move(each) if each.queue.topic == topic else each for each in self.pending]
        # In place: listeners and the appender hold this deque.
        self.pending.clear()
        self.pending.extend(kept)

    def _move(self, record: Pending | PendingBatch) -> Pending | PendingBatch:
        queue = self.queues.find_or_create(record.queue.topic, record.queue.queue_id)
        queue.is_gapless = False
        if isinstance(record, PendingBatch):
            queue.next_offset = max(queue.next_offset, record.next_queue_offset)
            record.queue = queue
            return record
        queue.next_offset = max(queue.next_offset, record.queue_offset + 1)
        return record._replace(queue=queue)

    def queue_undispatched(self) -> int:
        """Queues every whole record above `offset`, as a new master; returns where they end.

        A slave never parsed these bytes, and a master must know the queue offsets in them:
        `next_offset` of their queues is counted up. Raises CorruptLogError unless what follows is
        an incomplete record (R24): this process wrote or checked every byte, so nothing here can be
        torn. Origin: Java `CommitLog.recoverTopicQueueTable`,
        `AutoSwitchHAService.truncateInvalidMsg` (which looks only below confirmOffset).
        """
        self.pending.clear()
        self.queues.reset_next_offsets()
        scanner = LogScanner(self._log, self.offset, self._log.max_offset, check_crc=True)
        while (head := scanner.next()) is not None:
            queue = self.queues.of_bytes(head.topic, head.queue_id)
            if queue.handler is not None:
                # The first put must find topics and groups as the old master changed them (R31).
                queue.handler(head, scanner.body(head))
            record = self._describe(head, queue)
            self.pending.append(record)
            if record.queue_offset != NO_UNIT:
                if head.queue_offset != queue.next_offset:  # offsets jump after a deletion
                    queue.is_gapless = False
                queue.next_offset = max(queue.next_offset, head.queue_offset + 1)
        fault = fault_behind(self._log, scanner)
        if fault is not None:
            raise self._log.damage(scanner.offset, fault)
        return scanner.offset

    def _dispatch_system_record(self, queue: StoredQueue, phy_offset: int, end: int) -> None:
        scanner = LogScanner(self._log, phy_offset, end, check_crc=False)
        head = scanner.next()
        assert head is not None and queue.handler is not None
        queue.handler(head, scanner.body(head))

    def _dispatch_log(self, target: int, limit: int, touched: set[StoredQueue]) -> None:
        end = min(target, self._log.max_offset)
        # Records that this process has checked need no second CRC.
        check_crc = self.verified.end < end
        if self.offset < (checked_end := min(self.verified.end, end)):
            self._dispatch_part(checked_end, limit, touched, check_crc=False)
        if check_crc and checked_end <= self.offset < limit and not self._is_behind_deletion:
            self._dispatch_part(end, limit, touched, check_crc=True)
        self.has_more = self.offset < end and (limit <= self.offset or self._is_behind_deletion)

    def _dispatch_part(
        self, end: int, limit: int, touched: set[StoredQueue], *, check_crc: bool
    ) -> None:
        scanner = LogScanner(self._log, self.offset, end, check_crc=check_crc)
        try:
            if not check_crc and bulk_pays(min(limit, end) - self.offset, BULK_DISPATCH_BYTES):
                self._dispatch_in_bulk(scanner, limit, touched)
            self._dispatch_each(scanner, limit, touched, check_crc)
        finally:
            self.offset = scanner.offset
        if scanner.problem is not None:
            raise self._log.damage(scanner.offset, scanner.problem)

    def _dispatch_in_bulk(self, scanner: LogScanner, limit: int, touched: set[StoredQueue]) -> None:
        """Dispatches up to `limit` or the first bytes that are no record, many common records at
        once."""
        from batonmq.store.bulk_dispatch import RecordColumns, dispatch_run

        odd_topics = self.queues.topics_with_odd_queues()
        segment_size = self._log.segment_size
        while scanner.offset < min(limit, scanner.end):
            before = scanner.offset
            view, start = scanner.window()
            columns = RecordColumns(view, start, before, limit, start + segment_size, odd_topics)
            for first, behind in columns.runs():
                begin, end = int(columns.begins[first]), int(columns.ends[behind - 1])
                # The records before this run are not common ones; they come first in the log.
                self._dispatch_each(scanner, begin, touched)
                if scanner.offset != begin:
                    return  # no record here: nothing behind it is shown (R24)
                if behind - first >= _BULK_ROWS and dispatch_run(
                    columns, first, behind, self.queues, self._index, touched
                ):
                    scanner.offset = end
                    self.last_store_timestamp = int(columns.stored_at[behind - 1])
                else:
                    self._dispatch_each(scanner, end, touched)
                    if scanner.offset != end:
                        return
            # At least one record, or a window without common ones would be read again and again.
            self._dispatch_each(scanner, max(columns.end, before + 1), touched)
            if scanner.offset == before or scanner.problem or self._is_behind_deletion:
                return

    def _dispatch_each(
        self, scanner: LogScanner, limit: int, touched: set[StoredQueue], check_crc: bool = False
    ) -> None:
        """Dispatches the records that begin below `limit`, up to bytes that are no record, or to
        the end of the slice."""
        while scanner.offset < limit and not self._is_behind_deletion:
            self._dispatch_common(scanner, limit, touched, check_crc)
            if scanner.offset >= limit or (head := scanner.next()) is None:
                return
            self._dispatch_record(head, scanner, touched)

    def _dispatch_common(
        self, scanner: LogScanner, limit: int, touched: set[StoredQueue], check_crc: bool
    ) -> None:
        """Dispatches common records as long as nothing else comes; moves the scanner."""
        view, start = scanner.window()
        segment_end = start + self._log.segment_size
        queue_of, index_put = self.queues.of_bytes, self._index_put
        offset = scanner.offset
        while offset < limit:
            record = quick_record(view, offset - start, segment_end - offset, offset, check_crc)
            if record is None:
                return
            size, queue_id, queue_offset, stored_at, topic, tags, keys, uniq_key = record
            queue = queue_of(topic, queue_id)
            if queue.is_plain:
                code = tags_code(tags)
            elif queue.handler is not None:  # it needs the whole head: `_dispatch_record`
                return
            else:
                properties = raw_properties(view, offset - start)
                code = self._delay_levels.tags_code(queue.topic, properties, stored_at)
            if queue.consume_queue.put_unit_at(queue_offset, offset, size, code):
                touched.add(queue)
                if queue_offset >= queue.next_offset:
                    queue.next_offset = queue_offset + 1
            if uniq_key is not None or keys is not None:
                index_put(queue.topic, uniq_key, keys, offset, stored_at)
            self.last_store_timestamp = stored_at
            offset += size
            scanner.offset = offset

    def _dispatch_record(
        self, head: RecordHead, scanner: LogScanner, touched: set[StoredQueue]
    ) -> None:
        queue = self.queues.of_bytes(head.topic, head.queue_id)
        if queue.handler is not None:
            queue.handler(head, scanner.body(head))
            return
        record = self._describe(head, queue)
        if record.queue_offset != NO_UNIT and queue.consume_queue.put_unit_at(
            head.queue_offset, record.physical_offset, record.size, record.tags_code
        ):
            touched.add(queue)
            queue.next_offset = max(queue.next_offset, head.queue_offset + 1)
        if record.keys is not None or record.uniq_key is not None:
            self._index_put(
                queue.topic,
                record.uniq_key,
                record.keys,
                record.physical_offset,
                record.store_timestamp,
            )
        self.last_store_timestamp = record.store_timestamp

    def _describe(self, head: RecordHead, queue: StoredQueue) -> Pending:
        """What dispatch needs of a record read from the log."""
        properties = head.properties
        transaction = head.sys_flag & TRANSACTION_MASK
        is_indexed = transaction != TRANSACTION_ROLLBACK
        # A new master needs it if the commit's op is missing at the log's end (R56).
        if transaction == TRANSACTION_COMMIT:
            self._commits.append(head.prepared_transaction_offset, head.physical_offset)
        return Pending(
            head.physical_offset + head.size,
            head.physical_offset,
            head.size,
            queue,
            head.queue_offset if transaction in (0, TRANSACTION_COMMIT) else NO_UNIT,
            self._delay_levels.tags_code(queue.topic, properties, head.store_timestamp),
            find_property(properties, b"KEYS") if is_indexed else None,
            find_property(properties, b"UNIQ_KEY") if is_indexed else None,
            head.store_timestamp,
        )
