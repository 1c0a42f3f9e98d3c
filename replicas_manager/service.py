"""ReplicasManager: the shell around the role state machine.

Feeds it what sessions, calls, timers and the broker report, and performs its effects: gRPC calls,
durable files, role changes of the broker. Holds no policy. One per broker process, on the broker's
loop; public methods are for that loop only.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import assert_never

from baton.controller.v1 import controller_pb2 as pb
from protocol.role_view import RoleView
from replicas_manager.actions import BrokerActions, LogFacts, Proposal
from replicas_manager.calls import ControllerCalls
from replicas_manager.config import ReplicasManagerConfig
from replicas_manager.events import (
    ActionFailed,
    AdoptView,
    BecomeMaster,
    BecomeSlave,
    CloseSession,
    Effect,
    Event,
    FactsChanged,
    FetchView,
    LeaseChanged,
    Notice,
    NoticeReceived,
    OpenSessions,
    PersistRole,
    ProposalApplied,
    ProposalRefused,
    ProposalRequested,
    ProposalUnknown,
    ReportEvent,
    RoleAction,
    SaveIdentity,
    SendAlter,
    SendElect,
    SendHeartbeat,
    SendRegister,
    SetDead,
    StandDown,
    Started,
    SuspicionChanged,
    Tick,
    ViewReceived,
)
from replicas_manager.identity import IdentityFile, RoleFile
from replicas_manager.lives import LivesFile
from replicas_manager.reporter import EventReporter
from replicas_manager.role_runner import RoleRunner
from replicas_manager.session import ControllerChannels, ControllerSession
from replicas_manager.state import ReplicasState, Role
from replicas_manager.switch import SwitchTask
from replicas_manager.switch_runner import SwitchActions, SwitchRunner

log = logging.getLogger(__name__)

GOODBYE_TIMEOUT_S = 0.3


def boottime_ms() -> int:
    """The clock of all deadlines (R8)."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class ReplicasManager:
    """Registers the broker, keeps its controller sessions, and changes its role when told.

    `start` raises IdentityError or RoleFileError if the data folder does not fit; otherwise it
    returns at once and goes on in the background: the broker stays fenced until `actions` is told
    a role. `incarnation` is made afresh for each process start. `on_fatal` is called if this
    broker, elected, fails again and again to become master: it should stop, so that the sessions
    end and another is elected.
    """

    def __init__(
        self,
        config: ReplicasManagerConfig,
        actions: BrokerActions,
        *,
        incarnation: str = "",
        on_fatal: Callable[[BaseException], None] | None = None,
        clock_ms: Callable[[], int] = boottime_ms,
        switch: SwitchActions | None = None,
    ) -> None:
        """`switch`: what a planned switch needs of the broker; without it none is answered."""
        config.timings.check()
        self.incarnation = incarnation or secrets.token_hex(8)
        self._config = config
        self._actions = actions
        self._on_fatal = on_fatal
        self._clock_ms = clock_ms
        self._identity = IdentityFile(config.identity_path, config.cluster_name, config.broker_name)
        self._role_file = RoleFile(config.role_path)
        self._lives = LivesFile(config.role_path.with_name("lives"))
        self._suspect = ""
        self._channels = ControllerChannels()
        self._sessions: dict[str, ControllerSession] = {}
        self._calls: ControllerCalls | None = None
        self._registered = asyncio.Event()
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._state: ReplicasState | None = None
        self._runner: RoleRunner | None = None
        self._reporter = EventReporter(
            config.broker_name, self.incarnation, self._channels, lambda: self.leader
        )
        self._switch = None if switch is None else self._switch_runner(switch)

    # ----------------------------------------------------------------------------- for the broker

    @property
    def broker_id(self) -> int:
        """The id that the controller assigned, 0 until then."""
        return self._state.broker_id if self._state is not None else 0

    @property
    def view(self) -> RoleView | None:
        """The newest role view taken; the broker may still be on its way into that role."""
        return self._state.view if self._state is not None else None

    @property
    def role(self) -> Role:
        return self._state.role if self._state is not None else Role.NONE

    @property
    def leader(self) -> str | None:
        """gRPC address of the leading controller, None while none is known."""
        return self._state.leader if self._state is not None else None

    @property
    def highest_master_epoch(self) -> int:
        """The highest masterEpoch accepted by this replica (R2)."""
        return self._state.highest_master_epoch if self._state is not None else 0

    def lease_valid(self, now_ms: int) -> bool:
        """Whether this process is master and the leader answered it less than masterLeaseMs ago.

        `now_ms` is CLOCK_BOOTTIME in milliseconds.
        """
        return self._state is not None and self._state.lease_valid(now_ms)

    def propose(self, proposal: Proposal) -> None:
        """Ask for a new SyncStateSet. One at a time: the next only after an outcome (R11)."""
        runner = self._runner
        assert runner is not None, "a proposal comes from a master"
        event = ProposalRequested(
            new_set=proposal.new_set,
            reason=proposal.reason,
            confirm_offset=proposal.confirm_offset,
            based_on=runner.delivered_key,
        )
        asyncio.get_running_loop().call_soon(self._step, event)

    def report_event(self, kind: str, **fields: object) -> None:
        """Add an event (`opened`, `first_ack`, `truncated`, ...) to the controllers' history."""
        self._reporter.report(kind, self.broker_id, self.highest_master_epoch, fields)

    def facts_changed(self) -> None:
        """Heartbeat at once: controllers should hear of the log as it is now."""
        self._note_suspicion()
        self._step(FactsChanged())

    def acks_changed(self) -> None:
        """confirmOffset moved: a planned switch may go on."""
        if self._switch is not None and self._switch.core.task is not None:
            self._switch.look()

    def on_remoting_role_notice(self, master_epoch: int, sync_state_set_epoch: int) -> None:
        """A NOTIFY_BROKER_ROLE_CHANGED (1008) came: only a hint, the view itself is fetched."""
        self._step(NoticeReceived(master_epoch, sync_state_set_epoch))

    async def start(self) -> None:
        """Read the durable facts and begin to register."""
        identity = self._identity.load()
        earlier_lives = self._lives.begin(self.incarnation)
        highest = max(self._role_file.load(), self._actions.log_facts().epoch, 0)
        self._state = ReplicasState(
            broker_name=self._config.broker_name,
            broker_id=identity.broker_id,
            incarnation=self.incarnation,
            controllers=self._config.controllers,
            highest_master_epoch=highest,
            timings=self._config.timings,
            learner=self._config.learner,
        )
        self._calls = ControllerCalls(
            self._config,
            self.incarnation,
            identity.check_code,
            earlier_lives,
            self._channels,
            self._actions.log_facts,
            self._state,
            self._step,
        )
        self._runner = RoleRunner(
            self._actions,
            self._role_file.store,
            highest,
            lambda view: self._step(ActionFailed(view)),
            self._on_fatal,
        )
        self._note_suspicion()
        log.info(
            "replicas_manager_started broker_name=%s broker_id=%d incarnation=%s master_epoch=%d",
            self._config.broker_name,
            identity.broker_id,
            self.incarnation,
            highest,
        )
        self._step(Started())

    async def wait_registered(self) -> int:
        """Wait until the controllers know this process; returns its broker id."""
        await self._registered.wait()
        return self.broker_id

    async def close(self, reason: str = "planned stop") -> None:
        """Say Goodbye to every controller and stop. A role change under way is awaited."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        sessions = list(self._sessions.values())
        self._sessions.clear()
        await asyncio.gather(*(session.close(reason, GOODBYE_TIMEOUT_S) for session in sessions))
        if self._switch is not None:
            await self._switch.close()
        if self._runner is not None:
            await self._runner.close()
        await self._reporter.close()
        if self._calls is not None:
            await self._calls.close()
        await self._channels.close()

    # ------------------------------------------------------------------------------------- engine

    def _step(self, event: Event) -> None:
        state = self._state
        if self._closed or state is None:
            return
        for effect in state.step(event, self._clock_ms()):
            self._perform(effect)
        self._arm()

    def _arm(self) -> None:
        """One timer for all deadlines of the core."""
        assert self._state is not None
        deadline_ms = self._state.next_deadline_ms()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline_ms is not None and not self._closed:
            delay_s = max(deadline_ms - self._clock_ms(), 0) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._step, Tick())

    def _perform(self, effect: Effect) -> None:
        assert self._state is not None and self._runner is not None and self._calls is not None
        match effect:
            case (
                BecomeMaster()
                | BecomeSlave()
                | StandDown()
                | AdoptView()
                | SetDead()
                | ProposalApplied()
                | ProposalRefused()
                | ProposalUnknown()
                | LeaseChanged()
            ):
                self._log_role(effect)
                if isinstance(effect, BecomeMaster | BecomeSlave | StandDown):
                    self._role_comes(effect)
                self._runner.perform(effect)
            case PersistRole():
                pass  # the runner stores the epoch in a thread before the role change it permits
            case SendHeartbeat():
                self._heartbeat(effect)
            case SendRegister() | SendElect() | SendAlter() | FetchView():
                self._calls.ask(effect)
            case SaveIdentity(broker_id):
                self._identity.save(broker_id)
                log.info("broker_id_assigned broker_id=%d", broker_id)
            case OpenSessions(broker_id):
                self._open_sessions(broker_id)
            case CloseSession(controller, reason):
                session = self._sessions.get(controller)
                if session is not None:
                    session.drop(reason)
            case ReportEvent(kind, fields):
                self.report_event(kind, **dict(fields))
            case Notice(name, fields, warning):
                text = " ".join(f"{key}={value}" for key, value in fields)
                log.log(logging.WARNING if warning else logging.INFO, "%s %s", name, text)
            case _:
                assert_never(effect)

    def _log_role(self, effect: Effect) -> None:
        if isinstance(effect, BecomeMaster | BecomeSlave | StandDown):
            view = effect.view
            log.info(
                "role_changed broker_name=%s action=%s master=%s master_epoch=%d set=%s",
                self._config.broker_name,
                type(effect).__name__,
                view.master_broker_id,
                view.master_epoch,
                sorted(view.sync_state_set),
            )

    # ------------------------------------------------------------------------------ planned switch

    def _switch_runner(self, actions: SwitchActions) -> SwitchRunner:
        return SwitchRunner(
            self._config.broker_name,
            self._config.cluster_name,
            actions,
            lambda: self._channels,
            clock_ms=self._clock_ms,
            targets=lambda asked_by: self.leader or asked_by,
            elected=lambda controller, view: self._step(
                ViewReceived(controller, view, pushed=False)
            ),
            tell=self._tell,
            report=self.report_event,
        )

    def _switch_asked(self, task: SwitchTask) -> None:
        if self._switch is None or self._closed or self._state is None:
            return
        master = self._state.role is Role.MASTER
        self._switch.asked(
            task,
            master_epoch=self._state.highest_master_epoch if master else None,
            lease=self.lease_valid(self._clock_ms()),
        )

    def _tell(self, controller: str, message: pb.BrokerMessage) -> None:
        session = self._sessions.get(controller)
        if session is not None:
            session.tell(message)

    def _role_comes(self, effect: RoleAction) -> None:
        """In the very turn in which the view was taken, before anything durable is awaited."""
        if self._switch is not None:
            self._switch.role_changes(effect.view, master=isinstance(effect, BecomeMaster))

    # ----------------------------------------------------------------------------------- sessions

    def _open_sessions(self, broker_id: int) -> None:
        if not self._registered.is_set():
            self._registered.set()
            self._life_registered()
        hello = pb.Hello(
            cluster_name=self._config.cluster_name,
            broker_name=self._config.broker_name,
            broker_id=broker_id,
            incarnation=self.incarnation,
            log_id=self._actions.log_facts().log_id,
        )
        for address in self._config.controllers:
            if address not in self._sessions:
                self._sessions[address] = ControllerSession(
                    address, hello, self._channels, self._step, self._switch_asked
                )

    def _life_registered(self) -> None:
        try:
            self._lives.registered(self.incarnation)
        except OSError as error:  # more lives than needed do no harm
            log.warning("lives_not_trimmed path=%s error=%s", self._lives.path, error)

    def _heartbeat(self, effect: SendHeartbeat) -> None:
        session = self._sessions.get(effect.controller)
        if session is None:
            return
        facts = self._actions.log_facts()
        if facts.suspect != self._suspect:
            asyncio.get_running_loop().call_soon(self._note_suspicion)
        session.heartbeat(
            effect,
            pb.Heartbeat(
                sequence=effect.sequence,
                sent_ms=effect.sent_ms,
                epoch=facts.epoch,
                max_offset=facts.max_offset,
                confirm_offset=facts.confirm_offset,
                election_priority=self._config.election_priority,
                master_epoch=effect.master_epoch,
                sync_state_set_epoch=effect.sync_state_set_epoch,
                min_offset=facts.min_offset,
            ),
        )

    def _note_suspicion(self) -> None:
        suspect = self._actions.log_facts().suspect
        if suspect != self._suspect:
            self._suspect = suspect
            self._step(SuspicionChanged(suspect))


__all__ = ["BrokerActions", "LogFacts", "Proposal", "ReplicasManager", "Role", "boottime_ms"]
