"""What a server and a client share: their connections, the write turn, and the idle watch."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from remoting.connection import Connection, WriteTurn, boottime_ms
from remoting.processors import Processors

logger = logging.getLogger(__name__)

_CLOSE_WAIT_S: Final = 1.0


class Endpoint:
    """`on_connect` and `on_disconnect` are called with each connection; the latter once it is
    gone for good. `connections` are those that live."""

    _server_side = True

    def __init__(self, processors: Processors, *, name: str, idle_timeout_s: float) -> None:
        self.name = name
        self.connections: set[Connection] = set()
        self.on_connect: Callable[[Connection], None] | None = None
        self.on_disconnect: Callable[[Connection], None] | None = None
        self.on_batch_end: Callable[[], None] | None = None
        self._processors = processors
        self._idle_timeout_s = idle_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: WriteTurn | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Event | None = None
        self._next_idle_check_ms = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def turn(self) -> WriteTurn:
        """Flushes all connections of this endpoint. Needs a running loop."""
        self._bind()
        assert self._turn is not None
        return self._turn

    def _bind(self) -> asyncio.AbstractEventLoop:
        """The loop that all of this runs on, found at first use."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._turn = WriteTurn(self._loop)
            if self._idle_timeout_s > 0:
                self._schedule_idle_check()
        return self._loop

    def _new_connection(self) -> Connection:
        loop = self._bind()
        assert self._turn is not None
        return Connection(
            loop,
            self._turn,
            self._processors,
            server_side=self._server_side,
            tasks=self._tasks,
            made=self._connected,
            lost=self._disconnected,
            batch_end=self.on_batch_end,
        )

    def _connected(self, connection: Connection) -> None:
        self.connections.add(connection)
        if self.on_connect is not None:
            self.on_connect(connection)

    def _disconnected(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self.on_disconnect is not None:
            self.on_disconnect(connection)
        if self._empty is not None and not self.connections:
            self._empty.set()

    def _schedule_idle_check(self) -> None:
        assert self._loop is not None
        interval_s = min(self._idle_timeout_s / 4, 10.0)
        self._next_idle_check_ms = boottime_ms() + int(interval_s * 1000)
        self._idle_timer = self._loop.call_later(interval_s, self._idle_check)

    def _idle_check(self) -> None:
        now_ms = boottime_ms()
        # After a stall everyone seems idle: what they sent meanwhile is read first (R8).
        if now_ms - self._next_idle_check_ms <= 100:
            self.close_idle(now_ms)
        self._schedule_idle_check()

    def close_idle(self, now_ms: int) -> None:
        """Closes the connections that were silent for the idle timeout."""
        limit_ms = int(self._idle_timeout_s * 1000)
        for connection in [c for c in self.connections if now_ms - c.last_active_ms >= limit_ms]:
            logger.info("connection_idle peer=%s endpoint=%s", connection.peer, self.name)
            connection.close(f"idle for {self._idle_timeout_s:g} s")

    async def _close_connections(self, reason: str) -> None:
        """Closes all connections and waits until they are gone and their handlers have ended."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        # A handler may be the one that closes us.
        tasks = {task for task in self._tasks if task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._empty = asyncio.Event()
        for connection in list(self.connections):
            connection.close(reason)
        if self.connections:
            try:
                await asyncio.wait_for(self._empty.wait(), _CLOSE_WAIT_S)
            except TimeoutError:
                for connection in list(self.connections):
                    connection.drop()
                await self._empty.wait()
        self._empty = None


__all__ = ["Endpoint"]
