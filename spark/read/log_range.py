"""Reads a range of one commit-log file: its whole records window by window, and what is damaged.

A file may be split anywhere. A range owns the records that begin in it; it finds the first one
itself, by magic, own offset and CRC, and reads its last one past its end. Finding is a function of
the bytes alone, so the range before can compute where the next one will begin, and checks it:
neither damage at a split nor a forged record within a body goes unnoticed, and exactly one range
reports each damaged stretch, the one in which it begins (or in whose last record's place it lies).

At most one window (or one record, if larger) is held at a time. Free of Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from batonmq.protocol.records.codec import END_FILE_MIN_BLANK, scan_in_file, scan_record
from batonmq.protocol.records.columns import Bools, Int64s, Records, chain, locate, suspects
from batonmq.protocol.records.faults import CorruptRecord, RecordFault
from batonmq.protocol.records.search import OFFSET_END, candidates, is_record
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.storage import OpenFile

RECORD_BYTES_MAX: Final = 32 << 20
"""A larger record counts as damage, where nothing else is said."""
_SEARCH_MIN: Final = 1 << 16  # doubled up to _SEARCH_MAX: most damage is short
_SEARCH_MAX: Final = 1 << 20
_FIRST: Final = 8  # size and magic, of a record or of the blank that ends a file
_OVERLAP: Final = OFFSET_END - 1
_WINDOW_BEHIND_DAMAGE: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class LogRange:
    """Records that begin in [begin, end) of the file [file_start, file_end); all are log offsets.

    No record that reaches behind `limit`, the confirmed end or the file's, is given; what lies
    there is read only to distinguish a record that the limit cuts from damage. `at_boundary`: a
    record (or the file's blank) lies at `begin`. Bytes from `loose_from` on need not be whole
    records: behind the confirmed end a writer may have been interrupted; if then nothing follows
    there (`followed`: something does in the next file), the log simply ends.
    """

    path: str
    file_start: int
    file_end: int
    begin: int
    end: int
    limit: int
    at_boundary: bool
    loose_from: int
    followed: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Whole records of a window of the log; `base` is the log offset of the window's first byte."""

    window: bytes
    base: int
    records: Records

    @property
    def starts(self) -> Int64s:
        """Log offsets of the records."""
        return self.records.start + self.base

    @property
    def ends(self) -> Int64s:
        """Log offsets behind them."""
        return self.starts + self.records.size

    def keep(self, wanted: Bools | slice) -> Block:
        return Block(self.window, self.base, self.records.keep(wanted))


class RangeReader:
    """Reads one range; see `blocks`."""

    def __init__(
        self, file: OpenFile, wanted: LogRange, window_bytes: int, record_bytes_max: int
    ) -> None:
        self._file = file
        self._range = wanted
        self._window_bytes = window_bytes
        self._record_bytes_max = record_bytes_max

    def blocks(self) -> Iterator[Block | Damage]:
        """Blocks and damaged stretches in the order of the log."""
        wanted = self._range
        window_bytes = self._window_bytes
        position: int | None = wanted.begin
        if not wanted.at_boundary:
            position = self._find(wanted.begin, wanted.end)
        while position is not None and position < wanted.end:
            before = position
            block, position, reason = self._read_block(position, window_bytes)
            window_bytes = min(2 * window_bytes, self._window_bytes)
            if block is not None:
                yield block
            if reason is None and position < wanted.end:
                is_end, reason = self._inspect(position)
                if is_end:
                    return
                assert reason is not None or position > before, "a record that is good and is not"
            if reason is not None:
                damage = self._damage_at(position, reason)
                if damage is None:
                    return
                yield damage
                # What a window holds behind damage is read again: so it is small at first, or each
                # of many bad records would cost the decoding of a whole window.
                window_bytes = min(_WINDOW_BEHIND_DAMAGE, self._window_bytes)
                position = damage.offset + damage.size
                if position >= wanted.end:
                    return  # the next range finds the same record behind it
        if position is not None and wanted.end < wanted.limit:
            damage = self._check_seam(position)
            if damage is not None:
                yield damage

    def skip_older(self, store_ms: int) -> RangeReader:
        """The range without a leading part whose records were stored before `store_ms`.

        Bisects, so it trusts that times grow along the log; leave slack for clocks that differ.
        """
        low, high, is_record_start = self._range.begin, self._range.end, self._range.at_boundary
        while high - low > self._window_bytes:
            middle = (low + high) // 2
            found = self._find(middle, high)
            if found is None or self._store_ms(found) >= store_ms:
                high = middle
            else:
                low, is_record_start = found, True
        moved = replace(self._range, begin=low, at_boundary=is_record_start)
        return RangeReader(self._file, moved, self._window_bytes, self._record_bytes_max)

    def _read(self, offset: int, size: int) -> bytes:
        return self._read_file(offset, min(size, self._range.limit - offset))

    def _read_file(self, offset: int, size: int) -> bytes:
        """The same, but behind the limit, too."""
        return self._file.read_at(offset - self._range.file_start, size)

    def _store_ms(self, offset: int) -> int:
        head = scan_record(self._read(offset, self._size_at(offset)))
        assert head is not None
        return head.store_timestamp

    def _size_at(self, offset: int) -> int:
        return int.from_bytes(self._read(offset, 4), "big")

    def _read_block(self, position: int, window_bytes: int) -> tuple[Block | None, int, str | None]:
        """(block, next, reason): the records from `position` on that one window holds.

        `reason`: what is wrong with the record at `next`, None if it was not checked.
        """
        window = self._read(position, window_bytes)
        if len(window) >= 4:
            size = int.from_bytes(window[:4], "big")
            if len(window) < size <= self._record_bytes_max:
                window = self._read(position, size)
        starts, next_at = chain(window, 0, self._range.end - position)
        records, good = locate(window, starts)
        if good < len(starts):
            next_at = int(starts[good])
        bad, reason = self._first_bad(window, records, position)
        if bad is not None:
            next_at = int(records.start[bad])
            records = records.keep(slice(bad))
        block = Block(window, position, records) if len(records) else None
        return block, position + next_at, reason

    def _first_bad(
        self, window: bytes, records: Records, base: int
    ) -> tuple[int | None, str | None]:
        marked = suspects(window, records, base, self._range.file_end)
        for index in np.flatnonzero(marked).tolist():
            reason = self._problem(window, int(records.start[index]), base)
            if reason is not None:
                return index, reason
        return None, None

    def _problem(self, window: bytes, at: int, base: int) -> str | None:
        """What is wrong with the record at position `at` of a window, None if nothing is."""
        try:
            head = scan_in_file(window, at, base + at, self._range.file_end, check_crc=True)
        except CorruptRecord as error:
            return error.what
        if head is None:
            return RecordFault.CUT_OFF.text()
        return None if head.kind == "message" else RecordFault.BLANK.text()

    def _inspect(self, position: int) -> tuple[bool, str | None]:
        """(is_end, reason) of the place where a chain of records ended.

        (False, None): a record is there, the window was too short for it.
        """
        first = self._read_file(position, _FIRST)
        if len(first) < _FIRST:
            return False, RecordFault.CUT_OFF.text()
        file_end = self._range.file_end
        try:
            if scan_in_file(first, 0, position, file_end) is not None:
                return True, None  # the blank that ends the file
        except CorruptRecord as error:
            return False, error.what
        size = int.from_bytes(first[:4], "big")
        if position + size > file_end - END_FILE_MIN_BLANK:
            return False, RecordFault.LEAVES_FILE.text()
        if size > self._record_bytes_max:
            return False, f"a record of {size} bytes, above maxRecordBytes"
        if position + size > self._range.limit:
            # Not confirmed if it is whole; else its size may be wrong, and hide what is behind it.
            problem = self._problem(self._read_file(position, size), 0, position)
            return problem is None, f"a record across the confirmed end: {problem}"
        # Whole: either the window ended before it did, or its parts do not fit.
        return False, self._problem(self._read(position, size), 0, position)

    def _damage_at(self, position: int, reason: str) -> Damage | None:
        """The damaged stretch that begins here, or None if the log simply ends."""
        behind = self._find(position + 1, self._range.limit)
        if behind is None and position >= self._range.loose_from and not self._range.followed:
            return None
        end = self._range.limit if behind is None else behind
        return Damage(self._range.path, position, end - position, reason)

    def _check_seam(self, position: int) -> Damage | None:
        """Whether the next range will begin at `position`, where the last record here ended."""
        if position >= self._range.limit:
            return None
        found = self._find(self._range.end, position + 1)
        if found == position:
            return None
        if found is not None:
            what = "what looks like a record lies within another, where a range begins"
            return Damage(self._range.path, found, position - found, what)
        is_end, reason = self._inspect(position)
        if is_end:
            return None
        if reason is None:
            data = self._read(position, self._size_at(position))
            reason = self._problem(data, 0, position) or RecordFault.NOT_WHOLE.text()
        return self._damage_at(position, reason)

    def _find(self, position: int, before: int) -> int | None:
        """The first place in [position, before) where a whole record below the limit begins."""
        size_wanted = _SEARCH_MIN
        while position < before:
            window = self._read(position, size_wanted)
            for at in candidates(window, position):
                if position + at >= before:
                    return None
                size = int.from_bytes(window[at : at + 4], "big")
                if size > self._record_bytes_max or position + at + size > self._range.limit:
                    continue
                data, where = window, at
                if at + size > len(window):
                    data, where = self._read(position + at, size), 0
                if is_record(data, where, position + at):
                    return position + at
            if len(window) <= _OVERLAP:
                return None
            position += len(window) - _OVERLAP
            size_wanted = min(2 * size_wanted, _SEARCH_MAX)
        return None
