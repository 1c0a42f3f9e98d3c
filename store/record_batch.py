"""The check of many records at once, and Java's string hash of many pieces, with numpy.

The hash of `chars[b:e]` is the sum of `chars[k] * 31 ** (e - 1 - k)`, modulo 2 ** 32. 31 has an
inverse there, so one running sum of `chars[k] * 31 ** -k` gives every piece by a difference,
whatever their lengths are. `protocol.tags.java_string_hash` is the same for one text.
"""

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
from batonmq.protocol.tags import java_string_hash

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
Chars = npt.NDArray[np.uint8]
_MODULUS: Final = 1 << 32

Mask = npt.NDArray[np.bool_]
HEAD: Final = np.dtype(RECORD_V4.dtype)
BYTES_MAX: Final = 1 << 20
_BYTES_FIRST: Final = 32 << 10
"""What is read at first; twice as much each time while all of it is good."""
# The end of the properties: the CRC of all before it, least significant digit first.
_CRC_TAIL: Final = np.dtype(
    [("name", f"S{len(CRC_PROPERTY)}"), ("digits", "u1", 10), ("separator", "u1")]
)
_PLACES: Final = 10 ** np.arange(10, dtype=np.int64)
_unpack_start: Final = RECORD_HEAD.only("size", "magic").unpack_from
_CRC_NAME_SIZE: Final = len(CRC_PROPERTY)
_crc32: Final = zlib.crc32


class _Powers:
    """`base ** 0`, `base ** 1`, ... modulo 2 ** 32, as many as were ever asked for."""

    def __init__(self, base: int) -> None:
        self._base = np.uint32(base)
        self._known: U32 = np.ones(1, dtype=np.uint32)

    def up_to(self, count: int) -> U32:
        if count > len(self._known):
            steps = np.full(2 * count, self._base, dtype=np.uint32)
            steps[0] = 1
            self._known = np.cumprod(steps, dtype=np.uint32)
        return self._known[:count]


_powers: Final = _Powers(31)
_inverse_powers: Final = _Powers(pow(31, -1, _MODULUS))


def powers_of_31(exponents: I64) -> U32:
    """`31 ** n` modulo 2 ** 32 for each."""
    count = int(exponents.max(initial=0)) + 1
    return _powers.up_to(count)[exponents]


class PieceHashes:
    """The hashes of pieces of `chars`, UTF-8 bytes."""

    def __init__(self, chars: Chars) -> None:
        self._chars = chars
        self._sums: U32 = np.zeros(len(chars) + 1, dtype=np.uint32)
        np.cumsum(chars * _inverse_powers.up_to(len(chars)), dtype=np.uint32, out=self._sums[1:])
        self._not_ascii = np.flatnonzero(chars > 127)

    def of(self, begins: I64, ends: I64) -> U32:
        """Modulo 2 ** 32, in order; 0 for an empty piece. Wrong where `are_odd`."""
        sums = self._sums
        return (sums[ends] - sums[begins]) * powers_of_31(np.maximum(ends - 1, 0))

    def are_odd(self, begins: I64, ends: I64) -> npt.NDArray[np.bool_]:
        """Which pieces have other characters than ASCII: Java hashes UTF-16 units."""
        high = self._not_ascii
        if not len(high):
            return np.zeros(len(begins), dtype=np.bool_)
        odd: npt.NDArray[np.bool_] = np.searchsorted(high, begins) != np.searchsorted(high, ends)
        return odd

    def behind(self, prefixes: U32, begins: I64, ends: I64) -> U32:
        """The hashes of texts that begin with one of hash `prefixes` each, and go on with a piece
        of any characters."""
        result = prefixes * powers_of_31(ends - begins) + self.of(begins, ends)
        for row in np.flatnonzero(self.are_odd(begins, ends)).tolist():
            piece = self._chars[int(begins[row]) : int(ends[row])].tobytes()
            result[row] = _hash_behind(int(prefixes[row]), piece)
        return result


def _hash_behind(prefix: int, piece: bytes) -> int:
    text = piece.decode("utf-8", "replace")
    units = len(text.encode("utf-16-be", "surrogatepass")) // 2
    return (prefix * pow(31, units, _MODULUS) + java_string_hash(text)) % _MODULUS


assert _CRC_TAIL.itemsize == CRC_TAIL_SIZE


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
