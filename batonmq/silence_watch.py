"""Requests that a master has not answered for longer than is normal. Pure.

A hung process keeps its sockets open, so nothing but its silence tells. Each request under way has
a time from which its silence is suspicious; from then on, and again every `recheck_ms`, its address
is due to be looked into, once for all requests to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Silence:
    topic: str
    broker_name: str
    address: str


@dataclass(slots=True)
class _Request:
    silence: Silence
    suspect_at_ms: int
    recheck_ms: int


class SilenceWatch:
    def __init__(self) -> None:
        self._requests: dict[int, _Request] = {}
        self._serial = 0

    def begin(self, silence: Silence, now_ms: int, patience_ms: int, recheck_ms: int) -> int:
        """A request was sent; the number is for `end`."""
        self._serial += 1
        self._requests[self._serial] = _Request(silence, now_ms + patience_ms, recheck_ms)
        return self._serial

    def end(self, serial: int) -> None:
        """It was answered, or failed."""
        del self._requests[serial]

    def due(self, now_ms: int) -> Sequence[Silence]:
        """What to look into now: one silence per address."""
        found: dict[str, Silence] = {}
        for request in self._requests.values():
            if request.suspect_at_ms <= now_ms:
                request.suspect_at_ms = now_ms + request.recheck_ms
                found.setdefault(request.silence.address, request.silence)
        return list(found.values())

    def next_ms(self) -> int | None:
        """When something is due next, None while nothing is under way."""
        return min((r.suspect_at_ms for r in self._requests.values()), default=None)
