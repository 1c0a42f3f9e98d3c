"""Sends that are kept for a moment instead of being refused, in their order.

Two moments: a planned switch drains this master (R33), and a replica that was just elected has not
opened yet, while clients that were sent here arrive already. Nothing that is held is in the log.
Releasing handles each as if it came now: by then the gate takes it or refuses it.

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
HELD_MOST_S = 0.8
"""Longer than a switch may hold (R33); a backstop for roles that do not come."""


class SendHold:
    """`active` is all that the hot path looks at."""

    def __init__(self) -> None:
        self.active = False
        self._held: deque[tuple[Handler, Connection, int, bytes, bytes]] = deque()
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    def begin(self) -> None:
        """From now on sends are kept. Again: for the full time from now."""
        if self._timer is not None:
            self._timer.cancel()
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
        return True

    def release(self) -> None:
        """Handles all that is held, in its order and in this turn."""
        self.active = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, deque()
        self._bytes = 0
        for handler, connection, kind, header, body in held:
            if not connection.closed:
                connection.handle_again(handler, kind, header, body)
