"""Walks over the records of the log: where each begins, where whole records end, what is verified.
What a good record is, `protocol.records` says. Origin: Java `CommitLog.checkMessageAndReturnSize`.

`VerifiedLog` is the part that this process has written or checked (G8, R24). Each CRC is checked
once: of a master's bytes before they are acked, of what a start finds during recovery, of older
records when they are first read. A master sends bytes as they are on its disk, so a bad record is
reported with file and offset at once. A slave's ack covers whole, good records and at most the
beginning of one more, which no confirmOffset can reach.
"""

from __future__ import annotations

import itertools
import sys
from typing import Final

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.records.codec import FIXED_SIZE_V1, RecordHead, scan_in_file
from batonmq.protocol.records.common import quick_size
from batonmq.protocol.records.faults import CorruptRecord, RecordFault
from batonmq.protocol.records.search import (
    MAGIC_SIZE,
    ends_in_property_crc,
    has_magic,
    is_record,
    magics,
    read_place,
    wrong_size,
)
from batonmq.store.commit_log import CommitLog, Segment

_EMPTY: Final = memoryview(b"")
# From this many bytes on numpy is faster, and from so many its import pays. For less, as in a turn
# of a busy master, it costs up to half more.
BULK_DISPATCH_BYTES: Final = 160 << 10
_BULK_CHECK_BYTES: Final = 640 << 10
_CHECKED_BYTES: Final = 256 << 10
_IMPORT_BYTES: Final = 32 << 20
_BEFORE_BULK: Final = 8


def bulk_pays(size: int, least: int) -> bool:
    """Whether `size` bytes are best read many records at a time. `least`: from where on that is
    faster once numpy is loaded."""
    return size >= least and ("numpy" in sys.modules or size >= _IMPORT_BYTES)


class LogScanner:
    """Records of [offset, end), in order; blanks are skipped. `offset` is a record boundary: the
    end of the last record. When `next` returns None, `problem` says what is wrong at `offset`;
    None: the bytes only end too early."""

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
        self.problem = None
        while self.offset < self.end:
            position = self.offset - self._start
            if not self._view or position >= len(self._view):
                if not self._enter_segment():
                    return None
                position = self.offset - self._start
            segment_end = self._start + self._log.segment_size
            try:
                head = scan_in_file(
                    self._view, position, self.offset, segment_end, check_crc=self._check_crc
                )
            except CorruptRecord as error:
                self.problem = error.what
                return None
            if head is None or head.size > len(self._view) - position:
                return None
            if head.kind == "blank":
                self.offset += head.size
                continue
            self.record_at = position
            self.offset += head.size
            return head
        return None

    def body(self, head: RecordHead) -> bytes:
        """A copy of the body of the record that `next` just returned."""
        return bytes(self.view[head.body_offset : head.body_offset + head.body_len])

    def skip_common(self) -> None:
        """Skips common records, CRC-checked, as long as nothing else comes."""
        view, start = self.window()
        segment_end = start + self._log.segment_size
        offset = self.offset
        for number in itertools.count():
            # Bulk only after some common records, so that other logs are not read twice.
            if number == _BEFORE_BULK and bulk_pays(
                len(view) - (offset - start), _BULK_CHECK_BYTES
            ):
                from batonmq.protocol.records.columns import checked_end

                offset = checked_end(view, start, offset, segment_end)
            size = quick_size(view, offset - start, segment_end - offset, offset)
            if not size:
                break
            offset += size
        self.offset = offset

    def _enter_segment(self) -> bool:
        segment = self._log.segment_at(self.offset)
        if segment is None:
            return False
        self._start = segment.start_offset
        self._view = segment.buffer[: self.end - segment.start_offset]
        return True


def whole_records_end(log: CommitLog, offset: int, end: int) -> tuple[int, str | None]:
    """Where the whole, CRC-checked records from `offset` on end, and what is wrong there; None if
    the bytes only end too early."""
    scanner = LogScanner(log, offset, end, check_crc=True)
    scanner.skip_common()
    while scanner.next() is not None:
        scanner.skip_common()
    return scanner.offset, scanner.problem


def check_record(log: CommitLog, offset: int) -> RecordHead:
    """The head of the CRC-checked record at `offset`. Raises CorruptLogError."""
    try:
        head = _scan(log, offset)
    except CorruptRecord as error:
        raise log.damage(offset, error.what) from None
    if head is None or head.kind != "message":
        raise log.damage(offset, RecordFault.NOT_WHOLE.text())
    return head


def _scan(log: CommitLog, offset: int) -> RecordHead | None:
    """The record or blank at `offset`, CRC-checked; None if it is not whole. Raises
    CorruptRecord."""
    segment = log.segment_at(offset)
    if segment is None:
        return None
    position = offset - segment.start_offset
    return scan_in_file(segment.buffer, position, offset, segment.end_offset, check_crc=True)


def fault_of_record(log: CommitLog, offset: int) -> CorruptLogError | None:
    """What is wrong with the record or blank at `offset`, a record boundary; None if it is good."""
    try:
        head = _scan(log, offset)
    except CorruptRecord as error:
        return log.damage(offset, error.what)
    return None if head is not None else log.damage(offset, RecordFault.NOT_WHOLE.text())


def fault_at(log: CommitLog, offset: int) -> CorruptLogError | None:
    """What is wrong with the record at `offset`; None if it is good or none begins there. A bad
    record is recognized by its own offset, or by its magic and the record behind it."""
    segment = log.segment_at(offset)
    if segment is None or offset + FIXED_SIZE_V1 > log.max_offset:
        return None
    position = offset - segment.start_offset
    if position + FIXED_SIZE_V1 > segment.size:
        return None  # only a blank fits there
    size, own_offset = read_place(segment.buffer, position)
    behind = offset + size
    follows = behind == log.max_offset or has_magic(log.view(behind, 2 * MAGIC_SIZE), 0)
    # Else nothing shows that a record begins here at all.
    if own_offset != offset and not (has_magic(segment.buffer, position) and follows):
        return None
    scanner = LogScanner(log, offset, log.max_offset, check_crc=True)
    if scanner.next() is not None:
        return None
    return log.damage(offset, scanner.problem or RecordFault.NOT_WHOLE.text())


def fault_before(log: CommitLog, end: int) -> CorruptLogError | None:
    """What is wrong with one of the last records that end at `end`; None if they are good, or none
    begins in the last _CHECKED_BYTES."""
    segment = log.segment_at(end - 1)
    if segment is None:
        return None
    begin: int | None = segment.start_offset
    # It runs in a handshake, in one turn: so not from the beginning of a gigabyte.
    if end - segment.start_offset > _CHECKED_BYTES:
        begin = find_valid_record(log, end - _CHECKED_BYTES)
    if begin is None or begin >= end:
        return None
    bad, problem = whole_records_end(log, begin, end)
    if bad == end or problem is None:  # None: the last record is longer, `end` is no boundary
        return None
    return log.damage(bad, problem)


def may_end_at(log: CommitLog, end: int) -> bool:
    """Whether records may end at `end`: not where only zeros, or the middle of a record, are. Bad
    bytes before it do not count against that."""
    if end <= log.min_offset:
        return True
    segment = log.segment_at(end - 1)
    if segment is None:
        return False
    begin = find_valid_record(log, max(end - _CHECKED_BYTES, segment.start_offset))
    if begin is None or begin >= end or end - segment.start_offset <= _CHECKED_BYTES:
        begin = segment.start_offset
    found, _ = whole_records_end(log, begin, end)
    position = found - segment.start_offset
    # Only zeros from `found` on: the log never came as far as `end`.
    if found == end or segment.data_end(position) == position:
        return found == end
    # A good record there is longer; a bad one says nothing.
    return fault_of_record(log, found) is not None


def newest_timestamp(log: CommitLog) -> int:
    """The highest store timestamp in the last segment that has a record, in ms; 0 if none."""
    # A segment that was allocated ahead has no record.
    for segment in reversed(log.segments):
        scanner = LogScanner(log, segment.start_offset, segment.end_offset, check_crc=False)
        newest = 0
        while (head := scanner.next()) is not None:
            newest = max(newest, head.store_timestamp)
        if newest:
            return newest
    return 0


def is_record_boundary(commit_log: CommitLog, offset: int, dispatched_offset: int) -> bool:
    """Whether the log can be cut at `offset`: a record or blank begins there, or whole records end
    there. `dispatched_offset` is a known boundary; below it nothing is read."""
    if offset == dispatched_offset or offset % commit_log.segment_size == 0:
        return True
    if offset > dispatched_offset:
        # Record by record: within a body there may be bytes that look like one.
        scanner = LogScanner(commit_log, dispatched_offset, offset, check_crc=False)
        while scanner.next() is not None:
            pass
        return scanner.offset == offset
    try:
        return _scan(commit_log, offset) is not None
    except CorruptRecord:
        return False


def fault_behind(commit_log: CommitLog, scanner: LogScanner) -> str | None:
    """Why the bytes from the scanner to the log's end are damage; None if just incomplete."""
    if scanner.offset >= commit_log.max_offset:
        return None
    behind = find_valid_record(commit_log, scanner.offset)
    if behind is not None:
        problem = scanner.problem or RecordFault.NOT_WHOLE.text()
        return f"{problem}, but there are records behind it, at {behind}"
    if scanner.problem is None:
        view = commit_log.view(scanner.offset, commit_log.segment_size)
        if ends_in_property_crc(view, 0, len(view)):
            return RecordFault.SIZE_WRONG.text()
    return scanner.problem


def find_valid_record(log: CommitLog, offset: int) -> int | None:
    """The first place behind `offset` where a whole, CRC-checked record lies, in any segment."""
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
    for block_at, block in segment.data_blocks(position, overlap=MAGIC_SIZE):
        for at in magics(block):
            record_at = block_at + at
            offset = segment.start_offset + record_at
            if record_at >= position and is_record(segment.buffer, record_at, offset):
                return offset
    return None


class VerifiedLog:
    """The records of [start, end) were written or CRC-checked by this process; `end` is a record
    boundary. Records below `start` are checked when they are first read; bytes above `end` wait for
    `verify`."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self.start = 0
        self.end = 0

    def restart(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def cut(self, offset: int) -> None:
        """The log was cut at `offset`: what comes there next is new."""
        self.end = min(offset, self.end)

    def verify(self) -> None:
        """Checks what was appended since. Raises CorruptLogError; then `end` is where the bad
        record begins."""
        log = self._log
        self.end, problem = whole_records_end(log, self.end, log.max_offset)
        # With too large a size what follows would pass for a part of it, and be acked unchecked.
        if problem is None and self.end < log.max_offset:
            problem = wrong_size(log.view(self.end, log.segment_size))
        if problem is not None:
            raise log.damage(self.end, problem)
