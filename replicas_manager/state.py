"""The role state machine of one broker: pure, events and `now_ms` in, effects out.

Invariants
- The highest masterEpoch accepted never falls, and `PersistRole` comes before the role change that
  it permits (R2). A view is taken only if its (masterEpoch, setEpoch) grows (R20).
- This process is master only where a view names its id *and* incarnation, in an epoch above all
  that an earlier life of this broker accepted (R3).
- At most one Alter is open. Once its outcome is unknown it ends only by an answer to the same
  request id or by a view whose setEpoch passed it (R11).
- The lease counts from the send time of a heartbeat that the leader answered for this epoch (R5).

Origin: Java `ReplicasManager` (states, 1004 poll, changeBrokerRole); the sessions replace its
polling. `next_deadline_ms` says when to send a `Tick` at the latest; more ticks do no harm.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocol.codes import ResponseCode
from protocol.role_view import RoleView
from replicas_manager.config import SessionTimings
from replicas_manager.events import (
    ActionFailed,
    AdoptView,
    AlterFailed,
    AlterReplied,
    AnswerReceived,
    BecomeMaster,
    BecomeSlave,
    CloseSession,
    Effect,
    ElectFailed,
    ElectReplied,
    Event,
    FactsChanged,
    FetchFailed,
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
    RegisterFailed,
    RegisterReplied,
    ReportEvent,
    SaveIdentity,
    SendAlter,
    SendElect,
    SendHeartbeat,
    SendRegister,
    SessionClosed,
    SessionOpened,
    SessionRefused,
    SetDead,
    StandDown,
    Started,
    Tick,
    ViewReceived,
)

SUCCESS = ResponseCode.SUCCESS
FENCED_MASTER_EPOCH = ResponseCode.CONTROLLER_FENCED_MASTER_EPOCH
FENCED_SYNC_STATE_SET_EPOCH = ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH
INVALID_MASTER = ResponseCode.CONTROLLER_INVALID_MASTER
INVALID_REPLICAS = ResponseCode.CONTROLLER_INVALID_REPLICAS
INVALID_REQUEST = ResponseCode.CONTROLLER_INVALID_REQUEST
BROKER_NOT_ALIVE = ResponseCode.CONTROLLER_BROKER_NOT_ALIVE
NOT_LEADER = ResponseCode.CONTROLLER_NOT_LEADER
NEED_TO_BE_REGISTERED = ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
ALTER_FAILED = ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED

_FENCES = frozenset({FENCED_MASTER_EPOCH, FENCED_SYNC_STATE_SET_EPOCH, INVALID_MASTER})
_ALTER_ANSWERS = _FENCES | {
    INVALID_REPLICAS,
    INVALID_REQUEST,
    BROKER_NOT_ALIVE,
    NEED_TO_BE_REGISTERED,
    ALTER_FAILED,
}
"""Codes that say what became of an Alter. Any other leaves it unknown."""

RETRY_FIRST_MS = 50
RETRY_MOST_MS = 1000
REGISTER_RETRY_MOST_MS = 500
ELECT_RETRY_MS = 1000
ELECT_GRACE_MS = 300
"""A view that names an earlier life of this broker: the controller elects by itself (R3)."""
FETCH_AFTER_MS = 100
"""An answer tells of a newer view: its push may be this much behind."""


class Role(enum.Enum):
    MASTER = "master"
    SLAVE = "slave"
    NONE = "none"


@dataclass(slots=True)
class _Session:
    sequence: int
    heartbeat_due_ms: int
    heard_ms: int
    closing: bool = False
    behind_since_ms: int | None = None
    dead: frozenset[int] | None = None


@dataclass(slots=True)
class _Alter:
    request_id: str
    key: tuple[int, int]
    members: tuple[tuple[int, str], ...]
    confirm_offset: int
    reason: str
    target: str
    flying: bool = True
    unknown: bool = False
    attempts: int = 1
    retry_ms: int = 0


def _delay_ms(attempts: int, most_ms: int) -> int:
    return min(RETRY_FIRST_MS << min(attempts, 8), most_ms)


def _registrations(view: RoleView) -> tuple[object, ...]:
    return tuple(
        (r.broker_id, r.address, r.ha_address, r.learner, r.incarnation, r.log_id)
        for r in view.replicas
    )


class ReplicasState:
    """One broker's role. `broker_id` 0: not assigned yet."""

    def __init__(
        self,
        *,
        broker_name: str,
        broker_id: int,
        incarnation: str,
        controllers: tuple[str, ...],
        highest_master_epoch: int,
        timings: SessionTimings,
        learner: bool = False,
    ) -> None:
        assert controllers, "a ReplicasManager needs a controller"
        self.broker_name = broker_name
        self.broker_id = broker_id
        self.incarnation = incarnation
        self.highest_master_epoch = highest_master_epoch
        self.view: RoleView | None = None
        self.leader: str | None = None
        """Session of the controller that last answered as leader."""
        self.registered = False
        self._controllers = controllers
        self._timings = timings
        self._learner = learner
        self._earlier_epoch = highest_master_epoch
        """Highest epoch that an earlier life of this broker accepted (R3)."""
        self._sessions: dict[str, _Session] = {}
        self._controller_epoch = 0
        self._leader_heard_ms = 0
        self._leader_hint = ""
        self._turn = 0
        self._requests = 0
        self._started = False
        self._lost_said = False
        self._stale_said: set[tuple[str, int]] = set()
        self._register_flying = False
        self._register_due_ms = 0
        self._register_attempts = 0
        self._register_request = ""
        self._elect_flying = False
        self._elect_due_ms = 0
        self._alter: _Alter | None = None
        self._lease_until_ms = 0
        self._lease_said = False
        self._acted: tuple[int, Role, int] | None = None
        self._dead_said: frozenset[int] = frozenset()
        self._action_failures = 0
        self._action_retry_ms: int | None = None
        self._fetch_flying = False
        self._fetch_due_ms = 0
        self._fetch_wanted = (0, 0)
        self._deadline_ms: int | None = None
        self._handlers: dict[type[Event], Callable[[Any, int], list[Effect]]] = {
            Started: self._on_started,
            SessionOpened: self._on_session_opened,
            SessionClosed: self._on_session_closed,
            SessionRefused: self._on_session_refused,
            AnswerReceived: self._on_answer,
            ViewReceived: self._on_view,
            RegisterReplied: self._on_register_replied,
            RegisterFailed: self._on_register_failed,
            ElectReplied: self._on_elect_replied,
            ElectFailed: self._on_elect_failed,
            AlterReplied: self._on_alter_replied,
            AlterFailed: self._on_alter_failed,
            FetchFailed: self._on_fetch_failed,
            ProposalRequested: self._on_proposal,
            FactsChanged: self._on_facts_changed,
            NoticeReceived: self._on_notice,
            ActionFailed: self._on_action_failed,
            Tick: lambda event, now_ms: [],
        }

    # ------------------------------------------------------------------------------------ reading

    @property
    def role(self) -> Role:
        return Role.NONE if self.view is None else self._role_in(self.view)

    @property
    def alter_open(self) -> bool:
        """An AlterSyncStateSet of this master has no known outcome yet."""
        return self._alter is not None

    @property
    def open_sessions(self) -> frozenset[str]:
        return frozenset(self._sessions)

    def lease_valid(self, now_ms: int) -> bool:
        """This process is master, and the leader answered for its epoch less than a lease ago."""
        return now_ms < self._lease_until_ms and self.role is Role.MASTER

    def next_deadline_ms(self) -> int | None:
        """When the next `Tick` is due, None if only an event can change anything."""
        return self._deadline_ms

    def step(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event. The effects are to be performed in order."""
        effects = self._handlers[type(event)](event, now_ms)
        effects += self._pump(now_ms)
        return effects

    def check_invariants(self) -> None:
        if self.view is not None:
            assert self.view.master_epoch <= self.highest_master_epoch
            if self.role is Role.MASTER:
                assert self.view.master_epoch > self._earlier_epoch
        if self._alter is not None:
            assert self.view is not None and self.role is Role.MASTER
            assert self._alter.key == self.view.key
        assert self.leader is None or self.leader in self._sessions

    # ------------------------------------------------------------------------------- registration

    def _on_started(self, event: Started, now_ms: int) -> list[Effect]:
        self._started = True
        self._leader_heard_ms = now_ms
        return self._begin_register(now_ms)

    def _begin_register(self, now_ms: int) -> list[Effect]:
        self.registered = False
        self._register_request = self._next_request_id()
        self._register_attempts = 0
        self._register_due_ms = now_ms
        return []

    def _on_register_replied(self, event: RegisterReplied, now_ms: int) -> list[Effect]:
        self._register_flying = False
        if event.code == NOT_LEADER:
            return self._register_again(event.target, now_ms)
        if event.code != SUCCESS:
            self._register_attempts += len(self._controllers)
            self._register_due_ms = now_ms + _delay_ms(self._register_attempts, RETRY_MOST_MS)
            fields = (("code", event.code), ("remark", event.remark), ("target", event.target))
            return [Notice("register_refused", fields, warning=True)]
        effects: list[Effect] = []
        if self.broker_id == 0:
            assert event.broker_id > 0, "a registered broker has an id"
            self.broker_id = event.broker_id
            effects.append(SaveIdentity(event.broker_id))
        self.registered = True
        effects.append(OpenSessions(self.broker_id))
        if event.view is not None:
            effects += self._see(event.view, event.target, now_ms)
        return effects

    def _on_register_failed(self, event: RegisterFailed, now_ms: int) -> list[Effect]:
        self._register_flying = False
        return self._register_again(event.target, now_ms)

    def _register_again(self, target: str, now_ms: int) -> list[Effect]:
        """Ask the next controller at once; after a round over all of them wait a little."""
        self._pass_over(target)
        self._register_attempts += 1
        rounds, rest = divmod(self._register_attempts, len(self._controllers))
        wait_ms = 0 if rest else _delay_ms(rounds - 1, REGISTER_RETRY_MOST_MS)
        self._register_due_ms = now_ms + wait_ms
        return []

    # ----------------------------------------------------------------------------------- sessions

    def _on_session_opened(self, event: SessionOpened, now_ms: int) -> list[Effect]:
        self._sessions[event.controller] = _Session(0, now_ms, now_ms)
        return []

    def _on_session_closed(self, event: SessionClosed, now_ms: int) -> list[Effect]:
        self._sessions.pop(event.controller, None)
        effects: list[Effect] = []
        if self.leader == event.controller:
            effects = self._unlead(now_ms)
        if not self._sessions:
            # Wiped controllers count their leaderships from the start again.
            self._controller_epoch = 0
        return effects

    def _on_session_refused(self, event: SessionRefused, now_ms: int) -> list[Effect]:
        fields = (
            ("controller", event.controller),
            ("code", event.code),
            ("remark", event.remark),
        )
        effects: list[Effect] = [Notice("session_refused", fields, warning=True)]
        if event.code == NEED_TO_BE_REGISTERED and self.registered:
            effects += self._begin_register(now_ms)
            self._register_due_ms = now_ms + RETRY_FIRST_MS
        return effects

    def _on_answer(self, event: AnswerReceived, now_ms: int) -> list[Effect]:
        session = self._sessions.get(event.controller)
        if session is None:
            return []
        session.heard_ms = now_ms
        effects: list[Effect] = []
        if event.leader and event.controller_epoch >= self._controller_epoch:
            self._controller_epoch = event.controller_epoch
            self._leader_heard_ms = now_ms
            if self.leader != event.controller:
                effects += self._lead(event.controller, now_ms)
            self._extend_lease(event)
        elif self.leader == event.controller:
            effects += self._unlead(now_ms)
        if self.leader is None and not event.leader and event.leader_grpc_address:
            self._leader_hint = event.leader_grpc_address
        key = (event.master_epoch, event.sync_state_set_epoch)
        if self.view is not None and key > self.view.key:
            if session.behind_since_ms is None:
                session.behind_since_ms = now_ms
        else:
            session.behind_since_ms = None
        return effects

    def _extend_lease(self, event: AnswerReceived) -> None:
        """R5: only the leader's answer, only for the epoch that this process is master of."""
        view = self.view
        if view is None or self.role is not Role.MASTER:
            return
        if event.master_epoch == view.master_epoch:
            until_ms = event.sent_ms + self._timings.master_lease_ms
            self._lease_until_ms = max(self._lease_until_ms, until_ms)

    def _lead(self, controller: str, now_ms: int) -> list[Effect]:
        """A leader is known: everything that waited for one goes to it at once."""
        self.leader = controller
        self._leader_hint = ""
        self._sessions[controller].heartbeat_due_ms = now_ms
        self._register_due_ms = min(self._register_due_ms, now_ms)
        self._elect_due_ms = min(self._elect_due_ms, now_ms + ELECT_GRACE_MS)
        fields = (("controller", controller), ("controller_epoch", self._controller_epoch))
        effects: list[Effect] = [Notice("controller_leader", fields)]
        if self._lost_said:
            self._lost_said = False
            effects.append(Notice("controllers_back", (("leader", controller),)))
        alter = self._alter
        if alter is not None and (not alter.flying or alter.target != controller):
            effects += self._doubt(alter)
            effects.append(self._send_alter(alter, controller))
        effects += self._judge_dead()
        return effects

    def _unlead(self, now_ms: int) -> list[Effect]:
        """No leader is known: ask all controllers at the full pace."""
        self.leader = None
        for session in self._sessions.values():
            session.heartbeat_due_ms = now_ms
        return []

    def _on_facts_changed(self, event: FactsChanged, now_ms: int) -> list[Effect]:
        for session in self._sessions.values():
            session.heartbeat_due_ms = now_ms
        return []

    # -------------------------------------------------------------------------------------- views

    def _on_view(self, event: ViewReceived, now_ms: int) -> list[Effect]:
        if not event.pushed:
            self._fetch_flying = False
            return self._see(event.view, event.controller, now_ms)
        session = self._sessions.get(event.controller)
        if session is not None and event.view.broker_name == self.broker_name:
            session.dead = frozenset(
                replica.broker_id
                for replica in event.view.replicas
                if not replica.alive and replica.broker_id != self.broker_id
            )
        return self._see(event.view, event.controller, now_ms) + self._judge_dead()

    def _see(self, view: RoleView, controller: str, now_ms: int) -> list[Effect]:
        if view.broker_name != self.broker_name:
            return []
        if view.master_epoch < self.highest_master_epoch:
            return self._say_stale(view, controller)
        if self.view is None or view.key > self.view.key:
            return self._take(view, now_ms)
        if (
            view.key == self.view.key
            and view.raft_index > self.view.raft_index
            and _registrations(view) != _registrations(self.view)
        ):
            # A replica registered anew: an address or an incarnation (R12) changed.
            self.view = view
            return [AdoptView(view)]
        return []

    def _say_stale(self, view: RoleView, controller: str) -> list[Effect]:
        """A lagging follower is ordinary; a leader that knows less than this broker forgot."""
        mark = (controller, view.master_epoch)
        if controller != self.leader or mark in self._stale_said:
            return []
        self._stale_said.add(mark)
        fields = (
            ("controller", controller),
            ("master_epoch", view.master_epoch),
            ("accepted_master_epoch", self.highest_master_epoch),
        )
        return [Notice("leader_knows_an_older_epoch", fields, warning=True)]

    def _take(self, view: RoleView, now_ms: int) -> list[Effect]:
        overtaken = False
        if self._alter is not None:
            same_epoch = view.master_epoch == self._alter.key[0]
            overtaken = same_epoch and view.key > self._alter.key
            self._alter = None
        effects: list[Effect] = []
        self.view = view
        if view.master_epoch > self.highest_master_epoch:
            self.highest_master_epoch = view.master_epoch
            effects.append(PersistRole(view.master_epoch))
        role = self._role_in(view)
        acted = (view.master_epoch, role, view.master_broker_id or 0)
        if acted != self._acted:
            self._acted = acted
            self._action_failures = 0
            effects += self._act(now_ms)
        elif overtaken:
            effects.append(ProposalApplied(view))
        else:
            effects.append(AdoptView(view))
        return effects

    def _act(self, now_ms: int) -> list[Effect]:
        """The role change that the view in force asks for."""
        view = self.view
        assert view is not None
        self._action_retry_ms = None
        self._lease_until_ms = 0
        role = self._role_in(view)
        effects: list[Effect] = []
        if role is Role.MASTER:
            effects.append(BecomeMaster(view))
            for session in self._sessions.values():
                session.heartbeat_due_ms = now_ms
        elif role is Role.SLAVE:
            effects.append(BecomeSlave(view))
        else:
            effects.append(StandDown(view))
            stale_self = view.master_broker_id == self.broker_id
            self._elect_due_ms = now_ms + (ELECT_GRACE_MS if stale_self else 0)
        effects.append(SetDead(self._dead_said))
        fields = (("role", role.value), ("broker_id", self.broker_id))
        effects.append(ReportEvent("role_changed", fields))
        return effects

    def _role_in(self, view: RoleView) -> Role:
        if not view.master_broker_id:
            return Role.NONE
        if view.master_broker_id != self.broker_id:
            return Role.SLAVE
        own_life = view.master_incarnation == self.incarnation
        return Role.MASTER if own_life and view.master_epoch > self._earlier_epoch else Role.NONE

    def _judge_dead(self) -> list[Effect]:
        """Only the leader's verdict counts (R5)."""
        if self.leader is None or self._acted is None:
            return []
        dead = self._sessions[self.leader].dead
        if dead is None or dead == self._dead_said:
            return []
        self._dead_said = dead
        return [SetDead(dead)]

    def _on_notice(self, event: NoticeReceived, now_ms: int) -> list[Effect]:
        key = (event.master_epoch, event.sync_state_set_epoch)
        if self.view is None or key > self.view.key:
            self._fetch_wanted = max(self._fetch_wanted, key)
            self._fetch_due_ms = now_ms
        return []

    def _on_fetch_failed(self, event: FetchFailed, now_ms: int) -> list[Effect]:
        self._fetch_flying = False
        self._pass_over(event.target)
        return []

    def _on_action_failed(self, event: ActionFailed, now_ms: int) -> list[Effect]:
        if self.view is None or event.view.master_epoch != self.view.master_epoch:
            return []  # a newer role change is on its way already
        self._action_retry_ms = now_ms + _delay_ms(self._action_failures, RETRY_MOST_MS)
        self._action_failures += 1
        return []

    # ----------------------------------------------------------------------------------- election

    def _on_elect_replied(self, event: ElectReplied, now_ms: int) -> list[Effect]:
        self._elect_flying = False
        if event.code == NOT_LEADER:
            self._pass_over(event.target)
            self._elect_due_ms = now_ms + RETRY_FIRST_MS
            return []
        self._elect_due_ms = now_ms + ELECT_RETRY_MS
        return self._see(event.view, event.target, now_ms) if event.view is not None else []

    def _on_elect_failed(self, event: ElectFailed, now_ms: int) -> list[Effect]:
        self._elect_flying = False
        self._pass_over(event.target)
        self._elect_due_ms = now_ms + 2 * RETRY_FIRST_MS
        return []

    # -------------------------------------------------------------------------------------- alter

    def _on_proposal(self, event: ProposalRequested, now_ms: int) -> list[Effect]:
        view = self.view
        if view is None or self.role is not Role.MASTER:
            return [ProposalRefused(INVALID_MASTER, "this broker is not master")]
        if event.based_on != view.key:
            code = (
                FENCED_MASTER_EPOCH
                if event.based_on[0] != view.master_epoch
                else FENCED_SYNC_STATE_SET_EPOCH
            )
            return [ProposalRefused(code, f"based on {event.based_on}, recorded is {view.key}")]
        assert self._alter is None, "one Alter in flight (R11)"
        if event.new_set == view.sync_state_set:
            return [ProposalRefused(ALTER_FAILED, "the set is recorded already")]
        if self.broker_id not in event.new_set:
            return [ProposalRefused(ALTER_FAILED, "the master is not in the set")]
        replicas = {r.broker_id: r for r in view.replicas}
        members: list[tuple[int, str]] = []
        for broker_id in sorted(event.new_set):
            replica = replicas.get(broker_id)
            if replica is None or replica.learner:
                what = "unknown" if replica is None else "a learner"
                return [ProposalRefused(INVALID_REPLICAS, f"broker {broker_id} is {what}")]
            members.append((broker_id, replica.incarnation))
        self._alter = _Alter(
            self._next_request_id(),
            view.key,
            tuple(members),
            event.confirm_offset,
            event.reason,
            self._target(),
        )
        return [self._send_alter(self._alter, self._alter.target)]

    def _send_alter(self, alter: _Alter, target: str) -> SendAlter:
        alter.target = target
        alter.flying = True
        return SendAlter(
            target,
            alter.request_id,
            alter.key[0],
            alter.key[1],
            alter.members,
            alter.confirm_offset,
            alter.reason,
        )

    def _on_alter_replied(self, event: AlterReplied, now_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        if event.view is not None:
            # A view that passed the Alter's epochs ends it, whatever the code says.
            effects += self._see(event.view, event.target, now_ms)
        alter = self._alter
        if alter is None or alter.request_id != event.request_id:
            return effects
        conclusive = event.code in _ALTER_ANSWERS and not (
            # "Same set" proves nothing while the first attempt may be queued, and a fence may
            # have been raised by that attempt itself: a view has to show what is recorded.
            alter.unknown and (event.code in _FENCES or event.code == ALTER_FAILED)
        )
        if conclusive:
            self._alter = None
            return [*effects, ProposalRefused(event.code, event.remark)]
        if event.code == SUCCESS or event.code in _FENCES:
            self._fetch_wanted = max(self._fetch_wanted, (alter.key[0], alter.key[1] + 1))
        return effects + self._alter_again(alter, event.target, now_ms)

    def _on_alter_failed(self, event: AlterFailed, now_ms: int) -> list[Effect]:
        alter = self._alter
        if alter is None or alter.request_id != event.request_id:
            return []
        return self._alter_again(alter, event.target, now_ms)

    def _alter_again(self, alter: _Alter, target: str, now_ms: int) -> list[Effect]:
        self._pass_over(target)
        effects = self._doubt(alter)
        if target == alter.target:
            alter.flying = False
            alter.retry_ms = now_ms + _delay_ms(alter.attempts - 1, RETRY_MOST_MS)
            alter.attempts += 1
        return effects

    def _doubt(self, alter: _Alter) -> list[Effect]:
        if alter.unknown:
            return []
        alter.unknown = True
        return [ProposalUnknown()]

    # --------------------------------------------------------------------------------- what is due

    def _pump(self, now_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        deadlines: list[int] = []
        if self._started and not self.registered and not self._register_flying:
            if now_ms >= self._register_due_ms:
                self._register_flying = True
                target = self._target()
                effects.append(SendRegister(target, self.broker_id, self._register_request))
            else:
                deadlines.append(self._register_due_ms)
        effects += self._pump_sessions(now_ms, deadlines)
        effects += self._pump_lease(now_ms, deadlines)
        effects += self._pump_requests(now_ms, deadlines)
        self._deadline_ms = min(deadlines) if deadlines else None
        return effects

    def _pump_sessions(self, now_ms: int, deadlines: list[int]) -> list[Effect]:
        effects: list[Effect] = []
        timings = self._timings
        if self.leader is not None:
            silent_ms = self._sessions[self.leader].heard_ms + 3 * timings.heartbeat_ms
            if now_ms >= silent_ms:
                effects += self._unlead(now_ms)
            else:
                deadlines.append(silent_ms)
        for controller, session in self._sessions.items():
            if session.closing:
                continue
            silent_ms = session.heard_ms + 2 * timings.session_timeout_ms
            if now_ms >= silent_ms:
                session.closing = True
                effects.append(
                    CloseSession(controller, f"silent for {now_ms - session.heard_ms} ms")
                )
                continue
            if now_ms >= session.heartbeat_due_ms:
                session.sequence += 1
                known_follower = self.leader is not None and controller != self.leader
                session.heartbeat_due_ms = now_ms + (
                    timings.follower_heartbeat_ms if known_follower else timings.heartbeat_ms
                )
                effects.append(self._heartbeat(controller, session.sequence, now_ms))
            deadlines += (silent_ms, session.heartbeat_due_ms)
        if self.registered and self.leader is None and not self._lost_said:
            lost_ms = self._leader_heard_ms + timings.session_timeout_ms
            if now_ms >= lost_ms:
                self._lost_said = True
                fields = (("silent_ms", now_ms - self._leader_heard_ms), ("role", self.role.value))
                effects.append(Notice("controllers_lost", fields, warning=True))
            else:
                deadlines.append(lost_ms)
        return effects

    def _heartbeat(self, controller: str, sequence: int, now_ms: int) -> SendHeartbeat:
        set_epoch = self.view.sync_state_set_epoch if self.view is not None else 0
        return SendHeartbeat(controller, sequence, now_ms, self.highest_master_epoch, set_epoch)

    def _pump_lease(self, now_ms: int, deadlines: list[int]) -> list[Effect]:
        valid = self.lease_valid(now_ms)
        if valid:
            deadlines.append(self._lease_until_ms)
        if valid == self._lease_said:
            return []
        self._lease_said = valid
        effects: list[Effect] = [LeaseChanged(valid, self.highest_master_epoch)]
        if not valid and self.role is Role.MASTER and self._lease_until_ms:
            effects.append(ReportEvent("lease_lost", (("broker_id", self.broker_id),)))
            fields = (("master_epoch", self.highest_master_epoch),)
            effects.append(Notice("lease_lost", fields, warning=True))
        return effects

    def _pump_requests(self, now_ms: int, deadlines: list[int]) -> list[Effect]:
        effects: list[Effect] = []
        view = self.view
        if self._action_retry_ms is not None:
            if now_ms >= self._action_retry_ms:
                effects += self._act(now_ms)
            else:
                deadlines.append(self._action_retry_ms)
        masterless = view is not None and self.role is Role.NONE and not self._learner
        if self.registered and masterless and not self._elect_flying:
            if now_ms >= self._elect_due_ms:
                assert view is not None
                self._elect_flying = True
                request_id = self._next_request_id()
                target = self._target()
                effects.append(
                    SendElect(target, view.master_epoch, request_id, "no master is known")
                )
            else:
                deadlines.append(self._elect_due_ms)
        alter = self._alter
        if alter is not None and not alter.flying:
            if now_ms >= alter.retry_ms:
                effects.append(self._send_alter(alter, self._target()))
            else:
                deadlines.append(alter.retry_ms)
        effects += self._pump_fetch(now_ms, deadlines)
        return effects

    def _pump_fetch(self, now_ms: int, deadlines: list[int]) -> list[Effect]:
        """Net below the pushes: ask for a view that is known to exist and did not come."""
        if self._fetch_flying or not self.registered:
            return []
        known = self.view.key if self.view is not None else (0, 0)
        target = self._target() if self._fetch_wanted > known else ""
        due_ms = self._fetch_due_ms
        for controller, session in self._sessions.items():
            if session.behind_since_ms is not None and not target:
                target = controller
                due_ms = max(due_ms, session.behind_since_ms + FETCH_AFTER_MS)
        if not target:
            return []
        if now_ms < due_ms:
            deadlines.append(due_ms)
            return []
        self._fetch_flying = True
        self._fetch_due_ms = now_ms + 2 * FETCH_AFTER_MS
        return [FetchView(target)]

    # ------------------------------------------------------------------------------------- helpers

    def _target(self) -> str:
        """The controller to ask: the leader, who somebody says leads, else each in turn."""
        if self.leader is not None:
            return self.leader
        return self._leader_hint or self._controllers[self._turn % len(self._controllers)]

    def _pass_over(self, target: str) -> None:
        """`target` did not answer as leader: do not ask it first again."""
        if self._leader_hint == target:
            self._leader_hint = ""
        elif self.leader != target:
            self._turn += 1

    def _next_request_id(self) -> str:
        self._requests += 1
        return f"{self.incarnation}/{self._requests}"
