"""How quickly a replica whose store was emptied is level again.

The log is filled with 1 KiB messages, 64 to a batch frame, so that it has as many records as a real
one. The slave is stopped, its store removed but for the broker's identity, and started. The
master's HA status (907) is polled: from the last reply with nothing acknowledged to the first with
everything.
"""

import signal
import struct
import time
import uuid

from lab.bench.cpu import CpuMeter
from lab.bench.report import Mark, ReportRow
from lab.bench.run import BenchPart, BenchRun, progress
from lab.bench.side import QUEUES, ClusterSide, SideError
from lab.cluster import frames
from lab.cluster.connection import BlockingConnection, ha_status, parse_ha_status

TOPIC = "BenchCatchUp"
BATCH = 64
FRAMES_UNDER_WAY = 8
BODY = b"c" * 1024
POLL_S = 0.01
LIMIT_S = 300.0


def rows() -> list[ReportRow]:
    return [
        ReportRow("catch_up", "catch-up of an emptied replica", "MB/s", "more", Mark(times=1.2)),
        ReportRow("catch_up_total", "  from process start to level", "s", "less"),
        ReportRow("catch_up_master", "  master", "ms per MB", "less"),
        ReportRow("catch_up_slave", "  slave, with its start", "ms per MB", "less"),
    ]


def measure(run: BenchRun, table: dict[str, ReportRow]) -> None:
    size = run.count(1_400_000_000, 150_000_000)
    for name in run.sides:
        with run.side(name) as side:
            side.wait_whole()
            side.create_topic(TOPIC)
            progress(f"catch-up: {name}, filling {size / 1e6:,.0f} MB")
            fill(side.master_address(), size)
            side.wait_level()
            for _ in range(run.rounds):
                _round(run, side, table)


def _round(run: BenchRun, side: ClusterSide, table: dict[str, ReportRow]) -> None:
    master = side.master_address()
    slave = next(address for address in side.broker_addresses if address != master)
    side.kill_broker(slave, signal.SIGTERM)
    side.empty_store(slave)
    began = time.monotonic()
    side.start_broker(slave)
    # A new process starts at zero, so its whole time is what it uses from here on.
    meter = CpuMeter({"master": [side.broker_pid(master)], "slave": [side.broker_pid(slave)]})
    first, level, size = watch(master)
    use = meter.stop()
    rate = size / 1e6 / (level - first)
    table["catch_up"].samples(side.name).append(rate)
    table["catch_up_total"].samples(side.name).append(level - began)
    for who, used in use.seconds.items():
        table[f"catch_up_{who}"].samples(side.name).append(used * 1e3 / (size / 1e6))
    seen = {"bytes": size, "firstS": first - began, "levelS": level - began, "cpuS": use.seconds}
    run.note("catchup", side.name, seen, use.others_percent)
    progress(
        f"  {rate:,.0f} MB/s, {size / 1e6:,.0f} MB, level {level - began:.1f} s after the start;"
        f" master {use.seconds['master']:.1f} s, slave {use.seconds['slave']:.1f} s of processor,"
        f" noise {use.others_percent:.0f} %"
    )
    side.wait_level()


def watch(master: str) -> tuple[float, float, int]:
    """When the first byte was sent, when all were acknowledged, and how many they were."""
    deadline = time.monotonic() + LIMIT_S
    first = time.monotonic()
    seen_start = False
    with BlockingConnection(master) as connection:
        while (now := time.monotonic()) < deadline:
            status = parse_ha_status(connection.request(frames.HA_STATUS).body)
            acked = max(status.acked.values(), default=0)
            if acked <= 0:
                first, seen_start = now, True
            elif seen_start and acked >= status.max_offset:
                return first, time.monotonic(), status.max_offset
            elif not seen_start:
                raise SideError(f"the emptied slave began at {acked} of {status.max_offset}")
            time.sleep(POLL_S)
    raise SideError(f"the emptied slave was not level within {LIMIT_S:.0f} s: {ha_status(master)}")


def batch_body(prefix: str, first: int, count: int) -> bytes:
    """The body of a batch send (320): small records one after the other."""
    parts = []
    for number in range(first, first + count):
        properties = (
            f"UNIQ_KEY\x01{prefix}{number:016X}\x02WAIT\x01true\x02TAGS\x01TagA\x02".encode()
        )
        size = 22 + len(BODY) + len(properties)
        parts.append(struct.pack(">iiiii", size, 0, 0, 0, len(BODY)))
        parts.append(BODY + struct.pack(">h", len(properties)) + properties)
    return b"".join(parts)


def fill(master: str, size: int) -> None:
    """Writes until the log is at least `size` bytes long, a few frames under way at once."""
    prefix = uuid.uuid4().hex[:16]
    number = under_way = 0
    with BlockingConnection(master, timeout_s=30.0) as connection:
        while True:
            while under_way < FRAMES_UNDER_WAY:
                ext = frames.send_ext(TOPIC, number // BATCH % QUEUES) | {"m": "true"}
                connection.post(frames.SEND_BATCH, ext, batch_body(prefix, number, BATCH))
                number += BATCH
                under_way += 1
            reply = connection.take()
            under_way -= 1
            if reply.code not in (frames.OK, frames.SYSTEM_BUSY):
                raise SideError(f"a batch was refused: code {reply.code} {reply.remark}")
            if number % (BATCH * 512) == 0:
                status = ha_status(master)
                if status is not None and status.max_offset >= size:
                    break
        while under_way:
            connection.take()
            under_way -= 1


PART = BenchPart("catchup", "catch-up of an emptied replica", rows, measure)
