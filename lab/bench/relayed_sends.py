"""What a relayed send costs beside a direct one: `python -m lab.bench.relayed_sends`.

One local cluster of three; one connection with 1, 16 and 64 sends of 100 bytes on their way, to the
master and to a slave that passes them on, in turn. Printed for each: processor time per send at the
master and at that slave, and the median time until the answer.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.bench.cpu import cpu_seconds
from lab.cluster import frames
from lab.cluster.connection import BlockingConnection
from lab.cluster.up import ClusterProcess

TOPIC = "RelayedSends"
SIZE = 100
COUNT = 10_000
ROUNDS = 3


def send_all(address: str, count: int, flight: int) -> float:
    """Sends as a stock client does; the median time until an answer, in ms."""
    sent_at: dict[int, float] = {}
    took: list[float] = []
    with BlockingConnection(address) as connection:
        for number in range(1, count + 1):
            ext = frames.send_ext(TOPIC, number % 4, frames.key_properties(f"{number:032X}"))
            frame = frames.encode(frames.SEND_V2, ext, number, b"x" * SIZE, language="JAVA")
            sent_at[number] = time.monotonic()
            connection.write(frame)
            while len(sent_at) >= flight or (number == count and sent_at):
                reply = connection.take()
                if reply.code:
                    raise RuntimeError(f"{address} answered {reply.code} {reply.remark}")
                took.append(time.monotonic() - sent_at.pop(reply.opaque))
    return statistics.median(took) * 1000


def measure(master: dict[str, Any], slave: dict[str, Any], flight: int) -> None:
    for way, to in (("direct", master), ("relayed", slave)):
        before = [cpu_seconds([node["pid"]]) for node in (master, slave)]
        answer_ms = send_all(to["address"], COUNT, flight)
        after = [cpu_seconds([node["pid"]]) for node in (master, slave)]
        cost = [1e6 * (end - begin) / COUNT for begin, end in zip(before, after, strict=True)]
        print(
            f"{way:8} {flight:3} in flight: master {cost[0]:5.1f} µs, slave {cost[1]:5.1f} µs,"
            f" answered in {answer_ms:.2f} ms",
            flush=True,
        )


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="relayed-sends-") as folder,
        ClusterProcess(Path(folder), settings={}) as cluster,
    ):
        cluster.wait_in_sync(3)
        master, slave = cluster.master(), cluster.slaves()[0]
        for address in (master["address"], slave["address"]):
            send_all(address, 500, 16)
        for flight in (1, 16, 64):
            for _ in range(ROUNDS):
                measure(master, slave, flight)


if __name__ == "__main__":
    main()
