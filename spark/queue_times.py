"""Finds messages of a consume queue by the time at which they were stored. Free of Spark."""

from collections.abc import Callable

from batonmq.protocol.layout import UNIT_SIZE
from batonmq.spark.queue_units import Units, decode_units, last_written
from batonmq.spark.queues import QueuePiece, narrowed
from batonmq.spark.selection import HIGH, LOW, Span
from batonmq.spark.storage import OpenFile


class QueueTimes:
    """Bisects one queue file by the store times of its messages, which must grow along it.

    Damage misleads no search: units must point ahead, from one end of the searched part to the
    other, and what is hit must be a unit of a whole record. Else nothing is found, and the whole
    piece is to be read. `kept_from`: the log's first offset, what lies below has expired;
    `confirmed`: the log's end for this read, None if it has none. `store_ms` returns the time
    of the record of an offset and size, None if there is no whole one.
    """

    def __init__(
        self,
        file: OpenFile,
        piece: QueuePiece,
        *,
        kept_from: int,
        confirmed: int | None,
        store_ms: Callable[[int, int], int | None],
    ) -> None:
        self._file = file
        self._piece = piece
        self._kept_from = kept_from
        self._confirmed = HIGH if confirmed is None else confirmed
        self._store_ms = store_ms

    def part(self, wanted: Span, slack_ms: int) -> QueuePiece:
        """The part of the piece that may hold messages of the wanted times."""
        piece = self._piece
        begin, end = piece.begin, piece.end
        if not piece.followed:
            end = min(end, piece.file_start + last_written(self._file))
        found_begin: int | None = begin
        found_end: int | None = end
        if wanted.low != LOW:
            found_begin = self._first_stored(begin, end, wanted.low - slack_ms)
        if wanted.high != HIGH:
            found_end = self._first_stored(begin, end, wanted.high + slack_ms + 1)
        if found_begin is None or found_end is None:
            return piece
        return narrowed(piece, found_begin, found_end)

    def _first_stored(self, begin: int, end: int, at_least_ms: int) -> int | None:
        """The first queue offset in [begin, end) whose message was stored at or after a time, `end`
        without any; None if damage is in the way."""
        low, high = begin, end
        if low == high:
            return end
        first, last = self._log_offset(begin), self._log_offset(end - 1)
        while low < high:
            middle = (low + high) // 2
            is_late = self._is_late(middle, first, last, at_least_ms)
            if is_late is None:
                return None
            if is_late:
                high = middle
            else:
                low = middle + 1
        return low

    def _is_late(
        self, index: int, first: int | None, last: int | None, at_least_ms: int
    ) -> bool | None:
        """Whether the message at a queue offset was stored at or after a time; None: unknown."""
        units = self._unit(index)
        if units is None or first is None or last is None:
            return None
        if not len(units):
            return False if first < 0 else None  # filler comes before all messages
        offset, size = int(units.offset[0]), int(units.size[0])
        if not first <= offset <= last:
            return None
        if offset < self._kept_from:
            return False
        if offset >= self._confirmed:
            return True
        stored_ms = self._store_ms(offset, size)
        return None if stored_ms is None else stored_ms >= at_least_ms

    def _log_offset(self, index: int) -> int | None:
        """Where the unit at a queue offset points to; -1 for filler, None if it can be no unit."""
        units = self._unit(index)
        if units is None:
            return None
        return int(units.offset[0]) if len(units) else -1

    def _unit(self, index: int) -> Units | None:
        """The unit at a queue offset, none for filler; None if it can be no unit."""
        data = self._file.read_at((index - self._piece.file_start) * UNIT_SIZE, UNIT_SIZE)
        units, bad = decode_units(data, index)
        return None if len(bad) or len(data) < UNIT_SIZE else units


__all__ = ["QueueTimes"]
