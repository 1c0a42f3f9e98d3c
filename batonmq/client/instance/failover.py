"""When a request goes to another master: after which replies, after how long a silence, after which
pause. Pure.

A hung process keeps its sockets open, so only its silence shows that it hangs. Each request under
way has a time from which its silence is suspicious; from then on, and again every `recheck_ms`, its
address is due for a check at the name servers, once for all requests to it. Requests that a broker
holds on purpose come due one by one: in each `HELD_GAP_MS` of the clock one check of an address
counts for all of them, and while no other request waits there it is a look at one name server. What
a check costs grows with the requests that are due, not with those under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from batonmq.protocol.codes import ResponseCode
from batonmq.runtime.turns import AT_ONCE

FIRST_PAUSE_MS = 5
LAST_PAUSE_MS = 100
GROWTH = 1.5
HELD_GAP_MS = 250


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
    """`is_held`: the broker holds the request on purpose."""

    topic: str
    broker_name: str
    address: str
    is_held: bool = False


@dataclass(slots=True)
class _Request:
    silence: Silence
    recheck_ms: int


class SilenceWatch:
    def __init__(self) -> None:
        self._requests: dict[int, _Request] = {}
        self._times: list[tuple[int, int]] = []
        """A heap of (suspect_at_ms, number); those that ended are left out when they come up."""
        self._held_checks: dict[str, int] = {}
        """By address: the `HELD_GAP_MS` of the clock in which it was checked last."""
        self._serial = 0

    def begin(self, silence: Silence, now_ms: int, patience_ms: int, recheck_ms: int) -> int:
        """A request was sent; the number is for `end`."""
        self._serial += 1
        self._requests[self._serial] = _Request(silence, recheck_ms)
        heappush(self._times, (now_ms + patience_ms, self._serial))
        return self._serial

    def end(self, serial: int) -> None:
        """It was answered, or failed."""
        del self._requests[serial]

    def due(self, now_ms: int) -> Sequence[Silence]:
        """What to check now, one silence per address, of no held request if there is another, of
        `AT_ONCE` requests at most: while more are due, `next_ms` is not above `now_ms`."""
        found: dict[str, Silence] = {}
        again: list[tuple[int, int]] = []
        for _ in range(AT_ONCE):
            next_ms = self.next_ms()
            if next_ms is None or next_ms > now_ms:
                break
            serial = heappop(self._times)[1]
            request = self._requests[serial]
            silence = request.silence
            address = silence.address
            again.append((now_ms + request.recheck_ms, serial))
            if not silence.is_held:
                found[address] = silence
                continue
            gap = now_ms // HELD_GAP_MS
            if self._held_checks.get(address) != gap:
                self._held_checks[address] = gap
                found.setdefault(address, silence)
        for entry in again:
            heappush(self._times, entry)
        return list(found.values())

    def next_ms(self) -> int | None:
        """When something is due next, None while nothing is under way."""
        while self._times and self._times[0][1] not in self._requests:
            heappop(self._times)
        return self._times[0][0] if self._times else None
