"""A backlog that is read from the disk: written, put out of memory, read from its first message."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lab.bench.cpu import CpuMeter
from lab.bench.load_loop import SendTarget, write
from lab.cluster import frames
from lab.cluster.connection import BlockingConnection

TOPIC: Final = "ScaleBacklog"
QUEUES: Final = 8
BODY: Final = b"x" * (32 << 10)


def behind_memory(
    address: str, folder: Path, gigabytes: float, meter: CpuMeter
) -> dict[str, float]:
    """Rates of writing and of reading. The pages of the log are dropped in between, as far as the
    kernel does it for a file that a broker has mapped."""
    count = int(gigabytes * 1e9 / len(BODY))
    with BlockingConnection(address, timeout_s=60) as connection:
        phase = write(_targets(connection, count), BODY, meter)
        _drop_pages(folder)
        began = time.monotonic()
        read = _read_all(connection)
        seconds = time.monotonic() - began
    if read < count:
        raise RuntimeError(f"{read} of {count} messages were read")
    each = phase.use.micros_per(phase.acked)
    return {
        "mb_per_second": phase.per_second * len(BODY) / 1e6,
        "read_mb_per_second": read * len(BODY) / 1e6 / seconds,
        "master_us": each["master"],
        "slave_us": each["slave"],
        "gap_ms": phase.gap_s * 1000,
    }


def _targets(connection: BlockingConnection, count: int) -> Iterator[SendTarget]:
    for number in range(count):
        yield SendTarget(connection, TOPIC, number % QUEUES, QUEUES)


def _drop_pages(folder: Path) -> None:
    for path in folder.glob("**/commitlog/*"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read_all(connection: BlockingConnection) -> int:
    """How many messages there are; each queue has one pull under way."""
    asked: dict[int, tuple[int, int]] = {}

    def ask(queue_id: int, offset: int) -> None:
        ext = frames.pull_ext(TOPIC, queue_id, offset)
        asked[connection.post(frames.PULL, ext)] = queue_id, offset

    for queue_id in range(QUEUES):
        ask(queue_id, 0)
    read = 0
    while asked:
        reply = connection.take()
        queue_id, offset = asked.pop(reply.opaque)
        following = int(reply.ext.get("nextBeginOffset", offset))
        if reply.code == frames.OK and following > offset:
            read += following - offset
            ask(queue_id, following)
    return read
