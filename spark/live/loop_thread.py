"""An event loop that keeps running while the thread which uses it waits for something else."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

import uvloop

T = TypeVar("T")


class LoopThread:
    """`with LoopThread() as loop: loop.run(work())`. Tasks left by `run` continue in between.

    On a stopped loop, replies stay in the sockets while deadlines pass; when it continues, it
    handles the deadlines first.
    """

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sink", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for it; raises what it raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
