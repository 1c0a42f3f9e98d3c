"""How cost grows with size: `python -m lab.bench.scale --html scale.html`, about 12 minutes.

One thing grows at a time: broker groups, queues, connections, members of consumer groups, bodies,
and what is behind memory. For each size a fresh local cluster of three name servers and two
replicas a group: sends (16 under way for each group), what they cost each process, memory, the
longest wait of a light request meanwhile (`lab.bench.pinger`), and how long a kill -9 of the master
stops writes. `--quick` takes small sizes, for a minute: it shows that the bench works, no more.
`--json` keeps the figures, `--from` makes the page of such a file. It needs `make setup-spark`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lab.bench.cpu import CpuMeter, anon_mib
from lab.bench.load_loop import IN_FLIGHT, Phase, SendTarget, write
from lab.bench.pinger import pinging
from lab.bench.run import machine_facts, progress
from lab.bench.scale_groups import members
from lab.bench.scale_store import behind_memory
from lab.cluster.connection import BlockingConnection
from lab.cluster.load import Load
from lab.cluster.up import ClusterProcess

BODY: Final = b"x" * 1024
QUEUES_OF_A_TOPIC: Final = 8
FAILOVER_LIMIT_S: Final = 60.0

Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one run. Seconds are those of one load."""

    groups: tuple[int, ...] = (1, 4, 8)
    queues: tuple[int, ...] = (10, 1_000, 10_000)
    connections: tuple[int, ...] = (10, 1_000, 10_000)
    members: tuple[int, ...] = (10, 100, 1_000)
    bodies: tuple[int, ...] = (100, 1_024, 10_240, 102_400, 1_048_576)
    gigabytes: tuple[float, ...] = (1, 4)
    seconds: float = 8.0


QUICK: Final = Sizes((1, 2), (10, 200), (10, 200), (10, 50), (100, 10_240), (0.1,), 1.5)


class Bench:
    """What every size needs: a cluster, a load with its cost, a failover."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.folder = folder
        self.sizes = sizes
        self._clusters = 0

    @contextmanager
    def cluster(self, groups: int = 1) -> Iterator[ClusterProcess]:
        """A fresh one. Its files go with it: those of all sizes together fill a disk."""
        self._clusters += 1
        folder = self.folder / f"cluster{self._clusters}"
        try:
            with ClusterProcess(folder, replicas=2, groups=groups, settings={}) as cluster:
                yield cluster
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def load(
        self,
        cluster: ClusterProcess,
        targets: Iterator[SendTarget],
        body: bytes = BODY,
        *,
        in_flight: int = IN_FLIGHT,
    ) -> Values:
        masters, slaves = pids(cluster, "MASTER"), pids(cluster, "SLAVE")
        address = cluster.master()["address"]
        with pinging(address, cluster.folder / "pinger.log") as pinged:
            meter = CpuMeter({"master": masters, "slave": slaves})
            phase = write(targets, body, meter, in_flight=in_flight)
        return values_of(phase, len(body)) | {
            "wait_ms": pinged.longest_ms,
            "memory_mib": anon_mib([*masters, *slaves, *name_servers(cluster)]),
        }

    def failover(self, cluster: ClusterProcess) -> Values:
        """kill -9 of the first group's master, its start again."""
        addresses, master = cluster.addresses(), cluster.master()
        log = cluster.folder / "probe.log"
        with Load(addresses, prefix="scale", log=log) as load:
            if load.first_ack(sent_after=time.monotonic(), limit_s=FAILOVER_LIMIT_S) is None:
                raise RuntimeError(f"no write was acknowledged in {FAILOVER_LIMIT_S:.0f} s")
            time.sleep(0.5)
            took_s = load.failover_s(
                lambda: cluster.kill(master),
                broker=addresses.index(master["address"]),
                limit_s=FAILOVER_LIMIT_S,
            )
        cluster.wait_in_sync(1)
        began = time.monotonic()
        cluster.restart(master)
        cluster.wait_in_sync(2)
        return {
            "failover_ms": took_s * 1000,
            "back_s": time.monotonic() - began,
        }


def pids(cluster: ClusterProcess, role: str) -> list[int]:
    return [cluster.pid_of(broker) for broker in cluster.brokers if broker["role"] == role]


def name_servers(cluster: ClusterProcess) -> list[int]:
    return [int(node["pid"]) for node in cluster.document["nameServers"]]


def values_of(phase: Phase, size: int) -> Values:
    each = phase.use.micros_per(phase.acked)
    return {
        "per_second": phase.per_second,
        "mb_per_second": phase.per_second * size / 1e6,
        "master_us": each["master"],
        "slave_us": each["slave"],
        "gap_ms": phase.gap_s * 1000,
        "others_percent": phase.use.others_percent,
    }


def in_turn(
    connections: list[BlockingConnection], queues: int, seconds: float
) -> Iterator[SendTarget]:
    """Every queue after the other, every connection after the other, so long, and each once."""
    end, number, each = time.monotonic() + seconds, 0, QUEUES_OF_A_TOPIC
    while number < max(queues, len(connections)) or time.monotonic() < end:
        place = number % queues
        connection = connections[number % len(connections)]
        yield SendTarget(connection, f"Scale{place // each}", place % each, min(queues, each))
        number += 1


def groups(bench: Bench, count: int) -> Values:
    with bench.cluster(count) as cluster:
        names = sorted({broker["name"] for broker in cluster.brokers})
        opened = [
            BlockingConnection(cluster.master(name)["address"], timeout_s=60) for name in names
        ]
        targets = in_turn(opened, 8, bench.sizes.seconds)
        found = bench.load(cluster, targets, in_flight=IN_FLIGHT * count)
        for connection in opened:
            connection.close()
        return found | bench.failover(cluster)


def queues(bench: Bench, count: int) -> Values:
    with bench.cluster() as cluster:
        with BlockingConnection(cluster.master()["address"], timeout_s=60) as connection:
            first = bench.load(cluster, in_turn([connection], count, 0))
            found = bench.load(cluster, in_turn([connection], count, bench.sizes.seconds))
        return (
            found
            | {"first_wait_ms": first["wait_ms"], "first_gap_ms": first["gap_ms"]}
            | bench.failover(cluster)
        )


def connections(bench: Bench, count: int) -> Values:
    """Each sends, one after the other."""
    with bench.cluster() as cluster:
        address = cluster.master()["address"]
        before = anon_mib(pids(cluster, "MASTER"))
        opened = [BlockingConnection(address, timeout_s=60) for _ in range(count)]
        found = bench.load(cluster, in_turn(opened, 8, bench.sizes.seconds))
        each_kib = (anon_mib(pids(cluster, "MASTER")) - before) * 1024 / count
        failover = bench.failover(cluster)
        for connection in opened:
            connection.close()
        return found | failover | ({"connection_kib": each_kib} if count >= 1000 else {})


def bodies(bench: Bench, size: int) -> Values:
    with bench.cluster() as cluster:
        with BlockingConnection(cluster.master()["address"], timeout_s=60) as connection:
            targets = in_turn([connection], 8, bench.sizes.seconds)
            found = bench.load(cluster, targets, b"x" * size)
        return found | bench.failover(cluster)


def consumers(bench: Bench, count: int) -> Values:
    with bench.cluster() as cluster:
        master = cluster.master()
        meter = CpuMeter({"master": [cluster.pid_of(master)]})
        with pinging(master["address"], cluster.folder / "pinger.log") as pinged:
            found = members(master["address"], count)
        used_us = meter.stop().micros_per(count)["master"]
        return found | {"wait_ms": pinged.longest_ms, "member_us": used_us}


def backlog(bench: Bench, gigabytes: float) -> Values:
    with bench.cluster() as cluster:
        master = cluster.master()
        address, folder = master["address"], Path(master["dataDir"])
        meter = CpuMeter({"master": [cluster.pid_of(master)], "slave": pids(cluster, "SLAVE")})
        with pinging(address, cluster.folder / "pinger.log") as pinged:
            found = behind_memory(address, folder, gigabytes, meter)
        cluster.wait_in_sync(2)
        return found | {"wait_ms": pinged.longest_ms} | bench.failover(cluster)


SWEEPS: Final[dict[str, tuple[str, Callable[[Bench, Any], Values]]]] = {
    "groups": ("broker groups", groups),
    "queues": ("queues", queues),
    "connections": ("connections", connections),
    "members": ("members of consumer groups, ten in each", consumers),
    "bodies": ("bytes of a body", bodies),
    "gigabytes": ("gigabytes of messages, read from the disk", backlog),
}


def measured(sizes: Sizes, only: list[str], folder: Path) -> dict[str, Any]:
    bench, sweeps = Bench(folder, sizes), []
    machine = ", ".join(f"{what} {value}" for what, value in machine_facts().items())
    for name in only:
        title, measure = SWEEPS[name]
        points: list[tuple[float, Values]] = []
        for size in getattr(sizes, name):
            progress(f"{name}: {size:,}")
            values = measure(bench, size)
            points.append((size, values))
            progress("  " + ", ".join(f"{key} {value:,.1f}" for key, value in values.items()))
        sweeps.append({"name": name, "title": title, "points": points})
    return {"machine": machine, "sweeps": sweeps}


def main() -> None:
    parser = argparse.ArgumentParser(prog="lab.bench.scale", description=__doc__)
    parser.add_argument("--only", default=",".join(SWEEPS), help="sweeps, with commas between")
    parser.add_argument("--quick", action="store_true", help="small sizes, short loads")
    parser.add_argument("--gigabytes", help="sizes of the backlog, with commas between")
    parser.add_argument("--folder", type=Path, help="for the clusters; default: a temporary one")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--html", type=Path, help="where the page goes")
    parser.add_argument("--from", dest="source", type=Path, help="figures of an earlier run")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    if options.gigabytes:
        sizes = Sizes(gigabytes=tuple(map(float, options.gigabytes.split(","))))
    if options.source is not None:
        found = json.loads(options.source.read_text())
    else:
        with tempfile.TemporaryDirectory(prefix="batonmq-scale-", dir=options.folder) as folder:
            found = measured(sizes, options.only.split(","), Path(folder))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    if options.html is not None:
        from lab.bench.scale_page import (
            write_scale_page,  # its packages come with `make setup-spark`
        )

        write_scale_page(str(options.html), found)


if __name__ == "__main__":
    main()
