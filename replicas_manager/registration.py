"""When and where to ask for registration; pure.

Invariant: attempts whose outcome is unknown repeat the request id, so that a lost answer is found
again; after a refusal the next attempt is another request, because controllers remember the answer
of each id. What is said of the log (R17) is part of the request: it is the same in each attempt, or
else nobody would know which of two words the controllers have recorded.
"""

from __future__ import annotations

from collections.abc import Callable

from replicas_manager.events import SendRegister

RETRY_FIRST_MS = 50
RETRY_MOST_MS = 500
REFUSED_RETRY_MS = 1000


class Registration:
    """`done` is False until the controllers know this process, and again while they forgot it."""

    def __init__(self, controllers: int, next_request_id: Callable[[], str]) -> None:
        self.done = False
        self._suspect = ""
        self._suspect_told = ""
        self._suspect_flying = ""
        self._suspect_of_request: str | None = None
        self._controllers = controllers
        self._next_request_id = next_request_id
        self._begun = False
        self._flying = False
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
        self._flying = False
        self.done = True
        self._suspect_told = self._suspect_flying
        self._tell_suspicion(now_ms)

    def suspicion(self, suspect: str, now_ms: int) -> None:
        """What is known of the log now (R17): the controllers are to know it, too."""
        self._suspect = suspect
        self._tell_suspicion(now_ms)

    def _new_request(self) -> None:
        self._request_id = self._next_request_id()
        self._suspect_of_request = None

    def _tell_suspicion(self, now_ms: int) -> None:
        if self.done and self._suspect_told != self._suspect:
            self.begin(now_ms)

    def refused(self, now_ms: int) -> None:
        """By the leader: its reason may pass, but not at once."""
        self._flying = False
        self._new_request()
        self._due_ms = now_ms + REFUSED_RETRY_MS

    def not_answered(self, now_ms: int) -> None:
        """Ask the next controller at once; after a round over all of them wait a little."""
        self._flying = False
        self._attempts += 1
        rounds, rest = divmod(self._attempts, self._controllers)
        wait_ms = 0 if rest else min(RETRY_FIRST_MS << min(rounds - 1, 8), RETRY_MOST_MS)
        self._due_ms = now_ms + wait_ms

    def due(
        self, now_ms: int, deadlines: list[int], target: str, broker_id: int
    ) -> list[SendRegister]:
        if not self._begun or self.done or self._flying:
            return []
        if now_ms < self._due_ms:
            deadlines.append(self._due_ms)
            return []
        self._flying = True
        if self._suspect_of_request is None:
            self._suspect_of_request = self._suspect
        self._suspect_flying = self._suspect_of_request
        return [SendRegister(target, broker_id, self._request_id, self._suspect_flying)]
