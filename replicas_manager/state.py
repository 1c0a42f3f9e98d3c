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
from typing import Any

from protocol.codes import ResponseCode
from protocol.role_view import RoleView
from replicas_manager.alter import Answer, OpenAlter
from replicas_manager.config import SessionTimings
from replicas_manager.controllers import Controllers
from replicas_manager.events import (
    ActionFailed,
    AdoptView,
    AlterFailed,
    AlterReplied,
    AnswerReceived,
    BecomeMaster,
    BecomeSlave,
    Effect,
    ElectFailed,
    ElectReplied,
    Event,
    FactsChanged,
    FetchFailed,
    FetchView,
    LeaderHinted,
    LeaseChanged,
    Notice,
    NoticeReceived,
    OpenSessions,
    PersistRole,
    ProposalApplied,
    ProposalRefused,
    ProposalRequested,
    RegisterFailed,
    RegisterReplied,
    ReportEvent,
    SaveIdentity,
    SendElect,
    SessionClosed,
    SessionOpened,
    SessionRefused,
    SetDead,
    StandDown,
    Started,
    Tick,
    ViewReceived,
)
from replicas_manager.registration import Registration

SUCCESS = ResponseCode.SUCCESS
NOT_LEADER = ResponseCode.CONTROLLER_NOT_LEADER

RETRY_FIRST_MS = 50
RETRY_MOST_MS = 1000
ELECT_RETRY_MS = 1000
ELECT_GRACE_MS = 300
"""A view that names an earlier life of this broker: the controller elects by itself (R3)."""
FORGOTTEN_RETRY_MS = 5000
FETCH_AFTER_MS = 100
"""An answer tells of a newer view: its push may be this much behind."""

_ABOVE_ANY_KEY = (2**31, 2**31)
"""Before the first view no controller counts as ahead: each session begins by pushing one."""


class Role(enum.Enum):
    MASTER = "master"
    SLAVE = "slave"
    NONE = "none"


def retry_delay_ms(attempts: int, most_ms: int) -> int:
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
        self.broker_name = broker_name
        self.broker_id = broker_id
        self.incarnation = incarnation
        self.highest_master_epoch = highest_master_epoch
        self.view: RoleView | None = None
        self._controllers = Controllers(controllers, timings)
        self._timings = timings
        self._learner = learner
        self._earlier_epoch = highest_master_epoch
        """Highest epoch that an earlier life of this broker accepted (R3)."""
        self._requests = 0
        self._stale_said: set[tuple[str, int]] = set()
        self._registration = Registration(len(controllers), self._next_request_id)
        self._forgotten_due_ms = 0
        self._elect_flying = False
        self._elect_due_ms = 0
        self._alter: OpenAlter | None = None
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
            LeaderHinted: self._on_leader_hinted,
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
    def registered(self) -> bool:
        """The controllers know this process life."""
        return self._registration.done

    @property
    def leader(self) -> str | None:
        """gRPC address of the controller that last answered as leader, None if none does."""
        return self._controllers.leader

    @property
    def alter_open(self) -> bool:
        """An AlterSyncStateSet of this master has no known outcome yet."""
        return self._alter is not None

    def lease_valid(self, now_ms: int) -> bool:
        """This process is master, and the leader answered for its epoch less than a lease ago."""
        return now_ms < self._lease_until_ms and self.role is Role.MASTER

    def next_deadline_ms(self) -> int | None:
        """When the next `Tick` is due, None if only an event can change anything."""
        return self._deadline_ms

    def step(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event. The effects are to be performed in order."""
        effects = self._handlers[type(event)](event, now_ms)
        deadlines: list[int] = []
        effects += self._registration.due(
            now_ms, deadlines, self._controllers.target(), self.broker_id
        )
        effects += self._controllers.due(
            now_ms,
            deadlines,
            self._heartbeat_key(),
            master=self.role is Role.MASTER,
            tell_loss=self.registered,
        )
        effects += self._lease_due(now_ms, deadlines)
        effects += self._action_due(now_ms, deadlines)
        effects += self._elect_due(now_ms, deadlines)
        if self._alter is not None:
            effects += self._alter.due(now_ms, deadlines, self._controllers.target())
        effects += self._fetch_due(now_ms, deadlines)
        self._deadline_ms = min(deadlines) if deadlines else None
        return effects

    def check_invariants(self) -> None:
        if self.view is not None:
            assert self.view.master_epoch <= self.highest_master_epoch
            if self.role is Role.MASTER:
                assert self.view.master_epoch > self._earlier_epoch
        if self._alter is not None:
            assert self.view is not None and self.role is Role.MASTER
            assert self._alter.key == self.view.key
        self._controllers.check_invariants()

    # ------------------------------------------------------------------------------- registration

    def _on_started(self, event: Started, now_ms: int) -> list[Effect]:
        self._registration.begin(now_ms)
        return []

    def _on_register_replied(self, event: RegisterReplied, now_ms: int) -> list[Effect]:
        if event.code == NOT_LEADER:
            self._controllers.pass_over(event.target)
            self._registration.not_answered(now_ms)
            return []
        if event.code != SUCCESS:
            self._registration.refused(now_ms)
            fields = (("code", event.code), ("remark", event.remark), ("target", event.target))
            return [Notice("register_refused", fields, warning=True)]
        effects: list[Effect] = []
        if self.broker_id == 0:
            assert event.broker_id > 0, "a registered broker has an id"
            self.broker_id = event.broker_id
            effects.append(SaveIdentity(event.broker_id))
        self._registration.succeeded()
        self._controllers.leader_answered(now_ms)
        effects.append(OpenSessions(self.broker_id))
        if event.view is not None:
            effects += self._see(event.view, event.target, now_ms)
        return effects

    def _on_register_failed(self, event: RegisterFailed, now_ms: int) -> list[Effect]:
        self._controllers.pass_over(event.target)
        self._registration.not_answered(now_ms)
        return []

    # ----------------------------------------------------------------------------------- sessions

    def _on_session_opened(self, event: SessionOpened, now_ms: int) -> list[Effect]:
        self._controllers.opened(event.controller, now_ms)
        return []

    def _on_session_closed(self, event: SessionClosed, now_ms: int) -> list[Effect]:
        self._controllers.closed(event.controller, now_ms)
        return []

    def _on_session_refused(self, event: SessionRefused, now_ms: int) -> list[Effect]:
        if event.code == ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED and self.registered:
            self._registration.begin(now_ms + RETRY_FIRST_MS)
        fields = (
            ("controller", event.controller),
            ("code", event.code),
            ("remark", event.remark),
        )
        return [Notice("session_refused", fields, warning=True)]

    def _on_facts_changed(self, event: FactsChanged, now_ms: int) -> list[Effect]:
        self._controllers.hasten(now_ms)
        return []

    def _on_answer(self, event: AnswerReceived, now_ms: int) -> list[Effect]:
        if event.controller not in self._controllers:
            return []
        known_key = self.view.key if self.view is not None else _ABOVE_ANY_KEY
        heard = self._controllers.answered(event, known_key, now_ms)
        if not heard.authoritative:
            return []
        effects = self._new_leader(event.controller, now_ms) if heard.changed else []
        self._extend_lease(event)
        if event.master_epoch == 0 and self.registered:
            effects += self._forgotten(event.controller, now_ms)
        return effects

    def _forgotten(self, leader: str, now_ms: int) -> list[Effect]:
        """The leader knows no election of a group that had one: its data was cleaned or lost.
        Registering again lets it elect anew, above every epoch that replicas report (R19)."""
        if self.view is None or self.view.master_epoch == 0 or now_ms < self._forgotten_due_ms:
            return []
        self._forgotten_due_ms = now_ms + FORGOTTEN_RETRY_MS
        self._registration.begin(now_ms)
        fields = (("controller", leader), ("master_epoch", self.view.master_epoch))
        return [Notice("group_forgotten", fields, warning=True)]

    def _on_leader_hinted(self, event: LeaderHinted, now_ms: int) -> list[Effect]:
        self._controllers.hinted(event.target, event.leader, now_ms)
        return []

    def _new_leader(self, leader: str, now_ms: int) -> list[Effect]:
        """Everything that waited for a leader goes to it at once."""
        self._registration.hasten(now_ms)
        self._elect_due_ms = min(self._elect_due_ms, now_ms + ELECT_GRACE_MS)
        fields = (
            ("controller", leader),
            ("controller_epoch", self._controllers.controller_epoch),
        )
        effects: list[Effect] = [Notice("controller_leader", fields)]
        effects += self._controllers.back()
        if self._alter is not None:
            effects += self._alter.leader_changed(leader)
        effects += self._judge_dead()
        return effects

    def _heartbeat_key(self) -> tuple[int, int]:
        set_epoch = self.view.sync_state_set_epoch if self.view is not None else 0
        return (self.highest_master_epoch, set_epoch)

    # -------------------------------------------------------------------------------------- lease

    def _extend_lease(self, event: AnswerReceived) -> None:
        """R5: only the leader's answer, only for the epoch that this process is master of."""
        view = self.view
        if view is None or self.role is not Role.MASTER:
            return
        if event.master_epoch == view.master_epoch:
            until_ms = event.sent_ms + self._timings.master_lease_ms
            self._lease_until_ms = max(self._lease_until_ms, until_ms)

    def _lease_due(self, now_ms: int, deadlines: list[int]) -> list[Effect]:
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

    # -------------------------------------------------------------------------------------- views

    def _on_view(self, event: ViewReceived, now_ms: int) -> list[Effect]:
        if not event.pushed:
            self._fetch_flying = False
            return self._see(event.view, event.controller, now_ms)
        if event.view.broker_name != self.broker_name:
            return []
        dead = (r.broker_id for r in event.view.replicas if not r.alive)
        self._controllers.note_dead(event.controller, frozenset(dead) - {self.broker_id})
        return self._see(event.view, event.controller, now_ms) + self._judge_dead()

    def _see(self, view: RoleView, controller: str, now_ms: int) -> list[Effect]:
        """R20, R2: taken only if its key grows and its epoch is not below what was accepted."""
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
        overtaken = self._alter is not None and view.master_epoch == self._alter.key[0]
        self._alter = None
        self.view = view
        # What was committed binds elections by confirmOffset (R16): no controller may judge this
        # replica by what it told before.
        self._controllers.hasten(now_ms)
        effects: list[Effect] = []
        if view.master_epoch > self.highest_master_epoch:
            self.highest_master_epoch = view.master_epoch
            effects.append(PersistRole(view.master_epoch))
        acted = (view.master_epoch, self._role_in(view), view.master_broker_id or 0)
        if acted != self._acted:
            self._acted = acted
            self._action_failures = 0
            return effects + self._act(view, now_ms)
        return [*effects, ProposalApplied(view) if overtaken else AdoptView(view)]

    def _role_in(self, view: RoleView) -> Role:
        """R3: master only under this incarnation, in an epoch that no earlier life accepted."""
        if not view.master_broker_id:
            return Role.NONE
        if view.master_broker_id != self.broker_id:
            return Role.SLAVE
        own_life = view.master_incarnation == self.incarnation
        return Role.MASTER if own_life and view.master_epoch > self._earlier_epoch else Role.NONE

    def _act(self, view: RoleView, now_ms: int) -> list[Effect]:
        """The role change that the view in force asks for."""
        self._action_retry_ms = None
        self._lease_until_ms = 0
        role = self._role_in(view)
        effects: list[Effect] = []
        if role is Role.MASTER:
            effects.append(BecomeMaster(view))
        elif role is Role.SLAVE:
            effects.append(BecomeSlave(view))
        else:
            effects.append(StandDown(view))
            earlier_life = view.master_broker_id == self.broker_id
            self._elect_due_ms = now_ms + (ELECT_GRACE_MS if earlier_life else 0)
        effects.append(SetDead(self._dead_said))
        fields = (("role", role.value), ("broker_id", self.broker_id))
        effects.append(ReportEvent("role_changed", fields))
        return effects

    def _on_action_failed(self, event: ActionFailed, now_ms: int) -> list[Effect]:
        if self.view is None or event.view.master_epoch != self.view.master_epoch:
            return []  # a newer role change is on its way already
        self._action_retry_ms = now_ms + retry_delay_ms(self._action_failures, RETRY_MOST_MS)
        self._action_failures += 1
        return []

    def _action_due(self, now_ms: int, deadlines: list[int]) -> list[Effect]:
        if self._action_retry_ms is None or self.view is None:
            return []
        if now_ms >= self._action_retry_ms:
            return self._act(self.view, now_ms)
        deadlines.append(self._action_retry_ms)
        return []

    def _judge_dead(self) -> list[Effect]:
        """Only the leader's verdict counts (R5)."""
        dead = self._controllers.verdict()
        if dead is None or dead == self._dead_said or self._acted is None:
            return []
        self._dead_said = dead
        return [SetDead(dead)]

    # ------------------------------------------------------------- views whose push did not come

    def _on_notice(self, event: NoticeReceived, now_ms: int) -> list[Effect]:
        self._want_view((event.master_epoch, event.sync_state_set_epoch), now_ms)
        return []

    def _want_view(self, key: tuple[int, int], now_ms: int) -> None:
        if self.view is None or key > self.view.key:
            self._fetch_wanted = max(self._fetch_wanted, key)
            self._fetch_due_ms = now_ms

    def _fetch_due(self, now_ms: int, deadlines: list[int]) -> list[Effect]:
        if self._fetch_flying or not self.registered:
            return []
        due_ms = self._fetch_due_ms
        ahead = self._controllers.ahead()
        if self._fetch_wanted > (self.view.key if self.view is not None else (0, 0)):
            target = self._controllers.target()
        elif ahead is not None:
            controller, since_ms = ahead
            target = self.leader or controller
            due_ms = max(due_ms, since_ms + FETCH_AFTER_MS)
        else:
            return []
        if now_ms < due_ms:
            deadlines.append(due_ms)
            return []
        self._fetch_flying = True
        self._fetch_due_ms = now_ms + 2 * FETCH_AFTER_MS
        return [FetchView(target)]

    def _on_fetch_failed(self, event: FetchFailed, now_ms: int) -> list[Effect]:
        self._fetch_flying = False
        self._controllers.pass_over(event.target)
        return []

    # ----------------------------------------------------------------------------------- election

    def _elect_due(self, now_ms: int, deadlines: list[int]) -> list[Effect]:
        view = self.view
        if view is None or self.role is not Role.NONE or not self.registered:
            return []
        if self._learner or self._elect_flying:
            return []
        if now_ms < self._elect_due_ms:
            deadlines.append(self._elect_due_ms)
            return []
        self._elect_flying = True
        target = self._controllers.target()
        request_id = self._next_request_id()
        return [SendElect(target, view.master_epoch, request_id, "no master is known")]

    def _on_elect_replied(self, event: ElectReplied, now_ms: int) -> list[Effect]:
        self._elect_flying = False
        if event.code == NOT_LEADER:
            self._controllers.pass_over(event.target)
            self._elect_due_ms = now_ms + RETRY_FIRST_MS
            return []
        self._elect_due_ms = now_ms + ELECT_RETRY_MS
        return self._see(event.view, event.target, now_ms) if event.view is not None else []

    def _on_elect_failed(self, event: ElectFailed, now_ms: int) -> list[Effect]:
        self._elect_flying = False
        self._controllers.pass_over(event.target)
        self._elect_due_ms = now_ms + 2 * RETRY_FIRST_MS
        return []

    # -------------------------------------------------------------------------------------- alter

    def _on_proposal(self, event: ProposalRequested, now_ms: int) -> list[Effect]:
        view = self.view
        if view is not None and event.based_on < view.key:
            # The view that overtook it has ended it at the master (R11). A refusal would by now
            # meet that master's next proposal, and take back its union with the Alter under way.
            return []
        refused = self._refuse_at_home(event)
        if refused is not None or view is None:
            return [refused] if refused is not None else []
        assert self._alter is None, "one Alter in flight (R11)"
        members: list[tuple[int, str]] = []
        for broker_id in sorted(event.new_set):
            replica = view.replica(broker_id)
            if replica is None or replica.learner:
                what = "unknown" if replica is None else "a learner"
                code = ResponseCode.CONTROLLER_INVALID_REPLICAS
                return [ProposalRefused(code, f"broker {broker_id} is {what}")]
            members.append((broker_id, replica.incarnation))
        self._alter = OpenAlter(
            self._next_request_id(),
            view.key,
            tuple(members),
            event.confirm_offset,
            event.reason,
        )
        return [self._alter.send(self._controllers.target())]

    def _refuse_at_home(self, event: ProposalRequested) -> ProposalRefused | None:
        """What no controller could grant."""
        view = self.view
        if view is None or self.role is not Role.MASTER:
            code = ResponseCode.CONTROLLER_INVALID_MASTER
            return ProposalRefused(code, "this broker is not master")
        assert event.based_on == view.key, "a master knows no more than its ReplicasManager"
        code = ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED
        if event.new_set == view.sync_state_set:
            return ProposalRefused(code, "the set is recorded already")
        if self.broker_id not in event.new_set:
            return ProposalRefused(code, "the master is not in the set")
        return None

    def _on_alter_replied(self, event: AlterReplied, now_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        if event.view is not None:
            # A view that passed the Alter's epochs ends it, whatever the code says.
            effects += self._see(event.view, event.target, now_ms)
        alter = self._alter
        if alter is None or alter.request_id != event.request_id:
            return effects
        answer = alter.judge(event.code)
        if answer is Answer.REFUSED:
            self._alter = None
            return [*effects, ProposalRefused(event.code, event.remark)]
        if answer is Answer.RECORDED:
            self._want_view((alter.key[0], alter.key[1] + 1), now_ms)
        self._controllers.pass_over(event.target)
        return effects + alter.not_answered(event.target, now_ms)

    def _on_alter_failed(self, event: AlterFailed, now_ms: int) -> list[Effect]:
        alter = self._alter
        if alter is None or alter.request_id != event.request_id:
            return []
        self._controllers.pass_over(event.target)
        return alter.not_answered(event.target, now_ms)

    # ------------------------------------------------------------------------------------- helpers

    def _next_request_id(self) -> str:
        self._requests += 1
        return f"{self.incarnation}/{self._requests}"
