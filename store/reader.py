"""Reading messages of a queue out of the log, within the limits of one pull.

Nothing above the dispatched end is ever returned, and no record that this process has not written
or verified: a record from before its start is checked against its CRC at its first read (G8).
Origin: Java `DefaultMessageStore.getMessage`.
"""

from __future__ import annotations

import os
from typing import Final

from protocol.errors import CorruptLogError
from store.commit_log import CommitLog
from store.config import StoreConfig
from store.consume_queue import FILLER_SIZE, UNIT, UNIT_SIZE
from store.queue_table import Queue
from store.read_result import GetMessageResult, GetMessageStatus
from store.reader_checks import VerifiedRecords
from store.unit_check import LoadedUnits

SCAN_UNITS_MIN: Final = 16_000 // UNIT_SIZE  # Java: max(16000 bytes, maxMsgNums units)


class _BadUnit(Exception):
    """A unit of a queue, or the record that it rightly points to, is damaged."""

    def __init__(self, index: int, error: CorruptLogError) -> None:
        super().__init__(index, error)
        self.index, self.error = index, error


class QueueReader:
    """`read` for one pull after another; holds the limits and the verification state."""

    def __init__(self, log: CommitLog, config: StoreConfig, verified: VerifiedRecords) -> None:
        self._log = log
        self._verified = verified
        self._loaded_units = LoadedUnits(log)
        self._memory_bytes = (
            os.sysconf("SC_PHYS_PAGES")
            * os.sysconf("SC_PAGE_SIZE")
            * config.access_message_in_memory_max_ratio
            // 100
        )
        self._memory_limits = (
            config.max_transfer_bytes_on_message_in_memory,
            config.max_transfer_count_on_message_in_memory,
        )
        self._disk_limits = (
            config.max_transfer_bytes_on_message_in_disk,
            config.max_transfer_count_on_message_in_disk,
        )

    def read(
        self,
        queue: Queue,
        offset: int,
        max_num: int,
        max_bytes: int | None,
        wanted: frozenset[int] | None,
    ) -> GetMessageResult:
        """Messages from queue offset `offset`, which must lie within the queue, on.

        At least one is returned if any matches, at most `max_num` and, from the second on,
        `max_bytes`. `wanted` holds tag hashes; None takes all. Raises CorruptLogError for a
        damaged first record; a later one just ends the result before it. A bad unit of the queue
        itself is mended from the log.
        """
        try:
            return self._read(queue, offset, max_num, max_bytes, wanted)
        except _BadUnit as bad:
            if not self._loaded_units.mend(queue, bad.index):
                raise bad.error from None
        return self._read(queue, offset, max_num, max_bytes, wanted)

    def _read(
        self,
        queue: Queue,
        offset: int,
        max_num: int,
        max_bytes: int | None,
        wanted: frozenset[int] | None,
    ) -> GetMessageResult:
        consume_queue = queue.consume_queue
        result = GetMessageResult(
            GetMessageStatus.NO_MATCHED_MESSAGE,
            offset,
            consume_queue.min_offset,
            consume_queue.max_offset,
        )
        units = consume_queue.read_units(offset, max(SCAN_UNITS_MIN, max_num))
        assert units, "the offset must lie within the queue"
        self._collect(result, queue, units, max_num, max_bytes, wanted)
        if result.message_count:
            result.status = GetMessageStatus.FOUND
        return result

    def _collect(
        self,
        result: GetMessageResult,
        queue: Queue,
        units: bytes,
        max_num: int,
        max_bytes: int | None,
        wanted: frozenset[int] | None,
    ) -> None:
        log = self._log
        log_min, log_end = log.min_offset, log.max_offset
        trusted_from = self._verified.trusted_from
        loaded_end = queue.consume_queue.loaded_end
        size_sum = count = 0
        queue_offset = result.next_begin_offset
        run_start = run_end = -1  # adjacent records of one segment go out as one part
        phy_offset = 0
        for phy_offset, size, tags in UNIT.iter_unpack(units):
            if queue_offset < loaded_end:
                unit = (phy_offset, size, tags)
                if not self._is_good_unit(queue, queue_offset, unit, first=not count):
                    break
            if phy_offset < log_min or size == FILLER_SIZE:
                result.status = GetMessageStatus.MESSAGE_WAS_REMOVING
                queue_offset += 1
                continue
            if wanted is not None and tags not in wanted:
                queue_offset += 1
                continue
            if count:
                if count >= max_num or (max_bytes is not None and size_sum + size > max_bytes):
                    break
                in_memory = log_end - phy_offset <= self._memory_bytes
                bytes_max, count_max = self._memory_limits if in_memory else self._disk_limits
                if size_sum + size > bytes_max or count >= count_max:
                    break
            if phy_offset < trusted_from and not self._is_good(phy_offset, first=not count):
                break
            if phy_offset == run_end:
                run_end += size
            else:
                if run_start >= 0:
                    result.parts.append(log.view(run_start, run_end - run_start))
                run_start, run_end = phy_offset, phy_offset + size
            size_sum += size
            count += 1
            queue_offset += 1
        if run_start >= 0:
            result.parts.append(log.view(run_start, run_end - run_start))
        result.next_begin_offset = queue_offset
        result.message_count = count
        result.size = size_sum
        result.suggest_pulling_from_slave = log_end - phy_offset > self._memory_bytes

    def _is_good_unit(
        self, queue: Queue, index: int, unit: tuple[int, int, int], *, first: bool
    ) -> bool:
        try:
            self._loaded_units.ensure(queue, index, unit)
        except CorruptLogError as error:
            if first:
                raise _BadUnit(index, error) from None
            return False
        return True

    def _is_good(self, phy_offset: int, *, first: bool) -> bool:
        try:
            self._verified.ensure(phy_offset)
        except CorruptLogError:
            if first:
                raise
            return False
        return True
