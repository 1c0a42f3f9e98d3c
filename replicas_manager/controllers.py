"""The controllers as one broker sees them: the leader, heartbeats, requests and their targets.
Pure.

The leader is the controller with an open session whose last answer claimed the lead with the
highest controller epoch seen. While none is known, heartbeats go to all at the full rate, so that a
new leader is found within one period (`Controllers`).

`ControllerRegistration`, `Elections` and `MissedViews` decide when and where to send
RegisterBroker, ElectMaster and GetReplicaInfo; each has at most one request in flight. After an
unknown outcome the same request id is sent again, and a controller repeats its answer. After a
refusal a new id is used, or the refusal would be repeated. The controllers elect by themselves when
a master dies (R10); a broker requests an election only if it still has no master after that.
"""

from collections.abc import Callable
from dataclasses import dataclass

from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.config import SessionTimings
from batonmq.replicas_manager.role import Key

RETRY_FIRST_MS = 50
RETRY_MOST_MS = 500
WAITED_PER_PAUSE = 8
"""A registration that waits for a leader pauses for an eighth of its waiting time: it finds the
first leader of a cluster at once, and does not flood during a long outage."""
# A refusal may end only when an operator acts, a wrong target at the next attempt.
REFUSED_RETRY_MS = 1000
NOT_LEADER_RETRY_MS = 50
UNANSWERED_RETRY_MS = 100
ELECT_GRACE_MS = 300
"""How long to wait if a view names an earlier incarnation of this broker: the controllers then
elect by themselves (R3)."""
FETCH_AFTER_MS = 100
"""If an answer names a newer view, its push may come this much later."""


@dataclass(slots=True)
class _SessionTimes:
    heartbeat_due_ms: int
    answered_ms: int
    sequence: int = 0
    closing: bool = False
    behind_since_ms: int | None = None
    dead: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class AnswerMeaning:
    """`authoritative`: the answer is from the leader. `changed`: that one was not known as leader
    before."""

    authoritative: bool
    changed: bool


class Controllers:
    """`addresses`: the addresses of all controllers, at least one."""

    def __init__(self, addresses: tuple[str, ...], timings: SessionTimings) -> None:
        assert addresses, "a ReplicasManager needs a controller"
        self.addresses = addresses
        self.leader: str | None = None
        self.controller_epoch = 0
        self._timings = timings
        self._sessions: dict[str, _SessionTimes] = {}
        self._leader_answered_ms = 0
        self._hint = ""
        self._turn = 0
        self._loss_reported = False

    def __contains__(self, controller: str) -> bool:
        return controller in self._sessions

    def check_invariants(self) -> None:
        assert self.leader is None or self.leader in self._sessions

    def leader_answered(self, now_ms: int) -> None:
        """`target` answered a call as only a leader does."""
        self._leader_answered_ms = now_ms

    def opened(self, controller: str, now_ms: int) -> None:
        self._sessions[controller] = _SessionTimes(heartbeat_due_ms=now_ms, answered_ms=now_ms)

    def closed(self, controller: str, now_ms: int) -> None:
        self._sessions.pop(controller, None)
        if self.leader == controller:
            self._unlead(now_ms)
        if not self._sessions:
            # Controllers that lost their state begin again with low controller epochs.
            self.controller_epoch = 0

    def answered(
        self, event: ev.AnswerReceived, known_key: tuple[int, int], now_ms: int
    ) -> AnswerMeaning:
        """An answer on an open session. `known_key`: the key of the current view."""
        session = self._sessions[event.controller]
        session.answered_ms = now_ms
        if (event.master_epoch, event.sync_state_set_epoch) <= known_key:
            session.behind_since_ms = None
        # The view of that answer is on its way; only if it does not come it is fetched.
        elif session.behind_since_ms is None:
            session.behind_since_ms = now_ms
        # A lower epoch is that of a deposed leader that does not know it yet.
        if event.leader and event.controller_epoch >= self.controller_epoch:
            changed = self.leader != event.controller
            self.leader = event.controller
            self.controller_epoch = event.controller_epoch
            self._leader_answered_ms = now_ms
            if changed:
                self._hint = ""
                # It has had only a follower's rare heartbeats, and judges silence from now on.
                session.heartbeat_due_ms = now_ms
            return AnswerMeaning(authoritative=True, changed=changed)
        if self.leader == event.controller:
            self._unlead(now_ms)
        # A hint never replaces a leader that answers this broker itself.
        if self.leader is None and not event.leader and event.leader_grpc_address:
            self._hint = event.leader_grpc_address
        return AnswerMeaning(authoritative=False, changed=False)

    def hinted(self, target: str, leader: str, now_ms: int) -> None:
        """`target` answered that it does not lead, but `leader` does ("" if unknown)."""
        if self.leader == target:
            self._unlead(now_ms)
        if self.leader is None and leader != target:
            self._hint = leader

    def back(self) -> list[ev.Effect]:
        """A leader was found: reports it if the loss was reported."""
        if not self._loss_reported:
            return []
        self._loss_reported = False
        return [ev.Notice("controllers_back", (("leader", self.leader or ""),))]

    def note_dead(self, controller: str, dead: frozenset[int]) -> None:
        session = self._sessions.get(controller)
        if session is not None:
            session.dead = dead

    def retry_now(self, now_ms: int) -> None:
        """Makes the next heartbeat to each controller due now."""
        for session in self._sessions.values():
            session.heartbeat_due_ms = now_ms

    def _unlead(self, now_ms: int) -> None:
        self.leader = None
        self.retry_now(now_ms)

    def target(self) -> str:
        """The target of a request: the leader, else the hinted controller, else each in turn."""
        if self.leader is not None:
            return self.leader
        return self._hint or self.addresses[self._turn % len(self.addresses)]

    def pass_over(self, target: str) -> None:
        """`target` did not answer as leader: tries another one next time."""
        if self._hint == target:
            self._hint = ""
        # A leader stays the target after one failed call: its heartbeat answers decide.
        elif self.leader != target:
            self._turn += 1

    def dead_by_leader(self) -> frozenset[int] | None:
        """The brokers that the leader declares dead; None without a leader."""
        return None if self.leader is None else self._sessions[self.leader].dead

    def ahead(self) -> tuple[str, int] | None:
        """A controller that has a newer view than ours, and since when."""
        for controller, session in self._sessions.items():
            if session.behind_since_ms is not None:
                return controller, session.behind_since_ms
        return None

    def due(
        self,
        now_ms: int,
        deadlines: list[int],
        key: tuple[int, int],
        *,
        master: bool,
        report_loss: bool,
    ) -> list[ev.Effect]:
        """Handles heartbeats (which carry `key`), silent sessions, and a lost leader."""
        timings = self._timings
        # Only a master renews a lease.
        pace_ms = timings.heartbeat_ms if master else 2 * timings.heartbeat_ms
        # After three heartbeats without an answer all controllers get them at the full rate: a new
        # leader is then found within one period, long before this session counts as silent.
        if self.leader is not None:
            silent_ms = self._sessions[self.leader].answered_ms + 3 * pace_ms
            if now_ms >= silent_ms:
                self._unlead(now_ms)
            else:
                deadlines.append(silent_ms)
        effects: list[ev.Effect] = []
        # A message sent alone costs twice as much, so nearly due ones are sent with it.
        open_sessions = [s for s in self._sessions.values() if not s.closing]
        together = any(now_ms >= session.heartbeat_due_ms for session in open_sessions)
        horizon_ms = now_ms + (pace_ms // 2 if together else 0)
        for controller, session in self._sessions.items():
            if session.closing:
                continue
            silent_ms = session.answered_ms + 2 * timings.session_timeout_ms
            if now_ms >= silent_ms:
                session.closing = True
                reason = f"silent for {now_ms - session.answered_ms} ms"
                effects.append(ev.CloseSession(controller, reason))
                continue
            if horizon_ms >= session.heartbeat_due_ms:
                session.sequence += 1
                session.heartbeat_due_ms = now_ms + self._period_ms(controller, pace_ms)
                effects.append(ev.SendHeartbeat(controller, session.sequence, now_ms, *key))
            deadlines += (silent_ms, session.heartbeat_due_ms)
        if report_loss and self.leader is None and not self._loss_reported:
            lost_ms = self._leader_answered_ms + timings.session_timeout_ms
            if now_ms >= lost_ms:
                self._loss_reported = True
                fields = (("silent_ms", now_ms - self._leader_answered_ms),)
                effects.append(ev.Notice("controllers_lost", fields, warning=True))
            else:
                deadlines.append(lost_ms)
        return effects

    def _period_ms(self, controller: str, pace_ms: int) -> int:
        if self.leader is None:
            return self._timings.heartbeat_ms
        return pace_ms if controller == self.leader else self._timings.follower_heartbeat_ms


class ControllerRegistration:
    """`done`: whether the controllers have this process registered. `due` of each class here adds
    to `deadlines` when it must be called again."""

    def __init__(self, controllers: int, next_request_id: Callable[[], str]) -> None:
        self.done = False
        self.refusal = ""
        """Why the leader last refused the registration; empty once it is done."""
        self._suspect = ""
        self._suspect_recorded = ""
        self._suspect_sent = ""
        self._suspect_of_request: str | None = None
        self._controllers = controllers
        self._next_request_id = next_request_id
        self._begun = False
        self._in_flight = False
        self._since_ms = 0
        self._due_ms = 0
        self._attempts = 0
        self._request_id = ""

    def begin(self, due_ms: int) -> None:
        """Registers (again), not before `due_ms`."""
        self.done = False
        self._begun = True
        self._new_request()
        self._attempts = 0
        self._since_ms = self._due_ms = due_ms

    def repeat(self, now_ms: int) -> None:
        """Registers again, with a new request id."""
        if self.done:
            self.begin(now_ms)

    def retry_now(self, now_ms: int) -> None:
        """A leader is known: tries now."""
        self._due_ms = min(self._due_ms, now_ms)

    def succeeded(self, now_ms: int) -> None:
        self._in_flight = False
        self.done, self.refusal = True, ""
        self._suspect_recorded = self._suspect_sent
        self._register_suspicion(now_ms)

    def suspicion(self, suspect: str, now_ms: int) -> None:
        """Sets why the log is suspect (R17); a change is registered, too."""
        self._suspect = suspect
        self._register_suspicion(now_ms)

    @property
    def known_suspicion(self) -> str:
        """Why the log is suspect, once the controllers know it; empty if it is not."""
        return self._suspect if self.done and self._suspect_recorded == self._suspect else ""

    def _new_request(self) -> None:
        # With a new id: for the old one controllers would repeat their refusal.
        self._request_id = self._next_request_id()
        self._suspect_of_request = None

    def _register_suspicion(self, now_ms: int) -> None:
        if self.done and self._suspect_recorded != self._suspect:
            self.begin(now_ms)

    def refused(self, why: str, now_ms: int) -> None:
        """The leader refused: tries again later, since the reason may end."""
        self.refusal = why
        self._in_flight = False
        self._new_request()
        self._due_ms = now_ms + REFUSED_RETRY_MS

    def not_answered(self, now_ms: int) -> None:
        """Tries the next controller at once; pauses after each round over all."""
        self._in_flight = False
        self._attempts += 1
        # Another one may lead, and one attempt at each is cheap.
        if self._attempts % self._controllers:
            self._due_ms = now_ms
        else:
            waited_ms = now_ms - self._since_ms
            pause_ms = min(waited_ms // WAITED_PER_PAUSE, RETRY_MOST_MS)
            self._due_ms = now_ms + max(RETRY_FIRST_MS, pause_ms)

    def due(
        self, now_ms: int, deadlines: list[int], target: str, broker_id: int
    ) -> list[ev.SendRegister]:
        if not self._begun or self.done or self._in_flight:
            return []
        if now_ms < self._due_ms:
            deadlines.append(self._due_ms)
            return []
        self._in_flight = True
        if self._suspect_of_request is None:
            # R17: the same in each copy, or it would be unknown which one the controllers recorded.
            self._suspect_of_request = self._suspect
        self._suspect_sent = self._suspect_of_request
        return [ev.SendRegister(target, broker_id, self._request_id, self._suspect_sent)]


class Elections:
    """Requests an election while this broker has no master."""

    def __init__(self) -> None:
        self._in_flight = False
        self._due_ms = 0

    def wanted(self, due_ms: int) -> None:
        """The current view has no master: requests an election, not before `due_ms`."""
        self._due_ms = due_ms

    def retry_now(self, now_ms: int) -> None:
        """A leader is known: waits only for the election that it may begin itself."""
        self._due_ms = min(self._due_ms, now_ms + ELECT_GRACE_MS)

    def refused(self, now_ms: int, *, not_leader: bool) -> None:
        """Refused; a view in the answer may have ended the need."""
        self._in_flight = False
        self._due_ms = now_ms + (NOT_LEADER_RETRY_MS if not_leader else REFUSED_RETRY_MS)

    def unanswered(self, now_ms: int) -> None:
        self._in_flight = False
        self._due_ms = now_ms + UNANSWERED_RETRY_MS

    def due(self, now_ms: int, deadlines: list[int]) -> bool:
        """Whether to send now. Call it only while there is no master."""
        if self._in_flight:
            return False
        if now_ms < self._due_ms:
            deadlines.append(self._due_ms)
            return False
        self._in_flight = True
        return True


class MissedViews:
    """Fetches a newer view that is known to exist, if its push does not come."""

    def __init__(self) -> None:
        self._in_flight = False
        self._due_ms = 0
        self._wanted: Key = (0, 0)

    def want(self, key: Key, now_ms: int) -> None:
        """A view with `key` exists."""
        self._wanted = max(self._wanted, key)
        self._due_ms = now_ms

    def ended(self) -> None:
        """The fetch was answered, or failed."""
        self._in_flight = False

    def due(
        self,
        now_ms: int,
        deadlines: list[int],
        known: Key,
        ahead: tuple[str, int] | None,
        target: str,
        leader: str | None,
    ) -> list[ev.FetchView]:
        """`ahead`: a controller that has a newer view than `known`, and since when."""
        if self._in_flight:
            return []
        due_ms = self._due_ms
        # A view that surely exists is fetched at once, one that is on its way only if it is late.
        if self._wanted <= known:
            if ahead is None:
                return []
            controller, since_ms = ahead
            # Ask the leader, which has the newest view; the controller that is ahead pushes its
            # own.
            target = leader or controller
            due_ms = max(due_ms, since_ms + FETCH_AFTER_MS)
        if now_ms < due_ms:
            deadlines.append(due_ms)
            return []
        self._in_flight = True
        self._due_ms = now_ms + 2 * FETCH_AFTER_MS
        return [ev.FetchView(target)]
