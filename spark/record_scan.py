"""Where records begin in a piece of the commit log.

`chain` follows the sizes from one record to the next; `candidates` finds places that look like a
record where no boundary is known: behind damage, and where a large file is split. Free of Spark.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from batonmq.protocol.layout import RECORD_HEAD
from batonmq.protocol.record import FIXED_SIZE_V1, MAGIC_V1, MAGIC_V2, CorruptRecord, scan_record

Int64s = npt.NDArray[np.int64]

# Bytes from a record's start to the end of its physical offset.
OFFSET_END: Final = RECORD_HEAD.only("physical_offset").size
_MAGIC_AT: Final = RECORD_HEAD.at["magic"]
_MAGICS: Final = (MAGIC_V1.to_bytes(4, "big"), MAGIC_V2.to_bytes(4, "big"))
_read_size = RECORD_HEAD.only("size").unpack_from
_read_offset = RECORD_HEAD.only("physical_offset").unpack_from


def chain(window: bytes, position: int, stop: int) -> tuple[Int64s, int]:
    """(starts, next): whole records one behind the other from `position` on.

    Only those that start below `stop` (a position in the window, exclusive) and lie wholly in it.
    Only sizes are read, so the bytes at a start may still turn out to be no record. `next` is
    where the chain ended: at or behind `stop`, at what the window cuts off, or at something that
    cannot be a size.
    """
    starts: list[int] = []
    add = starts.append
    length = len(window)
    stop = min(stop, length - FIXED_SIZE_V1 + 1)
    while position < stop:
        (size,) = _read_size(window, position)
        if size < FIXED_SIZE_V1 or size > length - position:
            break
        add(position)
        position += size
    return np.array(starts, np.int64), position


def candidates(window: bytes, base: int) -> Iterator[int]:
    """Places in the window, ascending, with a record's magic and its own log offset behind it.

    `base` is the log offset of the window's first byte. A record must name its own offset, so a
    copy of one within a body does not count. `is_record` checks whether a whole record lies
    there. Places nearer than OFFSET_END to the window's end are not searched.
    """
    last = len(window) - OFFSET_END
    for at in magics(window):
        if at > last:
            return
        if _read_offset(window, at)[0] == base + at:
            yield at


def magics(data: bytes) -> Iterator[int]:
    """Places where a record would begin whose magic lies in `data`, ascending."""
    next_of = [data.find(magic, _MAGIC_AT) for magic in _MAGICS]
    while found := [at for at in next_of if at >= 0]:
        at = min(found)
        yield at - _MAGIC_AT
        which = next_of.index(at)
        next_of[which] = data.find(_MAGICS[which], at + 1)


def is_record(window: bytes, position: int, offset: int, *, finished: bool = False) -> bool:
    """Whether a whole record of log offset `offset` with the right CRC lies at `position`.

    `finished`: its properties must have been written to their end, too.
    """
    try:
        head = scan_record(window, position, check_crc=True)
    except CorruptRecord:
        return False
    if head is None or head.kind != "message" or head.physical_offset != offset:
        return False
    return not (finished and head.properties.endswith(b"\0"))


__all__ = ["OFFSET_END", "Int64s", "candidates", "chain", "is_record", "magics"]
