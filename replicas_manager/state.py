"""The role state machine of one broker: pure, events and `now_ms` in, effects out.

It ties together what each keeps its own invariants: `views` (R2, R3, R20), `role_changes`, `lease`
(R5), `registration`, `elections`, `alter` (R11) and `controllers`. Here is the order of things:
`PersistRole` comes before the role change that it permits (R2), and a newer view ends an open Alter
before anything is told of it.

Origin: Java `ReplicasManager` (states, 1004 poll, changeBrokerRole); the sessions replace its
polling. `next_deadline_ms` says when to send a `Tick` at the latest; more ticks do no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.codes import ResponseCode
from protocol.role_view import RoleView
from replicas_manager.alter import Answer, OpenAlter, alter_for
from replicas_manager.config import SessionTimings
from replicas_manager.controllers import Controllers
from replicas_manager.elections import ELECT_GRACE_MS, Elections
from replicas_manager.events import (
    ActionFailed,
    AdoptView,
    AlterFailed,
    AlterReplied,
    AnswerReceived,
    Effect,
    ElectFailed,
    ElectReplied,
    Event,
    FactsChanged,
    FetchFailed,
    LeaderHinted,
    Notice,
    NoticeReceived,
    OpenSessions,
    PersistRole,
    ProposalApplied,
    ProposalRefused,
    ProposalRequested,
    RegisterFailed,
    RegisterReplied,
    SaveIdentity,
    SendElect,
    SessionClosed,
    SessionOpened,
    SessionRefused,
    Started,
    SuspicionChanged,
    Tick,
    ViewReceived,
)
from replicas_manager.lease import Lease
from replicas_manager.registration import Registration
from replicas_manager.role_changes import RoleChanges
from replicas_manager.views import Key, MissedViews, Role, ViewInForce, Worth

__all__ = ["ReplicasState", "Role"]

SUCCESS = ResponseCode.SUCCESS
NOT_LEADER = ResponseCode.CONTROLLER_NOT_LEADER

RETRY_FIRST_MS = 50
FORGOTTEN_RETRY_MS = 5000

_ABOVE_ANY_KEY = (2**31, 2**31)
"""Before the first view no controller counts as ahead: each session begins by pushing one."""


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
        self._standing = ViewInForce(broker_id, incarnation, highest_master_epoch)
        self._controllers = Controllers(controllers, timings)
        self._learner = learner
        self._requests = 0
        self._stale_said: set[tuple[str, int]] = set()
        self._registration = Registration(len(controllers), self._next_request_id)
        self._forgotten_due_ms = 0
        self._elections = Elections()
        self._alter: OpenAlter | None = None
        self._lease = Lease(timings.master_lease_ms)
        self._changes = RoleChanges()
        self._missed = MissedViews()
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
            SuspicionChanged: self._on_suspicion_changed,
            NoticeReceived: self._on_notice,
            ActionFailed: self._on_action_failed,
            Tick: lambda event, now_ms: [],
        }

    # ------------------------------------------------------------------------------------ reading

    @property
    def broker_id(self) -> int:
        return self._standing.broker_id

    @property
    def incarnation(self) -> str:
        return self._standing.incarnation

    @property
    def view(self) -> RoleView | None:
        """The newest view taken."""
        return self._standing.view

    @property
    def highest_master_epoch(self) -> int:
        """The highest masterEpoch accepted (R2)."""
        return self._standing.highest_master_epoch

    @property
    def role(self) -> Role:
        return self._standing.role

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
        return self._lease.valid(now_ms) and self.role is Role.MASTER

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
            self._standing.told_key,
            master=self.role is Role.MASTER,
            tell_loss=self.registered,
        )
        effects += self._lease.due(
            now_ms,
            deadlines,
            master=self.role is Role.MASTER,
            master_epoch=self.highest_master_epoch,
            broker_id=self.broker_id,
        )
        if self.view is not None and self._changes.due(now_ms, deadlines):
            effects += self._act(self.view, now_ms)
        effects += self._elect_due(now_ms, deadlines)
        if self._alter is not None:
            effects += self._alter.due(now_ms, deadlines, self._controllers.target())
        if self.registered:
            controllers = self._controllers
            effects += self._missed.due(
                now_ms,
                deadlines,
                self._standing.key,
                controllers.ahead(),
                controllers.target(),
                controllers.leader,
            )
        self._deadline_ms = min(deadlines) if deadlines else None
        return effects

    def check_invariants(self) -> None:
        self._standing.check_invariants()
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
            self._standing.broker_id = event.broker_id
            effects.append(SaveIdentity(event.broker_id))
        self._registration.succeeded(now_ms)
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

    def _on_suspicion_changed(self, event: SuspicionChanged, now_ms: int) -> list[Effect]:
        """R17: who is whole again may join again, who is not had better leave the set."""
        self._registration.suspicion(event.suspect, now_ms)
        return [Notice("log_suspect" if event.suspect else "log_whole", (("why", event.suspect),))]

    def _on_answer(self, event: AnswerReceived, now_ms: int) -> list[Effect]:
        if event.controller not in self._controllers:
            return []
        known_key = self.view.key if self.view is not None else _ABOVE_ANY_KEY
        heard = self._controllers.answered(event, known_key, now_ms)
        if not heard.authoritative:
            return []
        effects = self._new_leader(event.controller, now_ms) if heard.changed else []
        if self.role is Role.MASTER:
            self._lease.extend(event, self._standing.key[0])
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
        self._elections.hasten(now_ms)
        fields = (
            ("controller", leader),
            ("controller_epoch", self._controllers.controller_epoch),
        )
        effects: list[Effect] = [Notice("controller_leader", fields)]
        effects += self._controllers.back()
        if self._alter is not None:
            effects += self._alter.leader_changed(leader)
        effects += self._changes.judge_dead(self._controllers.verdict())
        return effects

    # -------------------------------------------------------------------------------------- views

    def _on_view(self, event: ViewReceived, now_ms: int) -> list[Effect]:
        if not event.pushed:
            self._missed.ended()
            return self._see(event.view, event.controller, now_ms)
        if event.view.broker_name != self.broker_name:
            return []
        dead = (r.broker_id for r in event.view.replicas if not r.alive)
        self._controllers.note_dead(event.controller, frozenset(dead) - {self.broker_id})
        effects = self._see(event.view, event.controller, now_ms)
        return effects + self._changes.judge_dead(self._controllers.verdict())

    def _see(self, view: RoleView, controller: str, now_ms: int) -> list[Effect]:
        if view.broker_name != self.broker_name:
            return []
        match self._standing.worth(view):
            case Worth.STALE:
                return self._say_stale(view, controller)
            case Worth.NEWER:
                return self._take(view, now_ms)
            case Worth.REGISTERED_ANEW:
                self._standing.take(view)
                return [AdoptView(view)]
            case Worth.KNOWN:
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
        # What was committed binds elections by confirmOffset (R16): no controller may judge this
        # replica by what it told before.
        self._controllers.hasten(now_ms)
        effects: list[Effect] = []
        if self._standing.take(view):
            effects.append(PersistRole(view.master_epoch))
        if self._changes.asked_by(view, self._standing.role_in(view)):
            return effects + self._act(view, now_ms)
        return [*effects, ProposalApplied(view) if overtaken else AdoptView(view)]

    def _act(self, view: RoleView, now_ms: int) -> list[Effect]:
        """The role change that the view in force asks for."""
        self._lease.drop()
        role = self._standing.role_in(view)
        if role is Role.NONE:
            earlier_life = view.master_broker_id == self.broker_id
            self._elections.wanted(now_ms + (ELECT_GRACE_MS if earlier_life else 0))
        return self._changes.act(view, role, self.broker_id)

    def _on_action_failed(self, event: ActionFailed, now_ms: int) -> list[Effect]:
        if self.view is not None and event.view.master_epoch == self.view.master_epoch:
            self._changes.failed(now_ms)  # else a newer role change is on its way already
        return []

    # ------------------------------------------------------------- views whose push did not come

    def _on_notice(self, event: NoticeReceived, now_ms: int) -> list[Effect]:
        self._want_view((event.master_epoch, event.sync_state_set_epoch), now_ms)
        return []

    def _want_view(self, key: Key, now_ms: int) -> None:
        if self.view is None or key > self.view.key:
            self._missed.want(key, now_ms)

    def _on_fetch_failed(self, event: FetchFailed, now_ms: int) -> list[Effect]:
        self._missed.ended()
        self._controllers.pass_over(event.target)
        return []

    # ----------------------------------------------------------------------------------- election

    def _elect_due(self, now_ms: int, deadlines: list[int]) -> list[Effect]:
        view = self.view
        if view is None or self.role is not Role.NONE or not self.registered:
            return []
        if self._learner or not self._elections.due(now_ms, deadlines):
            return []
        target = self._controllers.target()
        request_id = self._next_request_id()
        return [SendElect(target, view.master_epoch, request_id, "no master is known")]

    def _on_elect_replied(self, event: ElectReplied, now_ms: int) -> list[Effect]:
        not_leader = event.code == NOT_LEADER
        self._elections.refused(now_ms, not_leader=not_leader)
        if not_leader:
            self._controllers.pass_over(event.target)
            return []
        return self._see(event.view, event.target, now_ms) if event.view is not None else []

    def _on_elect_failed(self, event: ElectFailed, now_ms: int) -> list[Effect]:
        self._elections.unanswered(now_ms)
        self._controllers.pass_over(event.target)
        return []

    # -------------------------------------------------------------------------------------- alter

    def _on_proposal(self, event: ProposalRequested, now_ms: int) -> list[Effect]:
        view = self.view
        if view is not None and event.based_on < view.key:
            # The view that overtook it has ended it at the master (R11). A refusal would by now
            # meet that master's next proposal, and take back its union with the Alter under way.
            return []
        if view is None or self.role is not Role.MASTER:
            code = ResponseCode.CONTROLLER_INVALID_MASTER
            return [ProposalRefused(code, "this broker is not master")]
        assert self._alter is None, "one Alter in flight (R11)"
        alter = alter_for(event, view, self.broker_id, self._next_request_id)
        if isinstance(alter, ProposalRefused):
            return [alter]
        self._alter = alter
        return [alter.send(self._controllers.target())]

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
