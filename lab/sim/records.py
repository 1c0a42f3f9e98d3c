"""The records in the bytes of a log, read without the code under test."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from batonmq.protocol.records.codec import MAGIC_BLANK, MAGIC_V2

# size, magic, CRC, queue id, flag, queue offset, own offset, flags, born, born host, stored,
# stored host, reconsumed, prepared: hosts have four bytes each, as all have here.
_HEAD = struct.Struct(">iIiiiqqiq8sq8siq")
_INT = struct.Struct(">i")


class LogRecord(NamedTuple):
    """`offset`: in the log. `prepared`: that of the half message whose commit it is."""

    offset: int
    size: int
    topic: str
    queue_id: int
    queue_offset: int
    stored_ms: int
    body: bytes | bytearray
    reconsumed: int
    prepared: int
    properties: bytes


def records(data: bytes | bytearray, at: int = 0, end: int | None = None) -> Iterator[LogRecord]:
    """The whole records of `data` that begin in [at, end); one begins at `at`."""
    end = len(data) if end is None else min(end, len(data))
    while at + _HEAD.size <= end:
        head = _HEAD.unpack_from(data, at)
        size, magic = head[0], head[1]
        if size <= 0:
            return
        if magic != MAGIC_BLANK:
            (length,) = _INT.unpack_from(data, at + _HEAD.size)
            begin = at + _HEAD.size + _INT.size
            named = begin + length + (2 if magic == MAGIC_V2 else 1)
            topic_end = named + int.from_bytes(data[begin + length : named], "big")
            properties_end = topic_end + 2 + int.from_bytes(data[topic_end : topic_end + 2], "big")
            yield LogRecord(
                at,
                size,
                data[named:topic_end].decode(),
                head[3],
                head[5],
                head[10],
                data[begin : begin + length],
                head[12],
                head[13],
                bytes(data[topic_end + 2 : properties_end]),
            )
        at += size


def log_end(disk: Path) -> int:
    """Where the last record ends in the log on a disk that holds it from offset 0 on."""
    log = b"".join(path.read_bytes() for path in sorted(disk.rglob("commitlog/*[0-9]")))
    return max((record.offset + record.size for record in records(log)), default=0)
