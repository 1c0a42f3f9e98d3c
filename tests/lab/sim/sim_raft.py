"""The controllers' Raft log, simulated: a leader is drawn, and its fall decides about open entries.

Nothing of consensus is simulated: there is one committed log. What a leader proposed and did not
commit before it lost its majority is in limbo; at the next election a random part of it is
committed, the rest vanishes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from batonmq.controller.raft.log import (
    Applied,
    Commit,
    LogStatus,
    Machine,
    NotApplied,
    Outcome,
    Reports,
    Unknown,
)
from lab.sim.loop import Process

if TYPE_CHECKING:
    from tests.lab.sim.sim_cluster import World

NODES = ("n0", "n1", "n2")


class Raft:
    """One committed log. `leader` proposes; `limbo` has the entries that are not committed yet."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.committed: list[bytes] = []
        self.truth = Machine()
        self.leader: str | None = None
        self.term = 0
        self.limbo: list[tuple[SimLog, bytes, asyncio.Future[Outcome]]] = []
        self.logs: dict[str, SimLog] = {}
        self._leader_log: SimLog | None = None
        self._elect_at_s = 0.0

    def has_majority(self, node: str) -> bool:
        world = self.world
        reached = [
            other
            for other in NODES
            if other in self.logs
            and not self.logs[other].process.dead
            and not self.logs[other].process.paused
            and not world.network.is_blocked(node, other)
        ]
        return len(reached) * 2 > len(NODES) and node in reached

    def commit(self, raw: bytes) -> None:
        self.committed.append(raw)
        self.truth.commit(raw, len(self.committed))
        self.truth.check_invariants()
        self.world.check_r1()
        for log in self.logs.values():
            log.pump()

    def poll(self) -> None:
        """Elects a leader if the old one has no majority. To be called every few ms."""
        if (
            self.leader is not None
            and self.logs[self.leader] is self._leader_log
            and self.has_majority(self.leader)
        ):
            self._elect_at_s = self.world.loop.time() + self.world.rng.uniform(0.05, 0.5)
            return
        if self.world.loop.time() < self._elect_at_s:
            return
        able = [node for node in NODES if self.has_majority(node)]
        if not able:
            return
        self.lead(self.world.rng.choice(able))

    def lead(self, node: str) -> None:
        """`node` is elected."""
        old, self.leader = self.leader, node
        self.term += 1
        limbo, self.limbo = self.limbo, []
        kept = self.world.rng.randint(0, len(limbo))
        for _, raw, _ in limbo[:kept]:
            self.commit(raw)
        if old is not None and old in self.logs:
            self.logs[old].lead_later(False)
        self._leader_log = self.logs[self.leader]
        self._leader_log.lead_later(True)


class SimLog:
    """One node's `ReplicatedLog`."""

    def __init__(self, raft: Raft, node: str, process: Process) -> None:
        self.raft = raft
        self.node = node
        self.process = process
        self._machine = Machine()
        self._index = 0
        self._leading = False
        self._armed = False
        self._roles: list[Any] = []
        self.reports = Reports()
        self.reports.send = self._report
        self._applieds: list[Any] = []
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        raft.logs[node] = self

    @property
    def state(self) -> Any:
        return self._machine.state

    async def start(self) -> None:
        self.pump()

    async def close(self) -> None:
        pass

    def on_role(self, callback: Any) -> None:
        self._roles.append(callback)

    def on_applied(self, callback: Any) -> None:
        self._applieds.append(callback)

    def leader_hint(self) -> str | None:
        return self.raft.leader

    def in_touch(self) -> bool:
        return self._leading

    async def hand_over(self, timeout_ms: int, node_id: str = "") -> bool:
        raft = self.raft
        if self._leading and node_id and raft.has_majority(node_id):
            raft.lead(node_id)
            await asyncio.sleep(0.05)
        return not self._leading

    def _report(self, *report: Any) -> None:
        raft, world = self.raft, self.raft.world
        leader = raft.leader
        if leader is None or leader == self.node or world.network.is_blocked(self.node, leader):
            return
        peer = raft.logs[leader]
        index, unheard, _ = report
        args = (peer.reports.on_report, self.node, index, unheard)
        peer.process.run(world.loop.call_later, world.network.delay_s(), *args)

    def status(self) -> LogStatus:
        return LogStatus(self.raft.term, self._index, self._index)

    def lead_later(self, leading: bool) -> None:
        world = self.raft.world
        late = world.rng.uniform(0.001, 0.01) if leading else world.rng.uniform(0.01, 0.4)
        self.process.run(world.loop.call_later, late, self._lead, leading)

    def _lead(self, leading: bool) -> None:
        if leading != (self.raft._leader_log is self):
            return  # another election came in between
        if self._leading != leading:
            self._leading = leading
            for callback in self._roles:
                callback(leading)

    async def propose(self, command: Any, timeout_ms: int) -> Outcome:
        raft, world = self.raft, self.raft.world
        if not self._leading:
            return NotApplied("not the leader")
        raw = self._machine.encode(command)
        future: asyncio.Future[Outcome] = world.loop.create_future()
        if raft._leader_log is not self:
            pass  # it is not sent to any node
        else:
            entry = (self, raw, future)
            raft.limbo.append(entry)
            world.call_later(world.rng.uniform(0.0005, 0.01), self._try_commit, entry)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await asyncio.shield(future)
        except TimeoutError:
            return Unknown("no answer in time")

    def _try_commit(self, entry: Any) -> None:
        raft, world = self.raft, self.raft.world
        if entry not in raft.limbo:
            return
        if (
            raft.limbo[0] is not entry
            or not raft.has_majority(self.node)
            or self.process.paused
            or self.process.dead
        ):
            world.call_later(0.005, self._try_commit, entry)
            return
        raft.limbo.pop(0)
        self._waiting[len(raft.committed) + 1] = entry[2]
        raft.commit(entry[1])

    async def read_barrier(self, timeout_ms: int) -> bool:
        raft, world = self.raft, self.raft.world
        await asyncio.sleep(world.rng.uniform(0.0005, 0.01))
        if raft._leader_log is self and raft.has_majority(self.node):
            return self._leading
        await asyncio.sleep(timeout_ms / 1000)
        return False

    def pump(self) -> None:
        """Applies what is committed, one entry at a time."""
        raft, world = self.raft, self.raft.world
        if self._armed or self.process.dead or self._index >= len(raft.committed):
            return
        self._armed = True
        late = 0.0003 if raft.leader == self.node else world.network.delay_s()
        self.process.run(world.loop.call_later, late, self._apply)

    def _apply(self) -> None:
        self._armed = False
        raft = self.raft
        if raft.leader == self.node or raft.has_majority(self.node):
            self._index += 1
            commit: Commit = self._machine.commit(raft.committed[self._index - 1], self._index)
            for callback in self._applieds:
                callback(commit)
            future = self._waiting.pop(self._index, None)
            if future is not None and not future.done():
                future.set_result(Applied(commit.result))
        else:
            self.process.run(raft.world.loop.call_later, 0.02, self.pump)
            return
        self.pump()
