"""Reads messages of a queue from the log, within the limits of one pull. Nothing above the
dispatched end is returned, and no record that this process has not written or checked (G8). A unit
by an earlier process is compared with its record, CRC included, at its first read. A bad unit is
rebuilt from the log, else readers would get bytes that are no message, or miss one. Origin: Java
`DefaultMessageStore.getMessage`."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.layout import FILLER_SIZE, RECORD_HEAD, UNIT, UNIT_SIZE
from batonmq.protocol.records.codec import RecordHead, raw_properties
from batonmq.protocol.topic_name import DUE_TOPICS
from batonmq.store.commit_log import CommitLog
from batonmq.store.config import DelayLevels, StoreConfig
from batonmq.store.consume_queue import ConsumeQueue, is_message
from batonmq.store.log_scan import LogScanner, VerifiedLog, check_record
from batonmq.store.queue_table import StoredQueue

SLAVE_RATIO_LESS: Final = 10  # points of accessMessageInMemoryMaxRatio
SCAN_UNITS_MIN: Final = 16_000 // UNIT_SIZE  # Java: max(16000 bytes, maxMsgNums units)

_unpack_each: Final = UNIT.struct.iter_unpack


class GetMessageStatus(enum.Enum):
    """How the requested offset relates to the queue."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


@dataclass(slots=True)
class GetMessageResult:
    """Queue offsets are of [min_offset, max_offset); `parts` are the records in order, views of the
    log: send them, do not keep them."""

    status: GetMessageStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    parts: list[memoryview] = field(default_factory=list)
    message_count: int = 0
    size: int = 0
    suggest_pulling_from_slave: bool = False
    """What was read is so far behind that it is only on disk."""
    behind_bytes: int = 0  # From the last message that was looked at to the end of the log.


class Wanted(NamedTuple):
    """Which messages are read: those whose tag hash is in `codes` (None: all) and whose properties,
    with a byte 2 on either side, pass `matches` (None: all). At least one if any matches, at most
    `max_num` and, from the second on, `max_bytes` (None: the store's limits)."""

    max_num: int
    max_bytes: int | None = None
    codes: frozenset[int] | None = None
    matches: Callable[[bytes], bool] | None = None


class _BadUnit(Exception):
    """A unit of a queue, or the record that it correctly points to, is damaged."""

    def __init__(self, index: int, error: CorruptLogError) -> None:
        super().__init__(index, error)
        self.index, self.error = index, error


log = logging.getLogger(__name__)

_PLACE: Final = RECORD_HEAD.only("queue_id", "queue_offset", "physical_offset")
_BLOCK_UNITS: Final = 1 << 15
_NEIGHBOURS_MAX: Final = 64
_SCAN_BYTES_MAX: Final = 64 << 20


class UnitChecks:
    """Which units and records were found good since the start."""

    def __init__(
        self,
        commit_log: CommitLog,
        delay_levels: DelayLevels,
        on_bad_record: Callable[[CorruptLogError], None],
    ) -> None:
        self._log = commit_log
        self._delay_levels = delay_levels
        self._on_bad_record = on_bad_record
        # One bit per unit, in blocks, for each queue that was read.
        self._good: dict[tuple[ConsumeQueue, int], bytearray] = {}

    def ensure(self, queue: StoredQueue, index: int, unit: tuple[int, int, int]) -> None:
        """Raises CorruptLogError unless `unit` agrees with the log and its record is good."""
        key = queue.consume_queue, index // _BLOCK_UNITS
        bits = self._good.get(key)
        if bits is None:  # 4 KiB for the queue's next 32,768 messages
            bits = self._good[key] = bytearray(_BLOCK_UNITS >> 3)
        cell, bit = index % _BLOCK_UNITS >> 3, 1 << (index & 7)
        if bits[cell] & bit:
            return
        if what := self._fault(queue, index, unit):
            raise CorruptLogError(*queue.consume_queue.place_of(index), what)
        bits[cell] |= bit

    def repair(self, queue: StoredQueue, index: int) -> bool:
        """Rebuilds the unit from the log. False if its record is not found nearby."""
        begin = self._begin_of_search(queue, index)
        # Bounded, since it runs in the turn of a pull (R58).
        end = min(self._log.max_offset, begin + _SCAN_BYTES_MAX)
        scanner = LogScanner(self._log, begin, end, check_crc=True)
        while (head := scanner.next()) is not None:
            if is_message(head, queue.consume_queue, index):
                unit = (head.physical_offset, head.size, self._tags_code(queue, head))
                queue.consume_queue.replace_unit(index, *unit)
                file, offset = queue.consume_queue.place_of(index)
                log.error("consume_queue_unit_mended file=%s offset=%d", file, offset)
                return True
        return False

    def _begin_of_search(self, queue: StoredQueue, index: int) -> int:
        consume_queue = queue.consume_queue
        lowest = max(consume_queue.min_offset, index - _NEIGHBOURS_MAX)
        for earlier in range(index - 1, lowest - 1, -1):
            unit = consume_queue.unit_at(earlier)
            if unit is not None and unit[1] != FILLER_SIZE and self._agrees(queue, earlier, unit):
                return unit[0] + unit[1]
        return self._log.min_offset

    def _agrees(self, queue: StoredQueue, index: int, unit: tuple[int, int, int]) -> bool:
        try:
            return unit[0] >= self._log.min_offset and not self._fault(queue, index, unit)
        except CorruptLogError:
            return False

    def _fault(self, queue: StoredQueue, index: int, unit: tuple[int, int, int]) -> str:
        """What is wrong with a unit; "" if nothing is."""
        phy_offset, size, tags = unit
        if size == FILLER_SIZE:
            return ""
        if phy_offset < 0 or phy_offset + size > self._log.max_offset:
            return f"unit {index} points to {phy_offset}, outside the log"
        if phy_offset < self._log.min_offset:
            return ""  # its record has expired, and is not read
        try:
            head = check_record(self._log, phy_offset)
        except CorruptLogError as error:
            if error.offset == phy_offset and self._is_known_place(phy_offset, queue, index):
                self._on_bad_record(error)
                raise  # the record is bad, not the unit
            return f"unit {index} points to {phy_offset}, where no record begins"
        if head.size != size or not is_message(head, queue.consume_queue, index):
            return f"unit {index} points to a record of another size or place"
        # A Java broker's unit may have a hash where ours has a due time.
        if queue.topic not in DUE_TOPICS and tags != self._tags_code(queue, head):
            return f"unit {index} has another tags code than its record"
        return ""

    def _tags_code(self, queue: StoredQueue, head: RecordHead) -> int:
        return self._delay_levels.tags_code(queue.topic, head.properties, head.store_timestamp)

    def _is_known_place(self, phy_offset: int, queue: StoredQueue, index: int) -> bool:
        """Whether the record there, which is bad, has this queue offset in its head."""
        head = self._log.view(phy_offset, _PLACE.size)
        place = (queue.queue_id, index, phy_offset)
        return len(head) == _PLACE.size and _PLACE.unpack(head) == place


class StoredQueueReader:
    """Holds the limits and the verification state of pulls."""

    def __init__(
        self,
        log: CommitLog,
        config: StoreConfig,
        verified: VerifiedLog,
        on_bad_record: Callable[[CorruptLogError], None],
    ) -> None:
        self._log = log
        self._verified = verified
        self._unit_checks = UnitChecks(log, config.delay_levels, on_bad_record)
        self._percent_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 100
        self._config = config

    def read(self, queue: StoredQueue, offset: int, wanted: Wanted) -> GetMessageResult:
        """Messages from queue offset `offset`, which must lie in the queue. Raises CorruptLogError
        for a damaged first record; a later one ends the result, also if it has no message yet: the
        next read begins there. A bad unit is mended from the log, one in each read: that may take
        a walk over 64 MiB."""
        try:
            return self._read(queue, offset, wanted)
        except _BadUnit as bad:
            if not self._unit_checks.repair(queue, bad.index):
                raise bad.error from None
        try:
            return self._read(queue, offset, wanted)
        except _BadUnit as bad:  # it stays bad
            raise bad.error from None

    def checked_units(
        self, queue: StoredQueue, offset: int, count: int
    ) -> list[tuple[int, int, int]]:
        """(physical offset, size, tags code) of up to `count` messages from `offset` on; none
        outside the queue. Raises CorruptLogError, mends bad units."""
        units = list(_unpack_each(queue.consume_queue.read_units(offset, count)))
        good: list[tuple[int, int, int]] = []
        for index, unit in enumerate(units, offset):
            if index < queue.consume_queue.loaded_end or unit[0] < self._verified.start:
                try:
                    self._unit_checks.ensure(queue, index, unit)
                except CorruptLogError:
                    if good:
                        break  # the next read begins there, and mends it
                    if not self._unit_checks.repair(queue, index):
                        raise
                    return self.checked_units(queue, offset, count)
            good.append(unit)
        return good

    def _read(self, queue: StoredQueue, offset: int, wanted: Wanted) -> GetMessageResult:
        consume_queue = queue.consume_queue
        result = GetMessageResult(
            GetMessageStatus.NO_MATCHED_MESSAGE,
            offset,
            consume_queue.min_offset,
            consume_queue.max_offset,
        )
        units = consume_queue.read_units(offset, max(SCAN_UNITS_MIN, wanted.max_num))
        assert units, "the offset must lie within the queue"
        self._collect(result, queue, units, wanted)
        if result.message_count:
            result.status = GetMessageStatus.FOUND
        return result

    def _collect(
        self, result: GetMessageResult, queue: StoredQueue, units: bytes, wanted: Wanted
    ) -> None:
        log, parts = self._log, result.parts
        max_num, max_bytes, codes, matches = wanted
        log_min, log_end = log.min_offset, log.max_offset
        verified_start, loaded_end = self._verified.start, queue.consume_queue.loaded_end
        memory_begin, memory_limits, disk_limits = self._limits(log_end)
        size_sum = count = phy_offset = 0
        begin = end = 0  # of the segment whose bytes are `buffer`
        first = queue_offset = result.next_begin_offset
        for queue_offset, (phy_offset, size, tags) in enumerate(_unpack_each(units), first):
            if queue_offset < loaded_end or phy_offset < verified_start:
                unit = (phy_offset, size, tags)
                if not self._is_good_unit(queue, queue_offset, unit, first=queue_offset == first):
                    break
            if phy_offset < log_min or size == FILLER_SIZE:
                result.status = GetMessageStatus.MESSAGE_WAS_REMOVING
                continue
            if codes is not None and tags not in codes:
                continue
            if not begin <= phy_offset < end:
                segment = log.segment_at(phy_offset)
                assert segment is not None, "a record of the log lies in one of its segments"
                begin, end, buffer = segment.start_offset, segment.end_offset, segment.buffer
            at = phy_offset - begin
            if matches is not None and not matches(b"\x02%b\x02" % raw_properties(buffer, at)):
                continue
            if count:
                if count >= max_num or (max_bytes is not None and size_sum + size > max_bytes):
                    break
                bytes_max, count_max = memory_limits if phy_offset >= memory_begin else disk_limits
                if size_sum + size > bytes_max or count >= count_max:
                    break
            parts.append(buffer[at : at + size])
            size_sum += size
            count += 1
        else:  # all units were looked at: the next read begins behind the last one
            queue_offset += 1
        result.next_begin_offset = queue_offset
        result.message_count = count
        result.size = size_sum
        result.behind_bytes = log_end - phy_offset

    def is_on_disk_only(self, behind_bytes: int, *, on_slave: bool) -> bool:
        """Whether a message so far behind the log's end has probably left the memory. A slave
        assumes a smaller share, as in Java."""
        ratio = self._config.access_message_in_memory_max_ratio
        if on_slave:
            ratio = max(0, ratio - SLAVE_RATIO_LESS)
        return behind_bytes > self._percent_bytes * ratio

    def _limits(self, log_end: int) -> tuple[int, tuple[int, int], tuple[int, int]]:
        """From where on the log counts as in memory; bytes and messages of a pull there, and from
        disk. May change at run time."""
        config = self._config
        return (
            log_end - self._percent_bytes * config.access_message_in_memory_max_ratio,
            (
                config.max_transfer_bytes_on_message_in_memory,
                config.max_transfer_count_on_message_in_memory,
            ),
            (
                config.max_transfer_bytes_on_message_in_disk,
                config.max_transfer_count_on_message_in_disk,
            ),
        )

    def _is_good_unit(
        self, queue: StoredQueue, index: int, unit: tuple[int, int, int], *, first: bool
    ) -> bool:
        try:
            self._unit_checks.ensure(queue, index, unit)
        except CorruptLogError as error:
            if first:
                raise _BadUnit(index, error) from None
            return False  # the messages before it are served; the next read begins here
        return True
