"""The network of the simulation: ordered streams and gRPC calls with delays, cuts and deaths.

A blocked pair of hosts loses nothing, as with TCP: bytes wait until the block ends. The streams of
a killed process end, unless its host vanished with it.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc.aio import AioRpcError, Metadata

from tests.sim.sim_loop import Process, SimLoop, current_process

_END = object()
_NO_PROCESS = contextvars.Context()


def at_world(loop: SimLoop, when_s: float, callback: Callable[..., object], *args: Any) -> None:
    """Calls it at that time, in no process: no kill and no pause delays it."""
    asyncio.BaseEventLoop.call_at(loop, when_s, callback, *args, context=_NO_PROCESS.copy())


class Network:
    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.blocked: set[frozenset[str]] = set()
        self.one_way: set[tuple[str, str]] = set()  # (from, to): bytes this way do not arrive
        self.listeners: dict[tuple[str, int], tuple[Process, Callable[[], Any]]] = {}
        self.endpoints: dict[str, tuple[Process, Any]] = {}  # by gRPC address
        self.waiting: list[Pipe] = []
        self.slow = False
        self.muted = False
        loop.network = self

    def delay_s(self) -> float:
        roll = self.rng.random()
        if roll < (0.2 if self.slow else 0.01):
            return self.rng.uniform(0.005, 0.08)
        return self.rng.uniform(0.0001, 0.0015)

    def is_blocked(self, one: str, other: str) -> bool:
        """Whether what `one` sends does not reach `other`."""
        if (one, other) in self.one_way:
            return True
        return bool(self.blocked) and frozenset((one, other)) in self.blocked

    def is_unreachable(self, one: str, other: str) -> bool:
        """Whether `one` cannot connect to `other`, or receives no answer."""
        return self.is_blocked(one, other) or self.is_blocked(other, one)

    def block(self, one: str, other: str) -> None:
        self.blocked.add(frozenset((one, other)))

    def heal(self) -> None:
        self.blocked.clear()
        self.one_way.clear()
        waiting, self.waiting = self.waiting, []
        for pipe in waiting:
            pipe.pump()

    # -- streams

    def listen(self, process: Process, factory: Callable[[], Any], host: str, port: int) -> Any:
        key = (process.host, port)
        self.listeners[key] = (process, factory)
        process.on_kill.append(lambda: self._unlisten(key, process))
        return _Server(self, key)

    def _unlisten(self, key: tuple[str, int], process: Process) -> None:
        if self.listeners.get(key, (None,))[0] is process:
            del self.listeners[key]

    async def connect(
        self, process: Process, factory: Callable[[], Any], host: str, port: int
    ) -> Any:
        protocol = factory()
        await asyncio.sleep(self.delay_s())
        for _ in range(300):
            if not self.is_unreachable(process.host, host):
                break
            await asyncio.sleep(0.01)
        else:
            raise OSError("timed out")
        listener = self.listeners.get((host, port))
        if listener is None:
            raise ConnectionRefusedError(f"{host}:{port}")
        server, make = listener
        near = SimTransport(self, process, server.host)
        far = SimTransport(self, server, process.host)
        near.peer, far.peer = far, near
        near.out = Pipe(self, process.host, server, far.receive)
        far.out = Pipe(self, server.host, process, near.receive)
        near.protocol = protocol
        server.post(far.accepted, make)
        self.loop.call_soon(protocol.connection_made, near)
        await asyncio.sleep(0)
        return near, protocol


class _Server:
    def __init__(self, network: Network, key: tuple[str, int]) -> None:
        self._network, self._key = network, key
        self.sockets = [self]

    def getsockname(self) -> tuple[str, int]:
        return self._key

    def close(self) -> None:
        self._network.listeners.pop(self._key, None)

    async def wait_closed(self) -> None:
        pass


class Pipe:
    """One direction between two processes, in order."""

    def __init__(
        self, network: Network, source: str, target: Process, deliver: Callable[[Any], None]
    ) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._deliver = deliver
        self._queue: deque[tuple[float, Any]] = deque()
        self._armed = False

    def send(self, item: Any) -> None:
        network = self._network
        if network.muted:
            return
        self._queue.append((network.loop.time() + network.delay_s(), item))
        self.pump()

    def pump(self) -> None:
        if self._armed or not self._queue or self._target.dead:
            return
        network = self._network
        if network.is_blocked(self._source, self._target.host):
            network.waiting.append(self)
            return
        self._armed = True
        at_world(network.loop, max(self._queue[0][0], network.loop.time()), self._fire)

    def _fire(self) -> None:
        self._armed = False
        network = self._network
        if not network.is_blocked(self._source, self._target.host):
            now = network.loop.time()
            while self._queue and self._queue[0][0] <= now:
                self._target.post(self._deliver, self._queue.popleft()[1])
        self.pump()


class SimTransport(asyncio.Transport):
    """One end of a stream. Bytes are taken at `write`, as a kernel with room takes them."""

    def __init__(self, network: Network, process: Process, peer_host: str) -> None:
        super().__init__()
        self._network = network
        self.process = process
        self.peer_host = peer_host
        self.peer: SimTransport
        self.out: Pipe
        self.protocol: Any = None
        self.ended = False
        process.on_kill.append(self._killed)

    def accepted(self, make: Callable[[], Any]) -> None:
        self.protocol = make()
        self.protocol.connection_made(self)

    def _killed(self) -> None:
        if not self.ended:
            self.ended = True
            if not self.process.vanished:
                self.out.send(_END)

    def write(self, data: Any) -> None:
        if not self.ended:
            self.out.send(bytes(data))

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        if not self.ended:
            self.ended = True
            self.out.send(_END)
            self._network.loop.call_soon(self.protocol.connection_lost, None)

    def is_closing(self) -> bool:
        return self.ended

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.peer_host, 0) if name == "peername" else default

    def receive(self, data: Any) -> None:
        if self.ended:
            return
        if data is _END:
            self.ended = True
            self.protocol.connection_lost(None)
            return
        cut = len(data)
        if self._network.rng.random() < 0.2:
            cut = self._network.rng.randint(1, len(data))
        for piece in (data[:cut], data[cut:]):
            if piece and not self.ended:
                self._feed(piece)

    def _feed(self, piece: bytes) -> None:
        if isinstance(self.protocol, asyncio.BufferedProtocol):
            self.protocol.get_buffer(-1)[: len(piece)] = piece
            self.protocol.buffer_updated(len(piece))
        else:
            self.protocol.data_received(piece)


# -- gRPC


def _error(code: grpc.StatusCode, details: str) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details=details)


class CallContext:
    """The context argument of a handler."""

    def __init__(self, write: Callable[[Any], None] | None = None) -> None:
        self.trailing: tuple[tuple[str, str], ...] = ()
        self._write = write

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise _error(code, details)

    def set_trailing_metadata(self, trailing: tuple[tuple[str, str], ...]) -> None:
        self.trailing = trailing

    async def write(self, message: Any) -> None:
        assert self._write is not None
        self._write(message)


class SimChannels:
    """`ControllerChannels` of one broker process over the simulated network."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def channel(self, address: str) -> _Channel:
        return _Channel(self._network, address)

    def stub(self, address: str) -> Any:
        return _Stub(self._network, address)

    async def drop(self, address: str) -> None:
        pass

    async def replace(self, address: str) -> None:
        pass

    async def close(self) -> None:
        pass


class _Channel:
    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address

    async def channel_ready(self) -> None:
        host = self._address.rpartition(":")[0]
        here = current_process().host
        network = self._network
        while self._address not in network.endpoints or network.is_unreachable(here, host):  # noqa: ASYNC110  two places end it
            await asyncio.sleep(0.05)


class _Stub:
    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address

    def BrokerSession(self, requests: AsyncIterator[Any]) -> _Stream:
        return _Stream(self._network, self._address, requests)

    def __getattr__(self, method: str) -> Callable[..., _Call]:
        return lambda request, timeout: _Call(
            self._network, self._address, method, request, timeout
        )


class _Call:
    def __init__(
        self, network: Network, address: str, method: str, request: Any, timeout: float
    ) -> None:
        self._timeout = timeout
        self._reply: asyncio.Future[Any] = network.loop.create_future()
        self._trailing: tuple[tuple[str, str], ...] = ()
        self._network = network
        self._client = current_process()
        self._host = address.rpartition(":")[0]
        entry = network.endpoints.get(address)
        if entry is None:
            self._answer_later(_error(grpc.StatusCode.UNAVAILABLE, "refused"))
            return
        server, endpoint = entry
        Pipe(network, self._client.host, server, self._serve).send(
            (server, endpoint, method, request)
        )
        server.on_kill.append(lambda: self._server_died(server))

    def _server_died(self, server: Process) -> None:
        if not server.vanished:
            self._answer_later(_error(grpc.StatusCode.UNAVAILABLE, "socket closed"))

    def _answer_later(self, outcome: Any) -> None:
        Pipe(self._network, self._host, self._client, self._answered).send((outcome, ()))

    def _serve(self, item: Any) -> None:
        server, endpoint, method, request = item

        async def handle() -> None:
            context = CallContext()
            outcome: Any
            try:
                outcome = await getattr(endpoint, method)(request, context)
            except AioRpcError as error:
                outcome = error
            Pipe(self._network, self._host, self._client, self._answered).send(
                (outcome, context.trailing)
            )

        server.loop.create_task(handle())

    def _answered(self, item: Any) -> None:
        outcome, self._trailing = item
        if self._reply.done():
            return
        if isinstance(outcome, AioRpcError):
            self._reply.set_exception(outcome)
        else:
            self._reply.set_result(outcome)

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.shield(self._reply)
        except TimeoutError:
            self._reply.cancel()
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline") from None

    async def trailing_metadata(self) -> Any:
        return self._trailing


class _Stream:
    """The client's end of a BrokerSession."""

    def __init__(self, network: Network, address: str, requests: AsyncIterator[Any]) -> None:
        self._network = network
        self._client = current_process()
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()
        self._cancelled = False
        self._sender: asyncio.Task[None] | None = None
        entry = network.endpoints.get(address)
        if entry is None:
            self._incoming.put_nowait(_error(grpc.StatusCode.UNAVAILABLE, "refused"))
            return
        server, endpoint = entry
        self._upward: asyncio.Queue[Any] = asyncio.Queue()
        self._up = Pipe(network, self._client.host, server, self._at_server)
        self._down = Pipe(network, server.host, self._client, self._incoming.put_nowait)
        self._server, self._endpoint = server, endpoint
        self._handler: asyncio.Task[None] | None = None
        lost = _error(grpc.StatusCode.UNAVAILABLE, "socket closed")
        self._client.on_kill.append(lambda: self._ended(self._client, self._up, _END))
        server.on_kill.append(lambda: self._ended(server, self._down, lost))
        self._sender = network.loop.create_task(self._send_all(requests))

    @staticmethod
    def _ended(process: Process, pipe: Pipe, last: Any) -> None:
        if not process.vanished:
            pipe.send(last)

    async def _send_all(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            self._up.send(request)
        self._up.send(_END)

    def _at_server(self, item: Any) -> None:
        self._upward.put_nowait(item)
        if self._handler is None:
            self._handler = self._network.loop.create_task(self._handle())

    async def _handle(self) -> None:
        try:
            await self._endpoint.BrokerSession(self._requests(), CallContext(self._down.send))
            self._down.send(_END)
        except AioRpcError as error:
            self._down.send(error)

    async def _requests(self) -> AsyncIterator[Any]:
        while (item := await self._upward.get()) is not _END:
            yield item

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> Any:
        if self._cancelled:
            raise asyncio.CancelledError
        item = await self._incoming.get()
        if item is _END:
            raise StopAsyncIteration
        if isinstance(item, AioRpcError):
            raise item
        if item is None:
            raise asyncio.CancelledError
        return item

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            if self._sender is not None:
                self._sender.cancel()
                self._up.send(_END)
            self._incoming.put_nowait(None)
