"""ReplicasManager: the shell around the role state machine.

Feeds it the events of link, timers and broker, and performs its effects: requests to the
controllers, durable files, role changes of the broker. Makes no decisions. One per broker process,
for use on the broker's loop only.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import assert_never

from batonmq.protocol.incarnation import ProcessName, new_process_name
from batonmq.protocol.role_view import Role, RoleView
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.config import ReplicasManagerConfig
from batonmq.replicas_manager.grpc_link import GrpcLink
from batonmq.replicas_manager.identity import IdentityFile, IncarnationLog, LoadedIdentity, RoleFile
from batonmq.replicas_manager.link import (
    BrokerActions,
    ControllerLink,
    DurableFacts,
    LinkEvents,
    SyncStateSetActions,
)
from batonmq.replicas_manager.remoting_link import RemotingLink
from batonmq.replicas_manager.role import CurrentView
from batonmq.replicas_manager.role_runner import EpochStore, RoleRunner, SwitchRunner
from batonmq.replicas_manager.state import ReplicasState
from batonmq.replicas_manager.switch import SwitchTask
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.start_retry import InOrder, StartRetry

log = logging.getLogger(__name__)


def _raise(error: BaseException) -> None:
    raise error


class ReplicasManager:
    """Registers the broker, keeps its controller sessions, and changes its role according to views.
    `start` raises IdentityError or RoleFileError if the data folder does not fit; otherwise it
    returns at once, and the broker stays fenced until `actions` gets a role. Each process start has
    a new incarnation with a secret; a given `incarnation` has none. `on_fatal` is called if this
    broker was elected and repeatedly fails to become master, or cannot store its id: it should
    stop, so that another one is elected.
    """

    def __init__(
        self,
        config: ReplicasManagerConfig,
        actions: BrokerActions,
        sets: SyncStateSetActions,
        *,
        incarnation: str = "",
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> None:
        config.timings.check()
        self._name = ProcessName(incarnation) if incarnation else new_process_name()
        self.incarnation = self._name.incarnation
        self._config = config
        self._actions = actions
        self._sets = sets
        self._on_fatal = on_fatal
        self._identity = IdentityFile(config.identity_path, config.cluster_name, config.broker_name)
        self._role_file = RoleFile(config.role_path)
        self._incarnations = IncarnationLog(config.role_path.with_name("lives"))
        self._suspect = ""
        self.registered = False
        """Whether the controllers have ever registered this process."""
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self.start_retry = StartRetry(config.identity_path)
        self._effects = InOrder(self._perform, self.start_retry, on_fatal or _raise)
        self._state: ReplicasState | None = None
        self._runner: RoleRunner | None = None
        events = LinkEvents(
            step=self._heard if config.protocol == "remoting" else self._step,
            switch_requested=self._switch_requested,
            leader=lambda: self.leader,
            log_facts=actions.log_facts,
        )
        kind = RemotingLink if config.protocol == "remoting" else GrpcLink
        self._link: ControllerLink = kind(config, self.incarnation, events)
        self._switch = SwitchRunner(actions, self._link, self.report_event, boot_ms)

    @property
    def broker_id(self) -> int:
        """The id assigned by the controllers; 0 until then."""
        return self._state.current.broker_id if self._state is not None else 0

    @property
    def view(self) -> RoleView | None:
        """The newest role view taken; the broker may not have that role yet."""
        return self._state.current.view if self._state is not None else None

    @property
    def role(self) -> Role:
        return self._state.current.role if self._state is not None else Role.FENCED

    @property
    def leader(self) -> str | None:
        """The address of the leading controller; None while none is known."""
        return self._state.controllers.leader if self._state is not None else None

    @property
    def registration_refusal(self) -> str:
        """Why the leading controller refuses to register this process; empty if it does not."""
        return self._state.registration.refusal if self._state is not None else ""

    def lease_valid(self, now_ms: int) -> bool:
        """Whether this process is master with a valid lease. `now_ms`: by
        `runtime.clock.boot_ms`."""
        return self._state is not None and self._state.lease_valid(now_ms)

    def propose(self, new_set: frozenset[int], reason: str, confirm_offset: int) -> None:
        """As master, proposes a new SyncStateSet. One at a time: the next only after an outcome
        (R11). `reason`: for the history. `confirm_offset`: of the moment of the proposal."""
        runner = self._runner
        assert runner is not None, "a proposal comes from a master"
        event = ev.ProposalRequested(
            new_set=new_set,
            reason=reason,
            confirm_offset=confirm_offset,
            based_on=runner.delivered_key,
            processes=runner.delivered_processes,
        )
        # In a later turn: HA may propose while it handles an outcome, and must not be re-entered.
        asyncio.get_running_loop().call_soon(self._step, event)

    def report_event(self, kind: str, **fields: object) -> None:
        """Adds an event (`opened`, `first_ack`, `truncated`, ...) to the controllers' history."""
        current = self._state.current if self._state is not None else None
        epoch = current.highest_master_epoch if current is not None else 0
        self._link.report(kind, self.broker_id, epoch, fields)

    def acks_changed(self) -> None:
        """confirmOffset grew: a planned switch may continue."""
        self._switch.poll()

    def on_remoting_role_notice(self, master_epoch: int, sync_state_set_epoch: int) -> None:
        """NOTIFY_BROKER_ROLE_CHANGED (1008) came: a hint to fetch the view."""
        self._step(ev.NoticeReceived(master_epoch, sync_state_set_epoch))

    async def start(self) -> None:
        """Reads the durable facts and begins to register."""

        async def load() -> tuple[LoadedIdentity, tuple[str, ...], int]:
            identity = self._identity.load()
            earlier = self._incarnations.begin(self.incarnation)
            # A new master writes both at the same time, so after a crash the higher one counts.
            return identity, earlier, max(self._role_file.load(), self._actions.log_facts().epoch)

        identity, earlier_incarnations, highest = await self.start_retry.wait(load)
        self._state = ReplicasState(
            broker_name=self._config.broker_name,
            current=CurrentView(identity.broker_id, self.incarnation, highest),
            controllers=self._config.controllers,
            timings=self._config.timings,
            learner=self._config.learner,
            protocol=self._config.protocol,
            requests=self._name.requests,
        )
        current, secret = self._state.current, self._name.secret
        self._link.begin(
            DurableFacts(
                identity.check_code, earlier_incarnations, current, secret, identity.folder_secret
            )
        )
        self._runner = RoleRunner(
            self._actions,
            self._sets,
            EpochStore(
                self._role_file.store, highest, lambda epoch: self._step(ev.EpochStored(epoch))
            ),
            lambda view: self._step(ev.ActionFailed(view)),
            # R45: the controllers elect another replica, if there is one.
            lambda: self._link.drop_all("elected, and no disk space to become master"),
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
        self._step(ev.Started())

    async def hand_over(self, reason: str, heirs: Collection[int] | None = None) -> bool:
        """As master, switches (R33) to the member of the set, among `heirs` if given, that has most
        of the log. Returns whether it did."""
        view, leader = self.view, self.leader
        # Without a leading controller no successor can be elected.
        if self.role is not Role.MASTER or view is None or leader is None:
            return False
        others = view.sync_state_set - {self.broker_id}
        if heirs is not None:
            others = others.intersection(heirs)
        if not others:
            return False
        # It has least to catch up, so sends are held for the shortest time.
        heir = max(others, key=lambda other: self._actions.switch_progress(other).ack)
        return await self._link.hand_over(leader, heir, view.master_epoch, reason)

    async def end(self) -> None:
        """Stops taking views and answering controllers, while sessions stay open, and waits for a
        running role change, so that the broker's parts can be closed. Idempotent."""
        # First: what is awaited below must begin no new role change.
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._effects.close()
        await self._switch.close()
        if self._runner is not None:
            await self._runner.close()

    async def close(self, reason: str = "planned stop") -> None:
        """Says Goodbye to every controller and stops. Replication must have ended before, because
        until then the controllers count this process as a living replica."""
        await self.end()
        await self._link.goodbye(reason)
        await self._link.close()

    def _heard(self, event: ev.Event) -> None:
        self._note_suspicion()
        self._step(event)

    def _step(self, event: ev.Event) -> None:
        state = self._state
        if self._closed or state is None:
            return
        # In order, even if one waits for a full disk: later effects rely on earlier ones.
        try:
            self._effects.add(state.step(event, boot_ms()))
        finally:  # R54: also after an unexpected error
            self._arm()

    def _arm(self) -> None:
        """Sets the one timer for all deadlines of the core."""
        assert self._state is not None
        deadline_ms = self._state.next_deadline_ms
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline_ms is not None and not self._closed:
            delay_s = max(deadline_ms - boot_ms(), 0) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._step, ev.TimeCame())

    def _perform(self, effect: ev.Effect) -> None:
        assert self._state is not None and self._runner is not None
        match effect:
            case (
                ev.BecomeMaster()
                | ev.BecomeSlave()
                | ev.StandDown()
                | ev.AdoptView()
                | ev.SetDead()
                | ev.ProposalRefused()
                | ev.ProposalUnknown()
                | ev.LeaseChanged()
            ):
                if isinstance(effect, ev.BecomeMaster | ev.BecomeSlave | ev.StandDown):
                    self._role_will_change(effect)
                self._runner.perform(effect)
            case ev.SendHeartbeat():
                self._heartbeat(effect)
            case ev.SendRegister() | ev.SendElect() | ev.SendAlter() | ev.FetchView():
                self._link.send(effect)
            case ev.SaveIdentity(broker_id):
                self._identity.save(broker_id)
                log.info("broker_id_assigned broker_id=%d", broker_id)
            case ev.OpenSessions(broker_id):
                self._open_sessions(broker_id)
            case ev.CloseSession(controller, reason):
                self._link.drop(controller, reason)
            case ev.DropSessions(reason):
                log.warning("sessions_dropped reason=%s", reason)
                self._link.drop_all(reason)
            case ev.HistoryReport(kind, fields):
                self.report_event(kind, **dict(fields))
            case ev.Notice(name, fields, warning):
                text = " ".join(f"{key}={value}" for key, value in fields)
                log.log(logging.WARNING if warning else logging.INFO, "%s %s", name, text)
            case _:
                assert_never(effect)

    def _role_will_change(self, effect: ev.RoleAction) -> None:
        """Called in the same turn in which the view was taken, before anything is awaited."""
        view = effect.view
        log.info(
            "role_changed failover=%s/%d action=%s master=%s set=%s",
            self._config.broker_name,
            view.master_epoch,
            type(effect).__name__,
            view.master_broker_id,
            sorted(view.sync_state_set),
        )
        # The switch ends first, since the new role answers its held sends.
        self._switch.role_will_change()
        self._actions.role_will_change(view, master=isinstance(effect, ev.BecomeMaster))

    def _switch_requested(self, task: SwitchTask) -> None:
        if self._closed:
            return
        current = self._state.current if self._state is not None else None
        is_master = current is not None and current.role is Role.MASTER
        self._switch.requested(
            task,
            master_epoch=current.highest_master_epoch if current and is_master else None,
            lease=self.lease_valid(boot_ms()),
        )

    def _open_sessions(self, broker_id: int) -> None:
        if not self.registered:
            self.registered = True
            try:
                self._incarnations.registered(self.incarnation)
            except OSError as error:  # extra incarnations do no harm
                path = self._incarnations.path
                log.warning("incarnation_log_not_trimmed path=%s reason=%s", path, error)
        self._link.open_sessions(broker_id)

    def _heartbeat(self, effect: ev.SendHeartbeat) -> None:
        facts = self._actions.log_facts()
        if facts.suspect != self._suspect:
            # Later: this is an effect of a running step, and the core takes one event at a time.
            asyncio.get_running_loop().call_soon(self._note_suspicion)
        self._link.heartbeat(effect, facts)

    def _note_suspicion(self) -> None:
        suspect = self._actions.log_facts().suspect
        if suspect != self._suspect:
            self._suspect = suspect
            self._step(ev.SuspicionChanged(suspect))
