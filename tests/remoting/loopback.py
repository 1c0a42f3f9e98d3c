"""A connection without sockets: a loop moved by hand and a transport that records."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from batonmq.remoting.connection import Connection, Processors, RequestDispatcher, WriteTurn


class Timer:
    def __init__(self, when: float, callback: Callable[[], Any]) -> None:
        self.when = when
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class HandLoop:
    """Time moves only by `advance`; `run_soon` ends the turn."""

    def __init__(self) -> None:
        self.now = 100.0
        self.soon: list[Callable[[], Any]] = []
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], Any]) -> None:
        self.soon.append(callback)

    def call_later(self, delay: float, callback: Callable[[], Any]) -> Timer:
        return self.call_at(self.now + delay, callback)

    def call_at(self, when: float, callback: Callable[[], Any]) -> Timer:
        handle = Timer(when, callback)
        self.timers.append(handle)
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.get_running_loop().create_future()

    def create_task(self, coroutine: Any) -> "asyncio.Task[Any]":
        return asyncio.get_running_loop().create_task(coroutine)

    def run_soon(self) -> None:
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()

    def advance(self, seconds: float) -> None:
        """To the time given, each due timer once, in order; `now` jumps there first (a stall)."""
        self.now += seconds
        due = sorted((t for t in self.timers if t.when <= self.now), key=lambda t: t.when)
        self.timers = [t for t in self.timers if t not in due]
        for timer in due:
            if not timer.cancelled:
                timer.callback()

    @property
    def live_timers(self) -> list[Timer]:
        return [t for t in self.timers if not t.cancelled]


class RecordingTransport:
    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.reading = True
        self.ended = ""
        self.unread_bytes = 0

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def get_extra_info(self, name: str) -> object:
        addresses = {"peername": ("127.0.0.1", 7), "sockname": ("127.0.0.1", 8)}
        return addresses.get(name)

    def write(self, data: bytes) -> None:
        assert type(data) is bytes
        self.writes.append(data)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = self.ended or "half"

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = "aborted"


class Link:
    """One connected connection and everything around it."""

    def __init__(self, processors: Processors | None = None, *, server_side: bool = True) -> None:
        self.loop = HandLoop()
        self.lost: list[str] = []
        self.transport = RecordingTransport()
        loop = cast(asyncio.AbstractEventLoop, self.loop)
        self.turn = WriteTurn(loop)
        self.dispatcher = RequestDispatcher(loop, processors or Processors())
        self.connection = Connection(
            loop,
            self.turn,
            self.dispatcher,
            server_side=server_side,
            made=lambda _: None,
            lost=lambda _: self.lost.append(self.transport.ended),
        )
        self.connection.connection_made(cast(asyncio.BaseTransport, self.transport))

    def receive(self, data: bytes) -> None:
        buffer = self.connection.get_buffer(-1)
        buffer[: len(data)] = data
        self.connection.buffer_updated(len(data))
