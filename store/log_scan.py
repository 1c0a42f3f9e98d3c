"""Walks over the records of the log: where each begins, where whole records end, what is verified.

The one place that turns bytes of segments into records, for dispatch, recovery and the check of
what a master sent. A slave reads every record that its master wrote, so the common record (format
V1, IPv4 hosts, a property CRC) is read in one go: `quick_record`, `quick_size`. For anything else
(a blank, a record cut short, also a wrong CRC) these find nothing, and `LogScanner` looks closely.
Origin: Java `CommitLog.checkMessageAndReturnSize` and its loops.

`VerifiedLog` is the part of the log that this process has written or checked itself (G8, R24). Each
record's CRC is checked once: what comes from a master before it is acknowledged, what is found
after a start when recovery reads it, everything older when it is first read (`reader`). A master
sends its log's bytes as they lie on its disk, so a record whose CRC does not fit is named by file
and offset at once. The ack of a slave then covers whole, good records and at most the beginning of
one more, which no confirmOffset can reach.
"""

from __future__ import annotations

import itertools
import struct
import sys
import zlib
from collections.abc import Iterator
from typing import Final

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.layout import HOST_V4_SIZE, HOST_V6_SIZE, RECORD_HEAD, RECORD_TAIL, RECORD_V4
from batonmq.protocol.properties import find_property
from batonmq.protocol.record import (
    CRC_PROPERTY,
    CRC_TAIL_SIZE,
    END_FILE_MIN_BLANK,
    FIXED_SIZE_V1,
    MAGIC_V1,
    MAGIC_V2,
    SIZE_MIN_WITH_CRC,
    CorruptRecord,
    RecordHead,
    crc_tail,
    scan_record,
)
from batonmq.protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6, TRANSACTION_MASK
from batonmq.store.commit_log import CommitLog, Segment

_MAGICS: Final = (MAGIC_V1, MAGIC_V2)
_MAGIC_BYTES: Final = tuple(magic.to_bytes(4, "big") for magic in _MAGICS)
_MAGIC_AT: Final = RECORD_HEAD.at["magic"]
_PLACE: Final = RECORD_HEAD.only("size", "magic", "physical_offset")
_EMPTY: Final = memoryview(b"")
# What a common record has: format V1, IPv4 hosts, a property CRC, no transaction.
_HEAD: Final = RECORD_V4.only(
    "size", "magic", "queue_id", "queue_offset", "physical_offset", "sys_flag", "store_ms",
    "body_length",
)  # fmt: skip
_BODY_AT: Final = _HEAD.size
UNUSUAL_FLAGS: Final = BORN_HOST_V6 | STORE_HOST_V6 | TRANSACTION_MASK
_unpack_head = _HEAD.unpack_from
_unpack_place: Final = _PLACE.unpack_from
_crc32 = zlib.crc32
# From so many bytes on numpy is quicker than a loop, and from so many also its import is paid. For
# less, as a busy master sends in a turn, it costs up to half as much again.
BULK_DISPATCH_BYTES: Final = 160 << 10
_BULK_CHECK_BYTES: Final = 640 << 10
_CHECKED_BYTES: Final = 256 << 10
_IMPORT_BYTES: Final = 32 << 20
_BEFORE_BULK: Final = 8
# size, queue id, queue offset, store timestamp, topic, TAGS, KEYS, UNIQ_KEY
QuickRecord = tuple[int, int, int, int, bytes, bytes | None, bytes | None, bytes | None]

_FLAGS_HEAD: Final = RECORD_HEAD.only("size", "magic", "sys_flag")
_BODY_LENGTH: Final = RECORD_TAIL.only("body_length")
_U16: Final = struct.Struct(">H")
_TAIL_AT: Final = RECORD_V4.size - RECORD_TAIL.size
_V6_EXTRA: Final = HOST_V6_SIZE - HOST_V4_SIZE


def bulk_pays(size: int, least: int) -> bool:
    """Whether `size` bytes of the log are best read many records at a time, with numpy. `least`:
    from how many on that is quicker once numpy is there."""
    return size >= least and ("numpy" in sys.modules or size >= _IMPORT_BYTES)


def quick_record(
    view: memoryview, position: int, room: int, offset: int, check_crc: bool = True
) -> QuickRecord | None:
    """The CRC-checked record at `position` of `view`, or None for one that is not the common case.

    `offset` is its place in the log, `room` the bytes from there to the end of its segment.
    `check_crc` is False for what this process has checked before.
    """
    checked = _check(view, position, room, offset, check_crc)
    if checked is None:
        return None
    size, queue_id, queue_offset, stored_at, topic_end, tail = checked
    properties = tail[topic_end + 2 : -CRC_TAIL_SIZE]
    return (
        size,
        queue_id,
        queue_offset,
        stored_at,
        tail[1:topic_end],
        _find(properties, b"TAGS\x01"),
        _find(properties, b"KEYS\x01"),
        _find(properties, b"UNIQ_KEY\x01"),
    )


def quick_size(view: memoryview, position: int, room: int, offset: int) -> int:
    """The size of the CRC-checked record at `position`, 0 for anything that is not common.

    The CRC covers all fields, so only those are read that are needed to find it.
    """
    available = len(view) - position
    if available < SIZE_MIN_WITH_CRC:
        return 0
    size, magic, physical_offset = _unpack_place(view, position)
    if (
        magic != MAGIC_V1
        or physical_offset != offset
        or not SIZE_MIN_WITH_CRC <= size <= available
        or size + END_FILE_MIN_BLANK > room
    ):
        return 0
    crc_at = position + size - CRC_TAIL_SIZE
    crc = _crc32(view[position:crc_at]) & 0x7FFFFFFF
    return size if view[crc_at : crc_at + CRC_TAIL_SIZE] == crc_tail(crc) else 0


def _check(
    view: memoryview, position: int, room: int, offset: int, check_crc: bool
) -> tuple[int, int, int, int, int, bytes] | None:
    """(size, queue id, queue offset, store time, end of topic, bytes behind the body)."""
    if len(view) - position < SIZE_MIN_WITH_CRC:
        return None
    size, magic, queue_id, queue_offset, physical_offset, sys_flag, stored_at, body_len = (
        _unpack_head(view, position)
    )
    end = position + size
    if (
        magic != MAGIC_V1
        or sys_flag & UNUSUAL_FLAGS
        or physical_offset != offset
        or size + END_FILE_MIN_BLANK > room
        or not 0 <= body_len <= size - SIZE_MIN_WITH_CRC
        or end > len(view)
    ):
        return None
    tail = bytes(view[position + _BODY_AT + body_len : end])
    topic_end = 1 + tail[0]
    properties_at = topic_end + 2
    if (
        properties_at + CRC_TAIL_SIZE > len(tail)
        or (tail[topic_end] << 8) + tail[topic_end + 1] != len(tail) - properties_at
        or not tail.startswith(CRC_PROPERTY, len(tail) - CRC_TAIL_SIZE)
    ):
        return None
    if not check_crc:
        return size, queue_id, queue_offset, stored_at, topic_end, tail
    digits = tail[-2:-12:-1]
    crc = _crc32(view[position : end - CRC_TAIL_SIZE]) & 0x7FFFFFFF
    if tail[-1] != 2 or not digits.isdigit() or int(digits) != crc:
        return None
    return size, queue_id, queue_offset, stored_at, topic_end, tail


def _find(properties: bytes, needle: bytes) -> bytes | None:
    """The value of the last pair that begins with `needle` (a key and its separator)."""
    at = properties.rfind(needle)
    if at < 0:
        return None
    start = at + len(needle)
    stop = properties.find(b"\x02", start)
    if stop <= start or (at and properties[at - 1] != 2):
        return find_property(properties, needle[:-1])  # repeated, empty, or part of another
    return properties[start:stop]


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
        for number in itertools.count():
            # Many at once only behind some that are common: of other logs nothing is read twice.
            if number == _BEFORE_BULK and bulk_pays(
                len(view) - (offset - start), _BULK_CHECK_BYTES
            ):
                from batonmq.store.record_batch import checked_end

                offset = checked_end(view, start, offset, segment_end)
            size = quick_size(view, offset - start, segment_end - offset, offset)
            if not size:
                break
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


def fault_at(log: CommitLog, offset: int) -> CorruptLogError | None:
    """What is wrong with the record that begins at `offset`; None if it is good or none begins.

    A bad record still shows that it begins there: by its own offset, or by its magic and the
    record behind it.
    """
    segment = log.segment_at(offset)
    if segment is None or offset + FIXED_SIZE_V1 > log.max_offset:
        return None
    position = offset - segment.start_offset
    if position + FIXED_SIZE_V1 > segment.size:
        return None  # only a blank has room there
    size, magic, own_offset = _PLACE.unpack_from(segment.buffer, position)
    behind = offset + size
    follows = behind == log.max_offset or log.view(behind + _MAGIC_AT, 4) in _MAGIC_BYTES
    if own_offset != offset and not (magic in _MAGICS and follows):
        return None
    scanner = LogScanner(log, offset, log.max_offset, check_crc=True)
    if scanner.next() is not None:
        return None
    return CorruptLogError(log.file_of(offset), offset, scanner.problem or "no whole record")


def fault_before(log: CommitLog, end: int) -> CorruptLogError | None:
    """What is wrong with one of the last records that end at `end`; None if they are good, or if
    none begins in the _CHECKED_BYTES before it."""
    segment = log.segment_at(end - 1)
    if segment is None:
        return None
    begin: int | None = segment.start_offset
    if end - segment.start_offset > _CHECKED_BYTES:
        begin = find_valid_record(log, end - _CHECKED_BYTES)
    if begin is None or begin >= end:
        return None
    bad, problem = whole_records_end(log, begin, end)
    if bad == end or problem is None:
        return None
    return CorruptLogError(log.file_of(bad), bad, problem)


def is_record_boundary(commit_log: CommitLog, offset: int, dispatched_offset: int) -> bool:
    """Whether the log can be cut at `offset`: a record or a blank begins there, or whole records
    end there.

    `dispatched_offset` is a known boundary at or below which nothing has to be read.
    """
    if offset == dispatched_offset or offset % commit_log.segment_size == 0:
        return True
    if offset > dispatched_offset:
        scanner = LogScanner(commit_log, dispatched_offset, offset, check_crc=False)
        while scanner.next() is not None:
            pass
        return scanner.offset == offset
    if _is_blank(commit_log, offset):
        return True
    try:
        check_record(commit_log, offset)
    except CorruptLogError:
        return False
    return True


def _is_blank(commit_log: CommitLog, offset: int) -> bool:
    """Whether a blank at `offset` ends its file."""
    segment = commit_log.segment_at(offset)
    if segment is None:
        return False
    try:
        head = scan_record(segment.buffer, offset - segment.start_offset, check_crc=False)
    except CorruptRecord:
        return False
    return head is not None and head.kind == "blank" and offset + head.size == segment.end_offset


def fault_behind(commit_log: CommitLog, scanner: LogScanner) -> str | None:
    """Why the bytes between the scanner and the log's end are damage, None if just incomplete."""
    if scanner.offset >= commit_log.max_offset:
        return None
    behind = find_valid_record(commit_log, scanner.offset)
    if behind is not None:
        return (
            f"{scanner.problem or 'no whole record'}, but there are records behind it, at {behind}"
        )
    if scanner.problem is None:
        view = commit_log.view(scanner.offset, commit_log.segment_size)
        if ends_in_property_crc(view, 0, len(view)):
            return "a record with a wrong length"
    return scanner.problem


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
    for block_at, block in segment.data_blocks(position, overlap=len(_MAGIC_BYTES[0])):
        found = [
            record_at
            for magic in _MAGIC_BYTES
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


def ends_in_property_crc(view: memoryview, start: int, end: int) -> bool:
    """Whether the 20 bytes before `end` begin as the property CRC of a record does."""
    at = end - CRC_TAIL_SIZE
    return at >= start and bytes(view[at : at + len(CRC_PROPERTY)]) == CRC_PROPERTY


class VerifiedLog:
    """The records of [start, end) were written or CRC-checked by this process.

    `end` is a record boundary. A record below `start` may have been written by an earlier process
    and is checked when it is first read; above `end` there is nothing, or what `verify` is to
    check.
    """

    __slots__ = ("_log", "end", "start")

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
        """Check what was appended since. Raises CorruptLogError; `end` is then where the bad
        record begins."""
        log = self._log
        self.end, problem = whole_records_end(log, self.end, log.max_offset)
        if problem is None and self.end < log.max_offset:
            problem = _wrong_size(log.view(self.end, log.segment_size))
        if problem is not None:
            raise CorruptLogError(log.file_of(self.end), self.end, problem)


def _wrong_size(part: memoryview) -> str | None:
    """What is wrong with the size of a record of which `part` is here; None as far as can be seen.

    A size that is too large would let the records behind it pass for more of the same one. Where
    the lengths within it are here, they say what it must be.
    """
    if len(part) < _TAIL_AT + _BODY_LENGTH.size + 2 * _V6_EXTRA:
        return None
    size, magic, flag = _FLAGS_HEAD.unpack_from(part)
    if magic not in (MAGIC_V1, MAGIC_V2):
        return None
    at = _TAIL_AT + _V6_EXTRA * (bool(flag & BORN_HOST_V6) + bool(flag & STORE_HOST_V6))
    (body_length,) = _BODY_LENGTH.unpack_from(part, at)
    at += _BODY_LENGTH.size + max(body_length, 0)
    if len(part) < at + 2:
        return None
    at += 1 + part[at] if magic == MAGIC_V1 else 2 + _U16.unpack_from(part, at)[0]
    if len(part) < at + _U16.size:
        return None
    (properties_length,) = _U16.unpack_from(part, at)
    expected = at + _U16.size + properties_length
    return None if expected == size else f"size {size} of a record of {expected} bytes"
