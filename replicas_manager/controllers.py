"""The controllers as one broker sees them: sessions, the leader, targets, heartbeats.

Pure. Invariants: the leader is a controller whose session is open and whose last answer claimed
the lead under the highest controller epoch seen; while no leader is known, every session is
heartbeaten at the full pace, so that a new leader is found within one heartbeat.
"""

from __future__ import annotations

from dataclasses import dataclass

from batonmq.replicas_manager.config import SessionTimings
from batonmq.replicas_manager.events import (
    AnswerReceived,
    CloseSession,
    Effect,
    Notice,
    SendHeartbeat,
)


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
    """What an answer means: `authoritative` if it came from the leader, `changed` if that
    controller was not known as leader before."""

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
        self, event: AnswerReceived, known_key: tuple[int, int], now_ms: int
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
        if self.leader is None and not event.leader and event.leader_grpc_address:
            self._hint = event.leader_grpc_address
        return AnswerMeaning(authoritative=False, changed=False)

    def hinted(self, target: str, leader: str, now_ms: int) -> None:
        """`target` does not lead, but `leader` does ("" if it has no hint)."""
        if self.leader == target:
            self._unlead(now_ms)
        if self.leader is None and leader != target:
            self._hint = leader

    def back(self) -> list[Effect]:
        """A leader was found: reported if its loss was."""
        if not self._loss_reported:
            return []
        self._loss_reported = False
        return [Notice("controllers_back", (("leader", self.leader or ""),))]

    def note_dead(self, controller: str, dead: frozenset[int]) -> None:
        session = self._sessions.get(controller)
        if session is not None:
            session.dead = dead

    def hasten(self, now_ms: int) -> None:
        """The next heartbeat to each is due now."""
        for session in self._sessions.values():
            session.heartbeat_due_ms = now_ms

    def _unlead(self, now_ms: int) -> None:
        self.leader = None
        self.hasten(now_ms)

    def target(self) -> str:
        """Where to send a request: the leader, else the hinted one, else each in turn."""
        if self.leader is not None:
            return self.leader
        return self._hint or self.addresses[self._turn % len(self.addresses)]

    def pass_over(self, target: str) -> None:
        """`target` did not answer as leader: the next request goes elsewhere."""
        if self._hint == target:
            self._hint = ""
        elif self.leader != target:
            self._turn += 1

    def dead_by_leader(self) -> frozenset[int] | None:
        """Who is dead as the leader judges, None while no controller leads."""
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
    ) -> list[Effect]:
        """Heartbeats, silent sessions, a lost leader. `key` goes out with the heartbeats.

        Only a `master` has a lease to renew: others take every second turn with the leader.
        """
        timings = self._timings
        pace_ms = timings.heartbeat_ms if master else 2 * timings.heartbeat_ms
        if self.leader is not None:
            silent_ms = self._sessions[self.leader].answered_ms + 3 * pace_ms
            if now_ms >= silent_ms:
                self._unlead(now_ms)
            else:
                deadlines.append(silent_ms)
        effects: list[Effect] = []
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
                effects.append(CloseSession(controller, reason))
                continue
            if horizon_ms >= session.heartbeat_due_ms:
                session.sequence += 1
                session.heartbeat_due_ms = now_ms + self._period_ms(controller, pace_ms)
                effects.append(SendHeartbeat(controller, session.sequence, now_ms, *key))
            deadlines += (silent_ms, session.heartbeat_due_ms)
        if report_loss and self.leader is None and not self._loss_reported:
            lost_ms = self._leader_answered_ms + timings.session_timeout_ms
            if now_ms >= lost_ms:
                self._loss_reported = True
                fields = (("silent_ms", now_ms - self._leader_answered_ms),)
                effects.append(Notice("controllers_lost", fields, warning=True))
            else:
                deadlines.append(lost_ms)
        return effects

    def _period_ms(self, controller: str, pace_ms: int) -> int:
        if self.leader is None:
            return self._timings.heartbeat_ms
        return pace_ms if controller == self.leader else self._timings.follower_heartbeat_ms
