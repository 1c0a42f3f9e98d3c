"""Sends that are kept for a moment instead of being refused, in their order.

Two cases: a planned switch drains this master (R33), and a replica that was just elected has not
opened yet, while its first clients arrive. Nothing that is held is in the log. After the release
each is handled as if it came then: by then the gate takes it or refuses it. The release is spread
over turns of the loop, since thousands at once would delay heartbeats longer than R34 allows; a
send that comes meanwhile is queued behind them.

Bounded in number, bytes and time. A send for which there is no room is refused at once (14); when
the time is over, all are released.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from batonmq.remoting.connection import Connection

Handler = Callable[[Connection, int, bytes, bytes], None]

HELD_MAX = 20_000
HELD_BYTES_MAX = 64 << 20
SLICE = 500
"""How many more are handled in a turn than came in the turn before; about 10 ms."""
HELD_MOST_S = 0.8
"""Longer than a switch may hold (R33): the limit if no role change comes."""


class SendHold:
    """The hot path checks `active` only: True from `begin` until all is handled."""

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
        """Keep sends from now on. A second call starts the time limit anew."""
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
