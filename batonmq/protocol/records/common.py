"""Reads the common record fast: magic V1, IPv4 hosts, a property CRC, no transaction. A slave reads
every record of its master, and nearly all are of this kind. For anything else, also a wrong CRC,
the result is None, and `codec.scan_record` decides. `columns` does the same for many records."""

import zlib
from typing import Final

from batonmq.protocol.layout import RECORD_HEAD, RECORD_V4
from batonmq.protocol.properties import find_property
from batonmq.protocol.records.codec import (
    CRC_PROPERTY,
    CRC_TAIL_SIZE,
    END_FILE_MIN_BLANK,
    MAGIC_V1,
    SIZE_MIN_WITH_CRC,
    crc_tail,
)
from batonmq.protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6, TRANSACTION_MASK

UNCOMMON_FLAGS: Final = BORN_HOST_V6 | STORE_HOST_V6 | TRANSACTION_MASK
# size, queue id, queue offset, store timestamp, topic, TAGS, KEYS, UNIQ_KEY
QuickRecord = tuple[int, int, int, int, bytes, bytes | None, bytes | None, bytes | None]

_HEAD: Final = RECORD_V4.only(
    "size", "magic", "queue_id", "queue_offset", "physical_offset", "sys_flag", "store_ms",
    "body_length",
)  # fmt: skip
_BODY_AT: Final = _HEAD.size
_unpack_head = _HEAD.unpack_from
_unpack_place: Final = RECORD_HEAD.only("size", "magic", "physical_offset").unpack_from
_crc32 = zlib.crc32


def quick_record(
    view: memoryview, position: int, space: int, offset: int, check_crc: bool = True
) -> QuickRecord | None:
    """The CRC-checked record at `position` of `view`; None if it is not common. `offset`: its place
    in the log; `space`: bytes from there to the segment's end. `check_crc` False: this process
    checked it before."""
    if len(view) - position < SIZE_MIN_WITH_CRC:
        return None
    size, magic, queue_id, queue_offset, physical_offset, sys_flag, stored_at, body_len = (
        _unpack_head(view, position)
    )
    end = position + size
    if (
        magic != MAGIC_V1
        or sys_flag & UNCOMMON_FLAGS
        or physical_offset != offset
        or size + END_FILE_MIN_BLANK > space
        or not 0 <= body_len <= size - SIZE_MIN_WITH_CRC
        or end > len(view)
    ):
        return None
    tail = bytes(view[position + _BODY_AT + body_len : end])
    topic_end = 1 + tail[0]
    properties_at = topic_end + 2
    if (
        properties_at + CRC_TAIL_SIZE > len(tail)
        or tail[topic_end] > 127  # the length is signed
        or (tail[topic_end] << 8) + tail[topic_end + 1] != len(tail) - properties_at
        or not tail.startswith(CRC_PROPERTY, len(tail) - CRC_TAIL_SIZE)
    ):
        return None
    if check_crc:
        digits = tail[-2:-12:-1]
        crc = _crc32(view[position : end - CRC_TAIL_SIZE]) & 0x7FFFFFFF
        if tail[-1] != 2 or not digits.isdigit() or int(digits) != crc:
            return None
    properties = b"\x02" + tail[properties_at:-CRC_TAIL_SIZE]
    return (
        size,
        queue_id,
        queue_offset,
        stored_at,
        tail[1:topic_end],
        _find(properties, b"\x02TAGS\x01"),
        _find(properties, b"\x02KEYS\x01"),
        _find(properties, b"\x02UNIQ_KEY\x01"),
    )


def quick_size(view: memoryview, position: int, space: int, offset: int) -> int:
    """The size of the CRC-checked record at `position`; 0 if it is not common. The CRC covers all
    fields, so only those needed to find it are read."""
    available = len(view) - position
    if available < SIZE_MIN_WITH_CRC:
        return 0
    size, magic, physical_offset = _unpack_place(view, position)
    if (
        magic != MAGIC_V1
        or physical_offset != offset
        or not SIZE_MIN_WITH_CRC <= size <= available
        or size + END_FILE_MIN_BLANK > space
    ):
        return 0
    crc_at = position + size - CRC_TAIL_SIZE
    crc = _crc32(view[position:crc_at]) & 0x7FFFFFFF
    return size if view[crc_at : crc_at + CRC_TAIL_SIZE] == crc_tail(crc) else 0


def _find(properties: bytes, needle: bytes) -> bytes | None:
    """The value of the last pair that begins with `needle`: a key and the separators around it."""
    at = properties.rfind(needle)
    if at < 0:
        return None
    start = at + len(needle)
    stop = properties.find(b"\x02", start)
    if stop <= start:
        return find_property(properties, needle[1:-1])  # repeated or empty
    return properties[start:stop]
