"""Long work, a slice in a turn of the loop.

Nothing that grows with the number of queues, topics, groups or connections runs whole in one turn:
heartbeats and acks of everyone wait behind it. What one call into C does for a whole table counts
as one step. Whoever needs the pause of a timer between two slices has it in `store/background`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable
from itertools import islice
from typing import Any, Final, TypeVar, cast

T = TypeVar("T")

AT_ONCE: Final = 256
"""Steps in a turn, of about 10 µs each."""
GATHERED_AT_ONCE: Final = 64


class Pace:
    """Counts the steps of one piece of work, however many loops it has."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = self._left = at_once

    async def step(self, count: int = 1) -> None:
        """`count` steps are done: every `at_once` of them the loop gets a turn."""
        self._left -= count
        if self._left <= 0:
            self._left = self._at_once
            await asyncio.sleep(0)

    async def through(self, items: Iterable[T]) -> AsyncIterator[T]:
        """The items, each a step."""
        for item in items:
            yield item
            await self.step()


def in_turns(items: Iterable[T], at_once: int = AT_ONCE) -> AsyncIterator[T]:
    """The items, with a turn for the loop behind every `at_once`."""
    return Pace(at_once).through(items)


async def gather_some(
    works: Iterable[Coroutine[Any, Any, T]], at_once: int = GATHERED_AT_ONCE
) -> list[T]:
    """The results, in order; `at_once` of them run at the same time. Raises the first error."""
    left = iter(works)
    results: list[T] = []
    while some := list(islice(left, at_once)):
        results += await asyncio.gather(*some)
    return results


async def gather_apart(lots: Iterable[Iterable[Coroutine[Any, Any, T]]]) -> list[T]:
    """The results, lot by lot. The lots run side by side, each as in `gather_some`, so that one
    which waits holds up no other. Raises the first error, which ends them all."""
    tasks = [asyncio.ensure_future(gather_some(lot)) for lot in lots]
    try:
        return [result for lot in await asyncio.gather(*tasks) for result in lot]
    finally:
        for task in tasks:
            task.cancel()


async def result_of(work: Generator[object, None, T]) -> T:
    """What `work` returns, a step of it in a turn."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return cast(T, end.value)
        await asyncio.sleep(0)


async def in_slices(step: Callable[[], bool]) -> None:
    """Calls `step`, once a turn, until it says that there is no more."""
    while step():  # noqa: ASYNC110  it does a slice of the work
        await asyncio.sleep(0)


def for_each(items: Iterable[T], act: Callable[[T], object], at_once: int = AT_ONCE) -> None:
    """Calls `act` with each item: `at_once` now, as many in each of the next turns of the running
    loop."""
    left = iter(items)

    def some() -> bool:
        count = 0
        for item in islice(left, at_once):
            act(item)
            count += 1
        return count == at_once

    go_on(some)


def go_on(step: Callable[[], bool]) -> None:
    """The same without a task: a slice now, the others in the next turns of the running loop."""
    if step():
        asyncio.get_running_loop().call_soon(go_on, step)
