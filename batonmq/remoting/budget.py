"""Limits what the peers of an endpoint cost: time per loop turn, memory, connections (R58). Neither
the number of a stranger's requests nor the announced size of a frame is trusted: requests beyond a
turn's time wait for a later turn, and without memory nothing more is read."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, ClassVar, Final, Protocol
from weakref import WeakSet, WeakValueDictionary

from batonmq.runtime.clock import boot_s
from batonmq.runtime.eviction import Crowd
from batonmq.runtime.sockets import descriptors_allowed

log = logging.getLogger(__name__)

SLICE_S: Final = 0.002  # for the frames of one connection, before others have their turn
TURN_S: Final = 0.005
"""For all connections of an endpoint, since heartbeats, acks and leases wait for so long."""
WOKEN_AT_ONCE: Final = 2
"""Waiting handlers that continue in one turn; how long they will take is unknown."""

LARGE_MAX: Final = 8
"""Handlers of large answers that run for one host: each may hold tens of megabytes."""

MEMORY_MAX: Final = 256 * 1024 * 1024
UNREAD_MAX: Final = 2 * MEMORY_MAX  # of answers that peers do not read
PEER_MEMORY_MAX: Final = 128 * 1024 * 1024  # of one host, so that it cannot take everything
CONNECTIONS_MAX: Final = 16_384  # of one endpoint
_SHARE: Final = 5 / 8
"""The share of the descriptors; gRPC may take a quarter, the rest is for files and other ports."""
_PASSED_OVER_MAX: Final = 16
_SHORT_S: Final = 60.0  # how long there are fewer places after descriptors ran short
STALE_S: Final = 10.0  # while others wait for memory, a frame must be complete within this time
_CHECK_S: Final = 0.05


class TurnBudget:
    """Counts the time of requests in this turn; beyond the limit they wait in order of arrival. (In
    the simulation time does not advance within a turn, so nothing waits there.)"""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.spent_s = 0.0
        self._is_counting = False
        self._waiting: deque[Callable[[], object] | asyncio.Future[None]] = deque()
        self._is_scheduled = False
        self._large: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def large_of(self, host: str) -> asyncio.Semaphore:
        """The places of a host's handlers of large answers."""
        places = self._large.get(host)
        if places is None:
            places = self._large[host] = asyncio.Semaphore(LARGE_MAX)
        return places

    def spend(self, seconds: float) -> None:
        self.spent_s += seconds
        # Up to a fifth of the limit is not reset, so that cheap turns need no callback.
        if self.spent_s > TURN_S / 5 and not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._turn_ended)

    def _turn_ended(self) -> None:
        self._is_counting = False
        self.spent_s = 0.0

    def in_time(self, step: Callable[[], object]) -> None:
        """Calls `step` now, or in one of the next turns if the time of this one is spent."""
        if self.spent_s >= TURN_S:
            self._wait(step)
            return
        begin_s = boot_s()
        try:
            step()
        finally:
            self.spend(boot_s() - begin_s)

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
        """Runs waiting steps for half of the turn; the other half is for new requests."""
        until_s, woken = boot_s() + TURN_S / 2, 0
        try:
            for _ in range(len(self._waiting)):
                waiter = self._waiting.popleft()
                if not isinstance(waiter, asyncio.Future):
                    waiter()
                elif not waiter.done():
                    waiter.set_result(None)
                    woken += 1
                # A woken handler runs only after this loop, so its time is unknown: wake few.
                if woken == WOKEN_AT_ONCE or boot_s() >= until_s:
                    break
        finally:
            # Also if a step raised: without a next turn all connections of the endpoint would wait.
            self._is_scheduled = bool(self._waiting)
            if self._is_scheduled:
                self._loop.call_soon(self._next)


class Paced:
    """Runs a handler's coroutine; its steps are counted and wait for a turn. `await Paced(budget,
    work)` returns the result of `work`.

    `large_for`: it makes a large answer for this host, and begins in one of LARGE_MAX places (R58).
    If its caller has gone by then (`is_wanted`), it does not begin, and the result is None."""

    def __init__(
        self,
        budget: TurnBudget,
        work: Coroutine[Any, Any, Any],
        large_for: str | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._budget = budget
        self._work = work
        self._places = budget.large_of(large_for) if large_for is not None else None
        self._is_wanted = is_wanted

    def close(self) -> None:
        """Closes work that is no longer awaited."""
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        places = self._places
        if places is None:
            return (yield from self._steps())
        try:
            yield from places.acquire().__await__()
        except BaseException:
            self.close()
            raise
        try:
            if self._is_wanted():
                return (yield from self._steps())
            self.close()
            return None
        finally:
            places.release()

    def _steps(self) -> Generator[Any, Any, Any]:
        budget, work = self._budget, self._work
        step: Callable[[], Any] = partial(work.send, None)
        while True:
            try:
                if budget.spent_s >= TURN_S:
                    yield from budget.turn().__await__()
            except BaseException as error:  # a cancellation is passed to the work
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


class Accepted(Protocol):
    """An accepted connection; `descriptor`: -1 if it has none."""

    @property
    def peer(self) -> str: ...
    @property
    def descriptor(self) -> int: ...
    @property
    def last_active_ms(self) -> int: ...
    def close(self, reason: str) -> None: ...


class Places:
    """The connections of a server. If there are too many, or descriptors run short, each new one
    replaces that of a stranger; of a member only if there are no strangers. `Crowd` chooses which
    one; a peer that sent something since the last look is skipped. A new descriptor is the lowest
    free one, so a high number shows that few are left. Then the server of this process with the
    most strangers has fewer places for a while.
    """

    _of_process: ClassVar[WeakSet[Places]] = WeakSet()

    def __init__(self, connections_max: int = CONNECTIONS_MAX) -> None:
        self._connections_max = self._places = connections_max
        self._fewer_since_s = 0.0
        self._strangers: Crowd[Accepted] = Crowd()
        self._looked_at_ms: dict[Accepted, int] = {}
        """Stranger -> its last activity when it was last looked at."""
        self._members: Crowd[Accepted] = Crowd()
        self._of_process.add(self)

    def __len__(self) -> int:
        return len(self._strangers) + len(self._members)

    def take(self, connection: Accepted) -> None:
        """Gives a connection a place. If there is none, ends another one, or this one."""
        if connection.descriptor >= int(descriptors_allowed() * _SHARE):
            # Descriptors are shared by the process: perhaps another of its servers has taken them.
            fullest = max(self._of_process, key=lambda places: len(places._strangers))
            if not fullest._strangers:
                self._end(connection)
                return
            fullest._fewer_since_s = boot_s()
            fullest._places = min(fullest._places, len(fullest)) - 1
            fullest._free_places(fullest._places)
        elif boot_s() - self._fewer_since_s > _SHORT_S:
            self._places = self._connections_max
        self._free_places(self._places - 1)
        # No stranger is left. Members lose their place only at the full limit.
        if len(self) >= self._connections_max and (loser := self._members.take_one()) is not None:
            self._end(loser)
        self._strangers.add(connection, connection.peer)
        self._looked_at_ms[connection] = connection.last_active_ms

    def _free_places(self, stay: int) -> None:
        while len(self) > stay and (loser := self._stranger_to_go()) is not None:
            self._end(loser)

    def _stranger_to_go(self) -> Accepted | None:
        loser = None
        for _ in range(_PASSED_OVER_MAX):
            loser = self._strangers.take_one()
            if loser is None or loser.last_active_ms <= self._looked_at_ms[loser]:
                break
            # It has sent something since: it may be about to become a member.
            self._looked_at_ms[loser] = loser.last_active_ms
            self._strangers.add(loser, loser.peer)
        else:
            loser = self._strangers.take_one()
        return loser

    def _end(self, loser: Accepted) -> None:
        self._looked_at_ms.pop(loser, None)
        loser.close("too many connections")
        log.warning("connections_crowded_out open=%d ended=%s", len(self), loser.peer)

    def keep(self, connection: Accepted) -> None:
        """The peer is a member now: a client of a group, or a broker."""
        if connection in self._strangers:
            self._strangers.remove(connection)
            self._looked_at_ms.pop(connection, None)
            self._members.add(connection, connection.peer)

    def leave(self, connection: Accepted) -> None:
        self._looked_at_ms.pop(connection, None)
        self._strangers.remove(connection)
        self._members.remove(connection)


class Holder(Protocol):
    """A connection with an incomplete frame, unread answers or running handlers."""

    @property
    def peer_host(self) -> str: ...
    def memory_came(self) -> None: ...
    def abort(self, reason: str) -> None: ...


class UnreadAnswers(Crowd[Holder]):
    """The bytes of answers that wait in the transports of an endpoint, since peers do not read."""

    def note(self, holder: Holder, size: int) -> bool:
        """`size` bytes wait for `holder`; returns whether it must go unless it reads."""
        self.hold(holder, holder.peer_host + ":", size)
        # In the second after which it is seen that peers read nothing, thousands of them can ask
        # for more than there is memory.
        if self.taken > UNREAD_MAX and (loser := self.take_one()) is not None:
            loser.abort("too many answers wait, and its host has the most of them")
        return self.taken > MEMORY_MAX


class MemoryBudget:
    """The memory of an endpoint's connections for incomplete frames and unread answers. Beyond the
    budget only the oldest frame is read on, so frames complete one after the other. If it does not
    progress, its connection ends. Requests whose handlers run have a budget of the same size: they
    need no more bytes, so beyond it all wait until some handlers end."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        bytes_max: int = MEMORY_MAX,
        peer_bytes_max: int = PEER_MEMORY_MAX,
    ) -> None:
        self.held_bytes = self.running_bytes = 0
        self._loop = loop
        self._bytes_max = bytes_max
        self._peer_bytes_max = peer_bytes_max
        # (bytes, since when), oldest first.
        self._holders: dict[Holder, tuple[int, float]] = {}
        self._bytes_of_host: Counter[str] = Counter()
        self._of_host: dict[str, dict[Holder, None]] = {}  # oldest first
        self._running_of_host: Counter[str] = Counter()
        self._waiting: dict[Holder, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def run(self, host: str, size: int) -> bool:
        """Handlers keep `size` more bytes of requests of `host`, also after their connection ended:
        a stranger may connect again. Returns False if it is too much."""
        self.running_bytes += size
        self._running_of_host[host] += size
        if not self._running_of_host[host]:
            del self._running_of_host[host]
        return self._may_run(host)

    def _may_run(self, host: str) -> bool:
        return (
            self.running_bytes <= self._bytes_max
            and self._running_of_host[host] <= self._peer_bytes_max
        )

    def hold(self, holder: Holder, size: int, *, is_running: bool = False) -> bool:
        """`holder` now holds `size` bytes of a frame and of answers; `is_running`: it has running
        handlers. Returns False if it must not read before `memory_came`."""
        if not (size or is_running or holder in self._holders or holder in self._waiting):
            return True  # as most that end: thousands may in one turn
        host = holder.peer_host
        before, since_s = self._holders.get(holder, (0, boot_s()))
        of_host = self._of_host.setdefault(host, {})
        if size < before:  # its frame was complete: these bytes are of another one
            del self._holders[holder], of_host[holder]
            since_s = boot_s()
        if size:
            self._holders[holder] = size, since_s
            of_host[holder] = None
        self.held_bytes += size - before
        self._bytes_of_host[host] += size - before
        if not of_host:
            del self._of_host[host], self._bytes_of_host[host]
        if not (size or is_running) or self._may_read(holder):
            self._waiting.pop(holder, None)
            return True
        self._waiting[holder] = None
        if self._timer is None:
            self._timer = self._loop.call_later(_CHECK_S, self._check)
        return False

    def _may_read(self, holder: Holder) -> bool:
        return self._may_run(holder.peer_host) and self.has_place(holder)

    def has_place(self, holder: Holder) -> bool:
        """Whether its incomplete frame may grow, or its answers wait."""
        if holder not in self._holders:
            return True
        if self.held_bytes > self._bytes_max:
            # The oldest frame always continues: if all waited, no memory would be freed.
            return holder is next(iter(self._holders))
        host = holder.peer_host
        if self._bytes_of_host[host] > self._peer_bytes_max:
            return holder is next(iter(self._of_host[host]))
        return True

    def _check(self) -> None:
        self._timer = None
        stale_s = boot_s() - STALE_S
        is_full = self.held_bytes > self._bytes_max and bool(self._waiting)
        waiting_hosts = {waiting.peer_host for waiting in self._waiting}
        for holder, (size, since_s) in self._holders.items():
            if since_s > stale_s:
                break
            # Only if others wait for its memory, and it does not wait itself.
            if holder not in self._waiting and (is_full or holder.peer_host in waiting_hosts):
                holder.abort(f"memory is short, and its {size} bytes wait for {STALE_S:.0f} s")
                break
        for holder in list(self._waiting):
            if self._may_read(holder):
                del self._waiting[holder]
                holder.memory_came()
        if self._waiting and self._timer is None:
            self._timer = self._loop.call_later(_CHECK_S, self._check)
