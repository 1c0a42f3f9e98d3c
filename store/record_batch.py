"""The check of many records at once, with numpy."""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

from batonmq.protocol.layout import RECORD_HEAD, RECORD_V4
from batonmq.protocol.record import (
    CRC_PROPERTY,
    CRC_TAIL_SIZE,
    END_FILE_MIN_BLANK,
    MAGIC_V1,
    SIZE_MIN_WITH_CRC,
)
from batonmq.store.hash_batch import I64

Mask = npt.NDArray[np.bool_]

HEAD: Final = np.dtype(RECORD_V4.dtype)
BYTES_MAX: Final = 1 << 20
_BYTES_FIRST: Final = 32 << 10
"""What is read at first; twice as much each time while all of it is good."""

# The end of the properties: the CRC of all before it, least significant digit first.
_CRC_TAIL: Final = np.dtype(
    [("name", f"S{len(CRC_PROPERTY)}"), ("digits", "u1", 10), ("separator", "u1")]
)
assert _CRC_TAIL.itemsize == CRC_TAIL_SIZE
_PLACES: Final = 10 ** np.arange(10, dtype=np.int64)
_unpack_start: Final = RECORD_HEAD.only("size", "magic").unpack_from
_CRC_NAME_SIZE: Final = len(CRC_PROPERTY)
_crc32: Final = zlib.crc32


def checked_end(view: memoryview, start: int, offset: int, segment_end: int) -> int:
    """Where the records that `log_scan.quick_size` takes, CRC-checked, end from `offset` on.

    `view` is the log from `start` on. It may stop earlier, at any of them.
    """
    window = _BYTES_FIRST
    while True:
        positions, ends, crcs = _walk_checked(view, offset - start, window)
        if not positions:
            return offset
        window = min(2 * window, BYTES_MAX)
        begins = np.array(positions, dtype=np.int64)
        good = _are_checked(view, start, begins, np.array(ends), np.array(crcs), segment_end)
        if not good.all():
            return start + positions[int(np.argmin(good))]
        offset = start + ends[-1]


def _walk_checked(
    view: memoryview, position: int, window: int
) -> tuple[list[int], list[int], list[int]]:
    """Where the next records with a CRC begin and end, those that begin within `window` bytes, and
    the CRC of each, without its last 20 bytes."""
    begins: list[int] = []
    ends: list[int] = []
    crcs: list[int] = []
    note_begin, note_end, note_crc = begins.append, ends.append, crcs.append
    available = len(view)
    last = min(available - SIZE_MIN_WITH_CRC, position + window)
    while position <= last:
        size, magic = _unpack_start(view, position)
        end = position + size
        tail = end - CRC_TAIL_SIZE
        if (
            magic != MAGIC_V1
            or size < SIZE_MIN_WITH_CRC
            or end > available
            or bytes(view[tail : tail + _CRC_NAME_SIZE]) != CRC_PROPERTY
        ):
            break
        note_crc(_crc32(view[position:tail]))
        note_begin(position)
        note_end(end)
        position = end
    return begins, ends, crcs


def _are_checked(
    view: memoryview, start: int, begins: I64, ends: I64, crcs: I64, segment_end: int
) -> Mask:
    heads = gather(view, begins, HEAD)
    tails = gather(view, ends - CRC_TAIL_SIZE, _CRC_TAIL)
    digits = (crcs & 0x7FFFFFFF)[:, None] // _PLACES % 10 + ord("0")
    good: Mask = (
        (heads["magic"] == MAGIC_V1)
        & (heads["physical_offset"] == begins + start)
        & (ends + start + END_FILE_MIN_BLANK <= segment_end)
        & (tails["name"] == CRC_PROPERTY)
        & (tails["digits"] == digits).all(axis=1)
        & (tails["separator"] == 2)
    )
    return good


def gather(
    data: memoryview | bytearray, positions: I64, dtype: np.dtype[np.void] | np.dtype
) -> npt.NDArray[np.void]:
    """A copy of one item of `dtype` at each position, whatever lies between them."""
    count = max(len(data) - dtype.itemsize + 1, 0)
    plain = np.dtype(f"V{dtype.itemsize}")
    every = np.ndarray((count,), dtype=plain, buffer=data, strides=(1,))
    return every[positions].view(dtype)
