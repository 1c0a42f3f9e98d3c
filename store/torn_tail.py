"""Is what lies behind the last good record a torn write, or a whole record that went bad? (R24)

A torn write misses something. A killed process leaves the beginning of a record and zeros behind
it; a lost page cache leaves any of its sectors, and zeros in place of the others. A record of which
nothing is missing, and whose CRC does not fit, was whole once: it may have been acknowledged, and
is damage. The property CRC stands at a record's very end, so it also shows a whole record whose
length went bad. Where a message itself holds a sector of zeros, a bad record passes for torn.
"""

from __future__ import annotations

import struct
from typing import Final

from protocol.record import CRC_PROPERTY, CRC_TAIL_SIZE, FIXED_SIZE_V1
from store.commit_log import CommitLog

SECTOR_SIZE: Final = 512
_ZERO_SECTOR: Final = bytes(SECTOR_SIZE)
_SIZE: Final = struct.Struct(">i")


def is_complete_but_bad(log: CommitLog, offset: int) -> bool:
    """Whether the bytes at `offset`, where no good record begins, were a whole one.

    What is not written is zero, as `CommitLog` keeps it. False also where there is nothing.
    """
    segment = log.segment_at(offset)
    if segment is None:
        return False
    start = offset - segment.start_offset
    data_end = segment.data_end(start)
    if data_end - start < _SIZE.size:
        return False
    view = segment.buffer
    (size,) = _SIZE.unpack_from(view, start)
    end = start + size if FIXED_SIZE_V1 <= size <= segment.size - start else data_end
    # Within the CRC's digits a write may be torn, too; the mark behind them may have been flipped.
    has_digits = data_end == end - 1 and ends_in_property_crc(view, start, end)
    reaches_its_end = data_end >= end or has_digits
    if not reaches_its_end and not ends_in_property_crc(view, start, data_end):
        return False
    first_sector = start + -start % SECTOR_SIZE
    return not any(
        view[at : at + SECTOR_SIZE] == _ZERO_SECTOR
        for at in range(first_sector, max(end, data_end) - SECTOR_SIZE + 1, SECTOR_SIZE)
    )


def ends_in_property_crc(view: memoryview, start: int, end: int) -> bool:
    """Whether the 20 bytes before `end` begin as the property CRC of a record does."""
    at = end - CRC_TAIL_SIZE
    return at >= start and bytes(view[at : at + len(CRC_PROPERTY)]) == CRC_PROPERTY
