"""Whole records that lie where they do not belong: bytes of a log were exchanged, or moved along.

Readers pass over them as damage, since a record names its own place. For an audit they tell that a
message is not gone but elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from protocol.record import MAGIC_V1, MAGIC_V2, CorruptRecord, scan_record
from spark.audit.layout import Message, message_at
from spark.audit.sides import Absent, Items, Side, Stretch
from spark.record_columns import locate
from spark.record_scan import Int64s

AnySide = Side | Absent
_MAGICS: Final = (MAGIC_V1.to_bytes(4, "big"), MAGIC_V2.to_bytes(4, "big"))
_MAGIC_AT: Final = 4
_OFFSET_AT: Final = (28, 36)


@dataclass(frozen=True, slots=True)
class Stray:
    """A whole record at log offset `place`; `message.offset` is where it says it belongs."""

    place: int
    message: Message

    @property
    def end(self) -> int:
        return self.place + len(self.message.raw)


def strays(
    side: AnySide,
    others: Sequence[AnySide],
    items: Items,
    stretch: Stretch,
    starts: Int64s,
    record_bytes_max: int,
) -> list[Stray]:
    """Those that begin in a stretch between the records (`items`) of a side, by their places.

    Not all that looks like a record is one: a body may hold a copy. Such count as lie where another
    one begins in one of the sides (`starts`), and such as another side has at the place that they
    name in this file, and this side has not.
    """
    others = [other for other in others if other is not side]
    found: list[Stray] = []
    for begin, end in _between(side, items, stretch):
        position = begin
        for place, message in _records(side, begin, end, record_bytes_max):
            if place < position:
                continue
            if place in starts:
                is_astray = not _is_only_misnamed(place, message, others)
            else:
                is_astray = _is_elsewhere(message, side, others, stretch)
            if is_astray:
                found.append(Stray(place, message))
                position = found[-1].end
    return found


def _is_only_misnamed(place: int, message: Message, others: Sequence[AnySide]) -> bool:
    """Whether others have this very message there, and only the place in its header is wrong."""
    begin, end = _OFFSET_AT
    raw = message.raw[:begin] + place.to_bytes(end - begin, "big") + message.raw[end:]
    return any(other.read(place, place + len(raw)) == raw for other in others)


def _is_elsewhere(
    message: Message, side: AnySide, others: Sequence[AnySide], stretch: Stretch
) -> bool:
    """Whether others have it where it says it belongs, and this side has not."""
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
    for at in _magics(data):
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


def _magics(data: bytes) -> Iterator[int]:
    """Where a record may begin, ascending."""
    next_of = [data.find(magic, _MAGIC_AT) for magic in _MAGICS]
    while found := [at for at in next_of if at >= 0]:
        at = min(found)
        yield at - _MAGIC_AT
        which = next_of.index(at)
        next_of[which] = data.find(_MAGICS[which], at + 1)


__all__ = ["Stray", "strays"]
