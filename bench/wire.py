"""Remoting frames by hand: just what a probe needs, independent of the code that is measured."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

VERSION: Final = 479
SEND_V2: Final = 310
SEND_BATCH: Final = 320
PULL: Final = 11
MAX_OFFSET: Final = 30
UPDATE_TOPIC: Final = 17
ROUTE: Final = 105
HA_STATUS: Final = 907
OK: Final = 0
BROKER_NAME: Final = "broker-a"
_HEAD: Final = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. `code` 0 is success; for a send, that all replicas of the set hold it."""

    code: int
    opaque: int
    remark: str
    ext: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def encode(code: int, ext: Mapping[str, str], opaque: int, body: bytes = b"") -> bytes:
    """A whole request frame with a JSON header."""
    header = json.dumps(
        {
            "code": code,
            "extFields": dict(ext),
            "flag": 0,
            "language": "JAVA",
            "opaque": opaque,
            "serializeTypeCurrentRPC": "JSON",
            "version": VERSION,
        },
        separators=(",", ":"),
    ).encode()
    return _HEAD.pack(4 + len(header) + len(body), len(header)) + header + body


class Frames:
    """Cuts a stream of bytes into replies. Frames that are no replies are passed over."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Reply]:
        """Adds what was received, and gives every whole reply."""
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if len(self._buffer) < 4 + size:
                return
            frame = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            reply = _decode(frame)
            if reply is not None:
                yield reply


def _decode(frame: bytes) -> Reply | None:
    header_size = int.from_bytes(frame[1:4], "big")
    header = json.loads(frame[4 : 4 + header_size])
    if not header.get("flag", 0) & 1:
        return None
    return Reply(
        header["code"],
        header["opaque"],
        header.get("remark") or "",
        header.get("extFields") or {},
        frame[4 + header_size :],
    )


def send_ext(topic: str, queue_id: int, uniq_key: str, now_ms: int) -> dict[str, str]:
    """The header fields of a send (310), as the stock Java producer fills them."""
    return {
        "a": "bench_probe",
        "b": topic,
        "c": "TBW102",
        "d": "8",
        "e": str(queue_id),
        "f": "0",
        "g": str(now_ms),
        "h": "0",
        "i": f"UNIQ_KEY\x01{uniq_key}\x02WAIT\x01true\x02",
        "j": "0",
        "k": "false",
        "m": "false",
        "n": BROKER_NAME,
    }


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


class Caller:
    """A blocking connection for one question after the other. Raises OSError for what breaks."""

    def __init__(self, address: str, timeout_s: float = 5.0) -> None:
        self._socket = socket.create_connection(split_address(address), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._frames = Frames()
        self._ready: list[Reply] = []
        self._opaque = 0

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def call(self, code: int, ext: Mapping[str, str], body: bytes = b"") -> Reply:
        """Asks, and waits for the answer."""
        self.post(code, ext, body)
        return self.take()

    def post(self, code: int, ext: Mapping[str, str], body: bytes = b"") -> None:
        """Asks without waiting; `take` gives the answers as they come."""
        self._opaque += 1
        self._socket.sendall(encode(code, ext, self._opaque, body))

    def take(self) -> Reply:
        while not self._ready:
            data = self._socket.recv(1 << 20)
            if not data:
                raise ConnectionError("the peer closed the connection")
            self._ready.extend(self._frames.feed(data))
        return self._ready.pop(0)


def ask(address: str, code: int, ext: Mapping[str, str], body: bytes = b"") -> Reply:
    """One question on a connection of its own."""
    with Caller(address) as caller:
        return caller.call(code, ext, body)


def now_ms() -> int:
    """Wall clock in ms, as messages carry it."""
    return time.time_ns() // 1_000_000
