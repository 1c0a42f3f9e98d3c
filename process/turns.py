"""Long work, a slice in a turn of the loop.

Nothing that grows with the number of queues, topics, groups or connections runs whole in one turn:
heartbeats and acks of everyone wait behind it. What one call into C does for a whole table counts
as one step. Whoever needs the pause of a timer between two slices has it in `store/background`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

AT_ONCE: Final = 256
"""Steps in a turn, of about 10 µs each."""


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


async def in_slices(step: Callable[[], bool]) -> None:
    """Calls `step`, once a turn, until it says that there is no more."""
    while step():  # noqa: ASYNC110  it does a slice of the work
        await asyncio.sleep(0)


def go_on(step: Callable[[], bool]) -> None:
    """The same without a task: a slice now, the others in the next turns of the running loop."""
    if step():
        asyncio.get_running_loop().call_soon(go_on, step)
