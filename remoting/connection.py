"""One socket that speaks remoting, the same at both ends.

Frames written during a turn of the loop leave in one `transport.write` at its end (`WriteTurn`).
A peer that does not read makes the frames wait here, bounded in bytes and in time; a malformed
frame ends this connection alone, with one log line that says what was wrong.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, cast

from protocol.codes import ResponseCode
from protocol.errors import (
    BatonError,
    BrokerRefusal,
    ConnectError,
    RemoteProtocolError,
    RequestTimeoutError,
    ResponseError,
)
from remoting.codec import decode_frame, encode_frame, peek_code, peek_is_response
from remoting.command import FLAG_ONEWAY, RemotingCommand
from remoting.pending import PendingRequests
from remoting.processors import Processors, Response
from remoting.protocol import FrameReader

logger = logging.getLogger(__name__)

# What may wait for a peer that does not read: bytes (four frames of the largest size) and time.
BACKLOG_BYTES_MAX: Final = 4 * 16_777_216
WRITE_STALL_S: Final = 30.0
UNANSWERED_MS: Final = 10_000
"""A peer whose kernel acknowledges nothing for so long is gone: its host is cut off, or came back
with another address. TCP itself would try for a quarter of an hour, ever more seldom, and a caller
would go on asking over a connection that leads nowhere."""


class WriteTurn:
    """Collects the connections that have something to write until the end of the loop's turn."""

    __slots__ = ("_dirty", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._dirty: list[Connection] = []

    def add(self, connection: "Connection") -> None:
        if not self._dirty:
            self._loop.call_soon(self.flush)
        self._dirty.append(connection)

    def flush(self) -> None:
        """Writes now what all connections hold; what is written later waits for the next turn."""
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            connection.flush()


class Connection(asyncio.BufferedProtocol):
    """Made by a server or a client, never by hand; `tasks` are the handlers that run for any of
    its connections, which outlive theirs.

    `peer` and `local` are "ip:port"; `attachments` belong to the handlers; `last_active_ms` is
    CLOCK_BOOTTIME of the last bytes received. `on_close` callbacks are called once, with the
    connection, when it is closed for good.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        turn: WriteTurn,
        processors: Processors,
        *,
        server_side: bool,
        tasks: set[asyncio.Task[None]],
        made: Callable[["Connection"], None],
        lost: Callable[["Connection"], None],
        batch_end: Callable[[], None] | None = None,
    ) -> None:
        self.peer = "?"
        self.local = "?"
        self.closed = False
        self.attachments: dict[str, object] = {}
        self.last_active_ms = boottime_ms()
        self.on_close: list[Callable[[Connection], None]] = []
        self.close_reason = ""
        self._loop = loop
        self._turn = turn
        self._handlers = processors.handlers
        self._raw_handlers = processors.raw_handlers
        self._processors = processors
        self._server_side = server_side
        self._made = made
        self._lost = lost
        self._batch_end = batch_end
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._out: list[bytes | memoryview] = []
        self._out_size = 0
        self._dirty = False
        self._paused = False
        self._stall_timer: asyncio.TimerHandle | None = None
        self._opaque = 0
        self._pending = PendingRequests(loop, self._timed_out)
        self._tasks = tasks

    def __repr__(self) -> str:
        return f"<Connection {self.local} - {self.peer}{' closed' if self.closed else ''}>"

    # ---- writing ----

    def write(self, frame: bytes) -> None:
        """Queues a whole frame; it leaves at the end of this turn. Nothing happens when closed."""
        if self.closed:
            return
        self._out.append(frame)
        self._out_size += len(frame)
        if not self._dirty:
            self._mark_dirty()

    def write_parts(self, parts: Iterable[bytes | memoryview]) -> None:
        """Queues one frame that is in pieces. Views must stay valid until the turn ends, or, with
        a peer that does not read, are copied at once."""
        if self.closed:
            return
        if self._paused:
            parts = (b"".join(parts),)
        for part in parts:
            self._out.append(part)
            self._out_size += len(part)
        if not self._dirty:
            self._mark_dirty()

    def _mark_dirty(self) -> None:
        if self._paused:
            if self._out_size > BACKLOG_BYTES_MAX:
                self.abort(f"peer does not read: {self._out_size} bytes wait for it")
            return
        self._dirty = True
        self._turn.add(self)

    def flush(self) -> None:
        """Gives the transport everything queued, joined into one piece."""
        self._dirty = False
        out = self._out
        if not out or self._transport is None:
            return
        if self._paused:
            # Nothing goes out now, and views must not outlive the turn.
            self._out = [b"".join(out)]
            return
        self._out = []
        self._out_size = 0
        first = out[0]
        if len(out) > 1 or not isinstance(first, bytes):
            first = b"".join(out)
        self._transport.write(first)

    def reply(self, request: RemotingCommand, response: RemotingCommand) -> None:
        """Queues the response to a request, unless that was oneway."""
        if request.flag & FLAG_ONEWAY:
            return
        response.opaque = request.opaque
        try:
            frame = encode_frame(response)
        except RemoteProtocolError as error:
            logger.error("reply_too_large code=%d peer=%s %s", request.code, self.peer, error)
            refusal = RemotingCommand.response_to(
                request, ResponseCode.SYSTEM_ERROR, f"the reply cannot be sent: {error}"
            )
            frame = encode_frame(refusal)
        self.write(frame)

    # ---- requests of ours ----

    async def invoke(self, cmd: RemotingCommand, timeout_ms: int = 3000) -> RemotingCommand:
        """Sends a request and waits for its response, whatever its code.

        Raises RequestTimeoutError, or ConnectError when the connection ends first.
        """
        future = self.request(cmd, timeout_ms)
        try:
            return await future
        finally:
            self._pending.drop(cmd.opaque)

    async def call(self, cmd: RemotingCommand, timeout_ms: int = 3000) -> RemotingCommand:
        """As `invoke`, but raises ResponseError for any code but 0."""
        response = await self.invoke(cmd, timeout_ms)
        if response.code != ResponseCode.SUCCESS:
            raise ResponseError(response.code, response.remark, self.peer)
        return response

    def request(self, cmd: RemotingCommand, timeout_ms: int) -> asyncio.Future[RemotingCommand]:
        """Sends a request; the future ends as `invoke` does. Raises ConnectError when closed."""
        if self.closed:
            raise ConnectError(self.peer, f"connection is closed: {self.close_reason}")
        cmd.opaque = self._next_opaque()
        frame = encode_frame(cmd)
        future = self._pending.add(cmd.opaque, cmd.code, timeout_ms)
        self.write(frame)
        return future

    def oneway(self, cmd: RemotingCommand) -> None:
        """Sends a request that nobody answers. Raises ConnectError when closed."""
        if self.closed:
            raise ConnectError(self.peer, f"connection is closed: {self.close_reason}")
        cmd.opaque = self._next_opaque()
        cmd.flag |= FLAG_ONEWAY
        self.write(encode_frame(cmd))

    def _next_opaque(self) -> int:
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return self._opaque

    def _timed_out(self, timeout_ms: int, code: int) -> Exception:
        return RequestTimeoutError(self.peer, timeout_ms, code)

    # ---- closing ----

    def close(self, reason: str) -> None:
        """Ends the connection after what is queued has been handed to the kernel."""
        if self.closed:
            return
        self.flush()
        if self._paused or self._transport is None:
            self.abort(reason)
            return
        self._mark_closed(reason)
        self._transport.close()

    def abort(self, reason: str) -> None:
        """Ends the connection at once; what is queued is lost."""
        if self.closed:
            return
        logger.warning(
            "connection_dropped peer=%s local=%s reason=%r", self.peer, self.local, reason
        )
        self._mark_closed(reason)
        if self._transport is not None:
            self._transport.abort()

    def drop(self) -> None:
        """Gives up a connection that was closed but whose last bytes the peer does not take."""
        if self._transport is not None:
            self._transport.abort()

    def _mark_closed(self, reason: str) -> None:
        self.closed = True
        self.close_reason = reason
        self._out.clear()
        self._out_size = 0
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        self._pending.fail_all(ConnectError(self.peer, f"connection ended: {reason}", sent=True))

    # ---- called by the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.peer = _address_text(transport.get_extra_info("peername"))
        self.local = _address_text(transport.get_extra_info("sockname"))
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)
        self._made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.last_active_ms = boottime_ms()
        raw_handlers = self._raw_handlers
        try:
            for serialize_type, header, body in self._reader.received(nbytes):
                code = peek_code(serialize_type, header)
                raw = raw_handlers.get(code)
                if raw is None or peek_is_response(serialize_type, header):
                    self._on_command(decode_frame(header, body, serialize_type))
                else:
                    self._on_raw(raw, serialize_type, header, body)
                if self.closed:
                    break
        except RemoteProtocolError as error:
            self.abort(f"malformed frame: {error}")
        if self._batch_end is not None:
            self._batch_end()

    def eof_received(self) -> None:
        if self._reader.waiting and not self.closed:
            self.abort(f"malformed frame: cut off after {self._reader.waiting} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed:
            self._mark_closed(f"lost: {exc}" if exc is not None else "closed by the peer")
        self._transport = None
        self._lost(self)
        callbacks, self.on_close = self.on_close, []
        for callback in callbacks:
            callback(self)

    def pause_writing(self) -> None:
        self._paused = True
        if self.closed:
            return
        self._stall_timer = self._loop.call_later(WRITE_STALL_S, self._on_stall)
        # A client goes on reading: if both ends stopped, neither would ever start again.
        if self._server_side and self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if self.closed:
            return
        if self._server_side and self._transport is not None:
            self._transport.resume_reading()
        if self._out and not self._dirty:
            self._mark_dirty()

    def _on_stall(self) -> None:
        self.abort(f"peer has not read for {WRITE_STALL_S:.0f} s")

    # ---- requests of the peer ----

    def handle_again(
        self,
        raw: Callable[["Connection", int, bytes, bytes], None],
        serialize_type: int,
        header: bytes,
        body: bytes,
    ) -> None:
        """Hands a request that a raw handler put aside to `raw`, as if it had just come."""
        try:
            self._on_raw(raw, serialize_type, header, body)
        except RemoteProtocolError as error:
            self.abort(f"malformed frame: {error}")

    def _on_raw(
        self,
        raw: Callable[["Connection", int, bytes, bytes], None],
        serialize_type: int,
        header: bytes,
        body: bytes,
    ) -> None:
        try:
            raw(self, serialize_type, header, body)
        except RemoteProtocolError:
            raise
        except Exception as error:
            self._answer_error(decode_frame(header, b"", serialize_type), error)

    def _on_command(self, cmd: RemotingCommand) -> None:
        if cmd.is_response:
            if not self._pending.resolve(cmd):
                logger.debug("late_response peer=%s opaque=%d", self.peer, cmd.opaque)
            return
        handler = self._handlers.get(cmd.code, self._processors.default_handler)
        try:
            result = handler(cmd, self)
        except Exception as error:
            self._answer_error(cmd, error)
            return
        if result is None:
            return
        if isinstance(result, RemotingCommand):
            self.reply(cmd, result)
            return
        task = self._loop.create_task(self._answer_later(cmd, result))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._answered(done, result))

    def _answered(self, task: asyncio.Task[None], result: Awaitable[Response]) -> None:
        self._tasks.discard(task)
        if task.cancelled() and asyncio.iscoroutine(result):
            # Cancelled before its first step: nobody else will ever await the handler.
            result.close()

    async def _answer_later(self, cmd: RemotingCommand, result: Awaitable[Response]) -> None:
        try:
            response = await result
        except Exception as error:
            self._answer_error(cmd, error)
            return
        if response is not None:
            self.reply(cmd, response)

    def _answer_error(self, cmd: RemotingCommand, error: Exception) -> None:
        if isinstance(error, BrokerRefusal | ResponseError):
            response = RemotingCommand.response_to(cmd, error.code, error.remark)
        elif isinstance(error, BatonError):
            response = RemotingCommand.response_to(cmd, error.response_code, str(error))
        else:
            logger.error("request_failed code=%d peer=%s", cmd.code, self.peer, exc_info=error)
            remark = f"{type(error).__name__}: {error}"
            response = RemotingCommand.response_to(cmd, ResponseCode.SYSTEM_ERROR, remark)
        self.reply(cmd, response)


def boottime_ms() -> int:
    """Milliseconds of CLOCK_BOOTTIME: never set back, and counting through a suspended machine."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def _address_text(address: Any) -> str:
    if not isinstance(address, tuple) or len(address) < 2:
        return "?"
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


__all__ = ["BACKLOG_BYTES_MAX", "WRITE_STALL_S", "Connection", "WriteTurn", "boottime_ms"]
