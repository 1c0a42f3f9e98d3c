"""Finds records if no boundary is known: after damage, where a file is split, at a log's end. A
record is found by its magic and must name its own offset, so copies and old bytes do not count."""

import struct
from collections.abc import Iterator
from typing import Final

from batonmq.protocol.layout import HOST_V4_SIZE, HOST_V6_SIZE, RECORD_HEAD, RECORD_TAIL, RECORD_V4
from batonmq.protocol.records.codec import (
    CRC_PROPERTY,
    CRC_TAIL_SIZE,
    MAGIC_V1,
    MAGIC_V2,
    Buffer,
    scan_record,
)
from batonmq.protocol.records.faults import CorruptRecord, RecordFault
from batonmq.protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6

# From a record's start to the end of its physical offset.
OFFSET_END: Final = RECORD_HEAD.only("physical_offset").size
MAGIC_SIZE: Final = 4
_MAGICS: Final = tuple(magic.to_bytes(MAGIC_SIZE, "big") for magic in (MAGIC_V1, MAGIC_V2))
_MAGIC_AT: Final = RECORD_HEAD.at["magic"]
#: The size and own log offset that the bytes at a position give, unchecked.
read_place: Final = RECORD_HEAD.only("size", "physical_offset").unpack_from
_read_offset: Final = RECORD_HEAD.only("physical_offset").unpack_from
_read_flags: Final = RECORD_HEAD.only("size", "magic", "sys_flag").unpack_from
_BODY_LENGTH: Final = RECORD_TAIL.only("body_length")
_BODY_LENGTH_AT: Final = RECORD_V4.size - RECORD_TAIL.size
_V6_EXTRA: Final = HOST_V6_SIZE - HOST_V4_SIZE
_U16: Final = struct.Struct(">H")
_I16: Final = struct.Struct(">h")


def magics(data: bytes) -> Iterator[int]:
    """Where a record would begin whose magic lies in `data`, ascending; perhaps before `data`, down
    to -4."""
    next_of = [data.find(magic) for magic in _MAGICS]
    while found := [at for at in next_of if at >= 0]:
        at = min(found)
        yield at - _MAGIC_AT
        which = next_of.index(at)
        next_of[which] = data.find(_MAGICS[which], at + 1)


def candidates(window: bytes, base: int) -> Iterator[int]:
    """Places in the window, ascending, with a record's magic and then its own log offset. `base`:
    the log offset of the window's first byte. Check them with `is_record`. The last OFFSET_END
    bytes are not searched."""
    last = len(window) - OFFSET_END
    for at in magics(window):
        if at > last:
            return
        if at >= 0 and _read_offset(window, at)[0] == base + at:
            yield at


def is_record(buf: Buffer, pos: int, offset: int) -> bool:
    """Whether a whole record of log offset `offset` with the right CRC lies at `pos`."""
    try:
        head = scan_record(buf, pos, check_crc=True)
    except CorruptRecord:
        return False
    return head is not None and head.kind == "message" and head.physical_offset == offset


def has_magic(buf: Buffer, pos: int) -> bool:
    """Whether a record that begins at `pos` would have its magic here."""
    return bytes(buf[pos + _MAGIC_AT : pos + _MAGIC_AT + MAGIC_SIZE]) in _MAGICS


def wrong_size(part: Buffer) -> str | None:
    """The fault of the size of a record that begins with `part`; None if none is visible. With too
    large a size later records would seem to be part of this one; the lengths inside show what it
    must be."""
    if len(part) < _BODY_LENGTH_AT + _BODY_LENGTH.size + 2 * _V6_EXTRA:
        return None
    size, magic, flag = _read_flags(part)
    if magic not in (MAGIC_V1, MAGIC_V2):
        return None
    at = _BODY_LENGTH_AT + _V6_EXTRA * (bool(flag & BORN_HOST_V6) + bool(flag & STORE_HOST_V6))
    (body_length,) = _BODY_LENGTH.unpack_from(part, at)
    at += _BODY_LENGTH.size + max(body_length, 0)
    if len(part) < at + 2:
        return None
    at += 1 + part[at] if magic == MAGIC_V1 else 2 + _U16.unpack_from(part, at)[0]
    if len(part) < at + _I16.size:
        return None
    (properties_length,) = _I16.unpack_from(part, at)
    parts = at + _I16.size + properties_length
    return None if parts == size else RecordFault.PARTS.text(parts=parts, size=size)


def ends_in_property_crc(buf: Buffer, start: int, end: int) -> bool:
    """Whether the 20 bytes before `end` begin like the property CRC of a record."""
    at = end - CRC_TAIL_SIZE
    return at >= start and bytes(buf[at : at + len(CRC_PROPERTY)]) == CRC_PROPERTY
