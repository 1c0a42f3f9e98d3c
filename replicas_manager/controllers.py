"""The controllers as one broker sees them: the leader, targets, heartbeats, requests. Pure.

The leader is a controller with an open session whose last answer claimed the lead under the highest
controller epoch seen. While none is known every session is heartbeaten at the full pace, so that a
new leader is found within one heartbeat (`Controllers`).

`ControllerRegistration`, `Elections` and `MissedViews` decide when to send RegisterBroker,
ElectMaster and GetReplicaInfo, and to which controller; each has one request in flight. If the
outcome is unknown the request id is repeated, so that a lost answer is found again. After a refusal
the next attempt is another request: controllers remember the answer of each id. The controllers
elect by themselves when a master dies (R10); a broker requests an election only if it still has no
master after that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.config import SessionTimings
from batonmq.replicas_manager.role import Key

RETRY_FIRST_MS = 50
RETRY_MOST_MS = 500
WAITED_PER_PAUSE = 8
"""A registration that waits for a leader pauses for an eighth of the time that it has waited: the
first leader of a cluster is found at once, and a long outage causes no flood of requests."""
REFUSED_RETRY_MS = 1000
NOT_LEADER_RETRY_MS = 50
UNANSWERED_RETRY_MS = 100
ELECT_GRACE_MS = 300
"""For a view that names an earlier incarnation of this broker: the controllers elect then (R3)."""
FETCH_AFTER_MS = 100
"""An answer named a newer view: its push may be this much later."""


@dataclass(slots=True)
class _Session:
    heartbeat_due_ms: int
    answered_ms: int
    sequence: int = 0
    closing: bool = False
    behind_since_ms: int | None = None
    dead: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class AnswerMeaning:
    """`authoritative`: it came from the leader. `changed`: which was not known as leader before."""

    authoritative: bool
    changed: bool


class Controllers:
    """`addresses`: gRPC addresses of all controllers, at least one."""

    def __init__(self, addresses: tuple[str, ...], timings: SessionTimings) -> None:
        assert addresses, "a ReplicasManager needs a controller"
        self.addresses = addresses
        self.leader: str | None = None
        self.controller_epoch = 0
        self._timings = timings
        self._sessions: dict[str, _Session] = {}
        self._leader_answered_ms = 0
        self._hint = ""
        self._turn = 0
        self._loss_reported = False

    def __contains__(self, controller: str) -> bool:
        return controller in self._sessions

    def check_invariants(self) -> None:
        assert self.leader is None or self.leader in self._sessions

    def leader_answered(self, now_ms: int) -> None:
        """A call was answered as only a leader does."""
        self._leader_answered_ms = now_ms

    def opened(self, controller: str, now_ms: int) -> None:
        self._sessions[controller] = _Session(heartbeat_due_ms=now_ms, answered_ms=now_ms)

    def closed(self, controller: str, now_ms: int) -> None:
        self._sessions.pop(controller, None)
        if self.leader == controller:
            self._unlead(now_ms)
        if not self._sessions:
            # Wiped controllers count their leaderships from the start again.
            self.controller_epoch = 0

    def answered(
        self, event: ev.AnswerReceived, known_key: tuple[int, int], now_ms: int
    ) -> AnswerMeaning:
        """An answer of an open session. `known_key` is the key of the view in force."""
        session = self._sessions[event.controller]
        session.answered_ms = now_ms
        if (event.master_epoch, event.sync_state_set_epoch) <= known_key:
            session.behind_since_ms = None
        elif session.behind_since_ms is None:
            session.behind_since_ms = now_ms
        if event.leader and event.controller_epoch >= self.controller_epoch:
            changed = self.leader != event.controller
            self.leader = event.controller
            self.controller_epoch = event.controller_epoch
            self._leader_answered_ms = now_ms
            if changed:
                self._hint = ""
                session.heartbeat_due_ms = now_ms
            return AnswerMeaning(authoritative=True, changed=changed)
        if self.leader == event.controller:
            self._unlead(now_ms)
        # A hint is second-hand: it never replaces a leader that answers us itself.
        if self.leader is None and not event.leader and event.leader_grpc_address:
            self._hint = event.leader_grpc_address
        return AnswerMeaning(authoritative=False, changed=False)

    def hinted(self, target: str, leader: str, now_ms: int) -> None:
        """`target` does not lead, but `leader` does ("" if it has no hint)."""
        if self.leader == target:
            self._unlead(now_ms)
        if self.leader is None and leader != target:
            self._hint = leader

    def back(self) -> list[ev.Effect]:
        """A leader was found: reported if its loss was."""
        if not self._loss_reported:
            return []
        self._loss_reported = False
        return [ev.Notice("controllers_back", (("leader", self.leader or ""),))]

    def note_dead(self, controller: str, dead: frozenset[int]) -> None:
        session = self._sessions.get(controller)
        if session is not None:
            session.dead = dead

    def retry_now(self, now_ms: int) -> None:
        """The next heartbeat to each is due now."""
        for session in self._sessions.values():
            session.heartbeat_due_ms = now_ms

    def _unlead(self, now_ms: int) -> None:
        self.leader = None
        self.retry_now(now_ms)

    def target(self) -> str:
        """Where to send a request: the leader, else the hinted one, else each in turn."""
        if self.leader is not None:
            return self.leader
        return self._hint or self.addresses[self._turn % len(self.addresses)]

    def pass_over(self, target: str) -> None:
        """`target` did not answer as leader: the next request goes elsewhere."""
        if self._hint == target:
            self._hint = ""
        # The leader is not passed over for one failed call: its own answers, or their absence,
        # decide.
        elif self.leader != target:
            self._turn += 1

    def dead_by_leader(self) -> frozenset[int] | None:
        """The brokers that the leader calls dead, None while no controller leads."""
        return None if self.leader is None else self._sessions[self.leader].dead

    def ahead(self) -> tuple[str, int] | None:
        """A controller with a newer view than ours, and since when."""
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
        """Heartbeats, silent sessions, a lost leader. `key` goes out with the heartbeats."""
        timings = self._timings
        # Only a master has a lease to renew.
        pace_ms = timings.heartbeat_ms if master else 2 * timings.heartbeat_ms
        if self.leader is not None:
            silent_ms = self._sessions[self.leader].answered_ms + 3 * pace_ms
            if now_ms >= silent_ms:
                self._unlead(now_ms)
            else:
                deadlines.append(silent_ms)
        effects: list[ev.Effect] = []
        # A message sent alone costs twice as much: what is nearly due is sent with it.
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
    """`done` is False until the controllers have registered this process, and again after they lost
    it. `due` of each class adds to `deadlines` when it must be called again."""

    def __init__(self, controllers: int, next_request_id: Callable[[], str]) -> None:
        self.done = False
        self.refusal = ""
        """Why the leader refused it last, empty once it is registered."""
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
        """Register (again), not before `due_ms`."""
        self.done = False
        self._begun = True
        self._new_request()
        self._attempts = 0
        self._since_ms = self._due_ms = due_ms

    def repeat(self, now_ms: int) -> None:
        """Register again, in a new request."""
        if self.done:
            self.begin(now_ms)

    def retry_now(self, now_ms: int) -> None:
        """A leader is known: wait no longer."""
        self._due_ms = min(self._due_ms, now_ms)

    def succeeded(self, now_ms: int) -> None:
        self._in_flight = False
        self.done, self.refusal = True, ""
        self._suspect_recorded = self._suspect_sent
        self._register_suspicion(now_ms)

    def suspicion(self, suspect: str, now_ms: int) -> None:
        """The state of the log (R17): a change is registered, too."""
        self._suspect = suspect
        self._register_suspicion(now_ms)

    @property
    def known_suspicion(self) -> str:
        """What is wrong with the log, once the controllers know it; empty if nothing is."""
        return self._suspect if self.done and self._suspect_recorded == self._suspect else ""

    def _new_request(self) -> None:
        # Controllers remember the answer of each id: under the old one they would repeat the
        # refusal.
        self._request_id = self._next_request_id()
        self._suspect_of_request = None

    def _register_suspicion(self, now_ms: int) -> None:
        if self.done and self._suspect_recorded != self._suspect:
            self.begin(now_ms)

    def refused(self, why: str, now_ms: int) -> None:
        """By the leader: the reason may end, but not at once."""
        self.refusal = why
        self._in_flight = False
        self._new_request()
        self._due_ms = now_ms + REFUSED_RETRY_MS

    def not_answered(self, now_ms: int) -> None:
        """Try the next controller at once; after a round over all of them wait a little."""
        self._in_flight = False
        self._attempts += 1
        # One of the others may lead, and one attempt at each is cheap.
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
            # R17: the same in each attempt, or it would be open which of two statements
            # the controllers recorded.
            self._suspect_of_request = self._suspect
        self._suspect_sent = self._suspect_of_request
        return [ev.SendRegister(target, broker_id, self._request_id, self._suspect_sent)]


class Elections:
    """The request for an election, while this broker has no master."""

    def __init__(self) -> None:
        self._in_flight = False
        self._due_ms = 0

    def wanted(self, due_ms: int) -> None:
        """The view in force gives no master: request one, not before `due_ms`."""
        self._due_ms = due_ms

    def retry_now(self, now_ms: int) -> None:
        """A leader is known: wait for its own election, no longer."""
        self._due_ms = min(self._due_ms, now_ms + ELECT_GRACE_MS)

    def refused(self, now_ms: int, *, not_leader: bool) -> None:
        """Answered; a view in the reply may have ended the need."""
        self._in_flight = False
        self._due_ms = now_ms + (NOT_LEADER_RETRY_MS if not_leader else REFUSED_RETRY_MS)

    def unanswered(self, now_ms: int) -> None:
        self._in_flight = False
        self._due_ms = now_ms + UNANSWERED_RETRY_MS

    def due(self, now_ms: int, deadlines: list[int]) -> bool:
        """Whether to send now; called only while no master is in force."""
        if self._in_flight:
            return False
        if now_ms < self._due_ms:
            deadlines.append(self._due_ms)
            return False
        self._in_flight = True
        return True


class MissedViews:
    """Fetches a newer view that is known to exist and whose push did not come."""

    def __init__(self) -> None:
        self._in_flight = False
        self._due_ms = 0
        self._wanted: Key = (0, 0)

    def want(self, key: Key, now_ms: int) -> None:
        """A view of `key` exists."""
        self._wanted = max(self._wanted, key)
        self._due_ms = now_ms

    def ended(self) -> None:
        """The fetch in flight was answered, or failed."""
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
        """`ahead`: a controller with a newer view than `known`, and since when."""
        if self._in_flight:
            return []
        due_ms = self._due_ms
        if self._wanted <= known:
            if ahead is None:
                return []
            controller, since_ms = ahead
            # The push is on its way from the one that is ahead; the leader's view is the newest.
            target = leader or controller
            due_ms = max(due_ms, since_ms + FETCH_AFTER_MS)
        if now_ms < due_ms:
            deadlines.append(due_ms)
            return []
        self._in_flight = True
        self._due_ms = now_ms + 2 * FETCH_AFTER_MS
        return [ev.FetchView(target)]
