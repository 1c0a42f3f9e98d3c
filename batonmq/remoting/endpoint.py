"""Both ends of remoting: a server listens, a client dials. Origin: Java `NettyRemotingServer`,
`NettyRemotingClient`."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import ConnectError, ResponseError
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import (
    Connection,
    Handler,
    Processors,
    RequestDispatcher,
    WriteTurn,
)
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.followed_files import FollowedFiles
from batonmq.runtime.service_manager import held_listener
from batonmq.runtime.sockets import dialled_place, listening_as
from batonmq.runtime.tls import Dialling, PortTls, Tls, TlsState, tls_reason
from batonmq.runtime.tls_listener import Listening, listen
from batonmq.runtime.turns import in_turns, run_in_turns

log = logging.getLogger(__name__)

IDLE_TIMEOUT_S: Final = 120.0
_CLOSE_WAIT_S: Final = 1.0
_CLOSED_AT_ONCE: Final = 128


def answer_tls(tls: Tls | None, more: Callable[[], Mapping[str, Any]] = dict) -> Handler:
    """The handler of BATON_GET_TLS: a TlsState as JSON. `more`: fields that only the caller
    knows."""

    def answer(request: RemotingCommand, _: Connection) -> RemotingCommand:
        watched = FollowedFiles.watched
        state = msgspec.structs.replace(
            tls.state if tls is not None else TlsState(),
            taken={files.name: files.taken_ms for files in watched},
            refusal="; ".join(filter(None, (files.refusal for files in watched))),
            **more(),
        )
        return RemotingCommand.response_to(request, body=msgspec.json.encode(state))

    return answer


class Endpoint:
    """`connections`: the open ones. `on_connect` and `on_disconnect` are called with each."""

    _server_side = True

    def __init__(
        self, processors: Processors, *, name: str, idle_timeout_s: float = IDLE_TIMEOUT_S
    ) -> None:
        self.name = name
        self.connections: set[Connection] = set()
        self.on_connect: Callable[[Connection], None] | None = None
        self.on_disconnect: Callable[[Connection], None] | None = None
        self._processors = processors
        self._idle_timeout_s = idle_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: WriteTurn | None = None
        self._dispatcher: RequestDispatcher | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Event | None = None
        self._next_idle_check_ms = 0

    @property
    def refused(self) -> Mapping[tuple[int, int], int]:
        """Numbers of refused requests, by (request code, response code)."""
        return self._dispatcher.refused if self._dispatcher is not None else {}

    def _bind(self) -> asyncio.AbstractEventLoop:
        """Binds the endpoint to the running loop, at its first use."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._turn = WriteTurn(self._loop)
            self._dispatcher = RequestDispatcher(self._loop, self._processors)
            if self._idle_timeout_s > 0:
                self._schedule_idle_check()
        return self._loop

    def _new_connection(self) -> Connection:
        loop = self._bind()
        assert self._turn is not None and self._dispatcher is not None
        return Connection(
            loop,
            self._turn,
            self._dispatcher,
            server_side=self._server_side,
            made=self._connected,
            lost=self._disconnected,
        )

    def _connected(self, connection: Connection) -> None:
        self.connections.add(connection)
        if self._server_side and self._dispatcher is not None:
            self._dispatcher.places.take(connection)
        if self.on_connect is not None:
            self.on_connect(connection)

    def _disconnected(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self._dispatcher is not None:
            self._dispatcher.places.leave(connection)
        if self.on_disconnect is not None:
            self.on_disconnect(connection)
        if self._empty is not None and not self.connections:
            self._empty.set()

    def _schedule_idle_check(self) -> None:
        assert self._loop is not None
        interval_s = min(self._idle_timeout_s / 4, 10.0)
        self._next_idle_check_ms = boot_ms() + int(interval_s * 1000)
        self._idle_timer = self._loop.call_later(interval_s, self._idle_check)

    def _idle_check(self) -> None:
        now_ms = boot_ms()
        # R8: after a stall all seem idle, so first read what they sent.
        if now_ms - self._next_idle_check_ms <= 100:
            self.close_idle(now_ms)
        self._schedule_idle_check()

    def close_idle(self, now_ms: int) -> None:
        """Closes connections that were silent for the idle timeout, a slice per turn."""
        oldest_ms = now_ms - int(self._idle_timeout_s * 1000)
        idle = [c for c in self.connections if c.last_active_ms <= oldest_ms]

        def close_some() -> bool:
            for connection in idle[-_CLOSED_AT_ONCE:]:
                # Check again: it may have sent something since the list was made.
                if connection.last_active_ms <= oldest_ms:
                    log.info("connection_idle peer=%s endpoint=%s", connection.peer, self.name)
                    connection.close(f"idle for {self._idle_timeout_s:g} s")
            del idle[-_CLOSED_AT_ONCE:]
            return bool(idle)

        run_in_turns(close_some)

    async def _close_connections(self, reason: str) -> None:
        """Closes all connections and waits until they and their handlers have ended."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        # Not the current task: a handler may be closing this endpoint.
        running = self._dispatcher.tasks if self._dispatcher is not None else set()
        tasks = {task for task in running if task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._empty = asyncio.Event()
        async for connection in in_turns(list(self.connections), _CLOSED_AT_ONCE):
            connection.close(reason)
        if self.connections:
            try:
                async with asyncio.timeout(_CLOSE_WAIT_S):
                    await self._empty.wait()
            except TimeoutError:
                async for connection in in_turns(list(self.connections), _CLOSED_AT_ONCE):
                    connection.drop()
                await self._empty.wait()
        self._empty = None


class RemotingServer(Endpoint):
    """A server on any number of addresses (a broker: its port and port - 2). Set the hooks before
    `listen`."""

    _server_side = True

    def __init__(
        self,
        processors: Processors,
        *,
        name: str = "server",
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        tls: PortTls | None = None,
    ) -> None:
        super().__init__(processors, name=name, idle_timeout_s=idle_timeout_s)
        self._tls = tls
        self._peers = tls.peers if tls is not None and tls.mode == "permissive" else None
        self._listeners: list[Listening] = []

    def _connected(self, connection: Connection) -> None:
        if self._peers is not None:
            self._peers.add(connection, connection.peer, encrypted=connection.is_encrypted)
        super()._connected(connection)

    def _disconnected(self, connection: Connection) -> None:
        if self._peers is not None:
            self._peers.discard(connection)
        super()._disconnected(connection)

    async def listen(self, host: str, port: int) -> int:
        """Listens on one more address; returns the port (`port` 0: any free one). Uses the service
        manager's socket for that port, if any. Raises CannotListenError."""
        self._bind()
        held = held_listener(port)
        with listening_as(self.name, port):
            listener = await listen(
                self._new_connection, self._tls, name=self.name, host=host, port=port, held=held
            )
        self._listeners.append(listener)
        bound = int(listener.sockets[0].getsockname()[1])
        log.info("listening endpoint=%s address=%s:%d", self.name, host, bound)
        return bound

    async def close(self) -> None:
        """Stops listening, closes all connections, cancels running handlers."""
        listeners, self._listeners = self._listeners, []
        # First, so that no client connects while the connections are closed.
        for listener in listeners:
            listener.close()
        await self._close_connections("the server is closing")
        for listener in listeners:
            await listener.wait_closed()


class RemotingClient(Endpoint):
    """A client with one shared connection per address "host:port", made on demand and again after a
    loss. `tls` None: without TLS. `sign` signs each request; None: unsigned. `processors` handle
    the servers' requests."""

    _server_side = False

    def __init__(
        self,
        processors: Processors | None = None,
        *,
        connect_timeout_ms: int = 3000,
        name: str = "client",
        tls: Dialling | None = None,
        sign: Callable[[RemotingCommand], None] | None = None,
    ) -> None:
        super().__init__(processors or Processors(), name=name)
        self._sign = sign
        self._tls = tls
        self._connect_timeout_s = connect_timeout_ms / 1000
        self._by_address: dict[str, Connection] = {}
        self._dials: dict[str, asyncio.Task[Connection]] = {}
        self._closed = False

    async def invoke(
        self, address: str, cmd: RemotingCommand, timeout_ms: int = 3000
    ) -> RemotingCommand:
        """Sends a request and returns the response, whatever its code. The timeout includes
        connecting. Raises ConnectError or RequestTimeoutError."""
        loop = self._bind()
        started = loop.time()
        connection = self.live_connection(address)
        if connection is None:
            connection = await self.connection(address, timeout_ms=timeout_ms)
        left_ms = timeout_ms - int((loop.time() - started) * 1000)
        return await connection.invoke(cmd, max(left_ms, 1))

    async def call(
        self, address: str, cmd: RemotingCommand, timeout_ms: int = 3000
    ) -> RemotingCommand:
        """As `invoke`, but raises ResponseError for any code other than SUCCESS (0)."""
        response = await self.invoke(address, cmd, timeout_ms)
        if response.code != ResponseCode.SUCCESS:
            raise ResponseError(response.code, response.remark, address)
        return response

    async def oneway(self, address: str, cmd: RemotingCommand) -> None:
        """Sends a request without response. Raises ConnectError."""
        (self.live_connection(address) or await self.connection(address)).oneway(cmd)

    def live_connection(self, address: str) -> Connection | None:
        """The open connection to an address, if any."""
        connection = self._by_address.get(address)
        return None if connection is None or connection.closed else connection

    async def connection(self, address: str, *, timeout_ms: int | None = None) -> Connection:
        """The connection to an address, made if needed; concurrent callers share one attempt.
        Raises ConnectError."""
        connection = self.live_connection(address)
        if connection is not None:
            return connection
        dial = self._dials.get(address)
        if dial is None:
            if self._closed:
                raise ConnectError(address, "the client is closed")
            dial = self._bind().create_task(self._dial(address))
            self._dials[address] = dial
            dial.add_done_callback(lambda task: self._dialled(address, task))
        # None: the dial's own limit.
        timeout_s = None if timeout_ms is None else timeout_ms / 1000
        # Not wait_for: it ends the dial of all callers with this one, and in Python 3.11 swallows a
        # cancellation at the moment when the dial ends.
        ended, _ = await asyncio.wait((dial,), timeout=timeout_s)
        if not ended:
            raise ConnectError(address, f"no connection within {timeout_ms} ms")
        if dial.cancelled():
            raise ConnectError(address, "the attempt to connect was ended")
        return dial.result()

    def _dialled(self, address: str, dial: asyncio.Task[Connection]) -> None:
        # After `close_connection` the address may have a newer dial: keep that.
        if self._dials.get(address) is dial:
            del self._dials[address]
        if not dial.cancelled():
            # Marks the error as retrieved: all callers may have given up.
            dial.exception()

    async def _dial(self, address: str) -> Connection:
        loop = self._bind()
        context = self._tls.dials if self._tls is not None else None
        connection = self._new_connection()
        with contextlib.ExitStack() as failed:
            failed.callback(connection.dial_failed)
            try:
                host, port = dialled_place(address)
                async with asyncio.timeout(self._connect_timeout_s):
                    await loop.create_connection(lambda: connection, host, port, ssl=context)
            except TimeoutError:
                limit_ms = int(self._connect_timeout_s * 1000)
                raise ConnectError(address, f"no connection within {limit_ms} ms") from None
            except OSError as error:
                raise ConnectError(address, tls_reason(error)) from error
            except ValueError as error:  # a route may name any text
                raise ConnectError(address, str(error)) from error
            failed.pop_all()
        connection.sign = self._sign
        self._by_address[address] = connection
        connection.on_close.append(lambda closed: self._forget(address, closed))
        return connection

    def _forget(self, address: str, connection: Connection) -> None:
        # The address may have a newer connection: keep that.
        if self._by_address.get(address) is connection:
            del self._by_address[address]

    def close_connection(self, address: str, reason: str = "no longer needed") -> None:
        """Closes the connection to an address, if any. Who waits for one gets ConnectError: a dial
        may take seconds, to a host that is cut off or a process that is just starting with TLS."""
        dial = self._dials.pop(address, None)
        if dial is not None:  # else it would put a new connection there
            dial.cancel()
        connection = self._by_address.pop(address, None)
        if connection is not None:
            connection.close(reason)

    async def close(self) -> None:
        """Closes all connections; later calls raise ConnectError."""
        self._closed = True
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        if dials:
            await asyncio.wait(dials)
        await self._close_connections("the client is closing")
