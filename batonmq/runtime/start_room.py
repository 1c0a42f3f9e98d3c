"""A start on a full disk waits for room, and ends nothing (SAFETY R45)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from batonmq.runtime import disk

log = logging.getLogger(__name__)

T = TypeVar("T")

ROOM_POLL_S: Final = 1.0


class StartRoom:
    """`missing`: what finds no room now, in words; empty if nothing. `where`: a path on the disk,
    for errors that name none."""

    def __init__(self, where: Path) -> None:
        self.missing = ""
        self._where = where

    def note(self, error: OSError) -> bool:
        """Whether something failed for want of room; the caller does it again then."""
        if not disk.is_short(error):
            return False
        missing = f"{error.filename or self._where}: {error.strerror}"
        if missing != self.missing:
            self.missing = missing
            log.error("start_waits_for_room why=%r", missing)
        return True

    async def wait(self, step: Callable[[], Awaitable[T]]) -> T:
        """What `step` returns; while the disk is full it is done again, from its beginning. Raises
        what it raises for other reasons."""
        while True:
            try:
                result = await step()
            except OSError as error:
                if not self.note(error):
                    raise
            else:
                self.missing = ""
                return result
            await asyncio.sleep(ROOM_POLL_S)


class InOrder(Generic[T]):
    """Does one thing after the other with `do`; what finds no room is tried again, and all behind
    it waits. `failed` gets other errors of a disk: what was behind is dropped."""

    def __init__(
        self, do: Callable[[T], None], room: StartRoom, failed: Callable[[OSError], None]
    ) -> None:
        self._do, self._room, self._failed = do, room, failed
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
                if self._room.note(error):
                    self._waiting = [*things[number:]]
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(ROOM_POLL_S, self._again)
                else:
                    self._failed(error)
                return

    def _again(self) -> None:
        things, self._waiting = self._waiting, []
        self.add(things)
        if not self._waiting:
            self._room.missing = ""

    def close(self) -> None:
        """Nothing is tried again."""
        if self._timer is not None:
            self._timer.cancel()
