"""The server processes of a simulated cluster: brokers, and name servers with their controllers.

A host keeps its disk; each start on it is a new process of the service that ships, unchanged.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
from pathlib import Path
from typing import Protocol

from batonmq.broker.config import BrokerConfig, BrokerSections, ReplicasConfig
from batonmq.broker.replication.controlled import ControllerReplication
from batonmq.broker.service import BrokerService
from batonmq.controller.config import ControllerConfig
from batonmq.controller.raft.log import Commit, Machine
from batonmq.controller.raft.node import RaftLog
from batonmq.controller.service import ControllerService, _raft_settings
from batonmq.ha.config import HAConfig
from batonmq.ha.node_secret import NONCE_BYTES, NodeSecret
from batonmq.ha.service import AutoSwitchHAService
from batonmq.namesrv.config import NamesrvConfig
from batonmq.namesrv.service import NamesrvService
from batonmq.namesrv.state import RouteInfoManager
from batonmq.protocol.errors import BatonError
from batonmq.protocol.role_view import Role
from batonmq.replicas_manager.service import ReplicasManager
from batonmq.runtime.secret_file import Secrets
from batonmq.runtime.server_main import started
from batonmq.store.config import StoreConfig
from batonmq.store.message_store import MessageStore
from lab.sim.ambient import release_locks
from lab.sim.disk import HostDisk
from lab.sim.loop import Crash, SimProcess
from lab.sim.settings import Settings
from lab.sim.world import World

CLUSTER = "C"
GROUP = "broker-a"
BROKERS = (1, 2, 3)
CONTROLLERS = (0, 1, 2)
NAMESRV_PORT = 9876
CONTROLLER_PORT = 9878
BROKER_PORT = 10911
DELAY_LEVELS_S = (1, 2, 1, 1, 1)
"""Retries begin at the third."""
_RESTART_S = 0.4


def broker_host(number: int) -> str:
    return f"10.0.0.{number}"


def controller_host(number: int) -> str:
    return f"10.0.1.{number}"


NAME_SERVERS = ";".join(f"{controller_host(n)}:{NAMESRV_PORT}" for n in CONTROLLERS)
CONTROLLER_ADDRESSES = [f"{controller_host(n)}:{CONTROLLER_PORT}" for n in CONTROLLERS]
_PEERS = ";".join(f"n{n}-{controller_host(n)}:{CONTROLLER_PORT}" for n in CONTROLLERS)
GRPC_ADDRESSES = [f"{controller_host(n)}:{CONTROLLER_PORT + 1}" for n in CONTROLLERS]


class ServerWatch(Protocol):
    """What observers of the servers implement."""

    def begins(self, host: BrokerHost, service: BrokerService) -> None: ...

    def confirmed(self, host: BrokerHost) -> None: ...

    def started(self, host: BrokerHost) -> None: ...

    def classic(self, host: BrokerHost, store: MessageStore) -> None: ...

    def opened(self, host: BrokerHost) -> None: ...

    def ended(self, host: BrokerHost) -> None: ...

    def promised(self, host: BrokerHost, offset: int) -> None: ...

    def routes(self, host: ControllerHost, routes: RouteInfoManager) -> None: ...

    def applied(self, host: ControllerHost, commit: Commit) -> None: ...


def controlled(service: BrokerService) -> ControllerReplication:
    """The replication of a broker that runs under controllers."""
    assert isinstance(service.replication, ControllerReplication)
    return service.replication


class Host:
    """One machine. `process` is the running one, None while it is down."""

    def __init__(self, world: World, name: str, address: str) -> None:
        self.world = world
        self.name = name
        self.address = address
        self.disk: HostDisk = world.disks.host(address)
        self.disk.on_fault = lambda what: world.tell(name, f"disk: {what}")
        self.disk.crash = self._crashed
        self.process: SimProcess | None = None
        self.boot = 1
        self.starts = 0
        self.rate = 1.0
        self.last_failure: BaseException | str | None = None
        self.wanted = False  # a supervisor starts it again when it ends by itself
        self.in_hand = False  # an operator stopped it: no fault starts it again
        self._stop: asyncio.Event | None = None

    @property
    def is_up(self) -> bool:
        return self.process is not None

    def start(self) -> None:
        if not self.in_hand:
            self.start_by_hand()

    def start_by_hand(self) -> None:
        self.wanted = not self.in_hand
        if self.process is not None:
            return  # if it is stopping, it starts again
        self.starts += 1
        world = self.world
        world.tell(self.name, f"start {self.starts}")
        process = self.process = SimProcess(world.loop, self.address, rate=self.rate)
        process.on_kill.append(self._ended)
        process.spawn(self._main())

    def kill(self) -> None:
        """SIGKILL: what it wrote is in the page cache."""
        self.wanted = False
        if self.process is not None:
            self.process.kill()

    def lose_power(self) -> None:
        """The machine stops at once; what was not synced may be gone."""
        self.wanted = False
        if self.process is not None:
            self.process.kill(vanish=True)
        self.boot += 1
        self.disk.lose_power()

    def wipe(self) -> None:
        """Its disk is replaced by an empty one."""
        self.lose_power()
        self.disk.wipe()

    def stop(self) -> None:
        """SIGTERM."""
        self.wanted = False
        if self._stop is not None and self.process is not None:
            self.process.run(self._stop.set)

    def _crashed(self) -> None:
        """At a call to its disk."""
        if self.process is not None:
            self.process.kill()

    def _ended(self) -> None:
        process, self.process = self.process, None
        self._stop = None
        assert process is not None
        # What a kernel does for a process that ends.
        self.world.disks.close_all_of(process)
        release_locks(self.disk.root)
        self.gone()
        if self.wanted:
            self.world.later(_RESTART_S, self._restart)

    def _restart(self) -> None:
        if self.wanted:
            self.start()

    def gone(self) -> None:
        """Its process has ended."""

    async def _main(self) -> None:
        self._stop = stop = asyncio.Event()
        process = self.process
        assert process is not None
        try:
            await self.serve(stop)
        except Crash:
            raise
        except (BatonError, OSError) as error:
            self.last_failure = error
            self.world.tell(self.name, f"ends: {error}")
        process.kill()

    async def serve(self, stop: asyncio.Event) -> None:
        raise NotImplementedError


class BrokerHost(Host):
    def __init__(self, world: World, number: int, watch: ServerWatch) -> None:
        super().__init__(world, f"broker {number}", broker_host(number))
        self.number = number
        self.watch = watch
        self.service: BrokerService | None = None
        self._classic_store: MessageStore | None = None
        self.classic = False  # its next process runs without controllers
        self.checked = 0  # up to here its bytes were compared with what is confirmed
        self.confirms: dict[int, int] = {}

    @property
    def incarnation(self) -> str:
        return f"{self.name}, start {self.starts}"

    def gone(self) -> None:
        self.watch.ended(self)
        self.service = self._classic_store = None

    async def serve(self, stop: asyncio.Event) -> None:
        world, watch = self.world, self.watch
        service = BrokerService(_broker_sections(self, world.settings), self._fatal)
        if world.settings.proves:
            service.replication.node_secret = _node_secret(service.config)
        store = service.store
        # The machine that is simulated: when it was booted, and how full its disk is.
        store._boot_id = lambda: f"boot-{self.number}-{self.boot}"
        store._disk_use_of = lambda folders: self.disk.used()
        if self.classic:
            await self._serve_classic(service, stop)
            return
        store.arrival_listeners.append(lambda *_: watch.confirmed(self))
        gate = service.path.gate
        opened = gate.open

        def open_gate() -> None:
            opened()
            world.tell(self.name, f"opens as master of epoch {gate.master_epoch}")
            watch.opened(self)

        gate.open = open_gate  # type: ignore[method-assign]
        self._watch_replication(controlled(service))
        watch.begins(self, service)
        # A new process shows its log from the first byte on, so all of it is compared again.
        self.checked = 0
        self.confirms.clear()
        if not await started(service.start(), stop.wait()):
            return
        self.service = service
        watch.started(self)
        try:
            await stop.wait()
        finally:
            await service.close()

    async def _serve_classic(self, service: BrokerService, stop: asyncio.Event) -> None:
        """Without controllers it follows none of the rules that hold under them: `service` stays
        None, and only what it acknowledges is looked at."""
        store = service.store
        store.arrival_listeners.append(lambda *_: self.look_classic())
        if not await started(service.start(), stop.wait()):
            return
        self._classic_store = store
        try:
            await stop.wait()
        finally:
            self.look_classic()
            await service.close()

    def look_classic(self) -> None:
        if self._classic_store is not None:
            self.watch.classic(self, self._classic_store)

    def _watch_replication(self, replication: ControllerReplication) -> None:
        """Called with what is confirmed, before the broker acts on it."""
        confirm, watch = replication.on_confirm_offset, self.watch

        def on_confirm_offset(offset: int) -> None:
            watch.promised(self, offset)
            confirm(offset)
            # At once: it may be killed before it is looked at, and its client has the answer.
            watch.confirmed(self)

        replication.on_confirm_offset = on_confirm_offset  # type: ignore[method-assign]

    @property
    def manager(self) -> ReplicasManager | None:
        """Of its process; None while it is down, or runs without controllers."""
        return controlled(self.service).manager if self.service is not None else None

    @property
    def ha(self) -> AutoSwitchHAService | None:
        """As `manager`."""
        return controlled(self.service).ha if self.service is not None else None

    @property
    def broker_id(self) -> int:
        """That of its process; 0 while it has none."""
        return self.service.replication.broker_id() if self.service is not None else 0

    def _fatal(self, error: BaseException) -> None:
        self.last_failure = error
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            self.world.violate(f"R45: {self.incarnation} ends because its disk is full: {error}")
        if not isinstance(error, OSError | BatonError):
            self.world.loop.note_error(error)  # a defect, and no fault of its disk
        self.world.tell(self.name, f"cannot continue: {error!r}")
        if self._stop is not None:
            self._stop.set()

    @property
    def knows(self) -> tuple[int, int]:
        """masterEpoch and setEpoch of the newest view that it took."""
        state = self.manager._state if self.manager is not None else None
        return state.current.key if state is not None else (0, 0)

    @property
    def is_open(self) -> bool:
        service = self.service
        return (
            service is not None
            and service.path.gate.refusal is None
            and service.path.gate.role is Role.MASTER
        )


class ControllerHost(Host):
    """A name server with a controller in its loop."""

    def __init__(self, world: World, number: int, watch: ServerWatch) -> None:
        super().__init__(world, f"controller {number}", controller_host(number))
        self.number = number
        self.watch = watch
        self.service: ControllerService | None = None
        self.raft: RaftLog | None = None

    def gone(self) -> None:
        self.service = self.raft = None

    @property
    def term(self) -> int:
        """Of Raft; 0 while it is down."""
        return self.raft.status().term if self.raft is not None else 0

    async def serve(self, stop: asyncio.Event) -> None:
        world, watch = self.world, self.watch
        folder = self.disk.root / "controller"
        namesrv = NamesrvService(NamesrvConfig(bind_address=self.address))
        config = ControllerConfig(
            controller_peers=_PEERS,
            controller_self_id=f"n{self.number}",
            controller_store_path=str(folder),
            bind_address=self.address,
        )
        settings = _raft_settings(config)
        raft = self.raft = RaftLog(settings, Machine(), on_fatal=self._raft_fatal)
        raft.on_applied(lambda commit: watch.applied(self, commit))
        raft.on_role(lambda leads: world.tell(self.name, "leads" if leads else "leads no more"))
        watch.routes(self, namesrv.routes)
        self.service = namesrv.controller = ControllerService(config, replicated_log=raft)
        await namesrv.start()
        try:
            await stop.wait()
        finally:
            await namesrv.close()

    def _raft_fatal(self, what: str) -> None:
        """As `exit_process`."""
        self.last_failure = what
        if f"[Errno {errno.ENOSPC}]" in what:
            self.world.violate(f"R53: {self.name} ends because its disk is full: {what}")
        self.world.tell(self.name, f"cannot continue: {what}")
        if self.process is not None:
            self.process.kill()
        raise Crash(what)


def _node_secret(config: BrokerSections) -> NodeSecret:
    """As that of a broker with users on. Without the users: clients do not sign here."""
    return NodeSecret(
        secrets=lambda: Secrets("of the nodes"),
        new_nonce=lambda: secrets.token_bytes(NONCE_BYTES),
        required=True,
        address=config.ha_address,
        name=(CLUSTER, GROUP, str(config.broker.broker_id)),
    )


def _broker_sections(host: BrokerHost, settings: Settings) -> BrokerSections:
    root: Path = host.disk.root / "store"
    return BrokerSections(
        broker=BrokerConfig(
            broker_cluster_name=CLUSTER,
            broker_name=GROUP,
            enable_controller_mode=not host.classic,
            broker_ip1=host.address,
            listen_port=BROKER_PORT,
            namesrv_addr=NAME_SERVERS,
            default_topic_queue_nums=4,
            flush_consumer_offset_interval=1_000,
            register_name_server_period=5_000,
            recall_message_enable=True,
            transaction_time_out=1_000,
            transaction_check_interval=500,
            transaction_check_max=1_000,
        ),
        store=StoreConfig(
            store_path_root_dir=str(root),
            mapped_file_size_commit_log=settings.segment_size,
            mapped_file_size_consume_queue=settings.queue_file_units * 20,
            max_hash_slot_num=200,
            max_index_num=800,
            max_message_size=settings.segment_size // 4,
            min_in_sync_replicas=settings.min_in_sync,
            message_delay_level=" ".join(f"{seconds}s" for seconds in DELAY_LEVELS_S),
            flush_disk_type="SYNC_FLUSH" if settings.sync_flush else "ASYNC_FLUSH",
            ha_sync_flush=settings.ha_sync_flush,
            clean_resource_interval=300 if settings.expires else 2_000,
            clean_file_forcibly_enable=settings.expires,
            delete_when=";".join(str(hour) for hour in range(24)),
            file_reserved_time=settings.reserved_hours,
            scrub_bytes_per_second=settings.scrub_rate,
        ),
        ha=HAConfig(
            ha_transfer_batch_size=settings.batch_bytes,
            ha_transfer_window_size=8 * settings.batch_bytes,
        ),
        replicas=ReplicasConfig(controller_grpc_addr=";".join(GRPC_ADDRESSES)),
    )
