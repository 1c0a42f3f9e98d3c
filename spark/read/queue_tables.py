"""The table `messages` through consume queues.

Free of Spark.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from batonmq.protocol.record import FIXED_SIZE_V1
from batonmq.spark.read.damage import Damage, Mode
from batonmq.spark.read.log_table import log_span
from batonmq.spark.read.message_columns import message_batch
from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.queues import (
    QueuePiece,
    Units,
    bad_units,
    confirmed_units,
    read_units,
    wanted_units,
)
from batonmq.spark.read.record_columns import (
    Int64s,
    Records,
    is_record,
    locate,
    misplaced,
    take_fields,
    wrong_crc,
)
from batonmq.spark.read.selection import Selection, Span
from batonmq.spark.read.storage import OpenFile, Storage
from batonmq.spark.read.store_facts import Segment, StoreFacts

# Records nearer than this are fetched with one read, the bytes between them too.
_GAP_BYTES = 1 << 16


class QueueReader:
    """Messages of pieces of queues, fetched from the log by their units."""

    def __init__(
        self,
        storage: Storage,
        log: list[Segment],
        facts: StoreFacts,
        confirmed: int | None,
        options: ReadOptions,
        selection: Selection,
        schema: pa.Schema,
    ) -> None:
        self._storage = storage
        self._log = log
        self._facts = facts
        self._confirmed = confirmed
        self._options = options
        self._selection = selection
        self._schema = schema
        self._starts = np.array([file.start for file in log], np.int64)
        # To find damage, all of it is read.
        is_strict = options.mode is Mode.FAILFAST
        self._span = log_span(storage, log, options, selection) if is_strict else Span()

    def read(self, piece: QueuePiece) -> Iterator[pa.RecordBatch | Damage]:
        """Wanted messages in the order of the queue; by hashes of tags, then by the tags."""
        items = read_units(self._storage, piece)
        before = -1
        for item in confirmed_units(items, piece, self._confirmed):
            if isinstance(item, Damage):
                yield item
                continue
            units, misplaced = self._without_expired(item)
            yield from bad_units(piece, misplaced)
            wanted = wanted_units(self._of_time(units, before), piece, self._selection)
            before = int(units.offset[-1]) if len(units) else before
            yield from self._fetch(wanted, piece)

    def _of_time(self, units: Units, before: int) -> Units:
        """Those of the wanted time; all of them if one does not point ahead, so that it is told.

        `before`: where the last unit before them points to.
        """
        if not self._span.is_all and bool((np.diff(units.offset, prepend=before) > 0).all()):
            return units.keep(self._span.holds(units.offset))
        return units

    def _without_expired(self, units: Units) -> tuple[Units, Int64s]:
        """(units, misplaced): the queue may still show what has expired from the log. Such units
        come before all others; `misplaced` are queue offsets of those that do not."""
        if not self._starts.size:
            return units, np.empty(0, np.int64)
        expired = units.offset < self._starts[0]
        count = int(np.count_nonzero(expired))
        return units.keep(~expired), units.index[count:][expired[count:]]

    def _file_of(self, offset: int) -> Segment | None:
        index = int(np.searchsorted(self._starts, offset, side="right")) - 1
        if index < 0 or offset >= self._log[index].end:
            return None
        return self._log[index]

    def _fetch(self, units: Units, piece: QueuePiece) -> Iterator[pa.RecordBatch | Damage]:
        at = 0
        while at < len(units):
            file = self._file_of(int(units.offset[at]))
            if file is None:
                yield self._lost(units, at, piece, "lies in no file of the log")
                at += 1
                continue
            stop = self._group_end(units, at, file)
            with self._storage.open(file.path) as opened:
                yield from self._decode(opened, units.keep(slice(at, stop)), file)
            at = stop

    def _group_end(self, units: Units, begin: int, file: Segment) -> int:
        """Behind the last unit that is fetched with one read together with that at `begin`."""
        ends = units.offset[begin:] + units.size[begin:]
        first = int(units.offset[begin])
        limit = int(
            np.searchsorted(ends, min(file.end, first + self._options.batch_bytes), side="right")
        )
        gaps = units.offset[begin + 1 : begin + limit] - ends[: max(limit - 1, 0)]
        apart = np.flatnonzero((gaps > _GAP_BYTES) | (gaps < 0))
        return begin + max(1, int(apart[0]) + 1 if len(apart) else limit)

    def _decode(
        self, file: OpenFile, units: Units, segment: Segment
    ) -> Iterator[pa.RecordBatch | Damage]:
        base = int(units.offset[0])
        stop = int(units.offset[-1] + units.size[-1])
        window = b""
        if stop - base <= max(self._options.record_bytes_max, self._options.batch_bytes):
            window = file.read_at(base - segment.start, stop - base)
        starts = units.offset - base
        fits = (units.size >= FIXED_SIZE_V1) & (starts + units.size <= len(window))
        data = np.frombuffer(window, np.uint8)
        sizes = take_fields(data, starts[fits], np.dtype(">u4")).astype(np.int64)
        fits[fits] = sizes == units.size[fits]
        whole = np.zeros(len(units), np.bool_)
        for located in self._located(window, starts[fits]):
            marks = misplaced(located, base)
            if self._options.check_crc:
                marks |= wrong_crc(window, located)
            for index in np.flatnonzero(marks).tolist():
                start = int(located.start[index])
                marks[index] = not is_record(window, start, base + start, finished=True)
            records = located.keep(~marks)
            whole |= np.isin(starts, records.start)
            records = self._selection.rows(window, records)
            if len(records):
                yield message_batch(window, records, self._facts, self._schema)
        for index in np.flatnonzero(~whole).tolist():
            offset, size = int(units.offset[index]), int(units.size[index])
            what = f"no record where the queue has one (queue offset {int(units.index[index])})"
            yield Damage(file.path, offset, size, what)

    def _located(self, window: bytes, starts: Int64s) -> Iterator[Records]:
        while len(starts):
            records, good = locate(window, starts)
            yield records
            starts = starts[good + 1 :]

    def _lost(self, units: Units, at: int, piece: QueuePiece, what: str) -> Damage:
        offset, size = int(units.offset[at]), int(units.size[at])
        return Damage(piece.path, offset, size, f"a record that {what}")
