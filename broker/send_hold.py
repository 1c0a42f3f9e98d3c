"""Sends that are kept for a moment instead of being refused, in their order.

Two moments: a planned switch drains this master (R33), and a replica that was just elected has not
opened yet, while clients that were sent here arrive already. Nothing that is held is in the log.
Releasing handles each as if it came now: by then the gate takes it or refuses it. That is spread
over turns of the loop, for thousands at once would keep heartbeats waiting for longer than R34
allows; who comes meanwhile stands behind those that wait.

Bounded in number, bytes and time; what goes beyond is handled at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from remoting.connection import Connection

Handler = Callable[[Connection, int, bytes, bytes], None]

HELD_MAX = 20_000
HELD_BYTES_MAX = 64 << 20
SLICE = 500
"""So many more are handled in a turn than came in the turn before: some 10 ms."""
HELD_MOST_S = 0.8
"""Longer than a switch may hold (R33); a backstop for roles that do not come."""


class SendHold:
    """`active` is all that the hot path looks at: on from `begin` until all is handled again."""

    def __init__(self) -> None:
        self.active = False
        self._held: deque[tuple[Handler, Connection, int, bytes, bytes]] = deque()
        self._bytes = 0
        self._came = 0
        self._timer: asyncio.TimerHandle | None = None
        self._next_slice: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._held)

    def begin(self) -> None:
        """From now on sends are kept. Again: for the full time from now."""
        self._stop_waiting()
        self.active = True
        self._timer = asyncio.get_running_loop().call_later(HELD_MOST_S, self.release)

    def take(
        self, handler: Handler, connection: Connection, kind: int, header: bytes, body: bytes
    ) -> bool:
        """Keeps the frame. False if there is no room: the caller refuses it."""
        if len(self._held) >= HELD_MAX or self._bytes + len(body) > HELD_BYTES_MAX:
            return False
        self._held.append((handler, connection, kind, header, body))
        self._bytes += len(body)
        self._came += 1
        return True

    def release(self) -> None:
        """Handles what is held, in its order: the first of it now, the rest in the next turns."""
        self._stop_waiting()
        self._came = 0
        self._release_slice()

    def _release_slice(self) -> None:
        self._next_slice = None
        count = min(len(self._held), SLICE + self._came)
        self._came = 0
        self.active = False  # handled, not held again
        try:
            for _ in range(count):
                handler, connection, kind, header, body = self._held.popleft()
                self._bytes -= len(body)
                if not connection.closed:
                    connection.handle_again(handler, kind, header, body)
        finally:
            if self._held:
                self.active = True
                loop = asyncio.get_running_loop()
                self._next_slice = loop.call_soon(self._release_slice)

    def _stop_waiting(self) -> None:
        for waiting in (self._timer, self._next_slice):
            if waiting is not None:
                waiting.cancel()
        self._timer = self._next_slice = None
