"""The write path of a master: from message to record, one `pwrite` per loop turn. A put assigns
queue offset and physical offset and keeps the record's bytes; `end_turn` writes them. What dispatch
needs is queued, so nothing is read back. A put changes nothing if it is refused. Origin: Java
`CommitLog.asyncPutMessage(s)`, `DefaultAppendMessageCallback`."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from batonmq.protocol.errors import DISK_FULL
from batonmq.protocol.properties import PROPERTIES_SIZE_MAX
from batonmq.protocol.records.codec import (
    END_FILE_MIN_BLANK,
    NewMessage,
    encode_blank,
    encode_record,
)
from batonmq.protocol.sysflag import TRANSACTION_MASK, TRANSACTION_ROLLBACK, has_queue_unit
from batonmq.protocol.topic_name import DUE_TOPICS
from batonmq.store.commit_log import CommitLog
from batonmq.store.config import StoreConfig
from batonmq.store.dispatch import BATCH_MAX, NO_UNIT, Pending, PendingBatch
from batonmq.store.errors import PutIllegal, PutPropertiesTooLong, PutUnavailable
from batonmq.store.queue_table import QueueTable, StoredQueue, may_have_folder

# Of a large batch, in one turn: 2 ms (R58).
_PLACED_AT_ONCE: Final = 1024
_PLACED_BYTES: Final = 1 << 20
_CRC_TAIL_MAX: Final = 21  # 20 bytes, perhaps a separator before them


class PutResult(NamedTuple):
    """Where a message went. `end_offset` is exclusive; `end_turn` writes the bytes."""

    physical_offset: int
    size: int
    end_offset: int
    queue_offset: int
    store_timestamp: int


class EncodedBatch:
    """Messages of one queue whose records are encoded before their place is known, a few in each
    turn of the loop. `Appender.put_encoded` fills in what depends on the place (R58)."""

    def __init__(self, topic: str, queue_id: int, encode: Callable[[NewMessage], bytes]) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self._encode = encode
        self.records: list[bytes] = []
        self.tags: list[int] = []
        self.keys: list[bytes | None] = []
        self.uniq_keys: list[bytes | None] = []
        self.born_host_size = 0

    def add(self, message: NewMessage) -> None:
        """Encodes a message. Raises PutRefused if it is too long."""
        self.records.append(self._encode(message))
        self.born_host_size = len(message.born_host)
        self.tags.append(message.tags_code)
        self.keys.append(message.keys)
        self.uniq_keys.append(message.uniq_key)


class _Unplaced:
    """A batch that has its place in the log, and records that do not name it yet."""

    def __init__(
        self, batch: EncodedBatch, ends: list[int], queue_offset: int, stored_ms: int
    ) -> None:
        """As of `PendingBatch`."""
        self._batch, self._ends = batch, ends
        self._queue_offset, self._stored_ms = queue_offset, stored_ms
        self._at = 0

    def take(self, *, has_crc: bool) -> tuple[bytes, int]:
        """The next records, which now name their places, and how many; not kept here."""
        from batonmq.protocol.records.columns import put_places

        at, ends = self._at, self._ends
        most = bisect_right(ends, ends[at] + _PLACED_BYTES) - 1
        stop = self._at = min(max(most, at + 1), at + _PLACED_AT_ONCE, len(ends) - 1)
        records, begin = self._batch.records, ends[at]
        data = bytearray().join(records[at:stop])
        records[at:stop] = [b""] * (stop - at)
        put_places(
            data, [end - begin for end in ends[at : stop + 1]],
            queue_offset=self._queue_offset + at, physical_offset=begin,
            store_ms=self._stored_ms, born_host_size=self._batch.born_host_size, has_crc=has_crc,
        )  # fmt: skip
        return bytes(data), stop - at

    @property
    def is_empty(self) -> bool:
        return self._at == len(self._ends) - 1


_Piece = bytes | _Unplaced


class BatchResult(NamedTuple):
    """Where an EncodedBatch went: the physical offset of each message, the queue offset of the
    first."""

    physical_offsets: list[int]
    size: int
    end_offset: int
    queue_offset: int

    @classmethod
    def of(cls, results: Sequence[PutResult]) -> BatchResult:
        """Of one message after the other."""
        offsets = [each.physical_offset for each in results]
        size = sum(each.size for each in results)
        return cls(offsets, size, results[-1].end_offset, results[0].queue_offset)


class Appender:
    """Assigns offsets and buffers the records of a turn. `refusal`: why puts are refused."""

    def __init__(
        self,
        config: StoreConfig,
        log: CommitLog,
        queues: QueueTable,
        pending: deque[Pending | PendingBatch],
        *,
        store_host: bytes,
        clock_ms: Callable[[], int],
        on_disk_failure: Callable[[OSError], None],
    ) -> None:
        """`on_disk_failure` is called when a write fails, also in a put that leaves a segment."""
        self._log = log
        self._queues = queues
        self._table = queues.queues
        self._pending = pending
        self._store_host = store_host
        self._clock_ms = clock_ms
        self._config = config
        self._delay_levels = config.delay_levels
        self._size_max = log.segment_size - END_FILE_MIN_BLANK
        self._append_prop_crc = config.enabled_append_prop_crc
        crc_tail_max = _CRC_TAIL_MAX if self._append_prop_crc else 0
        self._properties_max = PROPERTIES_SIZE_MAX - crc_tail_max
        self._pieces: list[_Piece] = []
        self._unplaced = 0  # of `_pieces`
        self._more_messages = 0  # in `_pieces`, beyond one each: a batch is one piece
        self._end = 0  # end of the log with the buffered records
        self._segment_end = 0  # of the segment that takes the next record; 0: not known yet
        self._turn_ms = 0  # store timestamp of this turn; 0 before its first put
        self.refusal: str | None = "not prepared as master"
        self._on_disk_failure = on_disk_failure
        self._pause = ""  # why the disk counts as full; "" if it does not
        self.messages_total = 0
        self.bytes_total = 0

    # Opening and closing for writes.

    def open_for_writes(self) -> None:
        assert not self._pieces
        self._end = self._log.max_offset
        self._segment_end = 0
        self.refusal = self._pause or None

    def refuse(self, why: str) -> None:
        """Take no more puts. Earlier ones are still written by `end_turn`."""
        self.refusal = why

    def pause(self, why: str) -> None:
        """Refuse puts because the disk is full (R45); "": take them again, unless they are refused
        for another reason."""
        is_masters, self._pause = self.is_masters, why
        if is_masters:
            self.refusal = why or None

    def drop_unwritten(self) -> bool:
        """Forget records that a full disk kept from the log: this broker leaves its role, and none
        of them was acknowledged. Whether there were any. Raises OSError; then it can be repeated.
        """
        if not self._pieces:
            return False
        log, pending = self._log, self._pending
        end = log.max_offset
        log.clear_torn()
        self._pieces.clear()
        self._more_messages = self._unplaced = 0
        # Their queue offsets are given again, as if they had never been put.
        while pending:
            record = pending.pop()
            if isinstance(record, PendingBatch):
                pending.extend(record.take(BATCH_MAX))
                continue
            if record.end_offset <= end:
                pending.append(record)
                break
            if record.queue_offset != NO_UNIT:
                record.queue.next_offset = record.queue_offset
        self._end = end
        return True

    @property
    def is_writable(self) -> bool:
        return self.refusal is None

    @property
    def is_masters(self) -> bool:
        """Whether puts are taken, or would be if the disk had space (R45)."""
        return self.refusal is None or (bool(self._pause) and self.refusal == self._pause)

    @property
    def end(self) -> int:
        """End (exclusive) of the log with the puts of this turn."""
        return self._end

    @property
    def has_buffered(self) -> bool:
        return bool(self._pieces)

    @property
    def is_placing(self) -> bool:
        """Whether a turn that was not `whole` left something, which may be written now."""
        return bool(self._unplaced) and not self._log.health.pauses

    # Hot path.

    def put_message(self, message: NewMessage, *, stored: bool = False) -> PutResult:
        """Gives the message its place, which counts once `end_turn` has returned. `stored`: the log
        had it before, so its body may exceed today's maxMessageSize. Raises PutRefused; then
        nothing changed."""
        if self.refusal is not None:
            raise PutUnavailable(self.refusal)
        if len(message.properties) > self._properties_max or (
            len(message.body) > self._config.max_message_size and not stored
        ):
            raise self._too_long(message)
        queue = self._table.get((message.topic, message.queue_id))
        if queue is None:
            queue = self._queues.find_or_create(message.topic, message.queue_id)
        stored_at = self._turn_ms
        if not stored_at:
            stored_at = self._turn_ms = self._clock_ms()
        queue_offset, has_unit = queue.next_offset, True
        if not queue.is_plain or message.sys_flag & TRANSACTION_MASK:
            if queue.topic in DUE_TOPICS:
                # A delay counts from this put: the turn may have begun before the message was sent.
                stored_at = self._turn_ms = self._clock_ms()
                message.tags_code = self._delay_levels.tags_code(
                    queue.topic, message.properties, stored_at
                )
            # R46: plain queues were checked when they were created.
            self._refuse_bad_place(message)
            has_unit = queue.handler is None and has_queue_unit(message.sys_flag)
            # a half message has no place in its queue yet
            queue_offset = queue_offset if has_unit else 0
            if message.sys_flag & TRANSACTION_MASK == TRANSACTION_ROLLBACK:
                message.keys = message.uniq_key = None  # nothing that a query by key should find
        offset = self._end
        host, crc = self._store_host, self._append_prop_crc
        topic = queue.topic_bytes
        record = encode_record(message, topic, queue_offset, offset, stored_at, host, crc)
        # A record never crosses a segment. Its own offset is in it, so it is encoded again.
        while offset + len(record) + END_FILE_MIN_BLANK > self._segment_end:
            offset = self._go_to_segment(len(record))
            record = encode_record(message, topic, queue_offset, offset, stored_at, host, crc)
        return self._keep(message, record, queue, queue_offset, has_unit)

    def put_though_full(self, message: NewMessage) -> PutResult:
        """The same for a record that expiry needs while the disk is full: it uses
        allocated space."""
        if not self._pause or self.refusal != self._pause:
            return self.put_message(message)
        self.refusal = None
        try:
            return self.put_message(message)
        finally:
            self.refusal = self.refusal or self._pause or None

    def put_batch(self, messages: Sequence[NewMessage]) -> list[PutResult]:
        """Puts messages of one queue with consecutive queue offsets in one segment, all or none.
        Raises PutRefused, also if no segment can hold them."""
        if self.refusal is not None:
            raise PutUnavailable(self.refusal)
        for message in messages:
            assert not message.sys_flag & TRANSACTION_MASK
            self._check_size(message)
        self._refuse_bad_place(messages[0])
        queue = self._queues.find_or_create(messages[0].topic, messages[0].queue_id)
        if not self._turn_ms:
            self._turn_ms = self._clock_ms()
        records = self._encode_batch(messages, queue, self._end)
        size = sum(map(len, records))
        while self._end + size + END_FILE_MIN_BLANK > self._segment_end:
            records = self._encode_batch(messages, queue, self._go_to_segment(size))
        return [
            self._keep(message, record, queue, queue.next_offset, True)
            for message, record in zip(messages, records, strict=True)
        ]

    def encoded_batch(self, topic: str, queue_id: int) -> EncodedBatch:
        """A batch to fill with messages of that queue, and then to put."""
        name, host, crc = topic.encode(), self._store_host, self._append_prop_crc

        def encode(message: NewMessage) -> bytes:
            assert not message.sys_flag & TRANSACTION_MASK
            self._check_size(message)
            return encode_record(message, name, 0, 0, 0, host, crc)

        return EncodedBatch(topic, queue_id, encode)

    def put_encoded(self, batch: EncodedBatch) -> BatchResult:
        """As `put_batch`. All messages have born hosts of one size. The batch belongs to the
        appender from now on."""
        if self.refusal is not None:
            raise PutUnavailable(self.refusal)
        if not may_have_folder(batch.topic, batch.queue_id):
            raise _no_folder(batch.topic, batch.queue_id)
        queue = self._queues.find_or_create(batch.topic, batch.queue_id)
        if not self._turn_ms:
            self._turn_ms = self._clock_ms()
        stored_at, first, count = self._turn_ms, queue.next_offset, len(batch.records)
        sizes = list(map(len, batch.records))
        size = sum(sizes)
        while self._end + size + END_FILE_MIN_BLANK > self._segment_end:
            self._go_to_segment(size)
        ends = list(accumulate(sizes, initial=self._end))
        columns = batch.tags, batch.keys, batch.uniq_keys
        self._pending.append(PendingBatch(queue, first, ends, columns, stored_at))
        self._pieces.append(_Unplaced(batch, ends, first, stored_at))
        self._unplaced += 1
        self._end = ends[-1]
        queue.next_offset = first + count
        return BatchResult(ends[:-1], size, self._end, first)

    def _refuse_bad_place(self, message: NewMessage) -> None:
        """Raises PutIllegal where no queue can be (R46): no member could show the message."""
        if not may_have_folder(message.topic, message.queue_id):
            raise _no_folder(message.topic, message.queue_id)

    def _check_size(self, message: NewMessage) -> None:
        if (
            len(message.body) > self._config.max_message_size
            or len(message.properties) > self._properties_max
        ):
            raise self._too_long(message)

    def _encode_batch(
        self, messages: Sequence[NewMessage], queue: StoredQueue, offset: int
    ) -> list[bytes]:
        records = []
        for queue_offset, message in enumerate(messages, queue.next_offset):
            record = encode_record(
                message,
                queue.topic_bytes,
                queue_offset,
                offset,
                self._turn_ms,
                self._store_host,
                self._append_prop_crc,
            )
            records.append(record)
            offset += len(record)
        return records

    def _keep(
        self,
        message: NewMessage,
        record: bytes,
        queue: StoredQueue,
        queue_offset: int,
        has_unit: bool,
    ) -> PutResult:
        offset, size, stored_at = self._end, len(record), self._turn_ms
        end = self._end = offset + size
        self._pieces.append(record)
        if has_unit:
            queue.next_offset = queue_offset + 1
        self._pending.append(
            _new_pending(
                Pending,
                (
                    end,
                    offset,
                    size,
                    queue,
                    queue_offset if has_unit else NO_UNIT,
                    message.tags_code,
                    message.keys,
                    message.uniq_key,
                    stored_at,
                ),
            )
        )
        return _new_result(PutResult, (offset, size, end, queue_offset, stored_at))

    def end_turn(self, *, whole: bool = True) -> int:
        """Writes all puts since the last call, or with `whole` False as much of a large batch as a
        turn may take (`is_placing`); the end of what is written. On a full disk they stay here for
        a later call (R45). Raises OSError if the disk fails; then the broker must stop."""
        log = self._log
        self._turn_ms = 0  # pieces that stay have their time; what comes later has its own
        if self._pieces and self._write_pieces(whole=whole):
            log.preallocate_when_due()
        return log.max_offset

    def _write_pieces(self, *, whole: bool = True) -> bool:
        """False if the disk is full; then all pieces are still here."""
        pieces: list[bytes] = self._pieces  # type: ignore[assignment]
        left: list[_Piece] = []
        if self._unplaced:
            pieces, left = self._placed(whole=whole)
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        try:
            self._log.append(data)
        except OSError as error:
            self._not_written(error)
            return False
        self.messages_total += len(pieces) + self._more_messages
        self._more_messages = 0
        self.bytes_total += len(data)
        self._pieces = left
        return True

    def _placed(self, *, whole: bool) -> tuple[list[bytes], list[_Piece]]:
        """The pieces that can be written, and the rest. All stay here: the disk may be full."""
        ready, rest = list[bytes](), deque(self._pieces)
        may_take = True
        while rest and (may_take or isinstance(rest[0], bytes)):
            piece = rest[0]
            if isinstance(piece, bytes):
                ready.append(piece)
                rest.popleft()
                continue
            data, count = piece.take(has_crc=self._append_prop_crc)
            ready.append(data)
            self._more_messages += count - 1
            may_take = whole
            if piece.is_empty:
                rest.popleft()
                self._unplaced -= 1
        self._pieces = [*ready, *rest]
        return ready, list(rest)

    def _not_written(self, error: OSError) -> None:
        """Raises the error again unless the write may succeed later."""
        if self._log.health.passes(error):
            return
        # None of them was acknowledged, and a broker that stops must not write them later.
        self._pieces.clear()
        self._unplaced = 0
        self.refusal = "the disk failed"
        self._on_disk_failure(error)
        raise error

    # Leaving a segment.

    def _go_to_segment(self, size: int) -> int:
        """Goes to the segment that can take `size` bytes; the offset for them. The next segment is
        allocated before the blank is written, so a full disk leaves the log as it is."""
        if size > self._size_max:
            self._forget_turn_if_empty()
            raise PutIllegal(f"{size} bytes do not fit into a segment; it holds {self._size_max}")
        log = self._log
        at = self._end
        boundary = at - at % log.segment_size
        if self._segment_end <= at:  # at a border, or at the first put
            self._ensure(boundary)
            self._segment_end = boundary + log.segment_size
            if at + size + END_FILE_MIN_BLANK <= self._segment_end:
                return at
        self._ensure(self._segment_end)
        # The blank goes directly into the log: the records before it must be there first.
        if self._pieces and not self._write_pieces():
            raise _full(log.health.full)
        try:
            log.append_blank(encode_blank(self._segment_end - at))
        except OSError as error:
            self._not_written(error)
            raise _full(error) from error
        self._end = self._segment_end
        self._segment_end += log.segment_size
        return self._end

    def _ensure(self, offset: int) -> None:
        try:
            self._log.ensure_segment(offset)
        except OSError as error:
            self._forget_turn_if_empty()
            self._not_written(error)
            raise _full(error) from error

    def _forget_turn_if_empty(self) -> None:
        if not self._pieces:
            self._turn_ms = 0

    def _too_long(self, message: NewMessage) -> PutIllegal:
        if len(message.properties) > self._properties_max:
            return PutPropertiesTooLong(
                f"properties of {len(message.properties)} bytes; the limit is"
                f" {self._properties_max}"
            )
        most = self._config.max_message_size
        return PutIllegal(f"a body of {len(message.body)} bytes; maxMessageSize is {most}")


def _no_folder(topic: str, queue_id: int) -> PutIllegal:
    return PutIllegal(f"topic {topic[:255]!r} queue {queue_id} can have no folder")


def _full(why: object) -> PutUnavailable:
    return PutUnavailable(f"{DISK_FULL}: {why}")


# A NamedTuple's own `__new__` is a Python function; puts call the one in C.
_new_result = tuple.__new__
_new_pending = tuple.__new__
