"""Runs long work in slices, one per turn of the loop, because heartbeats and acks wait for each
turn. Nothing that grows with the number of queues, topics, groups or connections may run in one
turn; one C call over a whole table counts as one step. `store/background` has slices with
pauses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping
from itertools import islice
from typing import Any, Final, TypeVar, cast

T = TypeVar("T")

AT_ONCE: Final = 256  # steps per turn, of about 10 µs each
GATHERED_AT_ONCE: Final = 64
KEYS_AT_ONCE: Final = 1_024
COPIES_MAX: Final = 5


class Pace:
    """Counts the steps of one piece of work, which may have several loops."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = self._left = at_once

    async def step(self, count: int = 1) -> None:
        """Counts `count` steps; after every `at_once` the loop gets a turn."""
        self._left -= count
        if self._left <= 0:
            self._left = self._at_once
            await asyncio.sleep(0)

    async def through(self, items: Iterable[T]) -> AsyncIterator[T]:
        for item in items:
            yield item
            await self.step()


def in_turns(items: Iterable[T], at_once: int = AT_ONCE) -> AsyncIterator[T]:
    """Yields the items, with a turn for the loop after every `at_once`."""
    return Pace(at_once).through(items)


async def copy_of_keys(table: Mapping[T, object], removals: Callable[[], int]) -> list[T]:
    """The keys of a dict that may change meanwhile, as they are in one moment. `removals()` grows
    when keys are taken out. Copying 20,000 keys in one turn would take 2 ms of it."""
    for _ in range(COPIES_MAX):
        before, left, keys = removals(), iter(table), list[T]()
        try:
            while some := list(islice(left, KEYS_AT_ONCE)):
                keys += some
                await asyncio.sleep(0)
        except RuntimeError:  # Python's error if a dict has another size than before: begin again
            continue
        # If as many keys came as were taken out there is no error, and others may be passed over.
        if removals() == before:
            return keys
    return list(table)  # keys come and go all the time


async def gather_some(
    works: Iterable[Coroutine[Any, Any, T]], at_once: int = GATHERED_AT_ONCE
) -> list[T]:
    """Awaits all, `at_once` at a time; returns the results in order. Raises the first error."""
    left = iter(works)
    results: list[T] = []
    while some := list(islice(left, at_once)):
        results += await asyncio.gather(*some)
    return results


async def gather_apart(lots: Iterable[Iterable[Coroutine[Any, Any, T]]]) -> list[T]:
    """Runs several lots concurrently, each as in `gather_some`, so that a slow lot delays no other.
    Returns all results, lot by lot. Raises the first error, which ends all."""
    tasks = [asyncio.ensure_future(gather_some(lot)) for lot in lots]
    try:
        return [result for lot in await asyncio.gather(*tasks) for result in lot]
    finally:
        for task in tasks:
            task.cancel()


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, which ends also if the caller is cancelled meanwhile; then the caller is
    cancelled after it. For work that must not stop half-way."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # marks an error as retrieved: the caller gets its cancellation
        raise


async def result_of(work: Generator[object, None, T]) -> T:
    """Runs the generator `work`, a step per turn; returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return cast(T, end.value)
        await asyncio.sleep(0)


async def is_set_within(event: asyncio.Event, limit_s: float) -> bool:
    """Waits for the event, at most so long; returns whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()


async def in_slices(step: Callable[[], bool]) -> None:
    """Calls `step` once a turn until it returns False."""
    while step():  # noqa: ASYNC110  each call does a slice
        await asyncio.sleep(0)


def for_each(items: Iterable[T], act: Callable[[T], object], at_once: int = AT_ONCE) -> None:
    """Calls `act` with each item: `at_once` now, and as many in each of the next turns."""
    left = iter(items)

    def some() -> bool:
        count = 0
        for item in islice(left, at_once):
            act(item)
            count += 1
        return count == at_once

    run_in_turns(some)


def run_in_turns(step: Callable[[], bool]) -> None:
    """Calls `step` now and once in each next turn, until it returns False. Needs no task."""
    if step():
        asyncio.get_running_loop().call_soon(run_in_turns, step)
