"""When to send RegisterBroker, ElectMaster and GetReplicaInfo, and to which controller. Pure.

Invariant: an attempt whose outcome is unknown repeats the request id, so that a lost answer is
found again; after a refusal the next attempt is another request, because controllers remember the
answer of each id. What a registration says of the log (R17) is part of the request: it is the same
in each attempt, else nobody could say which of two statements the controllers recorded.

Each kind has one request in flight. The controllers elect by themselves when a master dies (R10);
a broker requests an election only if it has no master though all those triggers have passed.
"""

from __future__ import annotations

from collections.abc import Callable

from batonmq.process.backoff import pause_ms
from batonmq.replicas_manager.events import FetchView, SendRegister
from batonmq.replicas_manager.role import Key

RETRY_FIRST_MS = 50
RETRY_MOST_MS = 500
REFUSED_RETRY_MS = 1000
NOT_LEADER_RETRY_MS = 50
UNANSWERED_RETRY_MS = 100
ELECT_GRACE_MS = 300
"""For a view that names an earlier incarnation of this broker: the controllers elect by
themselves (R3)."""
FETCH_AFTER_MS = 100
"""An answer named a newer view: its push may be this much later."""


class Registration:
    """`done` is False until the controllers have registered this process, and again after they
    lost it. `due` of each class adds to `deadlines` when it has to be called again."""

    def __init__(self, controllers: int, next_request_id: Callable[[], str]) -> None:
        self.done = False
        self._suspect = ""
        self._suspect_recorded = ""
        self._suspect_sent = ""
        self._suspect_of_request: str | None = None
        self._controllers = controllers
        self._next_request_id = next_request_id
        self._begun = False
        self._in_flight = False
        self._due_ms = 0
        self._attempts = 0
        self._request_id = ""

    def begin(self, due_ms: int) -> None:
        """Register (again), not before `due_ms`."""
        self.done = False
        self._begun = True
        self._new_request()
        self._attempts = 0
        self._due_ms = due_ms

    def hasten(self, now_ms: int) -> None:
        """A leader is known: wait no longer."""
        self._due_ms = min(self._due_ms, now_ms)

    def succeeded(self, now_ms: int) -> None:
        self._in_flight = False
        self.done = True
        self._suspect_recorded = self._suspect_sent
        self._register_suspicion(now_ms)

    def suspicion(self, suspect: str, now_ms: int) -> None:
        """The state of the log (R17): a change is registered, too."""
        self._suspect = suspect
        self._register_suspicion(now_ms)

    def _new_request(self) -> None:
        self._request_id = self._next_request_id()
        self._suspect_of_request = None

    def _register_suspicion(self, now_ms: int) -> None:
        if self.done and self._suspect_recorded != self._suspect:
            self.begin(now_ms)

    def refused(self, now_ms: int) -> None:
        """By the leader: the reason may end, but not at once."""
        self._in_flight = False
        self._new_request()
        self._due_ms = now_ms + REFUSED_RETRY_MS

    def not_answered(self, now_ms: int) -> None:
        """Try the next controller at once; after a round over all of them wait a little."""
        self._in_flight = False
        self._attempts += 1
        rounds, rest = divmod(self._attempts, self._controllers)
        wait_ms = 0 if rest else pause_ms(RETRY_FIRST_MS, RETRY_MOST_MS, rounds)
        self._due_ms = now_ms + wait_ms

    def due(
        self, now_ms: int, deadlines: list[int], target: str, broker_id: int
    ) -> list[SendRegister]:
        if not self._begun or self.done or self._in_flight:
            return []
        if now_ms < self._due_ms:
            deadlines.append(self._due_ms)
            return []
        self._in_flight = True
        if self._suspect_of_request is None:
            self._suspect_of_request = self._suspect
        self._suspect_sent = self._suspect_of_request
        return [SendRegister(target, broker_id, self._request_id, self._suspect_sent)]


class Elections:
    """The request for an election, while this broker has no master."""

    def __init__(self) -> None:
        self._in_flight = False
        self._due_ms = 0

    def wanted(self, due_ms: int) -> None:
        """The view in force gives no master: request one, not before `due_ms`."""
        self._due_ms = due_ms

    def hasten(self, now_ms: int) -> None:
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
    ) -> list[FetchView]:
        """`ahead`: a controller with a newer view than `known`, and since when."""
        if self._in_flight:
            return []
        due_ms = self._due_ms
        if self._wanted <= known:
            if ahead is None:
                return []
            controller, since_ms = ahead
            target = leader or controller
            due_ms = max(due_ms, since_ms + FETCH_AFTER_MS)
        if now_ms < due_ms:
            deadlines.append(due_ms)
            return []
        self._in_flight = True
        self._due_ms = now_ms + 2 * FETCH_AFTER_MS
        return [FetchView(target)]
