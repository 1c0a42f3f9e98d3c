"""Threads of simulated processes: stacks of their own, which run when the loop says so.

`Threads` takes the place of the module `threading` in the code under test (and `Queues` of
`queue`): the code of a thread runs as it is, but it waits in virtual time. A thread belongs to the
process that started it and ends with it, by an exception that no `except Exception` catches.
Where the loop itself waits for a thread (`join`, a lock that is held), that thread runs on at once.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any

import greenlet

from lab.sim.loop import Crash, SimLoop, SimProcess, current_process

_current: Thread | None = None


def current_thread() -> Thread | None:
    """The simulated thread that runs; None in the loop."""
    return _current


class Thread:
    """As `threading.Thread`, as far as it is used."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str = "",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool = True,
    ) -> None:
        assert target is not None
        self.name = name
        self._call = (target, args, kwargs or {})
        self._stack: greenlet.greenlet | None = None
        self._error: BaseException | None = None
        self._started = self._done = self._ending = False
        self._turn = 0  # of the pause that it is in
        self._timer: Any = None  # that ends it
        self._woken = True
        self.forced = False
        self._process: SimProcess
        self._loop: SimLoop

    def start(self) -> None:
        self._process = process = current_process()
        self._loop = process.loop
        self._context = contextvars.copy_context()
        self._started = True
        process.threads.append(self)
        self._loop.call_soon(self._resume, self._turn)

    def is_alive(self) -> bool:
        return self._started and not self._done

    def join(self, timeout: float | None = None) -> None:
        while not self._done:
            if _current is not None:
                _current.pause(0.001)
            else:
                self.force()

    def end(self) -> None:
        """Its process was killed."""
        self._ending = True
        if self._stack is not None and not self._done and _current is not self:
            self._switch()

    def force(self) -> None:
        """The loop waits for this thread: whatever it waits for ends now."""
        self.forced = True
        self._switch()
        self.forced = False

    def _resume(self, turn: int) -> None:
        if turn == self._turn and not self._done:
            self._switch()

    def _switch(self) -> None:
        """Runs it until it waits again or has ended."""
        global _current
        before, _current = _current, self
        if self._stack is None:
            self._stack = greenlet.greenlet(self._main)
        self._stack.parent = greenlet.getcurrent()
        self._stack.switch()
        _current = before
        error, self._error = self._error, None
        if error is not None and not isinstance(error, Crash):
            raise error

    def _main(self) -> None:
        target, args, kwargs = self._call
        try:
            self._context.run(target, *args, **kwargs)
        except BaseException as error:
            self._error = error
        self._done = True
        if self in self._process.threads:
            self._process.threads.remove(self)
        self._turn += 1

    def pause(self, seconds: float | None) -> bool:
        """Called in this thread: waits until `wake` or for so long. False if time ran out."""
        if self._ending:
            raise Crash(self.name)
        self._turn += 1
        if seconds is not None:
            self._timer = self._loop.call_later(
                seconds, self._resume, self._turn, context=self._process.context.copy()
            )
        self._woken = False
        assert self._stack is not None and self._stack.parent is not None
        self._stack.parent.switch()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ending:
            raise Crash(self.name)
        return self._woken

    def wake(self) -> None:
        """From the loop or another thread of the process."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._resume, self._turn, context=self._process.context.copy())


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            thread.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        thread = _current
        if self._set:
            return True
        if thread is None:
            while not self._set:
                for other in list(current_process().threads):
                    other.force()
            return True
        self._waiting.append(thread)
        while not self._set:
            if not thread.pause(timeout) and (timeout is not None or thread.forced):
                break
        if thread in self._waiting:
            self._waiting.remove(thread)
        return self._set


class Lock:
    """Also in place of RLock."""

    def __init__(self) -> None:
        self._holder: Thread | None = None
        self._count = 0
        self._waiting: list[Thread] = []

    def locked(self) -> bool:
        return self._count > 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        while self._count and self._holder is not _current:
            if not blocking:
                return False
            if _current is None or _current.forced:
                # The loop waits for the lock, or for a thread that waits for it.
                assert self._holder is not None
                self._holder.force()
            else:
                self._waiting.append(_current)
                _current.pause(None)
        self._holder = _current
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._holder = None
            waiting, self._waiting = self._waiting, []
            for thread in waiting:
                thread.wake()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimpleQueue:
    def __init__(self, maxsize: int = 0) -> None:
        self._items: deque[Any] = deque()
        self._waiting: list[Thread] = []

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            thread.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while not self._items:
            assert _current is not None, "the loop would never end its wait"
            self._waiting.append(_current)
            _current.pause(None)
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Threads:
    """Takes the place of `threading`."""

    Thread = Thread
    Event = Event
    Lock = Lock
    RLock = Lock

    @staticmethod
    def current_thread() -> Any:
        return _current or _LOOP_THREAD

    @staticmethod
    def get_ident() -> int:
        return id(_current)


class _SimMainThread:
    """The main thread of every simulated process."""

    name = "MainThread"

    @staticmethod
    def is_alive() -> bool:
        return True


_LOOP_THREAD = _SimMainThread()


class Queues:
    """Takes the place of `queue`."""

    SimpleQueue = SimpleQueue
    Queue = SimpleQueue
