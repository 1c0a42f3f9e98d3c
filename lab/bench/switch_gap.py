"""How long a planned switch stops the sends: `python -m lab.bench.switch_gap --switches 10`.

One local cluster of three, `--tasks` tasks of one Producer that each send as fast as they are
answered, and switches from replica to replica. The gap of a switch, as a client sees it, is from
the last ack of the old master to the first of the new one. Printed: each gap in ms, then minimum,
median and maximum, and how many sends failed (none may).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from batonmq import Admin, Message, Producer
from batonmq.client.admin.controller_admin import ControllerAdmin
from batonmq.protocol.bodies import ReplicasInfo
from lab.cluster.client_load import ClientLoad
from lab.cluster.cluster import GROUP
from lab.cluster.up import ClusterProcess

TOPIC = "SwitchGap"
REPLICAS = 3


def gap_ms(acks: list[tuple[float, str]], new: str) -> float:
    """From the last ack of another broker to the first of `new`."""
    first = next(at for at, address in acks if address == new)
    last = max(at for at, address in acks if address != new)
    return (first - last) * 1000


async def whole(admin: ControllerAdmin) -> ReplicasInfo:
    """The group, once it has a master and all replicas are in the set."""
    while True:
        table = await admin.sync_state_data([GROUP])
        info = table.replicas_info_table[GROUP]
        if info.master_broker_id and len(info.in_sync_replicas) == REPLICAS:
            return info
        await asyncio.sleep(0.2)


async def measure(document: dict[str, Any], switches: int, tasks: int, size: int) -> list[float]:
    name_servers = ";".join(node["address"] for node in document["nameServers"])
    gaps: list[float] = []
    async with (
        Producer("switch-gap", name_servers=name_servers) as producer,
        Admin(name_servers) as cluster,
    ):
        admin = cluster.controller([node["address"] for node in document["controllers"]])
        await producer.send(Message(TOPIC, b"first"))
        load = ClientLoad(producer, TOPIC, tasks=tasks, size=size)
        running = asyncio.create_task(load.run())
        for number in range(switches):
            await asyncio.sleep(1.5)
            info = await whole(admin)
            others = [r for r in info.in_sync_replicas if r.broker_id != info.master_broker_id]
            target = others[number % len(others)]
            load.acks.clear()
            reached = asyncio.create_task(load.until(1, target.broker_address))
            began = time.monotonic()
            elected = await admin.elect_master("", GROUP, target.broker_id)
            took_ms = (time.monotonic() - began) * 1000
            await reached
            gaps.append(gap_ms(list(load.acks), target.broker_address))
            print(
                f"{time.strftime('%H:%M:%S')} {info.master_broker_id} -> {elected.master_broker_id}"
                f" masterEpoch {elected.master_epoch}: gap {gaps[-1]:.1f} ms,"
                f" command {took_ms:.0f} ms",
                flush=True,
            )
        load.stop()
        await running
    for failure in load.failures:
        print(f"FAILED SEND: {failure}")
    print(f"failed sends: {len(load.failures)}")
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--switches", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--size", type=int, default=1024, help="bytes of a message")
    parser.add_argument("--keep", type=Path, help="folder for data and logs that stays")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="switch-gap-") as scratch:
        folder = options.keep or Path(scratch)
        with ClusterProcess(folder, replicas=REPLICAS, settings={}) as cluster:
            document = cluster.document
            gaps = uvloop.run(measure(document, options.switches, options.tasks, options.size))
    print(
        f"gap of {len(gaps)} switches: min {min(gaps):.1f} median {statistics.median(gaps):.1f}"
        f" max {max(gaps):.1f} ms"
    )


if __name__ == "__main__":
    main()
