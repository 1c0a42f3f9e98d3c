"""Units of consume queues as columns of numbers. Layout: `batonmq.protocol.layout`.

Free of Spark.
"""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from batonmq.protocol.layout import FILLER_SIZE, UNIT, UNIT_SIZE
from batonmq.spark.record_columns import Bools
from batonmq.spark.record_scan import Int64s
from batonmq.spark.storage import OpenFile, Storage
from batonmq.spark.store_facts import Segment

_CHUNK_BYTES: Final = 1 << 20
_LOOK_BYTES: Final = 1 << 16
_UNIT: Final = np.dtype(UNIT.dtype)


@dataclass(frozen=True, slots=True)
class Units:
    """Units of one queue without filler and unwritten ones; `index` is the queue offset."""

    index: Int64s
    offset: Int64s
    size: Int64s
    tags_code: Int64s

    def __len__(self) -> int:
        return len(self.index)

    def keep(self, wanted: "Bools | slice") -> "Units":
        return Units(*(getattr(self, field.name)[wanted] for field in fields(self)))


def decode_units(data: bytes, first_index: int) -> tuple[Units, Int64s]:
    """(units, bad): whole units of `data`; `bad` are queue offsets of units that can be none.

    All must be written: zeros are bad, like negative numbers.
    """
    count = len(data) // UNIT_SIZE
    raw = np.frombuffer(data, _UNIT, count)
    index = np.arange(first_index, first_index + count, dtype=np.int64)
    units = Units(
        index,
        raw["offset"].astype(np.int64),
        raw["size"].astype(np.int64),
        raw["tags_code"].astype(np.int64),
    )
    wrong = (units.size <= 0) | (units.offset < 0)
    filler = units.size == FILLER_SIZE
    return units.keep(~wrong & ~filler), units.index[wrong]


def last_written(file: OpenFile) -> int:
    """How many units of a queue file there are up to the last written one; reads all bytes
    behind that, so that zeros in the middle do not end the queue."""
    end = file.size // UNIT_SIZE * UNIT_SIZE
    while end > 0:
        begin = max(0, end - _CHUNK_BYTES)
        held = np.flatnonzero(np.frombuffer(file.read_at(begin, end - begin), np.uint8))
        if len(held):
            return (begin + int(held[-1])) // UNIT_SIZE + 1
        end = begin
    return 0


def queue_end(storage: Storage, files: list[Segment]) -> int:
    """The queue offset behind the last unit of a queue's files; 0 without any.

    For many queues: found by bisection, and a read of what follows. Zeros in the middle end the
    queue only if they are longer than that; `last_written` reads everything.
    """
    for file in reversed(files):
        with storage.open(file.path) as opened:
            written = _written_units(opened)
        if written:
            return file.start // UNIT_SIZE + written
    return files[0].start // UNIT_SIZE if files else 0


def _written_units(file: OpenFile) -> int:
    low, high = 0, file.size // UNIT_SIZE
    while low < high:
        middle = (low + high) // 2
        if any(file.read_at(middle * UNIT_SIZE, UNIT_SIZE)):
            low = middle + 1
        else:
            high = middle
    return last_written(file) if any(file.read_at(low * UNIT_SIZE, _LOOK_BYTES)) else low


@dataclass(frozen=True, slots=True)
class Queue:
    """One consume queue of a store and its files, ascending."""

    topic: str
    queue_id: int
    files: tuple[Segment, ...]


__all__ = [
    "Queue",
    "Units",
    "decode_units",
    "last_written",
    "queue_end",
]
