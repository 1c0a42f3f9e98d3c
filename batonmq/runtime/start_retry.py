"""A start of a server: it waits for disk space on a full disk instead of failing (R45), and says
how long each step took.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from batonmq.runtime import disk

log = logging.getLogger(__name__)

T = TypeVar("T")

SPACE_POLL_S: Final = 1.0


class StartRetry:
    """`missing`: what found no disk space, as a text; "" if nothing did. `where`: for errors
    without a path."""

    def __init__(self, where: Path) -> None:
        self.missing = ""
        self._where = where

    def note(self, error: OSError) -> bool:
        """Notes an error; returns whether it was a lack of disk space, so that the step must be
        repeated."""
        if not disk.is_short(error):
            return False
        missing = disk.described(disk.named(error, self._where))
        if missing != self.missing:
            self.missing = missing
            log.error("start_waits_for_disk_space reason=%r", missing)
        return True

    async def wait(self, step: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of `step`, which is repeated while the disk is full. Raises its other
        errors."""
        while True:
            try:
                result = await step()
            except OSError as error:
                if not self.note(error):
                    raise
            else:
                self.missing = ""
                return result
            await asyncio.sleep(SPACE_POLL_S)


class InOrder(Generic[T]):
    """Carries out items with `do`, in order. Without disk space an item is repeated, and later ones
    wait. Any other disk error is passed to `failed`, and later items are dropped."""

    def __init__(
        self, do: Callable[[T], None], space: StartRetry, failed: Callable[[OSError], None]
    ) -> None:
        self._do, self._space, self._failed = do, space, failed
        self._waiting: list[T] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, things: Sequence[T]) -> None:
        if self._waiting:
            self._waiting += things
            return
        for number, thing in enumerate(things):
            try:
                self._do(thing)
            except OSError as error:
                if self._space.note(error):
                    self._waiting = [*things[number:]]
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(SPACE_POLL_S, self._again)
                else:
                    self._failed(error)
                return

    def _again(self) -> None:
        things, self._waiting = self._waiting, []
        self.add(things)
        if not self._waiting:
            self._space.missing = ""

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Laps:
    """Call `begin` once, then `end` with the name of each step."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._since_ms = clock_ms()
        self._took: list[str] = []

    def begin(self) -> None:
        self._since_ms = self._clock_ms()

    def end(self, step: str) -> str:
        """Ends this step: all steps so far, as STEP_ms=N."""
        now_ms = self._clock_ms()
        self._took.append(f"{step}_ms={now_ms - self._since_ms}")
        self._since_ms = now_ms
        return " ".join(self._took)
