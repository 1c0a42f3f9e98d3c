"""The bytes of a classic HA connection and their readers. Pure. Slave to master: the end of its log
as i64, both request and ack. Master to slave: frames of i64 offset, i32 size and log bytes, which
may begin and end inside records; size 0 is a heartbeat with the next offset. Big-endian. Neither
side names itself. Origin: Java DefaultHAConnection and DefaultHAClient.

With a secret of the nodes a slave sends a hello before its first report, with its id and a random
number; the master answers with its own and its proof, and the slave sends its proof
(`node_secret`). Every eight bytes of the hello are a negative i64: a master of Java, or of an
earlier version, takes none of them for a report."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from batonmq.ha.node_secret import NONCE_BYTES, PROOF_BYTES
from batonmq.protocol.errors import RemoteProtocolError

REPORT: Final = struct.Struct(">q")
HEADER: Final = struct.Struct(
    ">"
    "q"  # 0  offset of the first byte in the log
    "i"  # 8  size of the body; 0 is a heartbeat
)
HELLO: Final = struct.Struct(
    ">"
    "4s"  # 0  BATH
    f"{NONCE_BYTES}s"  # 4
    "q"  # 20 brokerId
)
_HELLO_BYTES: Final = HELLO.size // 7 * 8
_HELLO_BEGIN: Final = b"\xffBATH"
ANSWER: Final = struct.Struct(
    ">"
    "4s"  # 0  BATH
    f"{NONCE_BYTES}s"  # 4
    f"{PROOF_BYTES}s"  # 20
)
BODY_SIZE_MAX: Final = (4 << 20) - HEADER.size
"""A Java slave hangs if a frame does not fit into its buffer of 4 MiB."""


class FrameHead(NamedTuple):
    """`size` bytes of the log, from `offset` on, follow."""

    offset: int
    size: int


class Hello(NamedTuple):
    """Of a slave that knows the secret of the nodes."""

    nonce: bytes
    broker_id: int


class Answer(NamedTuple):
    """The master's, to a Hello."""

    nonce: bytes
    proof: bytes


def encode_hello(hello: Hello) -> bytes:
    packed = HELLO.pack(b"BATH", *hello)
    return b"".join(b"\xff" + packed[at : at + 7] for at in range(0, HELLO.size, 7))


def encode_answer(answer: Answer) -> bytes:
    return ANSWER.pack(b"BATH", *answer)


def encode_report(log_end: int) -> bytes:
    return REPORT.pack(log_end)


def encode_head(offset: int, size: int) -> bytes:
    return HEADER.pack(offset, size)


class ReportReader:
    """Reads what a slave sends. Reports only grow, so only the last one of a read counts."""

    def __init__(self) -> None:
        self._pending = b""
        self._opened = False
        self._proof_next = False
        self.hello: Hello | None = None
        """Of the last `feed`; then `proof` comes before any report."""
        self.proof = b""
        """Of the last `feed`."""

    def feed(self, data: bytes) -> int | None:
        """Returns the last whole report, or None. Raises RemoteProtocolError if it is negative."""
        pending = self._pending + data
        self.hello, self.proof = None, b""
        if not self._opened or self._proof_next:
            pending = self._opening_in(pending)
            if not self._opened or self._proof_next:
                self._pending = pending
                return None
        whole = len(pending) - len(pending) % REPORT.size
        self._pending = pending[whole:]
        if not whole:
            return None
        last: int = REPORT.unpack_from(pending, whole - REPORT.size)[0]
        if last < 0:
            raise RemoteProtocolError(f"a slave that reports {last} as the end of its log")
        return last

    def _opening_in(self, pending: bytes) -> bytes:
        """Takes hello and proof; returns what is left."""
        if not self._opened and len(pending) >= REPORT.size:
            if not pending.startswith(_HELLO_BEGIN):
                self._opened = True
            elif len(pending) >= _HELLO_BYTES:
                packed = b"".join(pending[at + 1 : at + 8] for at in range(0, _HELLO_BYTES, 8))
                _, *fields = HELLO.unpack(packed)
                self.hello = Hello(*fields)
                self._opened = self._proof_next = True
                pending = pending[_HELLO_BYTES:]
        if self._proof_next and len(pending) >= PROOF_BYTES:
            self.proof, pending = pending[:PROOF_BYTES], pending[PROOF_BYTES:]
            self._proof_next = False
        return pending


class ClassicFrameReader:
    """Reads what a master sends: each FrameHead, then its body in pieces (memoryview)."""

    def __init__(self) -> None:
        self.answer_first = False
        """An Answer must come before the first frame."""
        self._pending = b""
        self.body_left = 0  # Bytes of the current body that are still to come; 0 between frames.

    def feed(self, data: memoryview) -> Iterator[Answer | FrameHead | memoryview]:
        """Yields the parts in `data`; exhaust it before the next `feed`. Raises RemoteProtocolError
        for an impossible offset or size."""
        at, end = 0, len(data)
        if self.answer_first:
            at = min(end, ANSWER.size - len(self._pending))
            self._pending += data[:at]
            if len(self._pending) < ANSWER.size:
                return
            magic, *fields = ANSWER.unpack(self._pending)
            if magic != b"BATH":
                raise RemoteProtocolError("the master proves nothing: it answers no hello")
            self._pending, self.answer_first = b"", False
            yield Answer(*fields)
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
