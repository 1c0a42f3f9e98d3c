"""Real pysyncobj cores on virtual time, a virtual network and disks in memory; same seed, same run.

A node is the library's own SyncObj behind `MendedTransport`, `DurableJournal` and `FileSnapshots`;
only sockets and files are replaced. `cures` can be switched off one by one, to show the harm.
"""

import functools
import heapq
import itertools
import pickle
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pysyncobj.syncobj
import pytest
from pysyncobj.config import FAIL_REASON
from pysyncobj.node import TCPNode
from pysyncobj.syncobj import SyncObj, replicated
from pysyncobj.tcp_connection import CONNECTION_STATE
from pysyncobj.transport import Transport
from raft_files import fatal

from batonmq.controller.config import RaftTimings
from batonmq.controller.raft import transport
from batonmq.controller.raft.journal import DurableJournal, VoteFile
from batonmq.controller.raft.messages import MendedTransport
from batonmq.controller.raft.node import make_conf
from batonmq.controller.raft.snapshot import FileSnapshots, LogEntry, decode_snapshot

TIMINGS = RaftTimings(election_min_ms=300, election_max_ms=600, heartbeat_ms=50, tick_ms=10)
ALL_CURES = frozenset({"snapshot pieces", "agreeing entries", "one batch"})
STOCK_BATCH = 1 << 16


class NodeEnded(Exception):
    """Its process would have ended; it starts again at once."""


@dataclass
class Disk:
    """What a node finds when it starts again."""

    entries: tuple[LogEntry, ...] = ()
    term: int = 0
    voted_for: str | None = None
    joined: bool = False
    full: bool = False
    snapshot: bytes | None = None


class MemoryJournal(DurableJournal):
    """Everything but the file."""

    def __init__(self, disk: Disk, head: tuple[LogEntry, LogEntry] | None) -> None:
        self._disk = disk
        self._entries = list(disk.entries)
        self._vote = VoteFile(Path(), lambda what, error: fatal(what))
        self._vote.term, self._vote.voted_for = disk.term, disk.voted_for
        self._commit_index = 0
        self._end = 0
        self.failure = ""
        self._joined = self._joined_durable = disk.joined
        self._replaced = False
        self.snapshot_index = head[1][1] if head else 1
        self._begin_with(head)

    def sync(self) -> bool:
        if self._disk.full:
            return False
        self._disk.entries = tuple(self._entries)
        self._disk.joined = self._joined_durable = self._joined
        return True

    def on_fatal(self, what: str) -> NoReturn:  # type: ignore[override]
        raise NodeEnded(what)

    _rewrite = sync

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:
        self._vote.term, self._vote.voted_for = term, votedForNodeId
        self._disk.term, self._disk.voted_for = term, votedForNodeId

    def deleteEntriesFrom(self, entryFrom: int) -> None:
        del self._entries[entryFrom:]

    def close(self) -> None:
        pass


class MemorySnapshots(FileSnapshots):
    def __init__(self, disk: Disk, **callbacks: Any) -> None:
        super().__init__(Path("/nowhere/at/all"), on_fatal=fatal, piece_bytes=200, **callbacks)
        self._disk = disk
        self._data = disk.snapshot
        if disk.snapshot is not None:
            _, (last, before_last) = decode_snapshot(disk.snapshot)
            self.head = (before_last, last)

    def _store(self, data: bytes) -> bool:
        self._data = self._disk.snapshot = data
        return True


class Core(SyncObj):  # type: ignore[misc]
    """Its state is the list of names that it applied."""

    def __init__(self, applied: list[str], *args: Any, **kwargs: Any) -> None:
        self.applied = applied
        super().__init__(*args, **kwargs)

    @replicated  # type: ignore[untyped-decorator]
    def _commit(self, name: str, padding: bytes) -> None:
        self.applied.append(name)


class Link:
    """One direction between two nodes; in order, as TCP."""

    def __init__(self, sim: "Sim", source: int, target: int) -> None:
        self._sim, self.source, self.target = sim, source, target
        self._last = 0.0

    @property
    def state(self) -> int:
        up = (self.source, self.target) in self._sim.up
        state: int = CONNECTION_STATE.CONNECTED if up else CONNECTION_STATE.DISCONNECTED
        return state

    def send(self, message: Any) -> None:
        sim = self._sim
        self._last = max(self._last, sim.now + sim.rng.uniform(*sim.delay_s))
        arrives = functools.partial(
            sim.arrive, self.source, self.target, sim.era(self), pickle.dumps(message)
        )
        sim.at(self._last, arrives)


class SimTransport(MendedTransport):
    def __init__(self, core: Any, own: TCPNode, others: Iterable[TCPNode], *, sim: "Sim") -> None:
        Transport.__init__(self, core, own, others)
        self.sim = sim
        self._syncObj = core
        self._nodes = set(others)
        number = sim.number(own)
        self._connections = {node: Link(sim, number, sim.number(node)) for node in others}
        self._ready = True
        self._send_random_sleep_duration = 0
        core.addOnTickCallback(self._onTick)

    def _maybeBind(self) -> None:
        pass

    _connectIfNecessary = _maybeBind

    def _mend_snapshot_piece(self, message: dict[str, Any]) -> None:
        if "snapshot pieces" in self.sim.cures:
            super()._mend_snapshot_piece(message)

    def _keep_agreeing_entries(self, message: dict[str, Any]) -> bool:
        return "agreeing entries" not in self.sim.cures or super()._keep_agreeing_entries(message)

    def _refuse_to_cut_applied(self, message: dict[str, Any]) -> None:
        if "agreeing entries" in self.sim.cures:
            super()._refuse_to_cut_applied(message)


class NoPoller:
    def poll(self, timeout: float) -> None:
        pass


class Sim:
    """`names` applied with SUCCESS are in `acked`. `run(seconds)` goes on; nothing else does."""

    def __init__(
        self,
        seed: int,
        patch: pytest.MonkeyPatch,
        *,
        cures: Iterable[str] = ALL_CURES,
        delay_s: tuple[float, float] = (0.0005, 0.003),
        compact_after: int = 2_000,
        batch_bytes: int = STOCK_BATCH,
        padding: int = 10,
    ) -> None:
        for module, name in (
            (transport.pysyncobj.pickle, "loads"),
            (transport.pysyncobj.pickle, "load"),
            (pysyncobj.syncobj, "createJournal"),
            (pysyncobj.syncobj, "Serializer"),
            (pysyncobj.syncobj, "monotonicTime"),
        ):
            patch.setattr(module, name, getattr(module, name))
        transport.install()
        patch.setattr(pysyncobj.syncobj, "monotonicTime", lambda: self.now)
        patch.setattr(pysyncobj.syncobj, "createPoller", lambda _: NoPoller())
        patch.setattr(pysyncobj.syncobj, "PIPE_NOTIFIER_ENABLED", False)
        self.rng = random.Random(seed)
        random.seed(seed)
        self.cures = frozenset(cures)
        self.delay_s = delay_s
        self.now = 1000.0
        self.acked: list[str] = []
        self.broken_pieces = 0
        self.up: set[tuple[int, int]] = set()
        self.deaf: set[tuple[int, int]] = set()
        """(source, target): what source sends to target is lost, and no connection ends."""
        self.ended: list[int] = []
        self.disks = [Disk() for _ in range(3)]
        self.cores: list[Core | None] = [None] * 3
        self._padding = padding
        self._compact_after = compact_after
        self._batch_bytes = batch_bytes
        self._eras: dict[tuple[int, int], int] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._names = itertools.count()
        self._addresses = [f"10.0.0.{number + 1}:1" for number in range(3)]
        for number in range(3):
            self.start(number)

    # Time.

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), event))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            if until():
                return True
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end
        return until()

    # Nodes and links.

    def number(self, node: TCPNode) -> int:
        return self._addresses.index(node.id)

    def era(self, link: Link) -> int:
        return self._eras.get((link.source, link.target), 0)

    def start(self, number: int) -> None:
        disk = self.disks[number]
        applied: list[str] = []
        snapshots = MemorySnapshots(
            disk,
            capture=lambda: {"applied": list(applied)},
            restore=lambda state, _: applied.__setitem__(slice(None), state["applied"]),
            holds=lambda index, term: journal.holds(index, term),
        )
        journal = MemoryJournal(disk, snapshots.head)
        one_batch = {} if "one batch" in self.cures else {
            "appendEntriesBatchSizeBytes": self._batch_bytes
        }  # fmt: skip
        conf = make_conf(
            TIMINGS,
            self._addresses[number],
            autoTick=False,
            journalFile=journal,
            fullDumpFile=__file__ if disk.snapshot is not None else "/nowhere/at/all",
            serializer=snapshots,
            deserializer=snapshots.deserialize,
            logCompactionMinEntries=self._compact_after,
            onStateChanged=lambda _, new: journal.join() if new == 2 else None,
            **one_batch,
        )
        others = [address for address in self._addresses if address != self._addresses[number]]
        core = Core(
            applied,
            self._addresses[number],
            others,
            conf=conf,
            transportClass=functools.partial(SimTransport, sim=self),
        )
        self.cores[number] = core
        for other in range(3):
            if other != number and self.cores[other] is not None:
                self.join(number, other)
        self._tick_again(number, core)

    def kill(self, number: int) -> None:
        """As kill -9: what was not synced is gone."""
        self.cores[number] = None
        for other in range(3):
            self.cut(number, other)

    def cut(self, one: int, other: int) -> None:
        for source, target in ((one, other), (other, one)):
            if (source, target) in self.up:
                self.up.remove((source, target))
                self._eras[source, target] = self._eras.get((source, target), 0) + 1
                self._tell(source, target, "_onNodeDisconnected")

    def join(self, one: int, other: int) -> None:
        if one != other and self.cores[one] is not None and self.cores[other] is not None:
            for source, target in ((one, other), (other, one)):
                if (source, target) not in self.up:
                    self.up.add((source, target))
                    self._tell(source, target, "_onNodeConnected")

    def isolate(self, number: int) -> None:
        for other in range(3):
            self.cut(number, other)

    def heal(self) -> None:
        for number in range(3):
            if self.cores[number] is None:
                self.start(number)
        for one, other in itertools.combinations(range(3), 2):
            self.join(one, other)

    def _tell(self, source: int, target: int, event: str) -> None:
        core = self.cores[source]
        if core is not None:
            getattr(core._SyncObj__transport, event)(TCPNode(self._addresses[target]))

    def arrive(self, source: int, target: int, era: int, message: bytes) -> None:
        core = self.cores[target]
        if core is None or self._eras.get((source, target), 0) != era:
            return
        if (source, target) in self.deaf:
            return
        node = TCPNode(self._addresses[source])
        try:
            core._SyncObj__transport._onMessageReceived(node, pickle.loads(message))
            core.doTick()
        except NodeEnded:
            self.ended.append(target)
            self.kill(target)
            self.start(target)
        except (
            EOFError,
            pickle.UnpicklingError,
        ):  # from the library's pieces of entries; its thread logs it and goes on
            assert "one batch" not in self.cures
            self.broken_pieces += 1

    def _tick_again(self, number: int, core: Core) -> None:
        if self.cores[number] is core:
            core.doTick()
            self.at(self.now + 0.01, functools.partial(self._tick_again, number, core))

    # Clients.

    def leaders(self) -> list[int]:
        """Those who take themselves for one, the newest term first."""
        found = [n for n, core in enumerate(self.cores) if core is not None and core._isLeader()]
        return sorted(found, key=lambda n: -self.cores[n].raftCurrentTerm)  # type: ignore[union-attr]

    def lead(self) -> int:
        """Waits for a leader that has committed in its term."""
        settled: list[int] = []

        def known() -> bool:
            if not (leaders := self.leaders()):
                return False
            core = self.cores[leaders[0]]
            assert core is not None
            settled[:] = leaders
            return bool(core.raftCommitIndex >= core._SyncObj__noopIDx)

        assert self.run(30, known), "no leader in 30 s"
        return settled[0]

    def propose(self, number: int, padding: int | None = None) -> str:
        core, name = self.cores[number], f"{next(self._names)}"
        assert core is not None

        def done(_: object, reason: int) -> None:
            if reason == FAIL_REASON.SUCCESS:
                self.acked.append(name)

        size = self._padding if padding is None else padding
        core._commit(name, b"x" * size, callback=done)
        core.doTick()
        return name

    # Judgement.

    def converged(self) -> bool:
        states = [core.applied for core in self.cores if core is not None]
        return all(state == states[0] for state in states) and len(states) == 3

    def lost(self) -> list[str]:
        """Acknowledged, and not applied by every node that is up."""
        return [
            name
            for name in self.acked
            if any(core is not None and name not in core.applied for core in self.cores)
        ]

    def forked(self) -> bool:
        """Whether two nodes applied different commands in one place."""
        states = [core.applied for core in self.cores if core is not None]
        return any(
            one[: len(other)] != other[: len(one)]
            for one, other in itertools.combinations(states, 2)
        )
