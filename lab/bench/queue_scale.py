"""How cost grows with the number of queues: `python -m lab.bench.queue_scale --queues
8,1200,10000`.

For each number one local cluster of two replicas. One connection with 16 sends under way writes
1 KiB to every queue in turn: first each topic is made by its first send (`--per-topic` queues
each), then `--seconds` long they are written over and over. Printed of both: sends per second, the
longest time without an ack, processor time of the brokers and the name servers per send, and how
many elections there were. Then the master is killed, and started again: the time until the set is
whole again. `--store` measures one store alone instead: puts, rounds of upkeep, opening.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lab.bench.cpu import CpuMeter
from lab.bench.load_loop import Phase, SendTarget, write
from lab.bench.side import OurCluster
from lab.bench.store_scale import measure_store
from lab.cluster import frames
from lab.cluster.connection import BlockingConnection, ask
from lab.cluster.processes import wait_for

BODY: Final = b"x" * 1024


def text_of(phase: Phase, elections: int) -> str:
    """`elections` counts new masterEpochs."""
    each = phase.use.micros_per(phase.acked)
    return (
        f"{phase.per_second:8,.0f} sends/s, longest gap {phase.gap_s * 1000:6.0f} ms,"
        f" master {each['master']:4.0f} + slave {each['slave']:4.0f} us,"
        f" name servers {each['name_servers']:4.0f} us per send,"
        f" {elections} elections, others used {phase.use.others_percent:.0f} %"
    )


def places(queues: int, per_topic: int) -> list[tuple[str, int]]:
    """(topic, queue id), a topic's queues side by side."""
    return [(f"Scale{number // per_topic}", number % per_topic) for number in range(queues)]


def epoch_of(side: OurCluster, address: str) -> int:
    info = ask(address, frames.RUNTIME_INFO).json["table"]
    return int(info["masterEpoch"])


def meter_of(side: OurCluster, master: str) -> CpuMeter:
    slaves = [side.broker_pid(address) for address in side.broker_addresses if address != master]
    return CpuMeter(
        {
            "master": [side.broker_pid(master)],
            "slave": slaves,
            "name_servers": side.name_server_pids(),
        }
    )


def written(side: OurCluster, places: Iterator[tuple[str, int]], per_topic: int) -> str:
    master = side.master_address()
    epoch = epoch_of(side, master)
    with BlockingConnection(master, timeout_s=60) as connection:
        targets = (SendTarget(connection, *place, per_topic) for place in places)
        phase = write(targets, BODY, meter_of(side, master))
    return text_of(phase, epoch_of(side, side.master_address()) - epoch)


def over_and_over(found: list[tuple[str, int]], seconds: float) -> Iterator[tuple[str, int]]:
    end = time.monotonic() + seconds
    while True:
        for number, place in enumerate(found):
            if number % 64 == 0 and time.monotonic() >= end:
                return
            yield place


def killed(side: OurCluster) -> str:
    """kill -9 of the slave, its start again: until it is whole and in the set."""
    slave = next(address for address in side.broker_addresses if address != side.master_address())
    side.kill_broker(slave)
    wait_for("a set without the slave", lambda: side.level() is None)
    began = time.monotonic()
    side.start_broker(slave)
    side.wait_level()
    return f"killed slave back in the set after {time.monotonic() - began:.1f} s"


def measure(folder: Path, queues: int, per_topic: int, seconds: float) -> None:
    found = places(queues, per_topic)
    with OurCluster(folder / f"queues{queues}") as side:
        print(f"{queues} queues", flush=True)
        print(f"  first sends   {written(side, iter(found), per_topic)}", flush=True)
        for _ in range(2):
            again = over_and_over(found, seconds)
            print(f"  in turn       {written(side, again, per_topic)}", flush=True)
        print(f"  {killed(side)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="lab.bench.queue_scale", description=__doc__)
    parser.add_argument("--queues", default="8,1200,10000", help="numbers, with commas between")
    parser.add_argument("--per-topic", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--store", action="store_true", help="one store alone, no processes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batonmq-scale-") as folder:
        for queues in map(int, options.queues.split(",")):
            if options.store:
                measure_store(Path(folder), queues, options.per_topic)
            else:
                measure(Path(folder), queues, options.per_topic, options.seconds)


if __name__ == "__main__":
    main()
