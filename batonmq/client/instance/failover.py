"""When a request is sent to another master: after which replies, silences and pauses. Pure.

A hung process keeps its sockets open, so only its silence shows that it hangs. Each pending request
has a time from which its silence is suspicious. From then on, every `recheck_ms`, the name servers
are asked about its address, once for all requests to it. Requests that a broker holds on purpose
(long polls) become due one by one: in each period of `HELD_GAP_MS` one check of an address counts
for all of them, and if no other request waits there, it asks only one name server. The cost of a
check grows with the due requests, not with the pending ones.
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
"""Replies of a broker that is not master, or cannot act as one now: retry at the group's master. A
slave answers sends and pulls with SYSTEM_BUSY (2), a deposed or leaseless master with
SERVICE_NOT_AVAILABLE (14).
"""


def pause_ms(failures: int) -> int:
    """The pause before the next try after `failures` (>= 1) in a row."""
    # The power has a limit: a float overflows after some 1,700 failures, 3 minutes of pauses.
    return min(round(FIRST_PAUSE_MS * GROWTH ** min(failures - 1, 16)), LAST_PAUSE_MS)


@dataclass(frozen=True, slots=True)
class Silence:
    """`is_held`: the broker holds the request on purpose."""

    topic: str
    broker_name: str
    address: str
    is_held: bool = False


class SilenceWatch:
    def __init__(self) -> None:
        self._requests: dict[int, tuple[Silence, int]] = {}
        """Number -> the request, and after how many ms it is checked again."""
        self._times: list[tuple[int, int]] = []
        """A heap of (suspect_at_ms, number); entries of ended requests are skipped."""
        self._held_checks: dict[str, int] = {}
        """Address -> the period of `HELD_GAP_MS` in which it was last checked."""
        self._serial = 0

    def begin(self, silence: Silence, now_ms: int, patience_ms: int, recheck_ms: int) -> int:
        """A request was sent; pass the returned number to `end`."""
        # A number, since equal requests may wait at once, and a heap needs an order.
        self._serial += 1
        self._requests[self._serial] = (silence, recheck_ms)
        heappush(self._times, (now_ms + patience_ms, self._serial))
        return self._serial

    def end(self, serial: int) -> None:
        """The request was answered, or failed."""
        # Its time stays in the heap, where removing it would cost a search.
        del self._requests[serial]

    def due(self, now_ms: int) -> Sequence[Silence]:
        """The silences to check now: one per address, preferably not of a held request. Handles at
        most `AT_ONCE` requests; if more are due, `next_ms` stays at or below `now_ms`."""
        found: dict[str, Silence] = {}
        again: list[tuple[int, int]] = []
        for _ in range(AT_ONCE):
            next_ms = self.next_ms()
            if next_ms is None or next_ms > now_ms:
                break
            serial = heappop(self._times)[1]
            silence, recheck_ms = self._requests[serial]
            address = silence.address
            # Pushed after the loop, so that one call sees each request once.
            again.append((now_ms + recheck_ms, serial))
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
        """When the next check is due; None without pending requests."""
        while self._times and self._times[0][1] not in self._requests:
            heappop(self._times)
        return self._times[0][0] if self._times else None
