"""The end of a loop turn: one write to the log, one notice to replication, for all sends of it.

On these machines waking up costs more than Python does, so when many sends are in flight the turn
is lengthened once by a fraction of a millisecond and the loop polls again before anything is
written (DESIGN section 7; reference figures: 42 + 28 µs a send without, 23 + 11 with). A few sends
are never delayed. `time.sleep` and not a timer: uvloop rounds timers to whole milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class SendTurn:
    """Calls `finish` once at the end of each turn in which something was put.

    `in_flight()` counts the sends that wait for their ack, those of this turn included.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        finish: Callable[[], None],
        in_flight: Callable[[], int],
        *,
        wait_us: int,
        threshold: int,
    ) -> None:
        self._loop = loop
        self._finish = finish
        self._in_flight = in_flight
        self._wait_s = wait_us / 1_000_000
        self._threshold = threshold if wait_us else 1 << 62
        self._scheduled = False
        self._waited = False

    def touched(self) -> None:
        """Something was put into the turn buffer."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._end)

    def _end(self) -> None:
        if not self._waited and self._in_flight() >= self._threshold:
            self._waited = True
            time.sleep(self._wait_s)
            self._loop.call_soon(self._end)
            return
        self._scheduled = self._waited = False
        self._finish()
