"""The bytes of a classic HA connection and their readers. Pure. Slave to master: the end of its log
as i64, both request and ack. Master to slave: frames of i64 offset, i32 size and log bytes, which
may begin and end inside records; size 0 is a heartbeat with the next offset. Big-endian. Neither
side names itself. Origin: Java DefaultHAConnection and DefaultHAClient."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from batonmq.protocol.errors import RemoteProtocolError

REPORT: Final = struct.Struct(">q")
HEADER: Final = struct.Struct(
    ">"
    "q"  # 0  offset of the first byte in the log
    "i"  # 8  size of the body; 0 is a heartbeat
)
BODY_SIZE_MAX: Final = (4 << 20) - HEADER.size
"""A Java slave hangs if a frame does not fit into its buffer of 4 MiB."""


class FrameHead(NamedTuple):
    """`size` bytes of the log, from `offset` on, follow."""

    offset: int
    size: int


def encode_report(log_end: int) -> bytes:
    return REPORT.pack(log_end)


def encode_head(offset: int, size: int) -> bytes:
    return HEADER.pack(offset, size)


class ReportReader:
    """Reads what a slave sends. Reports only grow, so only the last one of a read counts."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> int | None:
        """Returns the last whole report, or None. Raises RemoteProtocolError if it is negative."""
        pending = self._pending + data
        whole = len(pending) - len(pending) % REPORT.size
        self._pending = pending[whole:]
        if not whole:
            return None
        last: int = REPORT.unpack_from(pending, whole - REPORT.size)[0]
        if last < 0:
            raise RemoteProtocolError(f"a slave that reports {last} as the end of its log")
        return last


class ClassicFrameReader:
    """Reads what a master sends: each FrameHead, then its body in pieces (memoryview)."""

    def __init__(self) -> None:
        self._pending = b""
        self.body_left = 0  # Bytes of the current body that are still to come; 0 between frames.

    def feed(self, data: memoryview) -> Iterator[FrameHead | memoryview]:
        """Yields the parts in `data`; exhaust it before the next `feed`. Raises RemoteProtocolError
        for an impossible offset or size."""
        at, end = 0, len(data)
        while at < end:
            if self.body_left:
                piece = data[at : at + self.body_left]
                self.body_left -= len(piece)
                at += len(piece)
                yield piece
                continue
            take = min(HEADER.size - len(self._pending), end - at)
            self._pending += data[at : at + take]
            at += take
            if len(self._pending) < HEADER.size:
                return
            head = FrameHead._make(HEADER.unpack(self._pending))
            self._pending = b""
            if head.offset < 0 or not 0 <= head.size <= BODY_SIZE_MAX:
                raise RemoteProtocolError(
                    f"an HA frame of {head.size} bytes at offset {head.offset}; allowed are"
                    f" 0 to {BODY_SIZE_MAX} bytes"
                )
            self.body_left = head.size
            yield head
