"""Three brokers and three controllers in one process, with everything between them simulated.

Real: ControllerService without its sockets (state, gate, requests, liveness, watch, gRPC handlers),
ReplicasManager with its sessions and runner, RoleActions, RoleGate, PendingAcks, SendTurn,
Replication, AutoSwitchHAService with both shells and cores. Simulated: clock, network, Raft (an
agreed log in which entries of a deposed leader survive or vanish), the store.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sim_loop import Process, SimLoop
from sim_network import Network, SimChannels, at_world
from sim_store import Crash, Disk, FileStore, MemoryStore

import controller.requests
import controller.service
import controller.watch
from broker.config import BrokerConfig, ReplicasConfig
from broker.pending_acks import PendingAcks
from broker.replication import Replication
from broker.role_gate import Role, RoleGate
from broker.service import BrokerSections
from broker.turn import SendTurn
from controller.config import ControllerConfig
from controller.log import Applied, LogStatus, NotApplied, Outcome, Unknown
from controller.machine import Commit, Machine
from controller.service import ControllerService
from ha.config import HAConfig
from protocol.errors import ConnectError
from replicas_manager.identity import RoleFile
from replicas_manager.service import ReplicasManager
from store.config import StoreConfig

BROKERS = (1, 2, 3)
NODES = ("n0", "n1", "n2")
GROUP = "broker-a"
PEERS = ";".join(f"{node}-{node}:9878" for node in NODES)


_CLOCKS = (
    (controller.requests, "monotonic_ms"),
    (controller.requests, "wall_ms"),
    (controller.watch, "monotonic_ms"),
    (controller.watch, "wall_ms"),
    (controller.service, "wall_ms"),
)
"""Imported by name, so they are put in place of each other; `World.close` puts them back."""


class Violation(AssertionError):
    """A promise was broken."""


# -- Raft, agreed upon by magic


class Raft:
    """One committed log. `leader` proposes; entries in limbo survive its fall, or do not."""

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
        self.truth.state.check_invariants()
        self.world.check_r1()
        for log in self.logs.values():
            log.pump()

    def look(self) -> None:
        """Called now and then: elects a leader if the old one is cut off."""
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
        old, self.leader = self.leader, self.world.rng.choice(able)
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

    async def hand_over(self, timeout_ms: int) -> bool:
        return not self._leading

    def status(self) -> LogStatus:
        return LogStatus(self.raft.term, self._index, self._index)

    def lead_later(self, leading: bool) -> None:
        world = self.raft.world
        late = world.rng.uniform(0.001, 0.01) if leading else world.rng.uniform(0.01, 0.4)
        self.process.run(world.loop.call_later, late, self._lead, leading)

    def _lead(self, leading: bool) -> None:
        if leading != (self.raft._leader_log is self):
            return  # another change of mind came in between
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
            pass  # never leaves this node
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
        """Applies what is committed, an entry at a time, when it is reached."""
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


# -- brokers


class _Tables:
    def set_state_version(self, version: int) -> None:
        pass


class _NoSlaveSync:
    def follow(self, followed: object) -> None:
        pass


class _Client:
    """Answers 1007 from the broker at that address."""

    def __init__(self, world: World, host: str) -> None:
        self._world, self._host = world, host

    async def call(self, address: str, request: Any, timeout_ms: int) -> Any:
        world = self._world
        await asyncio.sleep(world.network.delay_s())
        peer = address.rpartition(":")[0]
        broker = world.broker_at(peer)
        if broker is None or world.network.is_blocked(self._host, peer):
            raise ConnectError(address, "refused")
        cache = broker.replication.epoch_cache()
        body = cache.encode()
        await asyncio.sleep(world.network.delay_s())
        return SimpleNamespace(body=body)


class Broker:
    """One life of a broker process."""

    def __init__(self, world: World, number: int, life: int) -> None:
        self.world = world
        self.number = number
        self.life = life
        self.host = f"10.0.0.{number}"
        self.incarnation = f"b{number}-life{life}"
        self.process = Process(world.loop, self.host)
        self.ended = False
        self.stalled_ms = 0
        self.confirms: dict[int, int] = {}
        self.process.run(self._build)
        self.process.spawn(self._main())

    def _build(self) -> None:
        world = self.world
        loop = world.loop
        root = world.folder / self.host
        root.mkdir(exist_ok=True)
        config = BrokerSections(
            broker=BrokerConfig(
                broker_cluster_name="C", broker_name=GROUP, broker_ip1=self.host, listen_port=10911
            ),
            store=StoreConfig(
                store_path_root_dir=str(root),
                mapped_file_size_commit_log=4096,
                min_in_sync_replicas=world.min_in_sync,
                flush_disk_type="SYNC_FLUSH" if world.ha_sync else "ASYNC_FLUSH",
                ha_sync_flush=world.ha_sync,
            ),
            ha=HAConfig(ha_transfer_batch_size=256, ha_transfer_window_size=1024),
            replicas=ReplicasConfig(
                controller_grpc_addr=";".join(f"{node}:9879" for node in NODES)
            ),
        )
        self.store: Any
        if world.on_files:
            self.store = FileStore(root / "store", world.rng, loop.now_ms, self._crash)
        else:
            self.store = MemoryStore(world.disks[self.number], world.rng, self._flush_later)
        self.gate = RoleGate()
        self.acks = PendingAcks(3000)
        self.replication = Replication(
            config,
            self.store,
            self.gate,
            self.acks,
            _Tables(),  # type: ignore[arg-type]
            _Tables(),  # type: ignore[arg-type]
            _NoSlaveSync(),  # type: ignore[arg-type]
            _Client(world, self.host),  # type: ignore[arg-type]
            clock_ms=loop.now_ms,
            routes_changed=lambda: None,
            role_left=lambda: None,
            on_fatal=self._fatal,
        )
        self.ha = self.replication._ha
        assert self.ha is not None and self.replication._actions is not None
        self.ha._now_ms = loop.now_ms
        self.manager = ReplicasManager(
            self.replication._manager_config(),
            self.replication._actions,
            incarnation=self.incarnation,
            on_fatal=self._fatal,
            clock_ms=loop.now_ms,
            switch=self.replication._actions,
        )
        channels = SimChannels(world.network)
        self.manager._channels = channels  # type: ignore[assignment]
        self.manager._reporter._channels = channels  # type: ignore[assignment]
        self.replication._manager = self.manager
        self.replication._actions.report = self.manager.report_event
        self.replication.on_diverged = self._diverged  # type: ignore[method-assign]
        hold = self.replication._actions.hold_sends

        def hold_sends() -> int:
            world.counts.drains += 1
            return hold()

        self.replication._actions.hold_sends = hold_sends  # type: ignore[method-assign]
        self.turn = SendTurn(loop, self._end_turn)
        advance = self.store.advance_confirm_offset

        def advanced(offset: int) -> int:
            confirmed = advance(offset)
            world.confirmed(self, confirmed)
            return confirmed

        self.store.advance_confirm_offset = advanced
        opened = self.gate.open

        def open_gate() -> None:
            opened()
            world.opened(self)

        self.gate.open = open_gate  # type: ignore[method-assign]

    def _flush_later(self, flush: Any) -> None:
        world = self.world
        world.loop.call_later(world.rng.uniform(0.0005, 0.006), flush)

    def _end_turn(self) -> None:
        self.replication.written(self.store.end_turn())

    def _crash(self) -> None:
        """In the middle of something."""
        self.world.counts.crashes += 1
        self.process.kill()
        self.world.brokers[self.number] = None
        self.world.call_later(0.0, self.store.abandon)

    def _fatal(self, error: BaseException) -> None:
        self.world.fatal.append((self.host, error))
        self.world.call_later(0.0, self.world.kill_broker, self.number)

    def _diverged(self, reason: str) -> None:
        raise Violation(f"{self.incarnation} cannot follow: {reason}")

    async def _main(self) -> None:
        await self.replication.start()
        while True:
            await asyncio.sleep(0.1)
            self.replication.tick(self.world.loop.now_ms())

    @property
    def is_open(self) -> bool:
        return self.gate.refusal is None and self.gate.role is Role.MASTER

    def put(self) -> None:
        """One message of a client; runs in this process."""
        if not self.is_open or not self.store.writable or self.replication.hold.active:
            return
        world = self.world
        world.written += 1
        record = b"%04d:%010d;" % (self.gate.master_epoch, world.written)
        end = self.store.put(record)
        epoch = self.gate.master_epoch
        self.acks.add_waiter(
            end,
            world.loop.now_ms(),
            lambda code, _: world.answered(self, epoch, end, record, code),
        )
        self.turn.touched()


# -- everything


@dataclass
class Counts:
    acked: int = 0
    failed: int = 0
    elections: int = 0
    kills: int = 0
    crashes: int = 0
    drains: int = 0
    faults: dict[str, int] = field(default_factory=dict)


class World:
    def __init__(
        self,
        seed: int,
        folder: Path,
        *,
        min_in_sync: int = 1,
        ha_sync: bool = False,
        on_files: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.min_in_sync = min_in_sync
        self.ha_sync = ha_sync
        self.on_files = on_files
        self.loop = SimLoop(self.rng)
        self.network = Network(self.loop, self.rng)
        self.raft = Raft(self)
        self.disks = {number: Disk(f"log-{number}") for number in BROKERS}
        self.lives = dict.fromkeys(BROKERS, 0)
        self.brokers: dict[int, Broker | None] = dict.fromkeys(BROKERS)
        self.services: dict[str, ControllerService] = {}
        self.truth = b""  # the longest log prefix that any master acknowledged
        self.truth_ends: dict[int, int] = {}  # masterEpoch -> how much of it stood in that epoch
        self.masters: dict[int, str] = {}
        self.written = 0
        self.fatal: list[tuple[str, BaseException]] = []
        self.counts = Counts()
        self.violations: list[Violation] = []
        self._clocks = [(module, name, getattr(module, name)) for module, name in _CLOCKS]
        for module, name, _ in self._clocks:
            setattr(module, name, self.loop.now_ms)

    def call_later(self, delay: float, callback: Any, *args: Any) -> None:
        at_world(self.loop, self.loop.time() + delay, callback, *args)

    # -- processes

    def start_controller(self, node: str) -> None:
        process = Process(self.loop, node)

        def build() -> None:
            log = SimLog(self.raft, node, process)
            service = ControllerService(
                ControllerConfig(
                    controller_peers=PEERS,
                    controller_self_id=node,
                    controller_store_path=str(self.folder / node),
                ),
                replicated_log=log,
            )
            self.services[node] = service
            service._watch.start()
            log.pump()
            address = f"{node}:9879"
            self.network.doors[address] = (process, service._grpc_door)
            process.on_kill.append(lambda: self.network.doors.pop(address, None))

        process.run(build)

    def kill_controller(self, node: str, *, vanish: bool = False) -> None:
        process = self.raft.logs[node].process
        if not process.dead:
            process.kill(vanish=vanish)

    def start_broker(self, number: int) -> None:
        self.lives[number] += 1
        self.brokers[number] = Broker(self, number, self.lives[number])

    def kill_broker(self, number: int, *, vanish: bool = False) -> None:
        broker = self.brokers[number]
        if broker is not None:
            self.counts.kills += 1
            broker.process.kill(vanish=vanish)
            broker.store.abandon()
            self.brokers[number] = None

    def broker_at(self, host: str) -> Broker | None:
        for broker in self.brokers.values():
            if broker is not None and broker.host == host:
                return broker
        return None

    def living(self) -> list[Broker]:
        return [broker for broker in self.brokers.values() if broker is not None]

    # -- what must hold

    def violate(self, what: str) -> None:
        violation = Violation(f"{what} at {self.loop.time() - 10_000:.4f} s")
        self.violations.append(violation)
        self.loop.stop()

    def answered(self, broker: Broker, epoch: int, end: int, record: bytes, code: int) -> None:
        if code != 0:
            self.counts.failed += 1
            return
        self.counts.acked += 1
        first = self.masters.setdefault(epoch, broker.incarnation)
        if first != broker.incarnation:
            self.violate(f"G2: {first} and {broker.incarnation} acknowledge in epoch {epoch}")
        data = bytes(broker.store.disk.data[:end])
        if record not in data[-256:]:
            self.violate(f"G1: {broker.incarnation} acknowledges {record!r} that it does not hold")
        self._extend_truth(broker, data)

    def _extend_truth(self, broker: Broker, data: bytes) -> None:
        shorter = min(len(data), len(self.truth))
        if data[:shorter] != self.truth[:shorter]:
            self.violate(f"G3: {broker.incarnation} shows other bytes than were acknowledged")
        if len(data) > len(self.truth):
            self.truth = data
            self.truth_ends[broker.gate.master_epoch] = len(data)
            for other in self.living():
                newer = other.is_open and other.gate.master_epoch > broker.gate.master_epoch
                if newer and not other.store.disk.data.startswith(data):
                    self.violate(
                        f"G1: {broker.incarnation} acknowledges in {broker.gate.master_epoch}, "
                        f"{other.incarnation} is master of {other.gate.master_epoch} without it"
                    )

    def confirmed(self, broker: Broker, confirmed: int) -> None:
        """A broker shows everything below `confirmed` to readers (G4)."""
        sync = broker.ha.sync_state
        if sync is not None:
            if sync.confirm_offset < broker.confirms.get(sync.master_epoch, 0):
                self.violate(f"R15: {broker.incarnation}'s confirmOffset falls")
            broker.confirms[sync.master_epoch] = sync.confirm_offset
        self._extend_truth(broker, bytes(broker.store.disk.data[:confirmed]))

    def opened(self, broker: Broker) -> None:
        self.counts.elections += 1
        # One that hung may open long after its epoch was over: it can acknowledge nothing (R1).
        epoch = broker.gate.master_epoch
        durable = RoleFile(broker.replication._manager_config().role_path).load()
        if durable < epoch:
            self.violate(f"R2: {broker.incarnation} opens in {epoch}, stored is {durable}")
        needed = max((end for e, end in self.truth_ends.items() if e < epoch), default=0)
        if not broker.store.disk.data.startswith(self.truth[:needed]):
            held = len(broker.store.disk.data)
            self.violate(
                f"G1: {broker.incarnation}, master of {broker.gate.master_epoch}, lacks "
                f"acknowledged bytes: holds {held} of {needed}"
            )

    def check_r1(self) -> None:
        group = self.raft.truth.state.group(GROUP)
        if group is None:
            return
        for broker in self.living():
            sync = broker.ha.sync_state
            if (
                sync is not None
                and sync.master_epoch == group.master_epoch
                and broker.incarnation == group.master_incarnation
                and not set(group.sync_state_set) <= sync.required_set
            ):
                self.violate(
                    f"R1: {broker.incarnation} waits for {sorted(sync.required_set)}, recorded is "
                    f"{group.sync_state_set} (epochs {group.master_epoch}, "
                    f"{group.sync_state_set_epoch})"
                )

    def check(self) -> None:
        if self.violations:
            raise self.violations[0]
        self.loop.errors = [e for e in self.loop.errors if not isinstance(e, Crash)]
        if self.loop.errors:
            error = self.loop.errors[0]
            raise error if isinstance(error, BaseException) else Violation(error)
        self.check_r1()
        living = self.living()
        for broker in living:
            sync = broker.ha.sync_state
            if sync is not None:
                broker.ha._master.core.check_invariants()  # type: ignore[union-attr]
            if broker.ha._slave is not None:
                broker.ha._slave.core.check_invariants()
            state = broker.manager._state
            if state is not None:
                state.check_invariants()
        for one in living:
            for other in living:
                common = min(one.store.confirm_offset, other.store.confirm_offset)
                if one is other:
                    break
                if one.store.disk.data[:common] != other.store.disk.data[:common]:
                    raise Violation(f"G3: {one.incarnation} and {other.incarnation} differ")

    # -- running

    def run(self, seconds: float) -> None:
        """Lets `seconds` pass, checking every few ms."""
        end = self.loop.time() + seconds

        async def watch() -> None:
            while self.loop.time() < end:
                await asyncio.sleep(0.02)
                self.raft.look()
                self.check()

        asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(watch())
        try:
            self.loop.run_until_complete(task)
        except RuntimeError:
            self.check()
            raise
        self.check()

    def close(self) -> None:
        for module, name, clock in self._clocks:
            setattr(module, name, clock)
        for number in BROKERS:
            self.kill_broker(number)
        asyncio.set_event_loop(None)
        self.network.muted = True
        self.loop.finish()


__all__ = ["BROKERS", "GROUP", "NODES", "Broker", "Violation", "World"]
