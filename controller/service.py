"""One controller node: log, gate, liveness, endpoints and history, wired together.

It runs alone (`controller.main`) or inside a name server's loop. It decides only behind its gate.
It pushes what it applied to its own sessions, leader or not (R20): the controller that applies an
election first informs the brokers.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from batonmq.auth.guard import Guard
from batonmq.controller.config import ControllerConfig, RuntimeConfig
from batonmq.controller.endpoints.grpc_endpoint import GrpcEndpoint
from batonmq.controller.endpoints.remoting_endpoint import RemotingEndpoint, RoleNotices
from batonmq.controller.gate import LeaderGate
from batonmq.controller.history_log import HistoryLog, HistoryNotes
from batonmq.controller.liveness import events as ev
from batonmq.controller.liveness.broker_sessions import LivenessConfig
from batonmq.controller.liveness.core import GROUPS_A_TURN, LivenessCore
from batonmq.controller.metrics import ControllerMetrics
from batonmq.controller.planned_switches import PlannedSwitches
from batonmq.controller.raft.log import Commit, Machine, ReplicatedLog
from batonmq.controller.raft.node import RaftLog, RaftSettings
from batonmq.controller.requests import ControllerRequests, OutcomeUnknownError
from batonmq.controller.rules.commands import NoteEvent, ReplicasChanged, RoleChanged, SetChanged
from batonmq.controller.rules.state import ControllerState
from batonmq.controller.watch import BrokerWatch, LeadOffers, SessionTable
from batonmq.history.event import EventKind
from batonmq.protocol.errors import NotLeaderError
from batonmq.protocol.role_view import RoleView
from batonmq.runtime import disk
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.durable_file import sync_directory
from batonmq.runtime.lock_file import FolderLock
from batonmq.runtime.start_retry import StartRetry
from batonmq.runtime.tls import Tls
from batonmq.runtime.turns import for_each

log = logging.getLogger(__name__)

RAFT_FOLDER: Final = "raft"
LOCK_NAME: Final = "lock"
GATE_TIMEOUT_MS: Final = 1_000
# So that a node ends within a second, also if peers keep their side of a connection open.
CLOSE_STEP_TIMEOUT_S: Final = 0.4
HAND_OVER_TIMEOUT_MS: Final = 250


class ControllerService:
    """`await start()` before anything else; `await close()` ends it within a second.

    `replicated_log` replaces Raft's log in tests. `guard`, the caller's, stands before the remoting
    port.
    """

    _rules_change: asyncio.Task[None] | None = None

    def __init__(
        self,
        config: ControllerConfig,
        *,
        replicated_log: ReplicatedLog | None = None,
        tls: Tls | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._runtime = RuntimeConfig(config)
        self._log = replicated_log or RaftLog(_raft_settings(config, tls), Machine())
        self.gate = LeaderGate(
            self._log,
            config.controller_self_id,
            wall_ms=wall_ms,
            timeout_ms=GATE_TIMEOUT_MS,
            on_change=self._gate_changed,
        )
        core_config = _liveness_config(config)
        core = LivenessCore(core_config)
        own = config.controller_self_id
        self._history = HistoryLog(Path(config.store_path) / f"history-{own}.jsonl")
        self.requests = ControllerRequests(
            self._runtime, self._log, self.gate, core, self._problems
        )
        self._start_retry = StartRetry(Path(config.store_path))
        self.sessions = SessionTable()
        self.metrics = ControllerMetrics(self.requests, self.sessions)
        self._notes = HistoryNotes(self.requests, own)
        self._lead = LeadOffers(self._log, core_config.unseen_timeout_ms)
        self._watch = BrokerWatch(
            core,
            self.requests,
            self._notes,
            tick_ms=core_config.tick_ms,
            push=self._push,
            ticked=self._ticked,
            lead=self._lead,
        )
        self._switches = PlannedSwitches(self.requests, self.sessions, self._notes)
        self._grpc_endpoint = GrpcEndpoint(
            self.requests, self.sessions, self._watch, self._switches, self._history, tls, guard
        )
        self._remoting_endpoint = RemotingEndpoint(
            self.requests, self._runtime, self._switches, self._watch, tls, guard
        )
        self._notices = RoleNotices(tls, guard.signer if guard is not None else None)
        self._core, self._closing, self._guard = core, False, guard
        self._lock: FolderLock | None = None
        self._runtime.on_change = self._config_changed
        self._log.on_applied(self._applied)

    @property
    def config(self) -> ControllerConfig:
        return self._runtime.current

    @property
    def state(self) -> ControllerState:
        """The state applied on this node."""
        return self._log.state

    async def start(self, answers: Callable[[], None] = lambda: None) -> None:
        """Opens the endpoints, the store and the Raft port. Calls `answers` when the endpoints are
        open. On a full disk it then waits for disk space, and reports that (R45).

        Raises CannotListenError for a port, OSError naming a path that cannot be written,
        ValueError for stored settings that cannot be used, FolderLockedError naming the process
        that holds the folder, JournalDamage for a damaged log. Nothing stays open then.
        """
        config = self.config
        try:
            peer = config.self_peer
            # Ports before the store: a node that waits for disk space still reports that.
            await self._remoting_endpoint.listen(config.bind_address, peer.port)
            await self._grpc_endpoint.listen(f"{config.bind_address}:{peer.grpc_port}")
            self._watch.start()
            answers()
            await self._start_retry.wait(self._open_store)
            await self._start_retry.wait(self._log.start)
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
        """Hands over the lead and closes everything."""
        # All sessions end now, which must not look as if all brokers had died.
        self._closing = True
        self.gate.close()
        # First: while the endpoints close, brokers already use the next leader.
        await self._log.hand_over(HAND_OVER_TIMEOUT_MS)
        await self._lead.close()
        await self._watch.close()
        if self._rules_change is not None:
            self._rules_change.cancel()
        await self._notes.close()
        for step in (self._grpc_endpoint.close, self._remoting_endpoint.close, self._notices.close):
            await _within(CLOSE_STEP_TIMEOUT_S, step)
        await self._log.close()
        self._history.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    async def _open_store(self) -> None:
        """May be called again after an error."""
        folder = Path(self.config.store_path)
        disk.makedirs(folder)
        sync_directory(folder.parent)
        if self._lock is None:
            # First: two processes with one log could vote twice.
            lock = FolderLock(folder / LOCK_NAME)
            lock.acquire()
            self._lock = lock
        self._runtime.load()
        config = self.config
        self._log.rules_most = config.controller_rules_max
        self._history.open(config.history_file_size, config.history_files)

    def _problems(self) -> tuple[str, ...]:
        found = {
            "its start waits for disk space": self._start_retry.missing,
            "its history is not written": self._history.failure,
            "its audit log is not written": self._guard.audit.failure if self._guard else "",
        }
        return tuple(f"{what}: {why}" for what, why in found.items() if why)

    # Called by the log and the gate.

    def _gate_changed(self, is_open: bool) -> None:
        self._watch.handle(ev.GateOpened() if is_open else ev.GateClosed())
        if is_open:
            # Not in the first election after a start of all controllers: none of them saw more.
            if self.gate.had_followed:
                self._lead.step_aside(self._core.never_saw())
        else:
            self._switches.gate_closed()

    def _ticked(self) -> None:
        self.gate.note_leader_seen()
        # One at a time: the rules are due until the command is applied.
        if self._rules_change is None and self.gate.open and self._log.rules_due():
            self._rules_change = asyncio.get_running_loop().create_task(self._change_rules())

    async def _change_rules(self) -> None:
        """Puts other rules in force, also if nothing else is proposed for a long time."""
        # It names no group, so every version refuses it: it changes nothing but the rules.
        command = NoteEvent(broker_name="", kind="", node=self.config.controller_self_id)
        try:
            await self.requests.submit(command)
            log.info("rules_changed rules=%d", self._log.state.rules)
        except (NotLeaderError, OutcomeUnknownError) as error:
            log.debug("rules_not_changed reason=%s", error)
        finally:
            self._rules_change = None

    def _applied(self, commit: Commit) -> None:
        # The brokers turn to the next leader already, and hear from that one.
        if self._closing:
            return
        self._inform_brokers(commit)
        self.metrics.applied(commit)
        # Last: a slow disk must not delay a view.
        self._history.write(commit)

    def _inform_brokers(self, commit: Commit) -> None:
        applied_ms = wall_ms()
        self._watch.handle(ev.StateApplied(commit.state))
        self._switches.state_applied(commit.state)
        if commit.command is None:  # a snapshot: any group may have changed
            for_each(commit.state.broker_names(), self._push, GROUPS_A_TURN)
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
        if not self.sessions.of_group(broker_name):
            return  # a view is expensive to make, and only sessions get it
        view = self.requests.view(broker_name)
        if view is not None:
            self.sessions.push_view(view)

    def _note_push(self, view: RoleView, applied_ms: int) -> None:
        """The leader records in the history when it pushed a new master."""
        if self.gate.open and view.master_broker_id is not None:
            self._notes.note(
                EventKind.PUSHED,
                view.broker_name,
                master_epoch=view.master_epoch,
                appliedMs=applied_ms,
                sessions=len(list(self.sessions.of_group(view.broker_name))),
            )

    def _config_changed(self, config: ControllerConfig) -> None:
        log.info("config_changed node=%s", config.controller_self_id)
        self._log.rules_most = config.controller_rules_max


def _raft_settings(config: ControllerConfig, tls: Tls | None = None) -> RaftSettings:
    return RaftSettings(
        config.self_peer,
        config.peers,
        config.raft_timings,
        Path(config.store_path) / RAFT_FOLDER,
        bind_host=config.raft_bind_address,
        cluster=config.controller_group,
        password_file=config.raft_password_path,
        tls=tls.for_raft if tls is not None else None,
    )


def _liveness_config(config: ControllerConfig) -> LivenessConfig:
    return LivenessConfig(
        session_timeout_ms=config.broker_session_timeout_ms,
        master_lease_ms=config.master_lease_ms,
        outcome_timeout_ms=config.propose_timeout_ms,
    )


async def _within(seconds: float, step: Callable[[], Awaitable[None]]) -> None:
    """Runs a step of `close`; one that hangs is abandoned."""
    try:
        async with asyncio.timeout(seconds):
            await step()
    except TimeoutError:
        log.warning("close_step_slow step=%s", step)
