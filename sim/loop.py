"""An event loop on a virtual clock, in which whole processes can be killed, stopped and slowed.

Everything scheduled while a `Process` runs belongs to it (by a context variable), so `kill` drops
all of its callbacks, timers and tasks at once, as SIGKILL does, and `pause` delays them, as
SIGSTOP does. Time stands still while callbacks run and jumps to the next timer when none is ready.
`digest` covers the time and owner of every callback: two runs with one digest were the same run.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import itertools
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
_NO_PROCESS = contextvars.Context()
_TIME = struct.Struct("<d")

START_S = 10_000.0


class Crash(BaseException):
    """Ends a process at this very point; nothing in it can catch it."""


class Process:
    """One start of a process on `host`. The world calls `on_kill` when it dies."""

    def __init__(self, loop: SimLoop, host: str, *, rate: float = 1.0) -> None:
        self.loop = loop
        self.host = host
        self.rate = rate  # how fast its clocks go
        self.dead = False
        self.paused = False
        self.vanished = False  # died with its host: no stream of it ends
        self.fuse = -1  # after so many callbacks it is killed; below 0: never
        self.busy_until_s = 0.0  # it waits for its disk
        self.backlog: list[tuple[asyncio.Handle, Callable[..., object], tuple[Any, ...]]] = []
        self.on_kill: list[Callable[[], None]] = []
        self.threads: list[Any] = []
        self.serial = loop.new_serial()
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Run it soon, in this process."""
        self.loop.call_soon(callback, *args, context=self.context.copy())

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

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Starts a program of it; what it raises ends the run."""
        task: asyncio.Task[Any] = self.run(self.loop.create_task, work)
        task.add_done_callback(self.loop.note_raised, context=_NO_PROCESS.copy())
        return task

    def kill(self, *, vanish: bool = False) -> None:
        if self.dead:
            return
        self.dead = True
        self.vanished = vanish
        self.backlog.clear()
        self.loop.note(self.host, "killed" if not vanish else "gone with its host")
        for callback in self.on_kill:
            callback()
        for thread in self.threads:
            thread.end()
        self.threads.clear()

    def pause(self) -> None:
        self.paused = True

    def stall(self, seconds: float) -> None:
        """Its loop does nothing for so long: it waits for the disk."""
        self.busy_until_s = max(self.busy_until_s, self.loop.now_s + seconds)
        at_world(self.loop, self.busy_until_s, self._unblocked)

    def _unblocked(self) -> None:
        if not self.paused and self.loop.now_s >= self.busy_until_s:
            self._release()

    def resume(self) -> None:
        self.paused = False
        self._release()

    def _release(self) -> None:
        backlog, self.backlog = self.backlog, []
        for handle, callback, args in backlog:
            self.post(self._late, handle, callback, args)

    @staticmethod
    def _late(handle: asyncio.Handle, callback: Callable[..., object], args: Any) -> None:
        if not handle.cancelled():
            callback(*args)


def current_process() -> Process:
    process = _PROCESS.get()
    assert process is not None, "this runs in no process"
    return process


process_here: Callable[[], Process | None] = _PROCESS.get
"""The process that runs now; None in the world's own callbacks."""


def at_world(loop: SimLoop, when_s: float, callback: Callable[..., object], *args: Any) -> None:
    """Calls it at that time, in no process: no kill and no pause delays it."""
    asyncio.BaseEventLoop.call_at(loop, when_s, callback, *args, context=_NO_PROCESS.copy())


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


def number_anew() -> None:
    """A new run begins."""
    global _numbers
    _numbers = itertools.count(1)


class SimLoop(asyncio.BaseEventLoop):
    """`errors` collects what callbacks raised; `network` serves sockets."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        number_anew()
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
        self._clock_resolution = 1e-7
        self._selector = self
        self.set_exception_handler(self._failed)
        self.set_task_factory(self._new_task)

    def new_serial(self) -> int:
        self._serials += 1
        return self._serials

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._note(context.get("exception") or context["message"])

    def _note(self, error: BaseException | str) -> None:
        """Not those of a disk that was made to fail: asyncio logs them, and goes on."""
        if isinstance(error, Crash):
            return
        if isinstance(error, OSError) and error.errno in (errno.EIO, errno.ENOSPC):
            return
        self.errors.append(error)

    def note_raised(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._note(error)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def _new_task(self, loop: Any, coro: Any, **kwargs: Any) -> Any:
        task = _Task(coro, loop=loop, **kwargs)
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
                    try:
                        coroutine.close()
                    except BaseException:
                        pass
        finally:
            asyncio._set_running_loop(None)
        for task in self._tasks:
            task._log_traceback = False
        self._tasks.clear()
        self._ready.clear()  # type: ignore[attr-defined]
        self._scheduled.clear()  # type: ignore[attr-defined]
        self.close()

    def time(self) -> float:
        return self.now_s

    def now_ms(self) -> int:
        return int(self.now_s * 1000 + 1e-6)

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen again")
        if timeout > 0:
            self.now_s += timeout
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    # Callbacks belong to processes.

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        if self.finished:
            return asyncio.Handle(callback, args, self, context)
        if context is None:
            context = contextvars.copy_context()
        process = context.get(_PROCESS)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        box: list[Any] = []
        handle = super().call_soon(_guarded, process, box, callback, args, context=context)
        box.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        if self.finished:
            return asyncio.TimerHandle(when, callback, args, self, context)
        if context is None:
            context = contextvars.copy_context()
        process = context.get(_PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        if process.rate != 1.0:
            when = self.now_s + (when - self.now_s) / process.rate
        box: list[Any] = []
        handle = super().call_at(when, _guarded, process, box, callback, args, context=context)
        box.append(handle)
        return handle

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


def _guarded(process: Process, box: list[Any], callback: Any, args: tuple[Any, ...]) -> None:
    if process.dead:
        return
    loop = process.loop
    if process.paused or process.busy_until_s > loop.now_s:
        process.backlog.append((box[0], callback, args))
        return
    if process.fuse >= 0:
        process.fuse -= 1
        if process.fuse < 0:
            process.kill()
            return
    loop.callbacks += 1
    loop.digest = zlib.crc32(_TIME.pack(loop.now_s), loop.digest ^ process.serial)
    try:
        callback(*args)
    except Crash:
        if not process.dead:
            raise
