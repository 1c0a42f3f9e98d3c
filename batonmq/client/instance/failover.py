"""When a request goes to another master: after which replies, after how long a silence, after which
pause. Pure.

A hung process keeps its sockets open, so only its silence shows that it hangs. Each request under
way has a time from which its silence is suspicious; from then on, and again every `recheck_ms`, its
address is due for a check at the name servers, once for all requests to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from batonmq.protocol.codes import ResponseCode

FIRST_PAUSE_MS = 5
LAST_PAUSE_MS = 100
GROWTH = 1.5


NOT_SERVING = frozenset(
    {ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.GO_AWAY}
)
"""Replies of a broker that cannot serve a request now: its group's master, perhaps another, can.

A slave answers sends and pulls with SYSTEM_BUSY, a deposed or leaseless master with
SERVICE_NOT_AVAILABLE.
"""


def pause_ms(failures: int) -> int:
    """How long to wait before the next try after `failures` (>= 1) failed ones in a row."""
    return min(round(FIRST_PAUSE_MS * GROWTH ** min(failures - 1, 16)), LAST_PAUSE_MS)


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
        """What to check now: one silence per address."""
        found: dict[str, Silence] = {}
        for request in self._requests.values():
            if request.suspect_at_ms <= now_ms:
                request.suspect_at_ms = now_ms + request.recheck_ms
                found.setdefault(request.silence.address, request.silence)
        return list(found.values())

    def next_ms(self) -> int | None:
        """When something is due next, None while nothing is under way."""
        return min((r.suspect_at_ms for r in self._requests.values()), default=None)
