"""Whole records at an offset that is not their own: bytes of a log were exchanged, or moved along.

Readers take them for damage, since the header of a record has its offset. For an audit they show
that a message is not lost but elsewhere. Free of Spark.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from batonmq.protocol.layout import RECORD_HEAD
from batonmq.protocol.record import CorruptRecord, scan_record
from batonmq.spark.audit.layout import Message, message_at
from batonmq.spark.audit.sides import Absent, Items, Side, Stretch
from batonmq.spark.read.record_columns import Int64s, locate, magics

AnySide = Side | Absent
_OFFSET_AT: Final = RECORD_HEAD.at["physical_offset"]
_OFFSET_END: Final = RECORD_HEAD.at["sys_flag"]


@dataclass(frozen=True, slots=True)
class MisplacedRecord:
    """A whole record at log offset `place`; `message.offset` is the one in its header."""

    place: int
    message: Message

    @property
    def end(self) -> int:
        return self.place + len(self.message.raw)


def misplaced_records(
    side: AnySide,
    others: Sequence[AnySide],
    items: Items,
    stretch: Stretch,
    starts: Int64s,
    record_bytes_max: int,
) -> list[MisplacedRecord]:
    """Those that begin in a stretch between the records (`items`) of a side, by their places.

    Not all that looks like a record is one: a body may hold a copy. Such count as lie where another
    one begins in one of the sides (`starts`), and such as another side has at the place that they
    name in this file, and this side has not.
    """
    others = [other for other in others if other is not side]
    found: list[MisplacedRecord] = []
    for begin, end in _between(side, items, stretch):
        position = begin
        for place, message in _records(side, begin, end, record_bytes_max):
            if place < position:
                continue
            if place in starts:
                is_misplaced = not _is_only_misnamed(place, message, others)
            else:
                is_misplaced = _is_elsewhere(message, side, others, stretch)
            if is_misplaced:
                found.append(MisplacedRecord(place, message))
                position = found[-1].end
    return found


def _is_only_misnamed(place: int, message: Message, others: Sequence[AnySide]) -> bool:
    """Whether others have this very message there, and only the place in its header is wrong."""
    offset = place.to_bytes(_OFFSET_END - _OFFSET_AT, "big")
    raw = message.raw[:_OFFSET_AT] + offset + message.raw[_OFFSET_END:]
    return any(other.read(place, place + len(raw)) == raw for other in others)


def _is_elsewhere(
    message: Message, side: AnySide, others: Sequence[AnySide], stretch: Stretch
) -> bool:
    """Whether others have it at the offset in its header, and this side has not."""
    begin, end = message.offset, message.end
    if not stretch.file.start <= begin < stretch.file.end or side.read(begin, end) == message.raw:
        return False
    return any(other.read(begin, end) == message.raw for other in others)


def _between(side: AnySide, items: Items, stretch: Stretch) -> Iterator[tuple[int, int]]:
    """Where in a stretch no good record of a side lies: [begin, end)."""
    at, end = stretch.begin, min(stretch.end, side.limit)
    for start, stop in zip(items.starts.tolist(), items.ends.tolist(), strict=True):
        if start > at:
            yield at, start
        at = max(at, stop)
    if at < end:
        yield at, end


def _records(
    side: AnySide, begin: int, end: int, record_bytes_max: int
) -> Iterator[tuple[int, Message]]:
    """(where it begins, message) of all that looks like a whole record, wherever it belongs."""
    data = side.read(begin, end)
    for at in magics(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size > record_bytes_max:
            continue
        raw = data[at : at + size]
        if len(raw) < size:
            raw = side.read(begin + at, begin + at + size)
        try:
            head = scan_record(raw, check_crc=True)
        except CorruptRecord:
            continue
        if head is None or head.properties.endswith(b"\0"):
            continue
        records, good = locate(raw, np.zeros(1, np.int64))
        if good:
            yield begin + at, message_at(raw, records)


__all__ = ["MisplacedRecord", "misplaced_records"]
