"""Raw remoting frames over a plain socket: what a broker answers, seen without any client of ours.

Only a frame and a JSON header; no retries, no routes, no imports from
the packages under test, so that an error there cannot hide itself here.
"""

from __future__ import annotations

import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SEND_V2 = 310
SEND_V1 = 10
PULL = 11
QUERY_OFFSET = 14
UPDATE_OFFSET = 15
UPDATE_TOPIC = 17
RUNTIME_INFO = 28
MAX_OFFSET = 30
ELECT_MASTER = 1002
METADATA = 1005
SYNC_STATE = 1006
EPOCH_CACHE = 1007
HA_STATUS = 907
ROUTE = 105
FLAG_ONEWAY = 2


@dataclass(frozen=True)
class Reply:
    """One response frame."""

    code: int
    remark: str
    ext: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Probe:
    """One connection to one address. Raises OSError as the socket does, EOFError on a close."""

    def __init__(self, address: str, *, timeout_s: float = 5.0) -> None:
        host, _, port = address.rpartition(":")
        self.address = address
        self._opaque = itertools.count(1)
        self._socket = socket.create_connection((host, int(port)), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def request(
        self, code: int, ext: Mapping[str, object] | None = None, body: bytes = b"", flag: int = 0
    ) -> Reply:
        """Sends one request and waits for its reply; requests of the peer's own are passed by."""
        opaque = self.post(code, ext, body, flag)
        while True:
            header, content = self.read_frame()
            if header["opaque"] == opaque and header["flag"] & 1:
                return Reply(
                    header["code"],
                    header.get("remark") or "",
                    header.get("extFields") or {},
                    content,
                )

    def post(
        self, code: int, ext: Mapping[str, object] | None = None, body: bytes = b"", flag: int = 0
    ) -> int:
        """Sends a request and does not wait; its opaque."""
        opaque = next(self._opaque)
        header = json.dumps(
            {
                "code": code,
                "extFields": {key: str(value) for key, value in (ext or {}).items()},
                "flag": flag,
                "language": "JAVA",
                "opaque": opaque,
                "serializeTypeCurrentRPC": "JSON",
                "version": 479,
            }
        ).encode()
        self.write(struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body)
        return opaque

    def write(self, data: bytes) -> None:
        self._socket.sendall(data)

    def read_frame(self) -> tuple[dict[str, Any], bytes]:
        (length,) = struct.unpack(">I", self._read(4))
        frame = self._read(length)
        header_length = int.from_bytes(frame[1:4], "big")
        return json.loads(frame[4 : 4 + header_length]), frame[4 + header_length :]

    def is_closed_by_peer(self) -> bool:
        """Waits for the peer to close; True if it did, False if it sent something instead."""
        try:
            return self._socket.recv(1) == b""
        except ConnectionError:
            return True

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            chunk = self._socket.recv(size - len(parts))
            if not chunk:
                raise EOFError(f"{self.address} closed the connection")
            parts += chunk
        return bytes(parts)

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        queue_id: int = 0,
        properties: str = "",
        queues: int = 4,
        flag: int = 0,
    ) -> Reply:
        """310, a topic created from TBW102 if it is new."""
        return self.request(SEND_V2, send_fields(topic, queue_id, properties, queues), body, flag)

    def pull(self, topic: str, offset: int, *, queue_id: int = 0, count: int = 32) -> Reply:
        """11, answered at once; the body holds the stored records."""
        return self.request(
            PULL,
            {
                "consumerGroup": "probe",
                "topic": topic,
                "queueId": queue_id,
                "queueOffset": offset,
                "maxMsgNums": count,
                "sysFlag": 4,
                "commitOffset": 0,
                "suspendTimeoutMillis": 0,
                "subVersion": 1,
                "subscription": "*",
                "expressionType": "TAG",
            },
        )


def send_fields(
    topic: str, queue_id: int = 0, properties: str = "", queues: int = 4
) -> dict[str, object]:
    """The extFields of a 310."""
    return {
        "a": "probe",
        "b": topic,
        "c": "TBW102",
        "d": queues,
        "e": queue_id,
        "f": 0,
        "g": int(time.time() * 1000),
        "h": 0,
        "i": properties,
        "j": 0,
        "k": "false",
        "m": "false",
    }


def ask(
    address: str, code: int, ext: Mapping[str, object] | None = None, body: bytes = b""
) -> Reply:
    """One request on a connection of its own."""
    with Probe(address) as probe:
        return probe.request(code, ext, body)


@dataclass(frozen=True)
class Ack:
    """A write that was answered with code 0."""

    number: int
    queue_id: int
    queue_offset: int
    at: float


@dataclass
class Writer:
    """A thread that writes the numbers 0, 1, 2, … into one queue, each until it is acknowledged.

    Brokers are tried in turn, so it finds a new master by itself; a number goes on only after the
    one before was acknowledged, so the queue must hold them in a non-falling order. `refusals`
    keeps every answer that was not code 0.
    """

    addresses: list[str]
    topic: str
    queue_id: int
    size: int = 200
    timeout_s: float = 4.0
    acks: list[Ack] = field(default_factory=list)
    refusals: list[tuple[float, str, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"writer-{self.queue_id}")
        self.error: BaseException | None = None

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends after the write in progress. Raises what ended the thread, if anything did."""
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive(), "the writer hangs"
        if self.error is not None:
            raise self.error

    def body(self, number: int) -> bytes:
        return b"%d %d " % (self.queue_id, number) + b"x" * self.size

    def _run(self) -> None:
        try:
            self._write_until_stopped()
        except BaseException as error:
            self.error = error

    def _write_until_stopped(self) -> None:
        turn = number = 0
        probe: Probe | None = None
        while not self._stop.is_set():
            address = self.addresses[turn % len(self.addresses)]
            try:
                if probe is None:
                    probe = Probe(address, timeout_s=self.timeout_s)
                reply = probe.send(self.topic, self.body(number), queue_id=self.queue_id)
            except (OSError, EOFError):
                if probe is not None:
                    probe.close()
                probe = None
                turn += 1
                self._stop.wait(0.002)
                continue
            if reply.code == 0:
                self.acks.append(
                    Ack(
                        number,
                        int(reply.ext["queueId"]),
                        int(reply.ext["queueOffset"]),
                        time.monotonic(),
                    )
                )
                number += 1
                continue
            self.refusals.append((time.monotonic(), address, reply.code, reply.remark))
            probe.close()
            probe = None
            turn += 1
            self._stop.wait(0.005)
        if probe is not None:
            probe.close()


def number_in(body: bytes) -> tuple[int, int]:
    """(queue id, number) of a body that a Writer made."""
    queue_id, number, _ = body.split(b" ", 2)
    return int(queue_id), int(number)
