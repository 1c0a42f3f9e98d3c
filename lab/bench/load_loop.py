"""Sends over any number of connections, answered in the order in which they went out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from lab.bench.cpu import CpuMeter, CpuUse
from lab.cluster import frames
from lab.cluster.connection import BlockingConnection

IN_FLIGHT: Final = 16


class SendTarget(NamedTuple):
    """Where a message goes. A topic that is new gets `queues` queues."""

    connection: BlockingConnection
    topic: str
    queue_id: int
    queues: int


@dataclass(frozen=True, slots=True)
class Phase:
    """`gap_s`: the longest time between two acks."""

    acked: int
    seconds: float
    gap_s: float
    use: CpuUse

    @property
    def per_second(self) -> float:
        return self.acked / self.seconds


def write(
    targets: Iterable[SendTarget], body: bytes, meter: CpuMeter, *, in_flight: int = IN_FLIGHT
) -> Phase:
    """Sends until `targets` end. Raises RuntimeError for a send that was refused."""
    under_way: deque[BlockingConnection] = deque()
    acked, gap_s = 0, 0.0
    began = last = time.monotonic()

    def take() -> None:
        nonlocal acked, gap_s, last
        reply = under_way.popleft().take()
        if reply.code != frames.OK:
            raise RuntimeError(f"send {acked}: code {reply.code} {reply.remark}")
        now = time.monotonic()
        gap_s, last = max(gap_s, now - last), now
        acked += 1

    for target in targets:
        if len(under_way) == in_flight:
            take()
        fields = frames.send_ext(target.topic, target.queue_id, queues=target.queues)
        target.connection.post(frames.SEND_V2, fields, body)
        under_way.append(target.connection)
    while under_way:
        take()
    return Phase(acked, time.monotonic() - began, gap_s, meter.stop())
