"""Requests of one connection that wait for responses. One timer is set to the earliest deadline.
After a stall of the process the timer is set a millisecond later, so that sockets are read first:
the responses may have arrived (R8). Deadlines are in a heap; many that expire together are handled
in slices.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.turns import run_in_turns

_STALL_S: Final = 0.1
_AT_ONCE: Final = 256
_ANSWERED_MAX: Final = 1024
"""The heap may have this many entries of answered requests, or as many as there are waiting
requests."""


class _Waiting(NamedTuple):
    future: asyncio.Future[RemotingCommand]
    deadline: float
    timeout_ms: int
    code: int


class PendingRequests:
    """`expired(timeout_ms, code)` makes the exception of a request that timed out."""

    __slots__ = ("_deadline", "_deadlines", "_expired", "_loop", "_timer", "_waiting")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, expired: Callable[[int, int], Exception]
    ) -> None:
        self._loop = loop
        self._expired = expired
        self._waiting: dict[int, _Waiting] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, opaque: int, code: int, timeout_ms: int) -> asyncio.Future[RemotingCommand]:
        """The future response of the request with this opaque."""
        future: asyncio.Future[RemotingCommand] = self._loop.create_future()
        deadline = self._loop.time() + timeout_ms / 1000
        self._waiting[opaque] = _Waiting(future, deadline, timeout_ms, code)
        heappush(self._deadlines, (deadline, opaque))
        # Answered requests leave their deadline in the heap, since a search would cost more. Once
        # most entries are such, building the heap again is cheaper.
        if len(self._deadlines) > 2 * len(self._waiting) + _ANSWERED_MAX:
            self._deadlines = [(one.deadline, key) for key, one in self._waiting.items()]
            heapify(self._deadlines)
        if self._timer is None or deadline < self._deadline:
            self._set_timer(deadline)
        return future

    def resolve(self, response: RemotingCommand) -> bool:
        """Gives the response to the waiting request. Returns False if there is none."""
        waiting = self._waiting.pop(response.opaque, None)
        # Already done: its caller was cancelled, and the response came before `drop`.
        if waiting is None or waiting.future.done():
            return False
        waiting.future.set_result(response)
        return True

    def drop(self, opaque: int) -> None:
        """Removes a request whose caller has given up."""
        self._waiting.pop(opaque, None)

    def fail_all(self, error: Exception) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        waiting = deque(self._waiting.values())
        # At once, although callers are woken in slices: no response may arrive in between.
        self._waiting, self._deadlines = {}, []

        def fail_some() -> bool:
            for _ in range(min(_AT_ONCE, len(waiting))):
                entry = waiting.popleft()
                if not entry.future.done():
                    entry.future.set_exception(error)
            return bool(waiting)

        run_in_turns(fail_some)

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._deadline = deadline
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self._loop.time()
        if now - self._deadline > _STALL_S:
            self._set_timer(now + 0.001)
            return
        deadlines = self._deadlines
        for _ in range(_AT_ONCE):
            if not deadlines:
                break
            deadline, opaque = deadlines[0]
            entry = self._waiting.get(opaque)
            # Opaques are reused: this deadline may be of an earlier request with the same one.
            waits = entry is not None and entry.deadline == deadline
            # The loop's timer may fire a little early; half a millisecond more saves another wake-
            # up.
            if waits and deadline > now + 0.0005:
                break
            heappop(deadlines)
            if entry is not None and waits:
                del self._waiting[opaque]
                if not entry.future.done():
                    entry.future.set_exception(self._expired(entry.timeout_ms, entry.code))
        if self._waiting:
            self._set_timer(max(now, deadlines[0][0]))
