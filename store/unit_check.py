"""Units of consume queues that an earlier process wrote: believed only when the log agrees (G8).

A queue is derived from the log, so what its file says can be held against the record it points to,
once for each unit and process. A bad unit is made anew from the log between its neighbours; it
would lead readers to bytes that are no message, or past one that is.
"""

from __future__ import annotations

import logging
from typing import Final

from protocol.errors import CorruptLogError
from protocol.properties import find_property
from protocol.record import RecordHead
from protocol.tags import tags_code
from store.commit_log import CommitLog
from store.consume_queue import FILLER_SIZE, ConsumeQueue
from store.log_scan import LogScanner
from store.queue_table import SCHEDULE_TOPIC, Queue
from store.reader_checks import check_record

log = logging.getLogger(__name__)

_NEIGHBOURS_MAX: Final = 64
_SCAN_BYTES_MAX: Final = 64 << 20


class LoadedUnits:
    """Which loaded units have been held against their records since the start."""

    def __init__(self, commit_log: CommitLog) -> None:
        self._log = commit_log
        self._checked: dict[ConsumeQueue, bytearray] = {}

    def ensure(self, queue: Queue, index: int, unit: tuple[int, int, int]) -> None:
        """Raises CorruptLogError, with file and offset, unless `unit` is what the log makes it."""
        consume_queue = queue.consume_queue
        bits = self._checked.get(consume_queue)
        if bits is None:
            size = (consume_queue.loaded_end >> 3) + 1
            bits = self._checked[consume_queue] = bytearray(size)
        if bits[index >> 3] & (1 << (index & 7)):
            return
        if what := self._fault(queue, index, unit):
            raise CorruptLogError(*consume_queue.place_of(index), what)
        bits[index >> 3] |= 1 << (index & 7)

    def mend(self, queue: Queue, index: int) -> bool:
        """Makes the unit anew from the log. False if its record is not found near by."""
        begin = self._begin_of_search(queue, index)
        end = min(self._log.max_offset, begin + _SCAN_BYTES_MAX)
        scanner = LogScanner(self._log, begin, end, check_crc=True)
        while (head := scanner.next()) is not None:
            if _is_message(head, queue, index):
                unit = (head.physical_offset, head.size, _tags_code(head))
                queue.consume_queue.replace_unit(index, *unit)
                file, offset = queue.consume_queue.place_of(index)
                log.error("consume_queue_unit_mended file=%s offset=%d", file, offset)
                return True
        return False

    def _begin_of_search(self, queue: Queue, index: int) -> int:
        consume_queue = queue.consume_queue
        lowest = max(consume_queue.min_offset, index - _NEIGHBOURS_MAX)
        for earlier in range(index - 1, lowest - 1, -1):
            unit = consume_queue.unit_at(earlier)
            if unit is not None and unit[1] != FILLER_SIZE and self._agrees(queue, earlier, unit):
                return unit[0] + unit[1]
        return self._log.min_offset

    def _agrees(self, queue: Queue, index: int, unit: tuple[int, int, int]) -> bool:
        try:
            return unit[0] >= self._log.min_offset and not self._fault(queue, index, unit)
        except CorruptLogError:
            return False

    def _fault(self, queue: Queue, index: int, unit: tuple[int, int, int]) -> str:
        """What is wrong with a unit; empty if nothing is."""
        phy_offset, size, tags = unit
        if size == FILLER_SIZE:
            return ""
        if phy_offset < 0 or phy_offset + size > self._log.max_offset:
            return f"unit {index} points to {phy_offset}, outside the log"
        if phy_offset < self._log.min_offset:
            return ""  # its record has expired: nobody is led there
        try:
            head = check_record(self._log, phy_offset)
        except CorruptLogError as error:
            if error.offset == phy_offset and self._is_known_place(phy_offset, queue, index):
                raise  # the record is bad, not the unit
            return f"unit {index} points to {phy_offset}, where no record begins"
        if head.size != size or not _is_message(head, queue, index):
            return f"unit {index} points to a record of another size or place"
        if queue.topic != SCHEDULE_TOPIC and tags != _tags_code(head):
            return f"unit {index} has another tags code than its record"
        return ""

    def _is_known_place(self, phy_offset: int, queue: Queue, index: int) -> bool:
        """Whether a bad record of that queue offset lies there by its own head."""
        head = self._log.view(phy_offset, 36)
        return (
            len(head) == 36
            and int.from_bytes(head[12:16], "big") == queue.queue_id
            and int.from_bytes(head[20:28], "big") == index
            and int.from_bytes(head[28:36], "big") == phy_offset
        )


def _is_message(head: RecordHead, queue: Queue, index: int) -> bool:
    return (
        head.kind == "message"
        and head.queue_offset == index
        and head.queue_id == queue.queue_id
        and head.topic == queue.topic_bytes
    )


def _tags_code(head: RecordHead) -> int:
    return tags_code(find_property(head.properties, b"TAGS"))
