"""An event loop on a virtual clock, in which whole processes can be killed, stopped and slowed.

What is scheduled while a `SimProcess` runs belongs to it (by a context variable), so `kill` drops
all of its callbacks, timers and tasks at once, as SIGKILL does, and `pause` delays them, as
SIGSTOP does. Time stands still while callbacks run and jumps to the next timer when none is ready.
`digest` covers the time and owner of every callback: two runs with one digest were the same run.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import inspect
import itertools
import random
import struct
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from heapq import heappop, heappush
from types import CoroutineType
from typing import Any
from zlib import crc32

from batonmq.remoting.budget import Paced
from batonmq.store.errors import StoreFailedError

_PROCESS: contextvars.ContextVar[SimProcess | None] = contextvars.ContextVar(
    "process", default=None
)
_NO_PROCESS = contextvars.Context()
_pack_time = struct.Struct("<d").pack
_RESOLUTION_S = 1e-7  # timers so close to each other are due together

START_S = 10_000.0


class Crash(BaseException):
    """Ends a process at this very point; nothing in it can catch it."""


class SimProcess:
    """One start of a process on `host`. The world calls `on_kill` when it dies."""

    def __init__(self, loop: SimLoop, host: str, *, rate: float = 1.0) -> None:
        self.loop = loop
        self.host = host
        self.rate = rate  # how fast its clocks go
        self.dead = False
        self.paused = False
        self.vanished = False  # died with its host: no stream of it ends
        self._fuse = -1  # after so many callbacks it is killed; below 0: never
        self.busy_until_s = 0.0  # it waits for its disk
        self.hindered = False  # it is dead, or hangs, or its fuse burns
        self.backlog: list[_Handle] = []
        self.on_kill: list[Callable[[], None]] = []
        self.threads: list[Any] = []
        self.serial = loop.new_serial()
        self.context = copy_context()
        self.context.run(_PROCESS.set, self)

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Run it soon, in this process."""
        self.loop.call_soon(callback, *args, context=self.context.copy())

    def post_at(self, when_s: float, callback: Callable[..., object]) -> None:
        """Run it at that time of the world, in this process."""
        self.loop.add_timer(_Handle(callback, (), self.context.copy(), when_s))

    def run(self, callback: Callable[..., Any], *args: object) -> Any:
        """Run it now, in this process."""
        outside = asyncio._get_running_loop() is None
        if outside:
            asyncio._set_running_loop(self.loop)
        try:
            return self.context.copy().run(callback, *args)
        finally:
            if outside:
                asyncio._set_running_loop(None)

    def is_held(self, handle: _Handle, now_s: float) -> bool:
        """Whether it does not run that now: it is dead, or hangs and runs it later. Asked of a
        process that is `hindered`."""
        if self.dead:
            return True
        if self.paused or self.busy_until_s > now_s:
            self.backlog.append(handle)
            return True
        if self._fuse >= 0:
            self._fuse -= 1
            if self._fuse < 0:
                assert handle.context is not None
                handle.context.run(self.kill)
                return True
            return False
        self.hindered = False
        return False

    def die_after(self, callbacks: int | None) -> None:
        """It is killed so many callbacks from now; None: it is not."""
        self._fuse = -1 if callbacks is None else callbacks
        self.hindered = True

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Starts a program of it; what it raises ends the run."""
        task: asyncio.Task[Any] = self.run(self.loop.create_task, work)
        task.add_done_callback(self.loop.note_raised, context=_NO_PROCESS.copy())
        return task

    def kill(self, *, vanish: bool = False) -> None:
        if self.dead:
            return
        self.dead = self.hindered = True
        self.vanished = vanish
        self.backlog.clear()
        self.loop.note(self.host, "killed" if not vanish else "gone with its host")
        for callback in self.on_kill:
            callback()
        threads, self.threads = self.threads, []  # each takes itself off the list as it ends
        for thread in threads:
            thread.end()

    def pause(self) -> None:
        self.paused = self.hindered = True

    def stall(self, seconds: float) -> None:
        """Its loop does nothing for so long: it waits for the disk."""
        self.busy_until_s = max(self.busy_until_s, self.loop.now_s + seconds)
        self.hindered = True
        at_world(self.loop, self.busy_until_s, self._unblocked)

    def _unblocked(self) -> None:
        if not self.paused and self.loop.now_s >= self.busy_until_s:
            self._release()

    def resume(self) -> None:
        self.paused = False
        self._release()

    def _release(self) -> None:
        backlog, self.backlog = self.backlog, []
        for handle in backlog:
            self.post(handle.run_late)


def current_process() -> SimProcess:
    process = _PROCESS.get()
    assert process is not None, "this runs in no process"
    return process


process_here: Callable[[], SimProcess | None] = _PROCESS.get
"""The process that runs now; None in the world's own callbacks."""


def at_world(loop: SimLoop, when_s: float, callback: Callable[..., object], *args: Any) -> None:
    """Calls it at that time, in no process: no kill and no pause delays it."""
    loop.add_timer(_Handle(callback, args, None, when_s))


class _Future(asyncio.Future[Any]):
    """Sets of futures and tasks are walked in an order that addresses in memory do not change."""

    def __hash__(self) -> int:
        return numbered(self)


class _Task(asyncio.Task[Any]):
    def __hash__(self) -> int:
        return numbered(self)


_numbers = itertools.count(1)


def numbered(thing: Any) -> int:
    """A hash by age."""
    try:
        number: int = thing._sim_number
    except AttributeError:
        number = thing._sim_number = next(_numbers)
    return number


def restart_numbers() -> None:
    """A new run begins."""
    global _numbers
    _numbers = itertools.count(1)


class _Handle:
    """A callback, None once it is cancelled, and the process that it belongs to, None: the world's.

    In place of asyncio's Handle and TimerHandle. Some thousand of them live and die in each second
    of a life, so it has what is used of them and no more.
    """

    __slots__ = ("args", "callback", "context", "process", "when_s")

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
        when_s: float,
    ) -> None:
        """`context` None: it runs in no process."""
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context
        self.process: SimProcess | None = None if context is None else context.get(_PROCESS)
        self.when_s = when_s

    def when(self) -> float:
        return self.when_s

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None

    def run_late(self) -> None:
        """Its process hung when it was due."""
        if self.callback is not None:
            self.callback(*self.args)


def _close_unawaited(coroutine: CoroutineType[Any, Any, Any]) -> None:
    """What a coroutine was given, and will not await: it never began."""
    if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
        for argument in inspect.getcoroutinelocals(coroutine).values():
            if isinstance(argument, Paced):
                argument.close()


class SimLoop(asyncio.BaseEventLoop):
    """`errors` collects what callbacks raised; `network` serves sockets."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        restart_numbers()
        self.rng = rng
        self.now_s = START_S
        self.errors: list[BaseException | str] = []
        self.finished = False
        self.digest = 0
        self.callbacks = 0
        self.note: Callable[[str, str], None] = lambda who, what: None
        self._serials = 0
        self._tasks: list[asyncio.Task[Any]] = []  # of dead processes, too, for the GC
        self.network: Any = None
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []  # a heap; of equal ones the older first
        self._timer_numbers = itertools.count()
        self.set_exception_handler(self._failed)

    def new_serial(self) -> int:
        self._serials += 1
        return self._serials

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.note_error(context.get("exception") or context["message"])

    def note_error(self, error: BaseException | str) -> None:
        """Not those of a disk that was made to fail: asyncio logs them and continues."""
        if isinstance(error, Crash):
            return
        cause = error.__cause__ if isinstance(error, StoreFailedError) else error
        if isinstance(cause, OSError) and cause.errno in (errno.EIO, errno.ENOSPC):
            return
        self.errors.append(error)

    def note_raised(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.note_error(error)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        task = _Task(coro, loop=self, name=name, context=context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # killed ones never end
        self._tasks.append(task)
        if len(self._tasks) > 2000:
            self._tasks = [task for task in self._tasks if not task.done()]
        return task

    def finish(self) -> None:
        """Ends the run: every coroutine is closed where it stands, nothing is called any more."""
        self.finished = True
        asyncio._set_running_loop(self)
        try:
            for _ in range(4):  # one that awaits while it is closed is closed again
                for task in self._tasks:
                    coroutine: Any = task.get_coro()
                    if inspect.iscoroutine(coroutine):
                        _close_unawaited(coroutine)
                    try:
                        coroutine.close()
                    except BaseException:
                        pass
        finally:
            asyncio._set_running_loop(None)
        for task in self._tasks:
            task._log_traceback = False
        self._tasks.clear()
        self._ready.clear()
        self._timers.clear()
        self.close()

    def time(self) -> float:
        return self.now_s

    def now_ms(self) -> int:
        return int(self.now_s * 1000 + 1e-6)

    get_debug = staticmethod(bool)  # False; each future asks, and this is no call of Python code

    def _run_once(self) -> None:
        """As asyncio's, on the virtual clock, but it loops until `stop`."""
        ready, timers = self._ready, self._timers
        digest, callbacks = self.digest, self.callbacks
        while True:
            while timers and timers[0][2].callback is None:
                heappop(timers)
            if not ready and not self._stopping:  # type: ignore[attr-defined]
                if not timers:
                    raise RuntimeError("nothing will ever happen again")
                self.now_s = max(self.now_s, timers[0][0])
            end_s = self.now_s + _RESOLUTION_S
            while timers and timers[0][0] < end_s:
                ready.append(heappop(timers)[2])
            now = _pack_time(self.now_s)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle.callback is not None:
                    process = handle.process
                    if process is not None:
                        if process.hindered and process.is_held(handle, self.now_s):
                            continue
                        callbacks += 1
                        digest = crc32(now, digest ^ process.serial)
                    try:
                        if handle.context is None:
                            handle.callback(*handle.args)
                        else:
                            handle.context.run(handle.callback, *handle.args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:
                        self.note_error(error)
            if self._stopping:  # type: ignore[attr-defined]
                self.digest, self.callbacks = digest, callbacks
                return

    # Callbacks belong to processes.

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        handle = _Handle(callback, args, copy_context() if context is None else context, 0.0)
        if not self.finished:
            self._ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        handle = _Handle(callback, args, copy_context() if context is None else context, when)
        process = handle.process
        if process is not None and process.rate != 1.0:
            handle.when_s = self.now_s + (when - self.now_s) / process.rate
        self.add_timer(handle)
        return handle

    def add_timer(self, handle: _Handle) -> None:
        if not self.finished:
            heappush(self._timers, (handle.when_s, next(self._timer_numbers), handle))

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        # A timer of the process that asks: its death drops the work, as it ends a real thread.
        self.call_later(self.rng.uniform(0.0002, 0.004), work)
        return future

    # Sockets.

    async def create_server(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **kwargs: Any
    ) -> Any:
        return self.network.listen(current_process(), protocol_factory, host, port)

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **kwargs: Any
    ) -> Any:
        return await self.network.connect(current_process(), protocol_factory, host, int(port))
