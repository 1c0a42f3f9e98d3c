"""A master that stood still asks before it acknowledges again.

Stopped for longer than its lease and woken, it finds the acks of its slaves in its sockets: every
member has those bytes, so releasing them would break no promise (R1). But by then another replica
may lead, and clients must not hear from two masters. So after a stall acks wait until the lease is
renewed, or a role change fails them (R4), or `most_ms` are over: then no controller can be reached
and a healthy group goes on without (R36). Pure; origin: R8.
"""

from __future__ import annotations

from collections.abc import Callable


class AckPause:
    """All times in ms of the one clock that `lease_valid` is judged by."""

    def __init__(
        self, lease_valid: Callable[[int], bool], *, stall_ms: int = 400, most_ms: int = 1_000
    ) -> None:
        self._lease_valid = lease_valid
        self._stall_ms = stall_ms
        self._most_ms = most_ms
        self._seen_ms: int | None = None
        self._until_ms = 0

    def holds(self, now_ms: int) -> bool:
        """Whether acks wait. To be asked in every turn that could release one, and by the tick."""
        if self._seen_ms is not None and now_ms - self._seen_ms >= self._stall_ms:
            self._until_ms = now_ms + self._most_ms
        self._seen_ms = now_ms
        if now_ms >= self._until_ms:
            return False
        if self._lease_valid(now_ms):
            self._until_ms = 0
            return False
        return True
