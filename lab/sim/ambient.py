"""Replaces what surrounds the code during a run: clock, random numbers, disk, network, threads.

`ambient(...)` is a context manager; after it everything is as before. The code under test is not
changed. Replaced are module `time`, `os.urandom` and `os.getpid`, the calls of `runtime.disk`,
`threading` and `queue` where servers use them, gRPC's channel and server, sockets of Raft.
"""

import asyncio
import contextlib
import functools
import gc
import itertools
import os
import queue
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pysyncobj.dns_resolver
import pysyncobj.node
import pysyncobj.pickle
import pysyncobj.syncobj
import pysyncobj.tcp_connection
import pysyncobj.tcp_server
import pysyncobj.transport

import batonmq.client.instance.connections
import batonmq.controller.raft.transport
from batonmq.broker.filter import subscription_filter
from batonmq.remoting.connection import Connection
from batonmq.runtime import disk, lock_file, sockets
from batonmq.store.index_service import IndexService
from batonmq.store.queue_table import StoredQueue
from lab.sim.disk import SimDisks
from lab.sim.loop import START_S, SimLoop, numbered, process_here
from lab.sim.network import SimNetwork
from lab.sim.raft import Notifier, SimRaftTransport, ThreadTime, TickPoller
from lab.sim.rpc import SimChannel, SimServer
from lab.sim.threads import Queues, Threads

_JUMP_S = 3.0  # a clock is wrong for at most this long
WALL_START_S = 1_767_600_000  # a Monday morning of 2026, 08:00 UTC

_SERVERS = frozenset(
    {"store", "epoch", "ha", "broker", "runtime", "namesrv", "replicas_manager", "history",
     "controller", "remoting"}
)  # fmt: skip

_ALL_TASKS = next(
    vars(asyncio.tasks)[name]
    for name in ("_scheduled_tasks", "_all_tasks")
    if name in vars(asyncio.tasks)
)

# What each start of a broker loads in the background is loaded once, before the first life.
subscription_filter.preload()
IndexService.preload()

#: The real clock, to measure the simulation.
real_seconds = time.perf_counter
processor_seconds = time.process_time


class Clocks:
    """The clocks of hosts. `jumps`: by how many seconds a host's wall clock is wrong. `passed_s`:
    time that was skipped on all hosts, in which nothing ran."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.jumps: dict[str, float] = {}
        self._jumped: list[tuple[float, str, float]] = []  # when, whose, by how many seconds
        self.farthest_s = 0.0  # the largest error of any host's clock so far
        self.passed_s = 0.0

    def jump(self, host: str, off_s: float) -> None:
        self.jumps[host] = off_s
        self._jumped.append((self._loop.now_s, host, off_s))
        self.farthest_s = max(self.farthest_s, abs(off_s))

    def off_s(self, host: str, seconds: float, *, behind: bool = False) -> float:
        """By how much at most the wall clock of a host was ahead in the last `seconds`, or
        `behind`."""
        since_s = self._loop.now_s - seconds - _JUMP_S
        found = [off for at, who, off in self._jumped if who == host and at >= since_s]
        return max(0.0, *(-off if behind else off for off in found)) if found else 0.0

    def true_s(self) -> float:
        """The time of day, whatever clocks say."""
        return WALL_START_S + self._loop.now_s - START_S + self.passed_s

    def boot_s(self, _: int = 0) -> float:
        process, now_s = process_here(), self._loop.now_s
        if process is None or process.rate == 1.0:
            return now_s
        return START_S + (now_s - START_S) * process.rate

    def wall_s(self) -> float:
        process = process_here()
        off = self.jumps.get(process.host, 0.0) if process is not None and self.jumps else 0.0
        return WALL_START_S + (self.boot_s() - START_S) + self.passed_s + off

    def boot_ns(self, _: int = 0) -> int:
        """In whole milliseconds. Asked for more often than anything else."""
        process, now_s = process_here(), self._loop.now_s
        if process is not None and process.rate != 1.0:
            now_s = START_S + (now_s - START_S) * process.rate
        return int(now_s * 1000 + 1e-6) * 1_000_000

    def wall_ns(self) -> int:
        return int(self.wall_s() * 1000 + 1e-6) * 1_000_000

    def functions(self) -> dict[str, Callable[..., Any]]:
        """In place of those of the module `time`. CLOCK_REALTIME is never read by its number."""
        return {
            "time": self.wall_s,
            "time_ns": self.wall_ns,
            "monotonic": self.boot_s,
            "monotonic_ns": lambda: int(self.boot_s() * 1e9),
            "clock_gettime": self.boot_s,
            "clock_gettime_ns": self.boot_ns,
        }


class Patches:
    """Attributes that are replaced, to be put back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def keep(self, owner: Any, name: str) -> None:
        """Whatever it becomes, it is put back."""
        self._before.append((owner, name, getattr(owner, name)))

    def undo(self) -> None:
        for owner, name, value in reversed(self._before):
            setattr(owner, name, value)
        self._before.clear()


@contextlib.contextmanager
def ambient(
    seed: int, network: SimNetwork, clocks: Clocks, disks: SimDisks | None
) -> Iterator[None]:
    """`disks` None: the disk calls are the real ones."""
    chance = random.Random(seed ^ 0x5EED)
    patches = Patches()
    before_random = random.getstate()
    before_disk = disk.replace_calls(disks.calls()) if disks is not None else {}
    before_held = set(lock_file._held_here)
    before_collect = gc.isenabled()
    gc.disable()
    random.seed(seed)
    try:
        for name, function in clocks.functions().items():
            patches.set(time, name, function)
        patches.set(os, "urandom", chance.randbytes)
        patches.set(random, "_urandom", chance.randbytes)
        patches.set(random, "Random", _seeded(chance))
        patches.set(os, "getpid", _pid)
        # All share the descriptors of one real process: each start would occupy thousands.
        patches.set(sockets, "HELD_MAX", 0)
        # No code asks for all tasks.
        patches.set(_ALL_TASKS, "add", lambda task: None)
        # A broker divides it by ten while it loads numpy. If it is killed meanwhile it is never
        # restored, and after some such lives the next division fails.
        patches.set(sys, "setswitchinterval", lambda interval_s: None)
        _replace_network(patches, network)
        _replace_raft(patches)
        _replace_in_servers(patches)
        yield
    finally:
        patches.undo()
        disk.replace_calls(before_disk)
        lock_file._held_here.clear()
        lock_file._held_here.update(before_held)
        random.setstate(before_random)
        if before_collect:
            gc.enable()


def _seeded(chance: random.Random) -> type[random.Random]:
    class Seeded(random.Random):
        """Without a seed it takes one from the run's generator."""

        def __init__(self, seed: Any = None) -> None:
            super().__init__(chance.getrandbits(64) if seed is None else seed)

    return Seeded


def _pid() -> int:
    process = process_here()
    return 100 + process.serial if process is not None else 1


def _replace_network(patches: Patches, network: SimNetwork) -> None:
    patches.set(
        grpc.aio, "insecure_channel", lambda address, options=None: SimChannel(network, address)
    )
    patches.set(grpc.aio, "server", lambda options=None: SimServer(network))
    patches.set(batonmq.client.instance.connections, "local_ip", _local_ip)
    patches.set(batonmq.client.instance.connections, "_serial", itertools.count(1))
    # Sets of them are iterated: the order must not depend on addresses in memory.
    patches.set(Connection, "__hash__", numbered)
    patches.set(
        StoredQueue, "__hash__", lambda queue: zlib.crc32(queue.topic_bytes) + queue.queue_id
    )


def _local_ip() -> str:
    process = process_here()
    assert process is not None
    return process.host


def _replace_raft(patches: Patches) -> None:
    core = pysyncobj.syncobj
    for owner, name in (
        (pysyncobj.pickle, "loads"),
        (pysyncobj.pickle, "load"),
        (pysyncobj.dns_resolver, "_g_resolver"),
        (core, "createJournal"),
        (core, "Serializer"),
        (core, "getEncryptor"),
        (core, "HAS_CRYPTO"),
        (pysyncobj.transport, "TcpConnection"),
        (pysyncobj.tcp_server, "TcpConnection"),
        (core, "monotonicTime"),
        (pysyncobj.transport, "monotonicTime"),
        (pysyncobj.tcp_connection, "monotonicTime"),
    ):
        patches.keep(owner, name)
    patches.set(batonmq.controller.raft.transport, "GuardedTransport", SimRaftTransport)
    patches.set(core, "createPoller", lambda kind: TickPoller())
    patches.set(core, "PipeNotifier", Notifier)
    patches.set(core, "threading", Threads)
    patches.set(core, "time", ThreadTime)
    # Sets of nodes are iterated, too.
    patches.set(pysyncobj.node.Node, "__hash__", lambda node: _hash_of_text(node._id))


@functools.cache
def _hash_of_text(text: str) -> int:
    return zlib.crc32(text.encode())


def _replace_in_servers(patches: Patches) -> None:
    """Replaces threads, queues and the check of real ports in all modules of the servers."""
    for name, module in sorted(sys.modules.items()):
        parts = name.split(".")
        if parts[0] != "batonmq" or len(parts) < 2 or parts[1] not in _SERVERS:
            continue
        if hasattr(module, "check_port_free"):
            patches.set(module, "check_port_free", lambda *_, **__: None)
        if parts[1] == "controller":
            continue  # pysyncobj's thread is replaced where it is started
        if getattr(module, "threading", None) is threading:
            patches.set(module, "threading", Threads)
        if getattr(module, "queue", None) is queue:
            patches.set(module, "queue", Queues)


def release_locks(root: Path) -> None:
    """The process that held locks below `root` is dead."""
    held = {path for path in lock_file._held_here if path.is_relative_to(root.resolve())}
    lock_file._held_here.difference_update(held)
