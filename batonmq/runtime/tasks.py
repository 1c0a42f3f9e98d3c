"""Background tasks that belong to one object and end with it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

AGAIN_S: Final = 1.0
"""A loop that fails at once each time must not fill the process log."""


class Tasks:
    """The tasks of one object, until `close`. What a task raises goes to the loop's handler: a
    failed assertion ends a server (`server_main`), any other error is logged."""

    def __init__(self) -> None:
        # The loop has only weak references: without these a task could be garbage-collected.
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def keep(self, loop: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Runs `loop()`, and begins it again AGAIN_S after it failed (R54)."""
        self.spawn(self._kept(loop, name), name)

    async def close(self) -> None:
        """Cancels all tasks and waits for their ends."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _kept(self, loop: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        while True:
            try:
                return await loop()
            except Exception as error:
                report_failure(f"task {name} failed", error)
            await asyncio.sleep(AGAIN_S)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            report_failure(f"task {task.get_name()} failed", error)


def report_failure(what: str, error: BaseException) -> None:
    """Passes an unexpected error to the loop's handler, for code that continues after it."""
    context = {"message": what, "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)


def pass_on_assertion(error: BaseException, what: str) -> None:
    """`report_failure` of a failed assertion, which ends a server. For code that logs every other
    error itself."""
    if isinstance(error, AssertionError):
        report_failure(what, error)
