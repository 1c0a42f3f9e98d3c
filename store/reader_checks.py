"""Which records of before this process's start may be served: those whose CRC was checked (G8)."""

from __future__ import annotations

from typing import Final

from protocol.errors import CorruptLogError
from protocol.record import CorruptRecord, RecordHead, scan_record
from store.commit_log import CommitLog

_CELL_SHIFT: Final = 6  # no two records begin within 64 bytes of each other


class VerifiedRecords:
    """Which records of before this process's start have passed their CRC check since."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self.trusted_from = 0  # everything at or above was written or verified by this process
        self._checked: dict[int, bytearray] = {}  # segment start -> one bit for each 64 bytes

    def ensure(self, offset: int) -> None:
        """Raises CorruptLogError, with file and offset, if the record at `offset` is damaged."""
        if offset >= self.trusted_from:
            return
        segment = self._log.segment_at(offset)
        if segment is None:
            return
        cell = (offset - segment.start_offset) >> _CELL_SHIFT
        bits = self._checked.get(segment.start_offset)
        if bits is None:
            bits = self._checked[segment.start_offset] = bytearray((segment.size >> 9) + 1)
        if bits[cell >> 3] & (1 << (cell & 7)):
            return
        check_record(self._log, offset)
        bits[cell >> 3] |= 1 << (cell & 7)

    def forget_below(self, log_min_offset: int) -> None:
        for start in [start for start in self._checked if start < log_min_offset]:
            del self._checked[start]

    def restart(self, trusted_from: int) -> None:
        self.trusted_from = trusted_from
        self._checked.clear()


def check_record(log: CommitLog, offset: int) -> RecordHead:
    """The head of the CRC-checked record at `offset`. Raises CorruptLogError."""
    what = "no whole record is there"
    segment = log.segment_at(offset)
    if segment is not None:
        try:
            head = scan_record(segment.buffer, offset - segment.start_offset, check_crc=True)
        except CorruptRecord as error:
            what = error.what
        else:
            if head is not None and head.kind == "message" and head.physical_offset == offset:
                return head
    raise CorruptLogError(log.file_of(offset), offset, what)
