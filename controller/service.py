"""One controller node: log, gate, liveness, doors and history, wired together.

It runs alone (`controller.main`) or inside a name server's loop. What a node decides it decides
behind its gate; what it has applied it pushes to the sessions it holds, leader or not (R20): a
broker hears of an election from whichever controller applies it first.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from controller.config import ControllerConfig
from controller.gate import LeaderGate
from controller.grpc_door import GrpcDoor
from controller.history import HISTORY_EVENTS_MAX, EventKind
from controller.history_file import HistoryFile
from controller.history_publisher import HistoryPublisher
from controller.liveness import LivenessConfig, LivenessCore
from controller.log import ReplicatedLog
from controller.machine import Commit, Machine
from controller.notes import HistoryNotes
from controller.raft.node import RaftLog
from controller.remoting_door import RemotingDoor, role_notice
from controller.requests import ControllerRequests, wall_ms
from controller.results import HistoryAppended, ReplicasChanged, RoleChanged, SetChanged
from controller.runtime_config import RuntimeConfig
from controller.sessions import SessionBook
from controller.state import ControllerState
from controller.switch_desk import SwitchDesk
from controller.watch import BrokerWatch
from epoch.durable_file import sync_directory
from protocol.errors import ConnectError
from protocol.role_view import RoleView
from remoting.client import RemotingClient
from store.lock_file import StoreLock

__all__ = ["ControllerService"]

log = logging.getLogger(__name__)

RAFT_FOLDER: Final = "raft"
LOCK_NAME: Final = "lock"
GATE_TIMEOUT_MS: Final = 1_000
NOTICE_TIMEOUT_MS: Final = 3_000
CLOSE_STEP_TIMEOUT_S: Final = 0.4
HAND_OVER_TIMEOUT_MS: Final = 250


class ControllerService:
    """`await start()` before anything else; `await close()` ends it within a second.

    `replicated_log` takes another log than Raft's, for tests.
    """

    def __init__(
        self,
        config: ControllerConfig,
        *,
        replicated_log: ReplicatedLog | None = None,
    ) -> None:
        self._runtime = RuntimeConfig(config)
        self._log = replicated_log or RaftLog(
            config.self_peer,
            config.peers,
            Machine(),
            config.raft_timings,
            Path(config.store_path) / RAFT_FOLDER,
            bind_host=config.raft_bind_address,
            cluster=config.controller_group,
            password_file=config.raft_password_path,
        )
        self.gate = LeaderGate(
            self._log,
            config.controller_self_id,
            wall_ms=wall_ms,
            timeout_ms=GATE_TIMEOUT_MS,
            on_change=self._gate_changed,
        )
        core_config = LivenessConfig(
            session_timeout_ms=config.broker_session_timeout_ms,
            master_lease_ms=config.master_lease_ms,
            outcome_timeout_ms=config.propose_timeout_ms,
        )
        self._core = LivenessCore(core_config)
        self.requests = ControllerRequests(config, self._log, self.gate, self._core)
        self.sessions = SessionBook()
        self._notes = HistoryNotes(self.requests, config.controller_self_id)
        self._watch = BrokerWatch(
            self._core,
            self.requests,
            self.sessions,
            self._notes,
            tick_ms=core_config.tick_ms,
            push=self._push,
            ticked=self.gate.look_for_leader,
        )
        self._desk = SwitchDesk(self.requests, self.sessions, self._notes)
        self._grpc_door = GrpcDoor(self.requests, self.sessions, self._watch, self._desk)
        self._remoting_door = RemotingDoor(
            self.requests,
            self._runtime,
            self._desk,
            heartbeat=self._watch.remoting_heartbeat,
            disconnected=self._watch.remoting_disconnected,
        )
        self._notices = _RoleNotices()
        self._lock: StoreLock | None = None
        self._history: HistoryFile | None = None
        self._history_behind = False  # a write failed: the next one brings what is missing
        self._history_path = Path(config.store_path) / f"history-{config.controller_self_id}.jsonl"
        self._publisher = HistoryPublisher(
            self._history_path, lambda: self.config, lambda: self.state
        )
        self.requests.publication_problems = self._publisher.problems
        self._closing = False
        self._runtime.on_change = self._config_changed
        self._log.on_applied(self._applied)

    @property
    def config(self) -> ControllerConfig:
        return self._runtime.current

    @property
    def state(self) -> ControllerState:
        """What is applied on this node."""
        return self._log.state

    async def start(self) -> None:
        """Opens the store, the Raft port and the doors.

        Raises OSError naming the port that is taken or the path that cannot be written, ValueError
        for kept settings that cannot be used, StoreLockedError naming the process that works on
        the folder already, JournalDamage for a log that is not what was written. Nothing stays
        open then.
        """
        config = self.config
        try:
            self._open_store(Path(config.store_path))
            peer = config.self_peer
            await _listen(
                "remoting", peer.port, self._remoting_door.listen(config.bind_address, peer.port)
            )
            await self._grpc_door.listen(f"{config.bind_address}:{peer.grpc_port}")
            self._watch.start()
            await self._log.start()
        except BaseException:
            await self.close()
            raise
        log.info(
            "controller_started node=%s remoting=%d grpc=%d raft=%d pid=%d",
            peer.node_id,
            peer.port,
            peer.grpc_port,
            peer.raft_port,
            os.getpid(),
        )

    async def close(self) -> None:
        """Ends everything; decides nothing on the way, though its sessions all end now."""
        self._closing = True
        self.gate.close()
        # First of all: while the doors close, brokers talk to the next leader already.
        await self._log.hand_over(HAND_OVER_TIMEOUT_MS)
        await self._watch.close()
        await self._notes.close()
        for step in (
            self._grpc_door.close,
            self._remoting_door.close,
            self._notices.close,
            self._publisher.close,
        ):
            await _within(CLOSE_STEP_TIMEOUT_S, step)
        await self._log.close()
        history, self._history = self._history, None
        self.requests.history_file = None
        if history is not None:
            history.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _open_store(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sync_directory(folder.parent)
        # First of all: two processes that answer from one log could vote twice.
        lock = StoreLock(folder / LOCK_NAME)
        lock.acquire()
        self._lock = lock
        self._runtime.load()
        config = self.config
        self._history = HistoryFile(
            self._history_path,
            size_max=config.history_file_size,
            files=config.history_files,
        )
        self.requests.history_file = self._history

    # From the log and the gate.

    def _gate_changed(self, is_open: bool) -> None:
        self._watch.gate_changed(is_open)
        if is_open:
            self._publisher.lead()
        else:
            self._publisher.resign()
            self._desk.gate_closed()

    def _applied(self, commit: Commit) -> None:
        if self._closing:
            return
        self._tell_brokers(commit)
        self._write_history(commit)  # last: a slow disk must not hold up a view
        self._publisher.look()

    def _tell_brokers(self, commit: Commit) -> None:
        applied_ms = wall_ms()
        self._watch.state_applied(commit.state)
        self._desk.state_applied(commit.state)
        if commit.command is None:  # a snapshot: whatever was in between is in it
            for broker_name in commit.state.broker_names():
                self._push(broker_name)
            return
        for effect in commit.effects:
            match effect:
                case RoleChanged(view):
                    self._push(view.broker_name)
                    self._note_push(view, applied_ms)
                    if self.gate.open and self.config.notify_broker_role_changed:
                        self._notices.send(view)
                case SetChanged(view) | ReplicasChanged(view):
                    self._push(view.broker_name)

    def _push(self, broker_name: str) -> None:
        view = self.requests.view(broker_name)
        if view is not None:
            self.sessions.push_view(view)

    def _note_push(self, view: RoleView, applied_ms: int) -> None:
        """The leader tells when its push of a new master left."""
        if self.gate.open and view.master_broker_id is not None:
            self._notes.note(
                EventKind.PUSHED,
                view.broker_name,
                master_epoch=view.master_epoch,
                appliedMs=applied_ms,
                sessions=len(list(self.sessions.of_group(view.broker_name))),
            )

    def _write_history(self, commit: Commit) -> None:
        if self._history is None:
            return
        cut = False
        if commit.command is None or self._history_behind:
            events = list(commit.state.history)
            cut = len(events) >= HISTORY_EVENTS_MAX  # the state keeps no more: older ones are gone
        else:
            events = [
                effect.event for effect in commit.effects if isinstance(effect, HistoryAppended)
            ]
        try:
            written = self._history.append(events, cut=cut)
            self._history_behind = False
            if written:
                self._publisher.written()
        except OSError as error:
            self._history_behind = True
            # The history explains, it decides nothing: a full disk must not stop elections.
            log.error("history_not_written error=%s", error)

    def _config_changed(self, config: ControllerConfig) -> None:
        self.requests.config = config
        self._publisher.look()
        log.info("config_changed node=%s", config.controller_self_id)


class _RoleNotices:
    """1008 to brokers that speak only remoting. Lost ones are made good by their polling."""

    def __init__(self) -> None:
        self._client = RemotingClient(name="controller-notices")
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def send(self, view: RoleView) -> None:
        """Tells each such replica that lives; a newer notice takes the place of one under way."""
        if view.master_broker_id is None:
            return
        for replica in view.replicas:
            if replica.alive and not replica.incarnation and replica.address:
                self._send_to(replica.address, view)

    def _send_to(self, address: str, view: RoleView) -> None:
        if (older := self._tasks.pop(address, None)) is not None:
            older.cancel()
        task = asyncio.get_running_loop().create_task(self._deliver(address, view))
        self._tasks[address] = task
        task.add_done_callback(lambda done: self._forget(address, done))

    async def _deliver(self, address: str, view: RoleView) -> None:
        try:
            async with asyncio.timeout(NOTICE_TIMEOUT_MS / 1000):
                await self._client.oneway(address, role_notice(view))
        except (ConnectError, TimeoutError) as error:
            log.info("role_notice_lost address=%s error=%s", address, error)

    def _forget(self, address: str, done: asyncio.Task[None]) -> None:
        if self._tasks.get(address) is done:
            del self._tasks[address]

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._client.close()


async def _listen(door: str, port: int, listening: Awaitable[int]) -> None:
    try:
        await listening
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"cannot bind {door} port {port}: {reason}") from error


async def _within(seconds: float, step: Callable[[], Awaitable[None]]) -> None:
    """Runs a step of the closing; one that hangs is left behind."""
    try:
        async with asyncio.timeout(seconds):
            await step()
    except TimeoutError:
        log.warning("close_step_slow step=%s", step)
