"""The write path of a master: from message to record, one `pwrite` per loop turn.

A put gives a record its queue offset and physical offset and keeps its bytes; `end_turn` writes
all of them at once. What dispatching will need of the record is queued beside it, so nothing is
read back or parsed. A put either has its place in the log or leaves no trace. Origin: Java
`CommitLog.asyncPutMessage(s)` and `DefaultAppendMessageCallback`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from protocol.record import END_FILE_MIN_BLANK, encode_blank, encode_record
from protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_MASK, TRANSACTION_ROLLBACK
from store.commit_log import CommitLog
from store.dispatch import NO_UNIT, Pending
from store.errors import PutIllegal, PutPropertiesTooLong, PutRefused, PutUnavailable
from store.queue_table import Queue, QueueTable

PROPERTIES_LENGTH_MAX: Final = 32767
_CRC_TAIL_MAX: Final = 21  # 20 bytes and perhaps a separator in front of them


class PutResult(NamedTuple):
    """Where a message went. `end_offset` is exclusive; the bytes are written by `end_turn`."""

    physical_offset: int
    size: int
    end_offset: int
    queue_offset: int
    store_timestamp: int


class BatchItem(NamedTuple):
    """One message of a batch: its own parts, the rest is common to the batch."""

    body: bytes
    properties: bytes
    tags_code: int
    keys: bytes | None
    uniq_key: bytes | None
    flag: int = 0


class Appender:
    """Assigns offsets and buffers the records of a turn. `refusal` says why puts are refused."""

    def __init__(
        self,
        log: CommitLog,
        queues: QueueTable,
        pending: deque[Pending],
        *,
        store_host: bytes,
        clock_ms: Callable[[], int],
        max_message_size: int,
        append_prop_crc: bool,
    ) -> None:
        self._log = log
        self._queues = queues
        self._table = queues.queues
        self._pending = pending
        self._store_host = store_host
        self._clock_ms = clock_ms
        self._body_max = max_message_size
        self._size_max = log.segment_size - END_FILE_MIN_BLANK
        self._append_prop_crc = append_prop_crc
        self._properties_max = PROPERTIES_LENGTH_MAX - (_CRC_TAIL_MAX if append_prop_crc else 0)
        self._pieces: list[bytes] = []
        self._end = 0  # end of the log with the buffered records
        self._segment_end = 0  # of the segment that takes the next record; 0: not known yet
        self._turn_ms = 0  # store timestamp of this turn, 0 before its first put
        self.refusal: str | None = "not prepared as master"
        #: Called when a write fails: within a put, too, where a turn leaves its segment.
        self.on_disk_failure: Callable[[OSError], None] = lambda error: None
        self.messages_total = 0
        self.bytes_total = 0

    # --- opening and closing for writes ---

    def open_for_writes(self) -> None:
        """Take puts from the end of the log on."""
        assert not self._pieces
        self._end = self._log.max_offset
        self._segment_end = 0
        self.refusal = None

    def refuse(self, why: str) -> None:
        """Take no more puts. What was put before still goes out with `end_turn`."""
        self.refusal = why

    @property
    def has_buffered(self) -> bool:
        return bool(self._pieces)

    # --- hot path ---

    def put_message(
        self,
        topic: str,
        queue_id: int,
        body: bytes,
        properties: bytes,
        tags_code: int,
        keys: bytes | None,
        uniq_key: bytes | None,
        *,
        flag: int = 0,
        sys_flag: int = 0,
        born_timestamp: int,
        born_host: bytes,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
    ) -> PutResult:
        """Give the message its place. Raises PutRefused, then nothing of it is in the log.

        `properties` is the raw property string without CRC tail; `keys` and `uniq_key` are the
        raw values of KEYS and UNIQ_KEY in it, for the index; `born_host` is ip and port, 8 or 20
        bytes. The result stands once `end_turn` returned.
        """
        if self.refusal is not None:
            raise PutUnavailable(self.refusal)
        if len(body) > self._body_max or len(properties) > self._properties_max:
            raise self._too_long(body, properties)
        queue = self._table.get((topic, queue_id))
        if queue is None:
            queue = self._queues.find_or_create(topic, queue_id)
        stored_at = self._turn_ms
        if not stored_at:
            stored_at = self._turn_ms = self._clock_ms()
        has_unit = True
        queue_offset = queue.next_offset
        if sys_flag & TRANSACTION_MASK or queue.handler is not None:
            has_unit = has_queue_offset(sys_flag, queue)
            if not has_unit:
                queue_offset = 0
            if sys_flag & TRANSACTION_MASK == TRANSACTION_ROLLBACK:
                keys = uniq_key = None
        offset = self._end
        while True:
            record = encode_record(
                topic=queue.topic_bytes,
                queue_id=queue_id,
                queue_offset=queue_offset,
                physical_offset=offset,
                flag=flag,
                sys_flag=sys_flag,
                born_timestamp=born_timestamp,
                born_host=born_host,
                store_timestamp=stored_at,
                store_host=self._store_host,
                reconsume_times=reconsume_times,
                prepared_transaction_offset=prepared_transaction_offset,
                body=body,
                properties=properties,
                append_prop_crc=self._append_prop_crc,
            )
            size = len(record)
            end = offset + size
            if end + END_FILE_MIN_BLANK <= self._segment_end:
                break
            offset = self._make_room(size)
        self._end = end
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
                    tags_code,
                    keys,
                    uniq_key,
                    stored_at,
                ),
            )
        )
        return _new_result(PutResult, (offset, size, end, queue_offset, stored_at))

    def put_batch(
        self,
        topic: str,
        queue_id: int,
        items: Sequence[BatchItem],
        *,
        sys_flag: int = 0,
        born_timestamp: int,
        born_host: bytes,
        reconsume_times: int = 0,
    ) -> list[PutResult]:
        """Put messages with consecutive queue offsets and adjacent records, in one segment.

        All or none: raises PutRefused as `put_message` does, also for a batch that no segment
        can hold.
        """
        assert items and not sys_flag & TRANSACTION_MASK
        if self.refusal is not None:
            raise PutUnavailable(self.refusal)
        for item in items:
            if len(item.body) > self._body_max or len(item.properties) > self._properties_max:
                raise self._too_long(item.body, item.properties)
        queue = self._queues.find_or_create(topic, queue_id)
        if not self._turn_ms:
            self._turn_ms = self._clock_ms()
        first = queue.next_offset

        def encode(offset: int) -> list[bytes]:
            records = []
            for number, item in enumerate(items):
                record = encode_record(
                    topic=queue.topic_bytes,
                    queue_id=queue_id,
                    queue_offset=first + number,
                    physical_offset=offset,
                    flag=item.flag,
                    sys_flag=sys_flag,
                    born_timestamp=born_timestamp,
                    born_host=born_host,
                    store_timestamp=self._turn_ms,
                    store_host=self._store_host,
                    reconsume_times=reconsume_times,
                    prepared_transaction_offset=0,
                    body=item.body,
                    properties=item.properties,
                    append_prop_crc=self._append_prop_crc,
                )
                records.append(record)
                offset += len(record)
            return records

        records = encode(self._end)
        size = sum(map(len, records))
        while self._end + size + END_FILE_MIN_BLANK > self._segment_end:
            records = encode(self._make_room(size))
        return [
            self._keep(record, queue, first + number, item)
            for number, (record, item) in enumerate(zip(records, items, strict=True))
        ]

    def _keep(self, record: bytes, queue: Queue, queue_offset: int, item: BatchItem) -> PutResult:
        offset, size = self._end, len(record)
        end = self._end = offset + size
        self._pieces.append(record)
        queue.next_offset = queue_offset + 1
        self._pending.append(
            Pending(
                end, offset, size, queue, queue_offset, item.tags_code, item.keys, item.uniq_key,
                self._turn_ms,
            )
        )  # fmt: skip
        return PutResult(offset, size, end, queue_offset, self._turn_ms)

    def end_turn(self) -> int:
        """Write everything put since the last call; the end of what is written.

        Raises OSError if the disk fails under an allocated segment: the caller stops the broker.
        """
        pieces = self._pieces
        log = self._log
        if not pieces:
            return log.max_offset
        self._write_pieces()
        self._turn_ms = 0
        if log.wants_preallocation:
            log.preallocate_in_thread()
        return log.max_offset

    def _write_pieces(self) -> None:
        pieces = self._pieces
        self.messages_total += len(pieces)
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self.bytes_total += len(data)
        pieces.clear()
        self._write(lambda: self._log.append(data))

    def _write(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self.refusal = "the disk failed"
            self.on_disk_failure(error)
            raise

    # --- leaving a segment ---

    def _make_room(self, size: int) -> int:
        """Go to the segment that can take `size` bytes; the offset where they go.

        The next segment is allocated before the blank is written: a full disk refuses the put
        and leaves the log as it is.
        """
        if size > self._size_max:
            self._forget_turn_if_empty()
            raise PutIllegal(f"{size} bytes do not fit into a segment; it holds {self._size_max}")
        log = self._log
        at = self._end
        boundary = at - at % log.segment_size
        if self._segment_end <= at:  # at a border, or the first put of all
            self._ensure(boundary)
            self._segment_end = boundary + log.segment_size
            if at + size + END_FILE_MIN_BLANK <= self._segment_end:
                return at
        self._ensure(self._segment_end)
        if self._pieces:
            self._write_pieces()
        self._write(lambda: log.append_blank(encode_blank(self._segment_end - at)))
        self._end = self._segment_end
        self._segment_end += log.segment_size
        return self._end

    def _ensure(self, offset: int) -> None:
        try:
            self._log.ensure_segment(offset)
        except OSError as error:
            self._forget_turn_if_empty()
            raise PutRefused(f"no new log segment at {offset}: {error}") from error

    def _forget_turn_if_empty(self) -> None:
        if not self._pieces:
            self._turn_ms = 0

    def _too_long(self, body: bytes, properties: bytes) -> PutIllegal:
        if len(body) > self._body_max:
            return PutIllegal(f"a body of {len(body)} bytes; maxMessageSize is {self._body_max}")
        return PutPropertiesTooLong(
            f"properties of {len(properties)} bytes; the limit is {self._properties_max}"
        )


def has_queue_offset(sys_flag: int, queue: Queue) -> bool:
    """Whether a record takes a place in its consume queue."""
    transaction = sys_flag & TRANSACTION_MASK
    return queue.handler is None and (transaction == 0 or transaction == TRANSACTION_COMMIT)


_new_result = tuple.__new__
_new_pending = tuple.__new__
