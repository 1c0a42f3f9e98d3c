"""What the requests of one endpoint may cost: time in a turn of the loop, and memory (SAFETY R58).

A peer is a stranger until it has shown what it is, so neither the number of its requests nor the
size that a frame announces is believed. What does not fit into a turn waits for one of the next;
what does not fit into memory is not read until there is room.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Final, Protocol

from batonmq.runtime.clock import boot_s

log = logging.getLogger(__name__)

SLICE_S: Final = 0.002
"""For the frames of one connection, before others have their turn."""
TURN_S: Final = 0.005
"""For all connections of an endpoint. Heartbeats, acks and leases wait no longer than that."""
WOKEN_AT_ONCE: Final = 2
"""Handlers that waited and continue in one turn: what they will take is not known yet."""

MEMORY_MAX: Final = 256 * 1024 * 1024
PEER_MEMORY_MAX: Final = 128 * 1024 * 1024
"""Of one host, so that one host cannot take the room of all."""
STALE_S: Final = 10.0
"""If others wait for memory, a frame that has not come whole by then costs its connection."""
_CHECK_S: Final = 0.05


class TurnBudget:
    """Counts the time that requests take in this turn; what is over it waits in order of arrival.
    The time of a simulation stands still in a turn, so nothing waits there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.spent_s = 0.0
        self._is_counting = False
        self._waiting: deque[Callable[[], object] | asyncio.Future[None]] = deque()
        self._is_scheduled = False

    @property
    def is_spent(self) -> bool:
        return self.spent_s >= TURN_S

    def spend(self, seconds: float) -> None:
        self.spent_s += seconds
        # What earlier turns took counts as well, up to a fifth: cheap turns need no callback.
        if self.spent_s > TURN_S / 5 and not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._turn_ended)

    def _turn_ended(self) -> None:
        self._is_counting = False
        self.spent_s = 0.0

    def later(self, step: Callable[[], object]) -> None:
        """Calls `step` in one of the next turns."""
        self._wait(step)

    async def turn(self) -> None:
        """Waits for one of the next turns."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._wait(waiter)
        await waiter

    def _wait(self, waiter: Callable[[], object] | asyncio.Future[None]) -> None:
        self._waiting.append(waiter)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Half a turn for those that wait: the other half is for who comes new."""
        until_s, woken = boot_s() + TURN_S / 2, 0
        for _ in range(len(self._waiting)):
            waiter = self._waiting.popleft()
            if not isinstance(waiter, asyncio.Future):
                waiter()
            elif not waiter.done():
                waiter.set_result(None)
                woken += 1
            if woken == WOKEN_AT_ONCE or boot_s() >= until_s:
                break
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            self._loop.call_soon(self._next)


class Paced:
    """A handler's coroutine, each of whose steps counts, and waits for a turn if this one is spent.

    Use: `await Paced(budget, work)`, which gives what `work` returns, or raises what it raises.
    """

    def __init__(self, budget: TurnBudget, work: Coroutine[Any, Any, Any]) -> None:
        self._budget = budget
        self._work = work

    def __await__(self) -> Generator[Any, Any, Any]:
        budget, work = self._budget, self._work
        step: Callable[[], Any] = partial(work.send, None)
        while True:
            try:
                if budget.is_spent:
                    yield from budget.turn().__await__()
            except BaseException as error:  # a cancellation belongs to the work
                step = partial(work.throw, error)
            begin_s = boot_s()
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value
            finally:
                budget.spend(boot_s() - begin_s)
            try:
                yield waits_for
                step = partial(work.send, None)
            except BaseException as error:
                step = partial(work.throw, error)


class Holder(Protocol):
    """A connection that holds bytes of a frame that has not come whole."""

    @property
    def peer_host(self) -> str: ...
    def room_came(self) -> None: ...
    def abort(self, reason: str) -> None: ...


class MemoryBudget:
    """Bytes that connections of an endpoint hold for what is not complete.

    Over the budget, only the frame that began first goes on, so all come whole, one after the
    other. If it is stuck, its connection ends.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        bytes_max: int = MEMORY_MAX,
        peer_bytes_max: int = PEER_MEMORY_MAX,
    ) -> None:
        self.held_bytes = 0
        self._loop = loop
        self._bytes_max = bytes_max
        self._peer_bytes_max = peer_bytes_max
        # (bytes, since when), the one that began first comes first.
        self._holders: dict[Holder, tuple[int, float]] = {}
        self._by_host: Counter[str] = Counter()
        self._waiting: dict[Holder, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, holder: Holder, size: int) -> bool:
        """`holder` holds `size` bytes from now on. False: it may not read before `room_came`."""
        before, since_s = self._holders.get(holder, (0, boot_s()))
        if size < before:  # a frame came whole: what is held is of another one
            del self._holders[holder]
            since_s = boot_s()
        if size:
            self._holders[holder] = size, since_s
        self.held_bytes += size - before
        self._by_host[holder.peer_host] += size - before
        if not self._by_host[holder.peer_host]:
            del self._by_host[holder.peer_host]
        if not size or self._may_read(holder):
            self._waiting.pop(holder, None)
            return True
        self._waiting[holder] = None
        if self._timer is None:
            self._timer = self._loop.call_later(_CHECK_S, self._check)
        return False

    def _may_read(self, holder: Holder) -> bool:
        host = holder.peer_host
        if self.held_bytes > self._bytes_max:
            return holder is next(iter(self._holders))
        if self._by_host[host] > self._peer_bytes_max:
            return holder is next(each for each in self._holders if each.peer_host == host)
        return True

    def _check(self) -> None:
        self._timer = None
        stale_s = boot_s() - STALE_S
        for holder, (size, since_s) in list(self._holders.items()):
            if since_s > stale_s:
                break
            # Only who takes room that somebody waits for.
            if any(self._competes(holder, other) for other in self._waiting):
                holder.abort(
                    f"a frame of which {size} bytes came in {STALE_S:.0f} s: memory is short"
                )
                break
        for holder in list(self._waiting):
            if self._may_read(holder):
                del self._waiting[holder]
                holder.room_came()
        if self._waiting and self._timer is None:
            self._timer = self._loop.call_later(_CHECK_S, self._check)

    def _competes(self, holder: Holder, other: Holder) -> bool:
        return self.held_bytes > self._bytes_max or holder.peer_host == other.peer_host
