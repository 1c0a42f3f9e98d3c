"""The record of the commit log: one message, byte for byte as RocketMQ stores it.

The fields of `protocol.layout`, then body, topic, properties, each with its length. The topic's
length has one byte under magic V1, two under V2 (topics longer than 127). With the property CRC the
properties end in `__CRC32#` \\x01 ten digits \\x02: the decimal CRC of all bytes before these 20,
least significant digit first. All CRCs have their top bit cleared. A file ends in a blank if no
record fits: i32 remaining bytes, magic, anything. Other readers must agree with `scan_record`.
Origin: Java `MessageExtEncoder`, `CommitLog.checkMessageAndReturnSize`, `MessageDecoder`.
"""

import struct
import zlib
from typing import Final, Literal, NamedTuple

import msgspec

from batonmq.protocol.layout import BLANK, HOST_V4_SIZE, HOST_V6_SIZE, RECORD_V4, record_layout
from batonmq.protocol.message import MessageExt
from batonmq.protocol.message_id import encode_offset_msg_id, host_text
from batonmq.protocol.properties import decode_properties, find_property
from batonmq.protocol.records.faults import CorruptRecord, RecordFault
from batonmq.protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6
from batonmq.protocol.tags import tags_code

MAGIC_V1: Final = 0xDAA320A7
MAGIC_V2: Final = 0xDAA320AB
MAGIC_BLANK: Final = 0xCBD43194
# Must stay free after a record in its file, for a blank.
END_FILE_MIN_BLANK: Final = 8
TOPIC_LENGTH_MAX_V1: Final = 127
CRC_TAIL_SIZE: Final = 20
CRC_PROPERTY: Final = b"__CRC32#\x01"
# A record without body, topic, properties; IPv4 hosts, magic V1 (V2: one more).
FIXED_SIZE_V1: Final = 91
SIZE_MIN_WITH_CRC: Final = FIXED_SIZE_V1 + CRC_TAIL_SIZE
Buffer = bytes | bytearray | memoryview
Kind = Literal["message", "blank"]
# The unpacked head, fields in the order of `RECORD_V4`.
_Head = tuple[int, int, int, int, int, int, int, int, int, bytes, int, bytes, int, int, int]
_HEAD_V4: Final = RECORD_V4.struct
_HEAD_ANY: Final = {
    (born, store): record_layout(born, store).struct
    for born in (HOST_V4_SIZE, HOST_V6_SIZE)
    for store in (HOST_V4_SIZE, HOST_V6_SIZE)
}
_TOPIC_HEADS: Final = [bytes((length,)) for length in range(TOPIC_LENGTH_MAX_V1 + 1)]
# A record without hosts, topic with its length, body, properties.
_FIXED_SIZE: Final = FIXED_SIZE_V1 - 2 * HOST_V4_SIZE - 1
_HOST_BITS: Final = BORN_HOST_V6 | STORE_HOST_V6
_U16: Final = struct.Struct(">H")
_I16: Final = struct.Struct(">h")
_FIRST: Final = BLANK.struct  # a record begins with the same two fields
_crc32 = zlib.crc32
_pack_v4 = _HEAD_V4.pack
_unpack_measures = RECORD_V4.only("size", "magic", "sys_flag", "body_length").unpack_from


class RecordHead(NamedTuple):
    """The fields of a record that dispatch needs. `size`: of the whole record (of a blank: to the
    end of the file). `body_offset`: in the scanned buffer. `properties`: raw, with the CRC tail. A
    blank has only `size` and `kind`."""

    size: int
    kind: Kind
    queue_id: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    store_timestamp: int
    topic: bytes
    properties: bytes
    body_offset: int
    body_len: int
    flag: int = 0
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0


class NewMessage(msgspec.Struct, gc=False):
    """A message to store (Java: `MessageExtBrokerInner`). `properties`: the raw string without CRC
    tail; `tags_code`: the hash of its TAGS; `keys` and `uniq_key`: its raw KEYS and UNIQ_KEY.
    `born_host`: ip and port, 8 or 20 bytes."""

    topic: str
    queue_id: int
    body: bytes
    properties: bytes
    tags_code: int
    keys: bytes | None
    uniq_key: bytes | None
    born_timestamp: int
    born_host: bytes
    flag: int = 0
    sys_flag: int = 0
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0


def encode_record(
    message: NewMessage,
    topic: bytes,
    queue_offset: int,
    physical_offset: int,
    store_timestamp: int,
    store_host: bytes,
    append_prop_crc: bool,
) -> bytes:
    """The bytes of one record; `topic` is the encoded topic. The host bits of `sys_flag` follow
    from the hosts' lengths. With `append_prop_crc` a missing last separator is added; `properties`
    must not hold `__CRC32#`. Raises struct.error for a number that does not fit; the caller checks
    sizes."""
    body, properties, born_host = message.body, message.properties, message.born_host
    if append_prop_crc and properties and properties[-1] != 2:
        properties += b"\x02"
    properties_len = len(properties) + (CRC_TAIL_SIZE if append_prop_crc else 0)
    topic_len = len(topic)
    if topic_len <= TOPIC_LENGTH_MAX_V1:
        magic, topic_head = MAGIC_V1, _TOPIC_HEADS[topic_len]
    else:
        magic, topic_head = MAGIC_V2, _U16.pack(topic_len)
    hosts_len = len(born_host) + len(store_host)
    sys_flag = message.sys_flag & ~_HOST_BITS
    pack = _pack_v4
    if hosts_len != 2 * HOST_V4_SIZE:
        pack = _HEAD_ANY[len(born_host), len(store_host)].pack
        sys_flag |= _host_bits(born_host, store_host)
    head = pack(
        _FIXED_SIZE + hosts_len + len(topic_head) + topic_len + len(body) + properties_len,
        magic,
        _crc32(body) & 0x7FFFFFFF,
        message.queue_id,
        message.flag,
        queue_offset,
        physical_offset,
        sys_flag,
        message.born_timestamp,
        born_host,
        store_timestamp,
        store_host,
        message.reconsume_times,
        message.prepared_transaction_offset,
        len(body),
    )
    record = b"".join((head, body, topic_head, topic, _I16.pack(properties_len), properties))
    return record + crc_tail(_crc32(record) & 0x7FFFFFFF) if append_prop_crc else record


def _host_bits(born_host: bytes, store_host: bytes) -> int:
    born = BORN_HOST_V6 if len(born_host) == HOST_V6_SIZE else 0
    return born | STORE_HOST_V6 if len(store_host) == HOST_V6_SIZE else born


def crc_tail(crc: int) -> bytes:
    """The 20 bytes that end the properties: digits of the CRC, least significant first."""
    return CRC_PROPERTY + (b"%010d" % crc)[::-1] + b"\x02"


def encode_blank(remaining: int) -> bytes:
    """The 8 bytes that end a file early. `remaining` includes them."""
    return _FIRST.pack(remaining, MAGIC_BLANK)


def scan_record(buf: Buffer, pos: int = 0, *, check_crc: bool = False) -> RecordHead | None:
    """Reads the record at `pos`; None if the buffer ends inside it. `check_crc`: checks the
    property CRC or, without one, the body CRC. A blank needs only its 8 bytes. Raises CorruptRecord
    for invalid bytes: wrong magic (also zeros), contradicting sizes, a wrong CRC."""
    available = len(buf) - pos
    if available < 8:
        return None
    size, magic = _FIRST.unpack_from(buf, pos)
    if magic == MAGIC_BLANK:
        if not 8 <= size <= 0x7FFFFFFF:
            raise CorruptRecord(RecordFault.BLANK_SIZE, size=size)
        return RecordHead(size, "blank", 0, 0, 0, 0, 0, b"", b"", pos + 8, 0)
    if magic != MAGIC_V1 and magic != MAGIC_V2:
        raise _wrong_magic(size, magic)
    if available < size:
        if size < FIXED_SIZE_V1:
            raise CorruptRecord(RecordFault.SIZE_TOO_SMALL, size=size)
        if size > 0x7FFFFFFF:
            raise CorruptRecord(RecordFault.SIZE_TOO_LARGE, size=size)
        return None
    head, body_at, topic_at, topic_end, properties_at = _locate(buf, pos, size, magic)
    end = pos + size
    if check_crc:
        _check_crc(buf, pos, end, head[2], body_at, head[14])
    return RecordHead(
        size,
        "message",
        head[3],
        head[5],
        head[6],
        head[7],
        head[10],
        bytes(buf[topic_at:topic_end]),
        bytes(buf[properties_at:end]),
        body_at,
        head[14],
        head[4],
        head[12],
        head[13],
    )


def scan_in_file(
    buf: Buffer, pos: int, offset: int, file_end: int, *, check_crc: bool = False
) -> RecordHead | None:
    """As `scan_record`, for the record or blank at log offset `offset` of a file that ends at
    `file_end`: it must name that offset and fit into the file. None if it continues after `buf`.
    Without a property CRC, `check_crc` also finds torn properties, which the body CRC does not
    cover: no writer puts a NUL there. Raises CorruptRecord."""
    head = scan_record(buf, pos, check_crc=check_crc)
    if head is None:
        if file_end - offset <= len(buf) - pos:
            raise CorruptRecord(RecordFault.LEAVES_FILE)
        return None
    size = head.size
    if head.kind == "blank":
        if offset + size != file_end:
            raise CorruptRecord(RecordFault.BLANK_WITHIN_FILE, size=size)
    elif head.physical_offset != offset:
        raise CorruptRecord(RecordFault.MISPLACED, offset=head.physical_offset)
    elif offset + size + END_FILE_MIN_BLANK > file_end:
        raise CorruptRecord(RecordFault.NO_SPACE_BEHIND)
    # A property CRC was checked and does not end in a NUL.
    elif check_crc and head.properties.endswith(b"\0"):
        raise CorruptRecord(RecordFault.TORN_PROPERTIES)
    return head


def decode_record(
    buf: Buffer, pos: int = 0, *, read_body: bool = True, check_crc: bool = False
) -> MessageExt:
    """The message of the record at `pos`; `read_body` False leaves the body empty. Raises
    CorruptRecord also for a blank and for a record that the buffer cuts off."""
    size, magic = _read_first(buf, pos)
    head, body_at, topic_at, topic_end, properties_at = _locate(buf, pos, size, magic)
    end = pos + size
    if check_crc:
        _check_crc(buf, pos, end, head[2], body_at, head[14])
    return _message(
        head,
        bytes(buf[body_at : body_at + head[14]]) if read_body else b"",
        bytes(buf[topic_at:topic_end]),
        bytes(buf[properties_at:end]),
    )


def raw_properties(buf: Buffer, pos: int = 0) -> bytes:
    """The property bytes, with CRC tail, of a whole record that was checked before. Raises
    CorruptRecord."""
    if len(buf) - pos >= FIXED_SIZE_V1:
        size, magic, flag, body_length = _unpack_measures(buf, pos)
        end = pos + size
        is_usual = magic == MAGIC_V1 and not flag & _HOST_BITS and end <= len(buf)
        if is_usual and 0 <= body_length <= size - FIXED_SIZE_V1:
            # Nearly all records. Filters read many of them, so do not unpack the rest of the head.
            at = pos + _HEAD_V4.size + body_length
            at += 1 + buf[at]
            if at + 2 <= end and at + 2 + _I16.unpack_from(buf, at)[0] == end:
                return bytes(buf[at + 2 : end])
    size, magic = _read_first(buf, pos)
    return bytes(buf[_locate(buf, pos, size, magic)[4] : pos + size])


def without_crc(record: Buffer) -> bytes:
    """A whole record without its property CRC, for tools, which would show it as a property."""
    size, magic = _read_first(record, 0)
    properties_at = _locate(record, 0, size, magic)[4]
    end = size - CRC_TAIL_SIZE
    if end < properties_at or bytes(record[end : end + len(CRC_PROPERTY)]) != CRC_PROPERTY:
        return bytes(record[:size])
    found = bytearray(record[:end])
    struct.pack_into(">i", found, 0, end)
    _I16.pack_into(found, properties_at - 2, end - properties_at)
    return bytes(found)


def message_to_store(record: Buffer) -> NewMessage:
    """The message of a whole record, without its place, to be stored again. Raises
    CorruptRecord as `decode_record`."""
    size, magic = _read_first(record, 0)
    head, body_at, topic_at, topic_end, properties_at = _locate(record, 0, size, magic)
    properties = bytes(record[properties_at:size])
    if properties[-CRC_TAIL_SIZE:].startswith(CRC_PROPERTY):
        properties = properties[:-CRC_TAIL_SIZE]
    return NewMessage(
        topic=bytes(record[topic_at:topic_end]).decode("utf-8", "replace"),
        queue_id=head[3],
        body=bytes(record[body_at : body_at + head[14]]),
        properties=properties,
        tags_code=tags_code(find_property(properties, b"TAGS")),
        keys=find_property(properties, b"KEYS"),
        uniq_key=find_property(properties, b"UNIQ_KEY"),
        born_timestamp=head[8],
        born_host=head[9],
        flag=head[4],
        sys_flag=head[7],
        reconsume_times=head[12],
        prepared_transaction_offset=head[13],
    )


def _message(head: _Head, body: bytes, topic: bytes, properties: bytes) -> MessageExt:
    store_host = head[11]
    return MessageExt(
        topic=topic.decode("utf-8", "replace"),
        queue_id=head[3],
        queue_offset=head[5],
        physical_offset=head[6],
        store_size=head[0],
        msg_id=encode_offset_msg_id(store_host, head[6]),
        body=body,
        body_crc=head[2],
        flag=head[4],
        sys_flag=head[7],
        born_timestamp=head[8],
        born_host=host_text(head[9]),
        store_timestamp=head[10],
        store_host=host_text(store_host),
        reconsume_times=head[12],
        prepared_transaction_offset=head[13],
        properties=decode_properties(properties),
    )


def msg_id_of(record: Buffer) -> str:
    """The id of a whole record that was checked before, by store host and physical offset."""
    head = _HEAD_V4.unpack_from(record)
    if head[7] & _HOST_BITS:
        head = _locate(record, 0, *_read_first(record, 0))[0]
    return encode_offset_msg_id(head[11], head[6])


def decode_records(buf: Buffer) -> list[MessageExt]:
    """All messages of a pull reply's body in order, body CRCs checked. Raises CorruptRecord if the
    bytes are not whole records to the end."""
    messages: list[MessageExt] = []
    pos = 0
    while pos < len(buf):
        message = decode_record(buf, pos)
        if message.body_crc != _crc32(message.body) & 0x7FFFFFFF and message.body:
            raise CorruptRecord(RecordFault.BODY_CRC)
        messages.append(message)
        pos += message.store_size
    return messages


def _read_first(buf: Buffer, pos: int) -> tuple[int, int]:
    """(size, magic) of the record that begins at `pos` and ends in `buf`. Raises CorruptRecord."""
    available = len(buf) - pos
    if available < 8:
        raise CorruptRecord(RecordFault.CUT_OFF)
    size, magic = _FIRST.unpack_from(buf, pos)
    if magic == MAGIC_BLANK:
        raise CorruptRecord(RecordFault.BLANK)
    if magic != MAGIC_V1 and magic != MAGIC_V2:
        raise _wrong_magic(size, magic)
    if available < size:
        raise CorruptRecord(RecordFault.CUT_OFF)
    return size, magic


def _locate(buf: Buffer, pos: int, size: int, magic: int) -> tuple[_Head, int, int, int, int]:
    """(unpacked head, body_at, topic_at, topic_end, properties_at) of a record that is whole in
    `buf`."""
    if size < FIXED_SIZE_V1:
        raise CorruptRecord(RecordFault.SIZE_TOO_SMALL, size=size)
    head = _HEAD_V4.unpack_from(buf, pos)
    body_at = pos + _HEAD_V4.size
    host_bits = head[7] & (BORN_HOST_V6 | STORE_HOST_V6)
    if host_bits:
        layout = _HEAD_ANY[
            20 if host_bits & BORN_HOST_V6 else 8, 20 if host_bits & STORE_HOST_V6 else 8
        ]
        if size < layout.size + 3:
            raise CorruptRecord(RecordFault.SIZE_OF_HOSTS, size=size)
        head = layout.unpack_from(buf, pos)
        body_at = pos + layout.size
    end = pos + size
    body_len = head[14]
    after_body = body_at + body_len
    if body_len < 0 or after_body + 4 > end + (magic == MAGIC_V1):
        raise CorruptRecord(RecordFault.BODY_LENGTH, length=body_len, size=size)
    if magic == MAGIC_V1:
        topic_len = buf[after_body]
        topic_at = after_body + 1
    else:
        topic_len = _U16.unpack_from(buf, after_body)[0]
        topic_at = after_body + 2
    topic_end = topic_at + topic_len
    properties_at = topic_end + 2
    if properties_at > end:
        raise CorruptRecord(RecordFault.TOPIC_LENGTH, length=topic_len, size=size)
    properties_len = _I16.unpack_from(buf, topic_end)[0]
    if properties_len < 0 or properties_at + properties_len != end:
        parts = properties_at + properties_len - pos
        raise CorruptRecord(RecordFault.PARTS, parts=parts, size=size)
    return head, body_at, topic_at, topic_end, properties_at


def _check_crc(buf: Buffer, pos: int, end: int, body_crc: int, body_at: int, body_len: int) -> None:
    view = memoryview(buf)
    tail_at = end - CRC_TAIL_SIZE
    tail = bytes(view[tail_at:end])
    if tail.startswith(CRC_PROPERTY):
        if tail != crc_tail(_crc32(view[pos:tail_at]) & 0x7FFFFFFF):
            raise CorruptRecord(RecordFault.PROPERTY_CRC)
        return
    # Correct digits after a wrong name: the name itself is damaged, which no CRC covers.
    digits = tail[len(CRC_PROPERTY) :]
    if digits[:-1].isdigit() and crc_tail(_crc32(view[pos:tail_at]) & 0x7FFFFFFF).endswith(digits):
        raise CorruptRecord(RecordFault.PROPERTY_CRC_NAME)
    if body_len and body_crc != _crc32(view[body_at : body_at + body_len]) & 0x7FFFFFFF:
        raise CorruptRecord(RecordFault.BODY_CRC)


def _wrong_magic(size: int, magic: int) -> CorruptRecord:
    if magic == 0 and size == 0:
        return CorruptRecord(RecordFault.ZEROS)
    return CorruptRecord(RecordFault.MAGIC, magic=magic)
