"""Three brokers and three controllers in one process, with everything between them simulated.

Real: ControllerService without its sockets (state, gate, requests, liveness, watch, gRPC handlers),
ReplicasManager with its sessions and runner, RoleActions, WritePath with its parts,
Replication, AutoSwitchHAService with both shells and cores. Simulated: clock, network, Raft (an
agreed log in which entries of a deposed leader survive or vanish), the store.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from batonmq.broker.config import BrokerConfig, BrokerSections, ReplicasConfig
from batonmq.broker.replication.controlled import ControllerReplication
from batonmq.broker.replication.role_actions import RoleActions
from batonmq.broker.tables.slave_sync import Followed
from batonmq.broker.write.write_path import WritePath
from batonmq.controller.config import ControllerConfig
from batonmq.controller.service import ControllerService
from batonmq.ha.config import HAConfig
from batonmq.ha.service import AutoSwitchHAService
from batonmq.protocol.errors import ConnectError
from batonmq.protocol.role_view import Role
from batonmq.replicas_manager.identity import RoleFile
from batonmq.replicas_manager.service import ReplicasManager
from batonmq.store.config import StoreConfig
from lab.sim.ambient import Clocks, ambient
from lab.sim.loop import Crash, Process, SimLoop, at_world
from lab.sim.network import Network
from tests.lab.sim.sim_raft import NODES, Raft, SimLog
from tests.lab.sim.sim_store import Disk, FileStore, MemoryStore

BROKERS = (1, 2, 3)
GROUP = "broker-a"
PEERS = ";".join(f"{node}-{node}:9878" for node in NODES)


class Violation(AssertionError):
    """A promise does not hold."""


class _Table:
    """Topics, offsets and locks of nothing."""

    master_epoch = 0

    def set_state_version(self, version: int) -> None:
        self.master_epoch = version

    def query(self, group: str, topic: str, queue_id: int) -> int:
        return -1

    def log_ends(self, end: int) -> None:
        pass

    def clamped(self, end_of: Any) -> tuple[None, ...]:
        return ()

    def clamp(self, end_of: Any, timer_end: int) -> None:
        pass

    def lead(self, now_ms: int) -> None:
        pass


class _NoSlaveSync:
    """Has the tables of each master at once."""

    held_epoch = -1
    failure = ""
    on_tables: Callable[[int], None]
    followed = None

    def follow(self, followed: Followed | None) -> None:
        if followed is not None:
            self.held_epoch = followed.master_epoch
            asyncio.get_running_loop().call_soon(self.on_tables, followed.master_epoch)

    def fetch_offsets_again(self) -> None:
        pass


class _Client:
    """Answers 1007 from the broker at that address."""

    def __init__(self, broker: Broker) -> None:
        self._world, self._host = broker.world, broker.host

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


class SimReplication(ControllerReplication):
    """Replication whose ReplicasManager speaks over the simulated network."""

    def __init__(self, broker: Broker, config: BrokerSections) -> None:
        self._broker = broker
        self.config = config
        tables, client = (
            SimpleNamespace(topics=_Table(), offsets=_Table(), delays=_Table(), locks=_Table()),
            _Client(broker),
        )
        super().__init__(
            config,
            broker.path,
            tables,  # type: ignore[arg-type]
            _NoSlaveSync(),  # type: ignore[arg-type]
            client,  # type: ignore[arg-type]
            broker,
        )

    def _new_manager(self, actions: RoleActions, ha: AutoSwitchHAService) -> ReplicasManager:
        world, hold = self._broker.world, actions.hold_sends

        def hold_sends() -> int:
            world.counts.drains += 1
            return hold()

        actions.hold_sends = hold_sends  # type: ignore[method-assign]
        return ReplicasManager(
            self.config.replicas_manager(),
            actions,
            ha,
            incarnation=self._broker.incarnation,
            on_fatal=self._broker.fatal,
            clock_ms=world.loop.now_ms,
        )

    def on_diverged(self, reason: str) -> None:
        raise Violation(f"{self._broker.incarnation} cannot follow: {reason}")


class Broker:
    """One incarnation of a broker process."""

    def __init__(self, world: World, number: int, start_number: int) -> None:
        self.world = world
        self.number = number
        self.start_number = start_number
        self.host = f"10.0.0.{number}"
        self.incarnation = f"b{number}-start{start_number}"
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
        self.path = WritePath(
            self.store,
            ack_wait_ms=3000,
            sync_flush=world.ha_sync,
            clock_ms=loop.now_ms,
        )
        self.gate = self.path.gate
        self.replication = SimReplication(self, config)
        self.ha = self.replication.ha
        self.manager = self.replication.manager
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

    def _crash(self) -> None:
        """Called in the middle of a cut."""
        self.world.counts.crashes += 1
        self.process.kill()
        self.world.brokers[self.number] = None
        self.world.call_later(0.0, self.store.abandon)

    def routes_changed(self) -> None:
        pass

    def master_opened(self) -> None:
        pass

    def role_left(self) -> None:
        pass

    def fatal(self, error: BaseException) -> None:
        self.world.fatal.append((self.host, error))
        self.world.call_later(0.0, self.world.kill_broker, self.number)

    async def _main(self) -> None:
        await self.replication.start()
        while True:
            await asyncio.sleep(0.1)
            now_ms = self.world.loop.now_ms()
            self.replication.tick(now_ms)
            self.path.tick(now_ms)

    @property
    def is_open(self) -> bool:
        return self.gate.refusal is None and self.gate.role is Role.MASTER

    def put(self) -> None:
        """One message of a client; runs in this process."""
        if not self.is_open or not self.store.writable or self.path.hold.active:
            return
        world = self.world
        world.written += 1
        record = b"%04d:%010d;" % (self.gate.master_epoch, world.written)
        end = self.store.put(record)
        epoch = self.gate.master_epoch
        self.path.acks.add_waiter(
            end,
            world.loop.now_ms(),
            lambda code, _: world.answered(self, epoch, end, record, code),
        )
        self.path.schedule_flush()


@dataclass
class Counts:
    """How often something happened in a run."""

    acked: int = 0
    failed: int = 0
    elections: int = 0
    kills: int = 0
    crashes: int = 0
    drains: int = 0
    faults: dict[str, int] = field(default_factory=dict)


class World:
    """The whole cluster, and the checks of its promises."""

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
        self.starts = dict.fromkeys(BROKERS, 0)
        self.brokers: dict[int, Broker | None] = dict.fromkeys(BROKERS)
        self.services: dict[str, ControllerService] = {}
        self.truth = b""  # the longest log prefix that any master acknowledged
        self.truth_ends: dict[int, int] = {}  # masterEpoch -> how much of it stood in that epoch
        self.masters: dict[int, str] = {}
        self.written = 0
        self.fatal: list[tuple[str, BaseException]] = []
        self.counts = Counts()
        self.violations: list[Violation] = []
        self._around = ExitStack()
        self._around.enter_context(ambient(seed, self.network, Clocks(self.loop), None))

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
            process.spawn(service._grpc_endpoint.listen(f"{node}:9879"))

        process.run(build)

    def kill_controller(self, node: str, *, vanish: bool = False) -> None:
        process = self.raft.logs[node].process
        if not process.dead:
            process.kill(vanish=vanish)

    def start_broker(self, number: int) -> None:
        self.starts[number] += 1
        self.brokers[number] = Broker(self, number, self.starts[number])

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
            if sync.log.confirm_offset < broker.confirms.get(sync.master_epoch, 0):
                self.violate(f"R15: {broker.incarnation}'s confirmOffset falls")
            broker.confirms[sync.master_epoch] = sync.log.confirm_offset
        self._extend_truth(broker, bytes(broker.store.disk.data[:confirmed]))

    def opened(self, broker: Broker) -> None:
        self.counts.elections += 1
        # One that hung may open long after its epoch was over: it can acknowledge nothing (R1).
        epoch = broker.gate.master_epoch
        durable = RoleFile(broker.replication.config.replicas_manager().role_path).load()
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
                self.raft.poll()
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
        for number in BROKERS:
            self.kill_broker(number)
        asyncio.set_event_loop(None)
        self.network.muted = True
        self.loop.finish()
        self._around.close()
