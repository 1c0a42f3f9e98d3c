"""How much a loop does in one turn, counted and not timed: lines of Python, and calls to the disk.

What runs in C (an encoder, a sort, a copy) counts as the line that calls it. Lines of tests do not
count.
"""

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from batonmq.runtime import disk

_TESTS = str(Path(__file__).parents[1])


def _line_counter() -> tuple[Callable[..., None], Callable[[], int]]:
    """What is called for each line, and how many it has counted. A variable of a closure costs half
    as much as an attribute, and these tests do little else."""
    lines = 0

    def line(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal lines
        if event == "line":
            lines += 1

    return line, lambda: lines


class Turns:
    """The most that one callback of a loop, or one call of `run`, did."""

    def __init__(self) -> None:
        self.lines = self.disk_calls = self.count = 0
        self._is_over = False
        self._disk_calls = self._begun = 0
        self._thread = threading.get_ident()
        self._counts: dict[CodeType, bool] = {}
        self._line, self._lines = _line_counter()

    def run(self, callback: Callable[..., object], *args: object) -> None:
        """One turn more."""
        self._disk_calls, self._begun = 0, self._lines()
        self.count += 1
        before, collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # what an earlier test left behind is no work of this turn
        sys.settrace(self._trace)
        try:
            callback(*args)
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()
            self._end_turn()

    def _end_turn(self) -> None:
        if not self._is_over:
            self.lines = max(self.lines, self._lines() - self._begun)
            self.disk_calls = max(self.disk_calls, self._disk_calls)

    def stop(self) -> None:
        """What comes now does not count, in this turn neither."""
        self._end_turn()
        self._is_over = True
        sys.settrace(None)

    def _trace(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        """A call begins: what counts its lines."""
        code = frame.f_code
        counts = self._counts.get(code)
        if counts is None:
            counts = self._counts[code] = not code.co_filename.startswith(_TESTS)
        return self._line if counts else None

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **more: Any) -> Any:
            # What a thread does meanwhile is no work of this turn.
            self._disk_calls += threading.get_ident() == self._thread
            return call(*args, **more)

        return counting


@contextmanager
def uncounted() -> Iterator[None]:
    """What is called within it does not count; it may not await. Counting takes most of the time of
    these tests."""
    trace = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)


@contextmanager
def counted_turns() -> Iterator[Turns]:
    """Every callback of every asyncio loop counts from here on, in this thread."""
    turns, run = Turns(), asyncio.Handle._run
    before = disk.replace_calls({name: turns.counted(getattr(disk, name)) for name in disk.CALLS})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", lambda handle: turns.run(run, handle))
        try:
            yield turns
            assert turns.count, "no turn of an asyncio loop: those of uvloop cannot be counted"
        finally:
            turns.stop()
            disk.replace_calls(before)
