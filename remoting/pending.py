"""Requests that wait for their responses, with one timer per connection.

The timer is set to the earliest deadline, and checks all requests when it fires. After a stall of
the process it fires again a millisecond later: first the sockets are read, because the responses
may be in them (R8).
"""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from batonmq.remoting.command import RemotingCommand

_STALL_S: Final = 0.1


class _Waiting(NamedTuple):
    future: asyncio.Future[RemotingCommand]
    deadline: float
    timeout_ms: int
    code: int


class PendingRequests:
    """`expired(timeout_ms, code)` makes the exception of a request that timed out."""

    __slots__ = ("_deadline", "_expired", "_loop", "_timer", "_waiting")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, expired: Callable[[int, int], Exception]
    ) -> None:
        self._loop = loop
        self._expired = expired
        self._waiting: dict[int, _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, opaque: int, code: int, timeout_ms: int) -> asyncio.Future[RemotingCommand]:
        """The future response of the request with this opaque."""
        future: asyncio.Future[RemotingCommand] = self._loop.create_future()
        deadline = self._loop.time() + timeout_ms / 1000
        self._waiting[opaque] = _Waiting(future, deadline, timeout_ms, code)
        if self._timer is None or deadline < self._deadline:
            self._set_timer(deadline)
        return future

    def resolve(self, response: RemotingCommand) -> bool:
        """Ends the wait of its request. False if none waits (any more)."""
        waiting = self._waiting.pop(response.opaque, None)
        if waiting is None or waiting.future.done():
            return False
        waiting.future.set_result(response)
        return True

    def drop(self, opaque: int) -> None:
        """Removes a request that is not awaited any more."""
        self._waiting.pop(opaque, None)

    def fail_all(self, error: Exception) -> None:
        """Ends all waits with `error`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, {}
        for entry in waiting.values():
            if not entry.future.done():
                entry.future.set_exception(error)

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
        for opaque in [o for o, entry in self._waiting.items() if entry.deadline <= now + 0.0005]:
            entry = self._waiting.pop(opaque)
            if not entry.future.done():
                entry.future.set_exception(self._expired(entry.timeout_ms, entry.code))
        if self._waiting:
            self._set_timer(min(entry.deadline for entry in self._waiting.values()))
