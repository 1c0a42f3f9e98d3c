"""An event loop on a virtual clock, in which whole processes can be killed and stopped.

Everything scheduled while a `Process` runs belongs to it (by a context variable), so `kill` drops
all of its callbacks, timers and tasks at once, as SIGKILL does, and `pause` delays them, as
SIGSTOP does. Time stands still while callbacks run and jumps to the next timer when none is ready.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable
from typing import Any

_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Process:
    """One start of a process on `host`. The world calls `on_kill` when it dies."""

    def __init__(self, loop: SimLoop, host: str) -> None:
        self.loop = loop
        self.host = host
        self.dead = False
        self.paused = False
        self.vanished = False  # died with its host: no stream of it ends
        self.backlog: list[tuple[asyncio.Handle, Callable[..., object], tuple[Any, ...]]] = []
        self.on_kill: list[Callable[[], None]] = []
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
        return self.run(self.loop.create_task, work)

    def kill(self, *, vanish: bool = False) -> None:
        self.dead = True
        self.vanished = vanish
        self.backlog.clear()
        for callback in self.on_kill:
            callback()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
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


class SimLoop(asyncio.BaseEventLoop):
    """`errors` collects what callbacks raised; `network` serves sockets."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.now_s = 10_000.0
        self.errors: list[BaseException | str] = []
        self.finished = False
        self._tasks: list[asyncio.Task[Any]] = []  # of dead processes, too, for the GC
        self.network: Any = None
        self._clock_resolution = 1e-7
        self._selector = self
        self.set_exception_handler(self._failed)
        self.set_task_factory(self._new_task)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception") or context["message"])

    def _new_task(self, loop, coro, **kwargs):  # type: ignore[no-untyped-def]
        task = asyncio.Task(coro, loop=loop, **kwargs)
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
                    coroutine = task.get_coro()
                    try:
                        coroutine.close()
                    except BaseException:
                        pass
        finally:
            asyncio._set_running_loop(None)
        self._tasks.clear()
        self._ready.clear()
        self._scheduled.clear()
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

    # -- callbacks belong to processes

    def call_soon(self, callback, *args, context=None):  # type: ignore[no-untyped-def]
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

    def call_at(self, when, callback, *args, context=None):  # type: ignore[no-untyped-def]
        if self.finished:
            return asyncio.TimerHandle(when, callback, args, self, context)
        if context is None:
            context = contextvars.copy_context()
        process = context.get(_PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        box: list[Any] = []
        handle = super().call_at(when, _guarded, process, box, callback, args, context=context)
        box.append(handle)
        return handle

    def call_soon_threadsafe(self, callback, *args, context=None):  # type: ignore[no-untyped-def]
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor, func, *args):  # type: ignore[no-untyped-def]
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

    # -- sockets

    async def create_server(self, factory, host=None, port=None, **kwargs):  # type: ignore[no-untyped-def]
        return self.network.listen(current_process(), factory, host, port)

    async def create_connection(self, factory, host=None, port=None, **kwargs):  # type: ignore[no-untyped-def]
        return await self.network.connect(current_process(), factory, host, int(port))


def _guarded(process: Process, box: list[Any], callback: Any, args: tuple[Any, ...]) -> None:
    if process.dead:
        return
    if process.paused:
        process.backlog.append((box[0], callback, args))
        return
    callback(*args)
