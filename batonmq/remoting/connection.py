"""One remoting connection, the same at both ends, and the handlers of its requests.

All frames of a loop turn are sent with one `transport.write` (`WriteTurn`). If a peer does not
read, its frames wait here, limited in bytes and time. A malformed frame ends only its connection.
`Processors` has a handler for each request code: it takes request and connection and returns the
response, a coroutine of it, or None if it replies later or never. A raw handler gets the undecoded
frame, so the hot path needs no task, future or command.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol, TypeAlias, cast

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import (
    BatonError,
    BrokerRefusal,
    ConnectError,
    RemoteProtocolError,
    RequestTimeoutError,
    ResponseError,
)
from batonmq.remoting.budget import TURN_S, MemoryBudget, Paced, Places, TurnBudget, UnreadAnswers
from batonmq.remoting.command import (
    FLAG_ONEWAY,
    SHORT_HEADER,
    FrameReader,
    RemotingCommand,
    decode_frame,
    encode_frame,
    header_problem,
    peek_code,
    peek_head,
    peek_is_response,
    receive_buffer,
)
from batonmq.remoting.headers import SendFrame
from batonmq.remoting.intake import Intake
from batonmq.remoting.pending_requests import PendingRequests
from batonmq.runtime.clock import boot_ms, boot_s
from batonmq.runtime.sockets import (
    address_of,
    descriptor_of,
    keep_alive_of,
    limit_unacknowledged_of,
)

log = logging.getLogger(__name__)

# Limits for a peer that does not read: bytes (four frames of the largest size) and time.
BACKLOG_BYTES_MAX: Final = 4 * 16_777_216
WRITE_STALL_S: Final = 30.0
UNREAD_S: Final = 1.0  # between two looks whether it reads
OPAQUE_MAX: Final = 0x7FFFFFFF
LINGER_S: Final = 1.0  # how long the peer may take to close after a farewell
_UNTIMED: Final = 8  # frames of the hot path between two readings of the clock
UNANSWERED_MS: Final = 10_000
"""If TCP gets no acknowledgement for so long, the host is cut off or has moved."""

Response: TypeAlias = RemotingCommand | None
Handler: TypeAlias = "Callable[[RemotingCommand, Connection], Response | Awaitable[Response]]"
# (connection, header type, header, body)
Later: TypeAlias = Coroutine[Any, Any, None] | None
"""The work that a raw handler leaves for later turns of the loop."""
RawHandler: TypeAlias = "Callable[[Connection, int, bytes, bytes], Later]"


class SendHandler(Protocol):
    """A raw handler that takes the decoded header, too, if the guard has decoded it already."""

    def __call__(
        self,
        connection: "Connection",
        kind: int,
        header: bytes,
        body: bytes,
        request: SendFrame | None = None,
        /,
    ) -> Later: ...


class Processors:
    """Handlers by request code; the default one answers REQUEST_CODE_NOT_SUPPORTED (3)."""

    def __init__(self) -> None:
        self.handlers: dict[int, Handler] = {}
        self.raw_handlers: dict[int, RawHandler] = {}
        self.send_handlers: dict[int, SendHandler] = {}
        """Those of `raw_handlers` that take a decoded header."""
        self.large: set[int] = set()  # codes: see `register`
        self.default_handler: Handler = answer_not_supported

    def register(self, code: int, handler: Handler, *, large: bool = False) -> None:
        """Sets the handler of a code; a second one is a bug. `large`: it may make a large answer,
        so LARGE_MAX of these run for one host at a time."""
        self._assert_free(code)
        self.handlers[int(code)] = handler
        if large:
            self.large.add(int(code))

    def register_raw(self, code: int, handler: RawHandler) -> None:
        """Sets the hot-path handler of a code."""
        self._assert_free(code)
        self.raw_handlers[int(code)] = handler

    def register_send(self, code: int, handler: SendHandler) -> None:
        """Sets the handler of a code of sends."""
        self.register_raw(code, handler)
        self.send_handlers[int(code)] = handler

    def default(self, handler: Handler) -> None:
        """Sets the handler of all other codes."""
        self.default_handler = handler

    def replace(self, other: "Processors") -> None:
        """Replaces all handlers by those of `other`, also for open connections."""
        # In place, because open connections refer to these tables.
        self.handlers.clear()
        self.handlers.update(other.handlers)
        self.raw_handlers.clear()
        self.raw_handlers.update(other.raw_handlers)
        self.large = other.large
        self.default_handler = other.default_handler

    def _assert_free(self, code: int) -> None:
        assert code not in self.handlers, f"request code {code} has a handler already"
        assert code not in self.raw_handlers, f"request code {code} has a raw handler already"


def answer_not_supported(request: RemotingCommand, connection: "Connection") -> RemotingCommand:
    """REQUEST_CODE_NOT_SUPPORTED (3), in Java's words."""
    remark = f" request type {request.code} not supported"
    return RemotingCommand.response_to(request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)


class RequestDispatcher:
    """Passes the requests of an endpoint's connections to their handlers. `tasks`: running
    handlers, which may outlive their connection. `turn`, `memory` and `places` limit what peers
    cost (R58)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, processors: Processors) -> None:
        self.raw_handlers = processors.raw_handlers
        self.tasks: set[asyncio.Task[None]] = set()
        self.refused: Counter[tuple[int, int]] = Counter()
        """Refusals by (request code, response code), only for codes that have a handler."""
        self.receive_buffer = receive_buffer()
        self.turn = TurnBudget(loop)
        self.memory = MemoryBudget(loop)
        self.unread = UnreadAnswers()
        self.places = Places()
        self._loop = loop
        self._processors = processors

    def raw(
        self,
        connection: "Connection",
        handler: RawHandler,
        serialize_type: int,
        header: bytes,
        body: bytes,
    ) -> None:
        """Calls a raw handler; runs what it returns over several turns. Raises RemoteProtocolError
        for a frame that the handler could not decode."""
        try:
            later = handler(connection, serialize_type, header, body)
        except RemoteProtocolError:
            raise
        except Exception as error:
            self._refuse(connection, decode_frame(header, b"", serialize_type), error)
            return
        # Decoded only here, since most hot-path handlers are done by now.
        if later is not None:
            cmd = decode_frame(header, b"", serialize_type)
            self._run(connection, cmd, later, len(header) + len(body))

    def request(self, connection: "Connection", cmd: RemotingCommand) -> None:
        handler = self._processors.handlers.get(cmd.code, self._processors.default_handler)
        try:
            result = handler(cmd, connection)
        except Exception as error:
            self._refuse(connection, cmd, error)
            return
        if isinstance(result, RemotingCommand):
            connection.reply(cmd, result)
        elif result is not None:
            self._run(connection, cmd, result, cmd.size)

    def _run(
        self, connection: "Connection", cmd: RemotingCommand, result: Awaitable[Response], size: int
    ) -> None:
        if asyncio.iscoroutine(result):
            large_for = connection.intake.peer_host if cmd.code in self._processors.large else None
            result = Paced(self.turn, result, large_for, lambda: not connection.closed)
        task = self._loop.create_task(self._answer_later(connection, cmd, result))
        self.tasks.add(task)
        connection.intake.handler_began(size)
        # Counted down by a callback: the task may be cancelled before its first step.
        task.add_done_callback(lambda done: self._answered(done, result))
        task.add_done_callback(lambda _: connection.intake.handler_ended(size))

    async def _answer_later(
        self, connection: "Connection", cmd: RemotingCommand, result: Awaitable[Response]
    ) -> None:
        try:
            response = await result
        except Exception as error:
            self._refuse(connection, cmd, error)
            return
        if response is not None:
            connection.reply(cmd, response)

    def _refuse(self, connection: "Connection", cmd: RemotingCommand, error: Exception) -> None:
        if isinstance(error, BrokerRefusal | ResponseError):
            code, remark = error.code, error.remark
        elif isinstance(error, BatonError):
            code, remark = error.response_code, str(error)
        else:
            log.error("request_failed code=%d peer=%s", cmd.code, connection.peer, exc_info=error)
            code, remark = ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}"
        # R58: a guard refuses unknown codes, too, and a stranger could send any number of them.
        if cmd.code in self._processors.handlers or cmd.code in self.raw_handlers:
            self.refused[cmd.code, int(code)] += 1
        connection.reply(cmd, RemotingCommand.refusal_of(cmd, code, remark))

    def _answered(self, task: asyncio.Task[None], result: Awaitable[Response]) -> None:
        self.tasks.discard(task)
        if task.cancelled() and isinstance(result, Paced):
            # Cancelled before its first step: close the handler's coroutine, which was never
            # awaited.
            result.close()


class WriteTurn:
    """Collects the connections with frames to write until the turn ends."""

    __slots__ = ("_dirty", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._dirty: list[Connection] = []

    def add(self, connection: "Connection") -> None:
        if not self._dirty:
            self._loop.call_soon(self.flush)
        self._dirty.append(connection)

    def flush(self) -> None:
        """Writes the frames of all connections; later frames wait for the next turn."""
        # Swap first: frames queued during the flush belong to the next turn.
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            connection.flush()


class Connection(asyncio.BufferedProtocol):
    """One connection of a server or client. `peer` and `local`: "ip:port". `attachments` belong to
    handlers. `last_active_ms`: `boot_ms` of the last received bytes. `on_close` callbacks are
    called once with the connection. `taken`: how many of the peer's frames were handed out. `sign`
    adds a signature to each request sent. `farewell(taken)` makes the one-way request that `close`
    sends last."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        turn: WriteTurn,
        dispatcher: RequestDispatcher,
        *,
        server_side: bool,
        made: Callable[["Connection"], None],
        lost: Callable[["Connection"], None],
    ) -> None:
        self.peer = "?"
        self.local = "?"
        self.descriptor = -1
        self.is_encrypted = False
        self.closed = False
        self.attachments: dict[str, object] = {}
        self.last_active_ms = boot_ms()
        self.on_close: list[Callable[[Connection], None]] = []
        self.taken = 0
        self.sign: Callable[[RemotingCommand], None] | None = None
        self.farewell: Callable[[int], RemotingCommand] | None = None
        self.close_reason = ""
        self._loop = loop
        self._turn = turn
        self._dispatcher = dispatcher
        self._raw_handlers = dispatcher.raw_handlers
        self._budget = dispatcher.turn
        self._server_side = server_side
        self._made = made
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self.intake = Intake(
            FrameReader(dispatcher.receive_buffer),
            dispatcher.turn,
            dispatcher.memory,
            self._take_frames,
            self.abort,
        )
        self._out: list[bytes] = []
        self._out_size = 0
        self._dirty = False
        self._paused = False
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        self._opaque = 0
        timed_out = lambda ms, code: RequestTimeoutError(self.peer, ms, code)  # noqa: E731
        self._pending = PendingRequests(loop, timed_out)

    def keep(self) -> None:
        """Marks the peer as a member, so that this connection is not closed for new ones."""
        self._dispatcher.places.keep(self)

    def probe_when_idle(self) -> None:
        """The kernel probes the peer each second while nothing is sent. A host that restarted
        answers with a reset; one that does not answer ends the connection after 10 s."""
        if self._transport is not None:
            keep_alive_of(self._transport, every_s=1, failures=3)

    def write(self, frame: bytes) -> None:
        """Queues a frame until the end of this turn. Without effect when closed."""
        if self.closed:
            return
        self._out.append(frame)
        self._out_size += len(frame)
        if not self._dirty:
            self._mark_dirty()

    def _mark_dirty(self) -> None:
        if self._paused:
            self.intake.hold(self._out_size)
            has_place = self._dispatcher.memory.has_place(self.intake)
            if self._out_size > BACKLOG_BYTES_MAX or not has_place:
                self.abort(f"peer does not read: {self._out_size} bytes wait for it")
            return
        self._dirty = True
        self._turn.add(self)

    def flush(self) -> None:
        """Gives the transport all queued frames, joined."""
        self._dirty = False
        out = self._out
        if not out or self._transport is None:
            return
        if self._paused:
            self._out = [b"".join(out)]  # they stay queued, and views must not outlive the turn
            return
        self._out = []
        self._out_size = 0
        first = out[0]
        # Joined, as each write is a system call; a single frame needs no copy.
        if len(out) > 1 or not isinstance(first, bytes):
            first = b"".join(out)
        self._transport.write(first)

    def reply(self, request: RemotingCommand, response: RemotingCommand) -> None:
        """Queues the response to a request, unless that was one-way."""
        if request.flag & FLAG_ONEWAY:
            return
        response.opaque = request.opaque
        try:
            frame = encode_frame(response)
        except RemoteProtocolError as error:
            log.error("reply_too_large code=%d peer=%s %s", request.code, self.peer, error)
            refusal = RemotingCommand.refusal_of(
                request, ResponseCode.SYSTEM_ERROR, f"the reply cannot be sent: {error}"
            )
            frame = encode_frame(refusal)
        self.write(frame)

    def _refuse_header(self, serialize_type: int, header: bytes, why: str) -> None:
        request = peek_head(serialize_type, header)
        log.warning("request_refused code=%d peer=%s reason=%s", request.code, self.peer, why)
        self.reply(request, RemotingCommand.refusal_of(request, ResponseCode.SYSTEM_ERROR, why))

    async def invoke(self, cmd: RemotingCommand, timeout_ms: int = 3000) -> RemotingCommand:
        """Sends a request and waits for its response, whatever its code. Raises
        RequestTimeoutError, or ConnectError if the connection ends first."""
        future = self.request(cmd, timeout_ms)
        try:
            return await future
        finally:
            self._pending.drop(cmd.opaque)

    def request(self, cmd: RemotingCommand, timeout_ms: int) -> asyncio.Future[RemotingCommand]:
        """Sends a request; the future ends as `invoke` does. Raises ConnectError when closed."""
        self._prepare(cmd)
        frame = encode_frame(cmd)
        future = self._pending.add(cmd.opaque, cmd.code, timeout_ms)
        self.write(frame)
        return future

    def oneway(self, cmd: RemotingCommand) -> None:
        """Sends a request without response. Raises ConnectError when closed."""
        self._prepare(cmd)
        cmd.flag |= FLAG_ONEWAY
        self.write(encode_frame(cmd))

    def _prepare(self, cmd: RemotingCommand) -> None:
        """Numbers and signs it. Raises ConnectError when closed."""
        if self.closed:
            raise ConnectError(self.peer, f"connection is closed: {self.close_reason}")
        cmd.opaque = self._opaque = (self._opaque + 1) & OPAQUE_MAX
        if self.sign is not None:
            self.sign(cmd)

    def close(self, reason: str) -> None:
        """Ends the connection after the queued frames. After a farewell the peer ends it."""
        if self.closed:
            return
        if self.farewell is not None:
            self.oneway(self.farewell(self.taken))
        self.flush()
        # The peer does not read, so its queued frames might wait forever.
        if self._paused or self._transport is None:
            self.abort(reason)
            return
        if self.farewell is not None:
            # Read and drop what the peer still sends: closing a socket with unread bytes resets it,
            # and the peer could lose our last frames.
            self.intake.read_on()
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:  # TLS closes with an exchange of its own
                self._transport.close()
            self._loop.call_later(LINGER_S, self.drop)
        else:
            self._transport.close()
        self._mark_closed(reason)

    def abort(self, reason: str) -> None:
        """Ends the connection at once; queued frames are lost."""
        if self.closed:
            return
        log.warning("connection_dropped peer=%s local=%s reason=%r", self.peer, self.local, reason)
        self._mark_closed(reason)
        if self._transport is not None:
            self._transport.abort()

    def drop(self) -> None:
        """Aborts a closed connection whose peer does not read its last bytes."""
        if self._transport is not None:
            self._transport.abort()

    def _mark_closed(self, reason: str) -> None:
        self.closed = True
        self.close_reason = reason
        self.intake.close()
        self._out.clear()
        self._out_size = 0
        self._stop_counting()
        # `sent`: they may have been carried out
        self._pending.fail_all(ConnectError(self.peer, f"connection ended: {reason}", sent=True))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.peer = address_of(transport, "peername")
        self.local = address_of(transport, "sockname")
        self.intake.connected(self._transport, self.peer.rpartition(":")[0])
        self.is_encrypted = transport.get_extra_info("sslcontext") is not None
        self.descriptor = descriptor_of(transport)
        limit_unacknowledged_of(transport, UNANSWERED_MS)
        self._made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.closed:
            return self._dispatcher.receive_buffer
        return self.intake.reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self.closed:
            return
        now_s = boot_s()
        self.last_active_ms = int(now_s * 1000)
        if self._budget.spent_s >= TURN_S:  # R58: other connections come first
            self.intake.put_by(nbytes)
        else:
            self._take_frames(nbytes, now_s)

    def _take_frames(self, nbytes: int, begin_s: float) -> None:
        """Hands out complete frames until the slice's time is used up."""
        raw_handlers = self._raw_handlers
        untimed = 0
        frames = self.intake.reader.received(nbytes)
        try:
            for serialize_type, header, body in frames:
                self.taken += 1
                # Before its code is looked for, which may take a second for 16 MiB of small fields.
                # Limits only requests: responses to our own may have any size.
                if (
                    len(header) > SHORT_HEADER
                    and self._server_side
                    and (why := header_problem(serialize_type, header))
                ):
                    self._refuse_header(serialize_type, header, why)
                # Codes of responses and requests overlap: a response must not reach a raw handler.
                elif (
                    raw := raw_handlers.get(peek_code(serialize_type, header))
                ) is None or peek_is_response(serialize_type, header):
                    cmd = decode_frame(header, body, serialize_type)
                    if not cmd.is_response:
                        self._dispatcher.request(self, cmd)
                    elif not self._pending.resolve(cmd):  # its time-out came first
                        log.debug("late_response peer=%s opaque=%d", self.peer, cmd.opaque)
                else:
                    self._dispatcher.raw(self, raw, serialize_type, header, body)
                    untimed += 1 + len(header) // SHORT_HEADER
                    # Not each time: reading the clock costs as much as a small request.
                    if untimed < _UNTIMED and not self.closed:
                        continue
                untimed = 0
                if self.closed or self.intake.must_wait(begin_s, self._out_size):
                    frames.close()
                    break
        except RemoteProtocolError as error:
            self.abort(f"malformed frame: {error}")
        self.intake.slice_ended(begin_s)

    def eof_received(self) -> None:
        if self.intake.reader.waiting and not self.closed:
            self.abort(f"malformed frame: cut off after {self.intake.reader.waiting} bytes")
        elif not self._server_side and not self.closed:
            # At once, or a request written later would be lost unnoticed.
            self._mark_closed("closed by the peer")

    def dial_failed(self) -> None:
        """Its dial was cancelled or timed out, perhaps after it succeeded. uvloop then closes the
        transport without the `connection_lost` that the endpoint waits for."""
        if self._transport is not None:
            self._transport.abort()
            self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is None:  # it is known: `dial_failed`
            return
        if not self.closed:
            self._mark_closed(f"lost: {exc}" if exc is not None else "closed by the peer")
        self._transport = None
        self._budget.in_time(self._ended)  # R58: a host may end thousands in one turn

    def _ended(self) -> None:
        self._lost(self)
        # Each is called once, even if one of them leads back here.
        callbacks, self.on_close = self.on_close, []
        for callback in callbacks:
            callback(self)

    def pause_writing(self) -> None:
        self._paused = True
        if self.closed:
            return
        self._stall_end_s = self._loop.time() + WRITE_STALL_S
        self._count_unread()
        # Only servers stop reading: if both ends stopped, neither would start again.
        self.intake.block(self._server_side)

    def _count_unread(self) -> None:
        """Looks each UNREAD_S whether the peer reads. It has WRITE_STALL_S; R58: if too much waits
        for all peers, it must have read something since the last look."""
        size = self._transport.get_write_buffer_size() if self._transport is not None else 0
        has_read = size < self._unread_bytes or self._stall_timer is None
        self._unread_bytes = size
        is_late = self._dispatcher.unread.note(self.intake, size) and not has_read
        if is_late or self._loop.time() >= self._stall_end_s:
            self.abort(f"peer has not read {size} bytes in time")
        elif not self.closed:
            self._stall_timer = self._loop.call_later(UNREAD_S, self._count_unread)

    def _stop_counting(self) -> None:
        self._dispatcher.unread.remove(self.intake)
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def resume_writing(self) -> None:
        self._paused = False
        self._stop_counting()
        if self.closed:
            return
        self.intake.block(False)
        # Flush now: no turn is scheduled for the frames queued since.
        if self._out and not self._dirty:
            self._mark_dirty()

    def handle(self, request: RemotingCommand) -> None:
        """Handles a kept request as if it had just arrived."""
        self._dispatcher.request(self, request)

    def handle_again(
        self, raw: RawHandler, serialize_type: int, header: bytes, body: bytes
    ) -> None:
        """Calls `raw` with a kept frame as if it had just arrived."""
        try:
            self._dispatcher.raw(self, raw, serialize_type, header, body)
        except RemoteProtocolError as error:
            self.abort(f"malformed frame: {error}")
