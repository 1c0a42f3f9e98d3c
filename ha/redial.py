"""When a slave dials its master again, and what it says while it cannot follow. Pure.

An end without a reason of ours: soon, doubling to a second. A reason that will not go away by
itself (another history, a damaged record, a full disk): said once, tried every second, doubling to
a minute, for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class RedialPolicy:
    """Times in ms: the first pause and the longest one."""

    retry_ms: int
    retry_ms_max: int
    diverged_retry_ms: int
    diverged_retry_ms_max: int


class Redial:
    """`at_ms` is when the next dial is due, while there is no connection."""

    def __init__(self, policy: RedialPolicy, now_ms: int) -> None:
        self.at_ms = now_ms
        self._policy = policy
        self._retry_ms = policy.retry_ms
        self._diverged_ms = policy.diverged_retry_ms
        self._said = ""
        self._stuck_offset = -1
        self._stuck_ms = policy.diverged_retry_ms

    def progress(self) -> None:
        """The master's frames come, or another master is named: pauses begin small again."""
        self._retry_ms = self._policy.retry_ms
        self._diverged_ms = self._policy.diverged_retry_ms

    def at(self, now_ms: int) -> None:
        """At that time, whatever the pauses are."""
        self.at_ms = now_ms

    def never(self) -> None:
        """The slave side ends."""
        self.at_ms = _NEVER

    def later(self, now_ms: int) -> None:
        """After a connection that ended, or was not made."""
        self.at_ms = now_ms + self._retry_ms
        self._retry_ms = min(self._retry_ms * 2, self._policy.retry_ms_max)

    def diverged(self, reason: str, now_ms: int) -> bool:
        """It cannot follow for `reason`. Whether that has to be said."""
        self.at_ms = now_ms + self._diverged_ms
        self._diverged_ms = min(self._diverged_ms * 2, self._policy.diverged_retry_ms_max)
        is_new = reason != self._said
        self._said = reason
        return is_new

    def stuck(self, offset: int, reason: str, now_ms: int) -> bool:
        """As `diverged`, but what each connection brings before `offset` is no progress."""
        if offset != self._stuck_offset:
            self._stuck_offset = offset
            self._stuck_ms = self._policy.diverged_retry_ms
            self._said = ""
        self._diverged_ms = self._stuck_ms
        is_new = self.diverged(reason, now_ms)
        self._stuck_ms = self._diverged_ms
        return is_new


__all__ = ["Redial", "RedialPolicy"]
