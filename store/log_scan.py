"""Walks over the records of the log: where does each begin, and where do whole records end.

The one place that turns bytes of segments into record heads, for dispatch, recovery and the
truncation of an incomplete tail. Origin: Java `CommitLog.checkMessageAndReturnSize` and its loops.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from protocol.errors import CorruptLogError
from protocol.record import (
    CRC_PROPERTY,
    CRC_TAIL_SIZE,
    END_FILE_MIN_BLANK,
    FIXED_SIZE_V1,
    MAGIC_V1,
    MAGIC_V2,
    CorruptRecord,
    RecordHead,
    scan_record,
)
from store.commit_log import CommitLog
from store.mapped_file import Segment
from store.quick_scan import quick_size

_MAGICS: Final = (MAGIC_V1.to_bytes(4, "big"), MAGIC_V2.to_bytes(4, "big"))
_MAGIC_AT: Final = 4
_PLACE: Final = struct.Struct(">I4s20xq")
_EMPTY: Final = memoryview(b"")


class LogScanner:
    """Records of [offset, end), in order; blanks are stepped over.

    `offset` is always a record boundary: the end of the last record handed out. When `next`
    returns None, `problem` says what is wrong with the bytes at `offset`, or is None if they just
    do not reach far enough.
    """

    __slots__ = ("_check_crc", "_log", "_start", "_view", "end", "offset", "problem", "record_at")

    def __init__(self, log: CommitLog, offset: int, end: int, *, check_crc: bool) -> None:
        self._log = log
        self._check_crc = check_crc
        self._view = _EMPTY
        self._start = 0  # log offset of the view's first byte
        self.offset = offset
        self.end = end
        self.record_at = 0  # position of the last record in `view`
        self.problem: str | None = None

    @property
    def view(self) -> memoryview:
        """The segment of the last record, up to `end`; `RecordHead.body_offset` counts in it."""
        return self._view

    def window(self) -> tuple[memoryview, int]:
        """The segment around `offset`, up to `end`, and its start; empty behind the last one."""
        if not self._start <= self.offset < self._start + len(self._view):
            self._enter_segment()
        return self._view, self._start

    def next(self) -> RecordHead | None:
        """The next whole record, or None: see `problem`."""
        while self.offset < self.end:
            position = self.offset - self._start
            if not self._view or position >= len(self._view):
                if not self._enter_segment():
                    return None
                position = self.offset - self._start
            try:
                head = scan_record(self._view, position, check_crc=self._check_crc)
            except CorruptRecord as error:
                self.problem = error.what
                return None
            if head is None or head.size > len(self._view) - position:
                if self._segment_end - self.offset <= len(self._view) - position:
                    self.problem = "a record that leaves its file"
                return None
            if head.kind == "blank":
                if self.offset + head.size != self._segment_end:
                    self.problem = f"a blank of {head.size} bytes that does not end its file"
                    return None
                self.offset += head.size
                continue
            self.problem = self._problem_of(head)
            if self.problem is not None:
                return None
            self.record_at = position
            self.offset += head.size
            return head
        return None

    def body(self, head: RecordHead) -> bytes:
        """A copy of the body of the record that `next` has just returned."""
        return bytes(self.view[head.body_offset : head.body_offset + head.body_len])

    def skip_common(self) -> None:
        """Step over common records, CRC-checked, as long as nothing else comes."""
        view, start = self.window()
        segment_end = start + self._log.segment_size
        offset = self.offset
        while size := quick_size(view, offset - start, segment_end - offset, offset):
            offset += size
        self.offset = offset

    @property
    def _segment_end(self) -> int:
        return self._start + self._log.segment_size

    def _enter_segment(self) -> bool:
        segment = self._log.segment_at(self.offset)
        if segment is None:
            return False
        self._start = segment.start_offset
        self._view = segment.buffer[: self.end - segment.start_offset]
        return True

    def _problem_of(self, head: RecordHead) -> str | None:
        if head.physical_offset != self.offset:
            return f"a record that says it belongs at {head.physical_offset}"
        if self._segment_end - self.offset - head.size < END_FILE_MIN_BLANK:
            return "a record that leaves no room for the end of its file"
        if self._check_crc and _ends_in_zeros(head.properties):
            return "properties that were never written to their end"
        return None


def _ends_in_zeros(properties: bytes) -> bool:
    """Whether a record without property CRC was torn within its properties.

    The body CRC does not see that, and no writer of property strings makes a NUL.
    """
    has_crc = properties[-CRC_TAIL_SIZE:].startswith(CRC_PROPERTY)
    return not has_crc and properties.endswith(b"\0")


def whole_records_end(log: CommitLog, offset: int, end: int) -> tuple[int, str | None]:
    """Where the whole, CRC-checked records from `offset` on end, and what is wrong there.

    The reason is None where the bytes up to `end` simply stop before a record does.
    """
    scanner = LogScanner(log, offset, end, check_crc=True)
    scanner.skip_common()
    while scanner.next() is not None:
        scanner.skip_common()
    return scanner.offset, scanner.problem


def fault_at(log: CommitLog, offset: int) -> CorruptLogError | None:
    """What is wrong with the record that begins at `offset`; None if it is good or none begins.

    A bad record still shows that it begins there: by its own offset, or by its magic and the
    record behind it.
    """
    segment = log.segment_at(offset)
    if segment is None or offset + FIXED_SIZE_V1 > log.max_offset:
        return None
    position = offset - segment.start_offset
    size, magic, own_offset = _PLACE.unpack_from(segment.buffer, position)
    behind = offset + size
    follows = behind == log.max_offset or log.view(behind + _MAGIC_AT, 4) in _MAGICS
    if own_offset != offset and not (magic in _MAGICS and follows):
        return None
    scanner = LogScanner(log, offset, log.max_offset, check_crc=True)
    if scanner.next() is not None:
        return None
    return CorruptLogError(log.file_of(offset), offset, scanner.problem or "no whole record")


def find_valid_record(log: CommitLog, offset: int) -> int | None:
    """The first place behind `offset` where a whole, CRC-checked record lies, in any segment.

    A record is searched by its magic and must name its own offset, so old bytes that only look
    like one do not count.
    """
    segment = log.segment_at(offset)
    if segment is None:
        return None
    for candidate in log.segments[log.segments.index(segment) :]:
        start = max(offset + 1 - candidate.start_offset, 0)
        found = _find_in_segment(candidate, start)
        if found is not None:
            return found
    return None


def _find_in_segment(segment: Segment, position: int) -> int | None:
    for block_at, block in segment.data_blocks(position, overlap=len(_MAGICS[0])):
        found = [
            record_at
            for magic in _MAGICS
            for record_at in _candidates(block_at, block, magic)
            if record_at >= position and _is_record(segment, record_at)
        ]
        if found:
            return segment.start_offset + min(found)
    return None


def _candidates(block_at: int, block: bytes, magic: bytes) -> Iterator[int]:
    """Where in the segment records with this `magic` in `block` would begin."""
    at = block.find(magic)
    while at >= 0:
        yield block_at + at - _MAGIC_AT
        at = block.find(magic, at + 1)


def _is_record(segment: Segment, position: int) -> bool:
    try:
        head = scan_record(segment.buffer, position, check_crc=True)
    except CorruptRecord:
        return False
    return head is not None and head.physical_offset == segment.start_offset + position
