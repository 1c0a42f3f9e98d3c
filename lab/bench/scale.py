"""How cost grows with size: `python -m lab.bench.scale`, about 12 minutes.

One thing grows at a time: broker groups, queues, connections, members of consumer groups, bodies,
and a backlog that is read from the disk. Each size gets a fresh local cluster of three name servers
and two replicas a group. Measured are sends (16 in flight for each group), their processor time,
memory, the longest wait of a light request meanwhile (`lab.bench.pinger`), and how long a kill -9
of the master stops writes. Prints a Markdown table for each. `--quick` takes small sizes, for a
minute: it shows that the bench works, no more.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from lab.bench.cpu import CpuMeter, CpuUse, anon_mib
from lab.bench.pinger import pinging
from lab.bench.report import number
from lab.bench.run import folder_there, machine_facts, names_among, progress
from lab.bench.scale_groups import members
from lab.cluster import frames
from lab.cluster.connection import BlockingConnection
from lab.cluster.load import Load
from lab.cluster.up import ClusterProcess

IN_FLIGHT: Final = 16
BODY: Final = b"x" * 1024
QUEUES_OF_A_TOPIC: Final = 8
BACKLOG_TOPIC: Final = "ScaleBacklog"
BACKLOG_BODY: Final = b"x" * (32 << 10)

Values = dict[str, float]


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
            load.wait_ack(sent_after=time.monotonic())
            time.sleep(0.5)
            took_s = load.failover_s(
                lambda: cluster.kill(master), broker=addresses.index(master["address"])
            )
        cluster.wait_in_sync(1)
        began = time.monotonic()
        cluster.restart(master)
        cluster.wait_in_sync(2)
        return {"failover_ms": took_s * 1000, "back_s": time.monotonic() - began}


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


def behind_memory(address: str, folder: Path, gigabytes: float, meter: CpuMeter) -> Values:
    """Rates of writing and of reading. The pages of the log are dropped in between, as far as the
    kernel does it for a file that a broker has mapped."""
    count, queues = int(gigabytes * 1e9 / len(BACKLOG_BODY)), QUEUES_OF_A_TOPIC
    with BlockingConnection(address, timeout_s=60) as connection:
        targets = (SendTarget(connection, BACKLOG_TOPIC, n % queues, queues) for n in range(count))
        phase = write(targets, BACKLOG_BODY, meter)
        _drop_pages(folder)
        began = time.monotonic()
        read = _read_all(connection)
        seconds = time.monotonic() - began
    if read < count:
        raise RuntimeError(f"{read} of {count} messages were read")
    return values_of(phase, len(BACKLOG_BODY)) | {
        "read_mb_per_second": read * len(BACKLOG_BODY) / 1e6 / seconds
    }


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
        ext = frames.pull_ext(BACKLOG_TOPIC, queue_id, offset)
        asked[connection.post(frames.PULL, ext)] = queue_id, offset

    for queue_id in range(QUEUES_OF_A_TOPIC):
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


MEASURES: Final = {
    "per_second": "sends/s, acknowledged by both replicas",
    "mb_per_second": "MB/s of bodies written",
    "read_mb_per_second": "MB/s of bodies read",
    "master_us": "masters, processor µs for a send",
    "slave_us": "slaves, the same",
    "member_us": "master, processor µs for a member",
    "memory_mib": "anonymous memory of all servers, MiB",
    "connection_kib": "KiB of the master for a connection",
    "wait_ms": "longest wait of a light request meanwhile, ms",
    "gap_ms": "longest gap between two acks, ms",
    "first_wait_ms": "longest wait while the queues were made, ms",
    "first_gap_ms": "longest gap while the queues were made, ms",
    "joins_per_second": "connections with their first heartbeat, per s",
    "notice_ms": "one of each group left: until all others were notified, ms",
    "rebalance_ms": "until they also had the new list, ms",
    "failover_ms": "kill -9 of the master to the first acked write, ms",
    "back_s": "the killed broker, started again, is in the set, s",
    "others_percent": "other work meanwhile, % of a core",
}


def sweep_table(title: str, points: Mapping[float, Values]) -> str:
    """Markdown: a row for each measure that a sweep has, a column for each size."""
    lines = [[title, *(f"{size:,}" for size in points)], ["---"] * (1 + len(points))]
    for key, text in MEASURES.items():
        if any(key in values for values in points.values()):
            cells = (number(v[key]) if key in v else "" for v in points.values())
            lines.append([text, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="lab.bench.scale", description=__doc__)
    names = ",".join(SWEEPS)
    parser.add_argument("--only", type=names_among(SWEEPS), default=tuple(SWEEPS), metavar=names)
    parser.add_argument("--quick", action="store_true", help="small sizes, short loads")
    parser.add_argument("--gigabytes", type=float, nargs="+", help="sizes of the backlog")
    parser.add_argument("--folder", type=folder_there, help="for the clusters; default: temporary")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    if options.gigabytes:
        sizes = replace(sizes, gigabytes=tuple(options.gigabytes))
    print(", ".join(f"{what} {value}" for what, value in machine_facts().items()))
    with tempfile.TemporaryDirectory(prefix="batonmq-scale-", dir=options.folder) as folder:
        bench = Bench(Path(folder), sizes)
        for name in options.only:
            title, measure = SWEEPS[name]
            points: dict[float, Values] = {}
            for size in getattr(sizes, name):
                progress(f"{name}: {size:,}")
                points[size] = measure(bench, size)
            print(f"\n{sweep_table(title, points)}", flush=True)


if __name__ == "__main__":
    main()
