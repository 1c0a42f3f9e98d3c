"""Raft nodes in one process, for tests: started, stopped and started again on their folders."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from batonmq.controller.config import Peer, RaftTimings
from batonmq.controller.raft.log import Commit, Machine
from batonmq.controller.raft.node import COMPACT_AFTER_ENTRIES, RaftLog, RaftSettings
from batonmq.controller.rules.commands import ApplyBrokerId, BecomeController
from tests.shared.ports import free_ports

QUICK = RaftTimings(election_min_ms=400, election_max_ms=800, heartbeat_ms=30, tick_ms=20)
"""Three nodes share a loop, and maybe a busy machine: a shorter silence is no sign of a death."""


def free_peers(count: int) -> tuple[Peer, ...]:
    first = free_ports(count)
    ports = range(first, first + count)
    return tuple(Peer(f"n{i}", "127.0.0.1", port, port, port) for i, port in enumerate(ports))


class Cluster:
    """`leader()` waits for one; `until(condition)` is asked again after each event of any node.

    A node that is stopped and started again finds its folder as it left it.
    """

    def __init__(
        self,
        folder: Path,
        count: int = 3,
        *,
        peers: tuple[Peer, ...] = (),
        compact_after_entries: int = COMPACT_AFTER_ENTRIES,
        **more: Any,
    ) -> None:
        self._more = more
        self.folder = folder
        self.peers = peers or free_peers(count)
        self._compact_after_entries = compact_after_entries
        self.nodes: dict[str, RaftLog] = {}
        self.machines: dict[str, Machine] = {}
        self.leading: dict[str, bool] = {}
        self.commits: dict[str, list[Commit]] = {}
        self.fatal: list[str] = []
        self._event = asyncio.Event()

    async def start(self, node_id: str, **other: Any) -> RaftLog:
        """`other`: its machine, and arguments of RaftLog that are this node's own."""
        peer = next(peer for peer in self.peers if peer.node_id == node_id)
        machine: Machine = other.pop("machine", None) or Machine()
        node = RaftLog(
            RaftSettings(
                peer,
                other.pop("peers", self.peers),
                QUICK,
                self.folder / node_id,
                compact_after_entries=self._compact_after_entries,
                **{**self._more, **other},
            ),
            machine,
            on_fatal=self.fatal.append,
        )
        self.nodes[node_id], self.machines[node_id] = node, machine
        commits = self.commits.setdefault(node_id, [])
        commits.clear()
        node.on_role(lambda leading: self._note(self.leading.__setitem__, node_id, leading))
        node.on_applied(lambda commit: self._note(commits.append, commit))
        await node.start()
        return node

    def _note(self, record: Callable[..., object], *args: Any) -> None:
        record(*args)
        self._event.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._event.clear()
                await self._event.wait()

    async def leader(self) -> tuple[str, RaftLog]:
        await self.until(lambda: any(self.leading.values()))
        node_id = next(node_id for node_id, leading in self.leading.items() if leading)
        return node_id, self.nodes[node_id]

    async def stop(self, node_id: str) -> None:
        self.leading[node_id] = False
        await self.nodes.pop(node_id).close()

    async def start_all(self) -> None:
        for peer in self.peers:
            if peer.node_id not in self.nodes:
                await self.start(peer.node_id)

    async def agree(self) -> None:
        """Waits until a leader's log is read through and all nodes hold the same state."""
        while True:
            _, leader = await self.leader()
            if await leader.read_barrier(2000):
                break
        await self.until(lambda: len({m.state.digest() for m in self.machines.values()}) == 1)

    async def close(self) -> None:
        for node_id in list(self.nodes):
            await self.stop(node_id)


@contextlib.asynccontextmanager
async def started(folder: Path, count: int = 3, **more: Any) -> AsyncIterator[Cluster]:
    """A cluster; nothing fatal may have happened by its end."""
    cluster = Cluster(folder, count, **more)
    try:
        await cluster.start_all()
        yield cluster
        assert cluster.fatal == []
    finally:
        await cluster.close()


def apply_id(number: int, broker_name: str = "broker-a") -> ApplyBrokerId:
    return ApplyBrokerId(
        request_id=f"request-{broker_name}-{number}",
        controller_epoch=1,
        broker_name=broker_name,
        broker_id=number,
        register_check_code=f"code-{number}",
    )


BECOME = BecomeController(node="n", nonce="nonce-1")
