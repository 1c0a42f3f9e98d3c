"""The probe: raw sends to all broker addresses in turn, and which of them were acknowledged.

A stock client learns a new route only by polling, so it cannot show how quick a failover is. The
probe keeps one connection per broker, sends to each at a fixed pace without waiting for answers,
and notes each acknowledgement with its time. At the end every acknowledged key is read back.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from bench import wire
from protocol.record import decode_records

TOPIC: Final = "BenchProbe"
BODY: Final = b"p" * 128
CONNECT_TIMEOUT_S: Final = 0.05
IN_FLIGHT_MAX: Final = 256
PULL_FLAGS: Final = "4"  # the subscription is in the request, nothing is waited for


@dataclass(frozen=True, slots=True)
class Ack:
    """One acknowledged write, times of the monotonic clock."""

    key: str
    address: str
    sent_s: float
    acked_s: float


@dataclass(slots=True)
class _Line:
    """The connection to one broker and what is under way on it."""

    address: str
    socket: socket.socket | None = None
    frames: wire.Frames = field(default_factory=wire.Frames)
    in_flight: dict[int, tuple[str, float]] = field(default_factory=dict)


class Probe:
    """Writes to several brokers at once. `acks` holds every acknowledged write of its life."""

    def __init__(self, addresses: Iterable[str], *, prefix: str, interval_s: float) -> None:
        self._lines = [_Line(address) for address in addresses]
        self._prefix = prefix
        self._interval_s = interval_s
        self._opaque = itertools.count(1)
        self.acks: list[Ack] = []
        self.sent = 0
        self.codes: Counter[int] = Counter()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exc: object) -> None:
        for line in self._lines:
            self._drop(line)

    def run(self, seconds: float) -> int:
        """Writes for a while; how many were acknowledged in it."""
        before = len(self.acks)
        self._run(time.monotonic() + seconds, None)
        return len(self.acks) - before

    def run_until_ack(self, seconds: float, *, not_from: str | None = None) -> Ack | None:
        """Writes until a write sent from now on is acknowledged by a broker other than `not_from`.

        None if that took longer than `seconds`.
        """
        begun = time.monotonic()

        def wanted(ack: Ack) -> bool:
            return ack.sent_s >= begun and ack.address != not_from

        return self._run(begun + seconds, wanted)

    def _run(self, deadline: float, wanted: Callable[[Ack], bool] | None) -> Ack | None:
        next_due = time.monotonic()
        while (now := time.monotonic()) < deadline:
            if now >= next_due:
                for line in self._lines:
                    self._send(line)
                next_due = max(next_due + self._interval_s, now)
                continue
            for ack in self._receive(min(next_due, deadline) - now):
                self.acks.append(ack)
                if wanted is not None and wanted(ack):
                    return ack
        return None

    def _send(self, line: _Line) -> None:
        if line.socket is None and not self._connect(line):
            return
        assert line.socket is not None
        if len(line.in_flight) >= IN_FLIGHT_MAX:
            return
        opaque = next(self._opaque)
        key = f"{self._prefix:0<16.16}{opaque:016X}"
        ext = wire.send_ext(TOPIC, opaque % 4, key, wire.now_ms())
        line.in_flight[opaque] = (key, time.monotonic())
        try:
            line.socket.sendall(wire.encode(wire.SEND_V2, ext, opaque, BODY))
            self.sent += 1
        except OSError:
            self._drop(line)

    def _connect(self, line: _Line) -> bool:
        try:
            line.socket = socket.create_connection(
                wire.split_address(line.address), CONNECT_TIMEOUT_S
            )
        except OSError:
            return False
        line.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return True

    def _receive(self, timeout_s: float) -> list[Ack]:
        open_lines = {line.socket: line for line in self._lines if line.socket is not None}
        if not open_lines:
            time.sleep(max(0.0, timeout_s))
            return []
        readable, _, _ = select.select(list(open_lines), [], [], max(0.0, timeout_s))
        return [ack for ready in readable for ack in self._read(open_lines[ready])]

    def _read(self, line: _Line) -> list[Ack]:
        assert line.socket is not None
        try:
            data = line.socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._drop(line)
            return []
        now = time.monotonic()
        acks = []
        for reply in line.frames.feed(data):
            self.codes[reply.code] += 1
            sent = line.in_flight.pop(reply.opaque, None)
            if sent is not None and reply.code == wire.OK:
                acks.append(Ack(sent[0], line.address, sent[1], now))
        return acks

    def _drop(self, line: _Line) -> None:
        if line.socket is not None:
            with contextlib.suppress(OSError):
                line.socket.close()
        line.socket = None
        line.frames = wire.Frames()
        line.in_flight.clear()


def read_keys(master: str, topic: str, queues: int) -> Counter[str]:
    """How often each unique key can be read from the queues of a topic."""
    found: Counter[str] = Counter()
    with wire.Caller(master, timeout_s=15.0) as caller:
        for queue_id in range(queues):
            found.update(_read_queue(caller, topic, queue_id))
    return found


def _read_queue(caller: wire.Caller, topic: str, queue_id: int) -> Counter[str]:
    found: Counter[str] = Counter()
    asked = caller.call(wire.MAX_OFFSET, {"topic": topic, "queueId": str(queue_id)})
    end = int(asked.ext.get("offset", "0"))
    offset = 0
    while offset < end:
        reply = caller.call(wire.PULL, _pull_ext(topic, queue_id, offset))
        if reply.code == wire.OK:
            for message in decode_records(reply.body):
                found[message.properties["UNIQ_KEY"]] += 1
        following = int(reply.ext.get("nextBeginOffset", "0"))
        if following <= offset:
            raise RuntimeError(
                f"queue {queue_id} of {topic} cannot be read on from {offset} of {end}:"
                f" code {reply.code} {reply.remark}"
            )
        offset = following
    return found


def _pull_ext(topic: str, queue_id: int, offset: int) -> dict[str, str]:
    return {
        "consumerGroup": "bench_read_back",
        "topic": topic,
        "queueId": str(queue_id),
        "queueOffset": str(offset),
        "maxMsgNums": "32",
        "sysFlag": PULL_FLAGS,
        "commitOffset": "0",
        "suspendTimeoutMillis": "0",
        "subVersion": "0",
        "subscription": "*",
        "expressionType": "TAG",
    }


@dataclass(frozen=True, slots=True)
class HaStatus:
    """What a broker answers to 907. `acked` = the slaves' acknowledged offsets, by connection."""

    master: bool
    max_offset: int
    in_sync_slaves: int
    acked: dict[str, int]

    def is_level(self, slaves: int) -> bool:
        """Whether that many slaves are in the set, connected, and hold the whole log."""
        return (
            self.master
            and self.in_sync_slaves >= slaves
            and sum(offset >= self.max_offset for offset in self.acked.values()) >= slaves
        )


def parse_ha_status(body: bytes) -> HaStatus:
    """Reads the JSON body of 907."""
    info = json.loads(body)
    connections = info.get("haConnectionInfo") or []
    return HaStatus(
        bool(info.get("master")),
        int(info.get("masterCommitLogMaxOffset") or 0),
        sum(bool(one.get("inSync")) for one in connections),
        {one["addr"]: int(one.get("slaveAckOffset") or 0) for one in connections},
    )


def ha_status(address: str) -> HaStatus | None:
    """Asks a broker; None while it does not answer."""
    try:
        reply = wire.ask(address, wire.HA_STATUS, {})
    except OSError:
        return None
    return parse_ha_status(reply.body) if reply.code == wire.OK and reply.body else None
