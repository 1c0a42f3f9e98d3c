"""The role state machine of one broker: events and `now_ms` in, effects out. Pure.

Each part keeps its own invariants: `role` (R2, R3, R5, R20), `alter` (R11) and `controllers`. This
class orders them: a newer view ends an open Alter before its effects are returned. The runner first
stores the epoch of a role change, and reports that (`EpochStored`, R2).

`next_deadline_ms` says when the next `TimeCame` is due; extra ticks do no harm.

Origin: Java `ReplicasManager` (states, changeBrokerRole); the sessions replace its polling.
"""

from typing import assert_never

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.role_view import Role, RoleView
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.alter import AlterOutcome, OpenAlter, alter_for
from batonmq.replicas_manager.config import Protocol, SessionTimings
from batonmq.replicas_manager.controllers import (
    ELECT_GRACE_MS,
    ControllerRegistration,
    Controllers,
    Elections,
    MissedViews,
)
from batonmq.replicas_manager.role import CurrentView, Key, Lease, RoleChanges, ViewFreshness
from batonmq.runtime.recent_events import RecentEvents, records_event, shows_events

SUCCESS = ResponseCode.SUCCESS
NOT_LEADER = ResponseCode.CONTROLLER_NOT_LEADER

RETRY_FIRST_MS = 50
FORGOTTEN_RETRY_MS = 5000

_ABOVE_ANY_KEY = (2**31, 2**31)
"""Before the first view no controller counts as ahead: each session begins with a pushed view."""


class ReplicasState:
    """One broker's role. `current`: the identity of this process, without a view. `requests`: the
    prefix of its request ids, which no other process may be able to guess. Controllers with
    `protocol` "remoting" do not know the state of logs and have no request ids: so this replica
    itself refuses a mastership for which its log is unfit (R17), and `alter` trusts no refusal.
    """

    def __init__(
        self,
        *,
        broker_name: str,
        current: CurrentView,
        controllers: tuple[str, ...],
        timings: SessionTimings,
        learner: bool = False,
        protocol: Protocol = "grpc",
        requests: str = "",
    ) -> None:
        self.broker_name = broker_name
        self.recent_events = RecentEvents()
        self.current = current
        self.controllers = Controllers(controllers, timings)
        self.open_alter: OpenAlter | None = None
        """The AlterSyncStateSet of this master without a known outcome."""
        self.next_deadline_ms: int | None = None
        """When the next `TimeCame` is due; None if only another event can change anything."""
        self._learner = learner
        self._java = protocol == "remoting"
        self._suspect = ""
        self._requests = 0
        self._request_prefix = requests or current.incarnation
        self._stale_logged: set[tuple[str, int]] = set()
        self.registration = ControllerRegistration(len(controllers), self._next_request_id)
        self._forgotten_due_ms = 0
        self._elections = Elections()
        self._lease = Lease(timings.master_lease_ms)
        self._changes = RoleChanges()
        self._missed = MissedViews()

    @property
    def registered(self) -> bool:
        """The controllers have registered this incarnation."""
        return self.registration.done

    def lease_valid(self, now_ms: int) -> bool:
        """Whether this process is master with a valid lease."""
        return self._lease.valid(now_ms) and self.current.role is Role.MASTER

    @records_event
    def step(self, event: ev.Event, now_ms: int) -> list[ev.Effect]:
        """Takes one event. Perform the effects in order."""
        effects = self._handle(event, now_ms)
        deadlines: list[int] = []
        # After every event, not only a tick, because most make something due at once.
        effects += self._due(now_ms, deadlines)
        self.next_deadline_ms = min(deadlines, default=None)
        return effects

    @shows_events
    def check_invariants(self) -> None:
        self.current.check_invariants()
        if self.open_alter is not None:
            assert self.current.role is Role.MASTER
            assert self.open_alter.key == self.current.key
        self.controllers.check_invariants()

    def _handle(self, event: ev.Event, now_ms: int) -> list[ev.Effect]:
        match event:
            case ev.Started():
                self.registration.begin(now_ms)
            case ev.SessionOpened(controller):
                self.controllers.opened(controller, now_ms)
            case ev.SessionClosed(controller):
                self.controllers.closed(controller, now_ms)
            case ev.SessionRefused():
                return self._on_session_refused(event, now_ms)
            case ev.AnswerReceived():
                return self._on_answer(event, now_ms)
            case ev.ViewReceived():
                return self._on_view(event, now_ms)
            case ev.LeaderHinted(target, leader):
                self.controllers.hinted(target, leader, now_ms)
            case ev.Replied():
                return self._on_replied(event, now_ms)
            case ev.Unanswered(call):
                return self._on_unanswered(call, now_ms)
            case ev.ProposalRequested():
                return self._on_proposal(event)
            case ev.SuspicionChanged(suspect):
                # R17: a replica that is whole again may join, a suspect one must leave the set.
                self._suspect = suspect
                self.registration.suspicion(suspect, now_ms)
                self._changes.suspicion(suspect)
                return [
                    ev.Notice("log_suspect" if suspect else "log_whole", (("reason", suspect),))
                ]
            case ev.NoticeReceived(master_epoch, sync_state_set_epoch):
                self._want_view((master_epoch, sync_state_set_epoch), now_ms)
            case ev.ActionFailed(view):
                if view.master_epoch == self.current.key[0]:
                    self._changes.failed(now_ms)  # else a newer role change follows
            case ev.EpochStored(master_epoch):
                self.current.stored_master_epoch = master_epoch
                self.controllers.retry_now(now_ms)  # earlier heartbeats named an older epoch
            case ev.TimeCame():
                pass
            case _:
                assert_never(event)
        return []

    def _due(self, now_ms: int, deadlines: list[int]) -> list[ev.Effect]:
        """Returns what is due at `now_ms`; adds to `deadlines` when each part is due again."""
        current, controllers = self.current, self.controllers
        is_master = current.role is Role.MASTER
        target = controllers.target()
        effects: list[ev.Effect] = [
            *self.registration.due(now_ms, deadlines, target, current.broker_id)
        ]
        effects += controllers.due(
            now_ms, deadlines, current.heartbeat_key, master=is_master, report_loss=self.registered
        )
        effects += self._lease.due(
            now_ms,
            deadlines,
            master=is_master,
            master_epoch=current.highest_master_epoch,
            broker_id=current.broker_id,
        )
        # With the newest view, which may have replaced the one that failed.
        if current.view is not None and self._changes.due(now_ms, deadlines):
            effects += self._act(current.view, now_ms)
        effects += self._elect_due(now_ms, deadlines)
        if self.open_alter is not None:
            effects += self.open_alter.due(now_ms, deadlines, controllers.target())
        if self.registered:
            effects += self._missed.due(
                now_ms,
                deadlines,
                current.key,
                controllers.ahead(),
                controllers.target(),
                controllers.leader,
            )
        return effects

    def _on_replied(self, event: ev.Replied, now_ms: int) -> list[ev.Effect]:
        match event.call:
            case ev.SendRegister():
                return self._on_registered(event, now_ms)
            case ev.SendElect(target):
                not_leader = event.code == NOT_LEADER
                self._elections.refused(now_ms, not_leader=not_leader)
                if not_leader:
                    self.controllers.pass_over(target)
                    return []
            case ev.SendAlter():
                return self._on_alter_replied(event, event.call, now_ms)
            case ev.FetchView(target):
                self._missed.ended()
                # That controller lags, or lost its state.
                if event.view is None:
                    self.controllers.pass_over(target)
            case _:
                assert_never(event.call)
        return self._see(event.view, event.call.target, now_ms)

    def _on_unanswered(self, call: ev.Call, now_ms: int) -> list[ev.Effect]:
        match call:
            case ev.SendRegister():
                self.registration.not_answered(now_ms)
            case ev.SendElect():
                self._elections.unanswered(now_ms)
            case ev.SendAlter():
                alter = self.open_alter
                if alter is None or alter.request_id != call.request_id:
                    return []
                self.controllers.pass_over(call.target)
                return alter.not_answered(call.target, now_ms)
            case ev.FetchView():
                self._missed.ended()
            case _:
                assert_never(call)
        self.controllers.pass_over(call.target)
        return []

    def _on_registered(self, event: ev.Replied, now_ms: int) -> list[ev.Effect]:
        target = event.call.target
        if event.code == NOT_LEADER:
            self.controllers.pass_over(target)
            self.registration.not_answered(now_ms)
            return []
        if event.code != SUCCESS:
            self.registration.refused(event.remark, now_ms)
            fields = (("code", event.code), ("remark", event.remark), ("target", target))
            return [ev.Notice("register_refused", fields, warning=True)]
        effects: list[ev.Effect] = []
        if self.current.broker_id == 0:
            assert event.broker_id > 0, "a registered broker has an id"
            self.current.broker_id = event.broker_id
            effects.append(ev.SaveIdentity(event.broker_id))
        self.registration.succeeded(now_ms)
        self.controllers.leader_answered(now_ms)
        # Only now: a leading controller accepts sessions only of registered processes (R59).
        effects.append(ev.OpenSessions(self.current.broker_id))
        effects += self._see(event.view, target, now_ms)
        return effects + self._changes.refetch(self.current, self.registration.known_suspicion)

    def _on_session_refused(self, event: ev.SessionRefused, now_ms: int) -> list[ev.Effect]:
        # The group was cleaned, or the controllers lost their state.
        if event.code == ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED and self.registered:
            self.registration.begin(now_ms + RETRY_FIRST_MS)
        fields = (("controller", event.controller), ("code", event.code), ("remark", event.remark))
        return [ev.Notice("session_refused", fields, warning=True)]

    def _on_answer(self, event: ev.AnswerReceived, now_ms: int) -> list[ev.Effect]:
        # A late answer of an ended session proves nothing.
        if event.controller not in self.controllers:
            return []
        known_key = _ABOVE_ANY_KEY if self.current.view is None else self.current.key
        meaning = self.controllers.answered(event, known_key, now_ms)
        if not meaning.authoritative:
            return []
        effects = self._new_leader(event.controller, now_ms) if meaning.changed else []
        if self.current.role is Role.MASTER:
            self._lease.extend(event, self.current.key[0])
        if self.registered:
            effects += self._forgotten(event, now_ms)
        return effects

    def _forgotten(self, answer: ev.AnswerReceived, now_ms: int) -> list[ev.Effect]:
        """Registers again if the leader does not know this process, or knows no election of a group
        that had one (R52)."""
        master_epoch = self.current.key[0]
        group_lost = answer.master_epoch == 0 and master_epoch > 0
        # The group's data was cleaned or lost: a registration lets the leader elect above every
        # epoch that replicas report (R19). Or this broker was cleaned, or the late registration of
        # an earlier process replaced this one's.
        if now_ms < self._forgotten_due_ms or not (group_lost or self._not_in_view):
            return []
        # The view with the registration comes only after further answers like this one.
        self._forgotten_due_ms = now_ms + FORGOTTEN_RETRY_MS
        self.registration.begin(now_ms)
        what = "group_forgotten" if group_lost else "registration_lost"
        fields = (("controller", answer.controller), ("master_epoch", master_epoch))
        return [ev.Notice(what, fields, warning=True)]

    @property
    def _not_in_view(self) -> bool:
        """Whether the current view lacks this process (Java's controllers record no processes)."""
        view = self.current.view
        if view is None or self._java:
            return False
        record = view.replica(self.current.broker_id)
        return record is None or record.incarnation != self.current.incarnation

    def _new_leader(self, leader: str, now_ms: int) -> list[ev.Effect]:
        """A new leader: sends it every waiting request at once."""
        self.registration.retry_now(now_ms)
        self._elections.retry_now(now_ms)
        fields = (("controller", leader), ("controller_epoch", self.controllers.controller_epoch))
        effects: list[ev.Effect] = [ev.Notice("controller_leader", fields)]
        effects += self.controllers.back()
        if self.open_alter is not None:
            effects += self.open_alter.leader_changed(leader)
        # The new leader judges by its own sessions (R5), so its list replaces the earlier one.
        effects += self._changes.dead_changed(self.controllers.dead_by_leader())
        return effects

    def _on_view(self, event: ev.ViewReceived, now_ms: int) -> list[ev.Effect]:
        if not event.pushed:
            return self._see(event.view, event.controller, now_ms)
        if event.view.broker_name != self.broker_name:
            return []
        dead = (r.broker_id for r in event.view.replicas if not r.alive)
        # Without this broker: if the view still calls it dead, the controller is late (R5).
        self.controllers.note_dead(event.controller, frozenset(dead) - {self.current.broker_id})
        effects = self._see(event.view, event.controller, now_ms)
        return effects + self._changes.dead_changed(self.controllers.dead_by_leader())

    def _see(self, view: RoleView | None, controller: str, now_ms: int) -> list[ev.Effect]:
        """Takes a view of `controller`, from its session or a reply."""
        if view is None or view.broker_name != self.broker_name:
            return []
        match self.current.freshness_of(view):
            case ViewFreshness.STALE:
                return self._stale(view, controller)
            case ViewFreshness.NEWER:
                return self._take(view, now_ms)
            case ViewFreshness.REGISTERED_AGAIN:
                self.current.take(view)
                return [ev.AdoptView(view)]
            case ViewFreshness.KNOWN:
                return []

    def _stale(self, view: RoleView, controller: str) -> list[ev.Effect]:
        """An older view: a follower may lag, but a leader has lost data."""
        mark = (controller, view.master_epoch)
        # Once per epoch, or every answer of such a leader would repeat it.
        if controller != self.controllers.leader or mark in self._stale_logged:
            return []
        self._stale_logged.add(mark)
        fields = (
            ("controller", controller),
            ("master_epoch", view.master_epoch),
            ("accepted_master_epoch", self.current.highest_master_epoch),
        )
        return [ev.Notice("leader_knows_an_older_epoch", fields, warning=True)]

    def _take(self, view: RoleView, now_ms: int) -> list[ev.Effect]:
        # The newer view shows the outcome, or makes the request impossible (R11).
        self.open_alter = None
        # A committed set counts in elections by confirmOffset (R16), so controllers need a
        # heartbeat newer than it.
        self.controllers.retry_now(now_ms)
        effects: list[ev.Effect] = []
        if self._unfit and self.current.refuse(view):
            fields = (("master_epoch", view.master_epoch), ("reason", self._unfit))
            effects.append(ev.Notice("mastership_refused", fields, warning=True))
        self.current.take(view)
        if self._suspect and self.current.role is Role.MASTER and len(view.sync_state_set) > 1:
            # R17: as the only member it stayed master although suspect; now another one may lead.
            self.registration.repeat(now_ms)
        if self._changes.is_new(view, self.current.role_in(view)):
            return effects + self._act(view, now_ms)
        effects.append(ev.AdoptView(view))
        return effects + self._changes.refetch(self.current, self.registration.known_suspicion)

    @property
    def _unfit(self) -> str:
        """Why this replica must not become master, if only it knows that; else ""."""
        return self._suspect if self._java else ""

    def _act(self, view: RoleView, now_ms: int) -> list[ev.Effect]:
        """The role change to this process's role in `view`, the current one."""
        # The lease of one epoch must not cover the next.
        self._lease.drop()
        role = self.current.role_in(view)
        if role is Role.FENCED:
            earlier_incarnation = view.master_broker_id == self.current.broker_id
            # The registration of a new incarnation makes the controllers elect by themselves (R3).
            self._elections.wanted(now_ms + (ELECT_GRACE_MS if earlier_incarnation else 0))
        return self._changes.act(view, role, self.current.broker_id)

    def _want_view(self, key: Key, now_ms: int) -> None:
        if self.current.view is None or key > self.current.key:
            self._missed.want(key, now_ms)

    def _elect_due(self, now_ms: int, deadlines: list[int]) -> list[ev.Effect]:
        view = self.current.view
        if view is None or self.current.role is not Role.FENCED or not self.registered:
            return []
        # `due` last, because it notes that a request is in flight.
        if self._learner or self._unfit or not self._elections.due(now_ms, deadlines):
            return []
        target = self.controllers.target()
        request_id = self._next_request_id()
        return [ev.SendElect(target, view.master_epoch, request_id, "no master is known")]

    def _on_proposal(self, event: ev.ProposalRequested) -> list[ev.Effect]:
        view = self.current.view
        if view is not None and event.based_on < view.key:
            # The newer view has ended this proposal at the master (R11). Passing on this refusal
            # would hit the master's next proposal while its Alter is in flight.
            return []
        if view is None or self.current.role is not Role.MASTER:
            code = ResponseCode.CONTROLLER_INVALID_MASTER
            return [ev.ProposalRefused(code, "this broker is not master")]
        assert self.open_alter is None, "one Alter in flight (R11)"
        own_id, request_id = self.current.broker_id, self._next_request_id()
        alter = alter_for(event, view, own_id, request_id, ids_remembered=not self._java)
        if isinstance(alter, ev.ProposalRefused):
            return [alter]
        self.open_alter = alter
        return [alter.send(self.controllers.target())]

    def _on_alter_replied(
        self, event: ev.Replied, call: ev.SendAlter, now_ms: int
    ) -> list[ev.Effect]:
        # A view with newer epochs than the Alter's ends it, whatever the code is.
        effects = self._see(event.view, call.target, now_ms)
        alter = self.open_alter
        if alter is None or alter.request_id != call.request_id:
            return effects
        outcome = alter.outcome_of(event.code)
        if outcome is AlterOutcome.REFUSED:
            self.open_alter = None
            return [*effects, ev.ProposalRefused(event.code, event.remark)]
        if outcome is AlterOutcome.RECORDED:
            self._want_view((alter.key[0], alter.key[1] + 1), now_ms)
        self.controllers.pass_over(call.target)
        effects += alter.not_answered(call.target, now_ms)
        return effects + alter.stands_still(event.code, now_ms)

    def _next_request_id(self) -> str:
        self._requests += 1
        return f"{self._request_prefix}/{self._requests}"
