"""When a broker without a known master asks for an election; pure.

One request at a time. The controllers elect by themselves when a master dies (R10): this is the
second way, for a broker that sees no master though all triggers have passed.
"""

from __future__ import annotations

ELECT_GRACE_MS = 300
"""A view that names an earlier life of this broker: the controller elects by itself (R3)."""
_REFUSED_RETRY_MS = 1000
_NOT_LEADER_RETRY_MS = 50
_UNANSWERED_RETRY_MS = 100


class Elections:
    def __init__(self) -> None:
        self._flying = False
        self._due_ms = 0

    def wanted(self, due_ms: int) -> None:
        """The view in force gives no master: ask, not before `due_ms`."""
        self._due_ms = due_ms

    def hasten(self, now_ms: int) -> None:
        """A leader is known: it gets its grace, no more."""
        self._due_ms = min(self._due_ms, now_ms + ELECT_GRACE_MS)

    def refused(self, now_ms: int, *, not_leader: bool) -> None:
        """Answered; a view that settles it may have come along."""
        self._flying = False
        self._due_ms = now_ms + (_NOT_LEADER_RETRY_MS if not_leader else _REFUSED_RETRY_MS)

    def unanswered(self, now_ms: int) -> None:
        self._flying = False
        self._due_ms = now_ms + _UNANSWERED_RETRY_MS

    def due(self, now_ms: int, deadlines: list[int]) -> bool:
        """Whether to ask now; the caller knows that no master is in force."""
        if self._flying:
            return False
        if now_ms < self._due_ms:
            deadlines.append(self._due_ms)
            return False
        self._flying = True
        return True
