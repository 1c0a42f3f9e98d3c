"""gRPC over the simulated network: it takes the place of `grpc.aio.insecure_channel` and `server`.

Stubs and servicers are the generated ones, and every message is encoded and decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc.aio import AioRpcError, Metadata

from lab.sim.loop import SimProcess, current_process
from lab.sim.network import Pipe, SimNetwork

_END = object()


def _error(code: grpc.StatusCode, details: str) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details=details)


class CallContext:
    """The context argument of a handler."""

    def __init__(self, write: Callable[[Any], None] | None = None) -> None:
        self.trailing: tuple[tuple[str, str], ...] = ()
        self._write = write

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise _error(code, details)

    def peer(self) -> str:
        return ""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()  # no client signs in the simulation

    def set_trailing_metadata(self, trailing: tuple[tuple[str, str], ...]) -> None:
        self.trailing = trailing

    async def write(self, message: Any) -> None:
        assert self._write is not None
        self._write(message)


class SimServer:
    """As `grpc.aio.Server`: of one process, on any number of ports."""

    def __init__(self, network: SimNetwork) -> None:
        self._network = network
        self._process = current_process()
        self._methods: dict[str, Any] = {}
        self._addresses: list[str] = []
        self.handlers: list[asyncio.Task[None]] = []

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The registered ones are those that are used."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._methods.update({f"/{service}/{name}": each for name, each in handlers.items()})

    def add_insecure_port(self, address: str) -> int:
        port = address.rpartition(":")[2]
        self._addresses.append(f"{self._process.host}:{port}")
        return int(port)

    async def start(self) -> None:
        for address in self._addresses:
            self._network.endpoints[address] = (self._process, self)
        self._network.more_is_reachable()
        self._process.on_kill.append(self._unlisten)

    def _unlisten(self) -> None:
        for address in self._addresses:
            if self._network.endpoints.get(address, (None,))[0] is self._process:
                del self._network.endpoints[address]

    async def stop(self, grace: float | None) -> None:
        self._unlisten()
        for task in self.handlers:
            task.cancel()
        await asyncio.gather(*self.handlers, return_exceptions=True)

    def method(self, path: str) -> Any:
        return self._methods[path]

    def spawn(self, work: Any) -> None:
        self.handlers = [task for task in self.handlers if not task.done()]
        self.handlers.append(asyncio.get_running_loop().create_task(work))


class SimChannel:
    """As `grpc.aio.Channel`."""

    def __init__(self, network: SimNetwork, address: str) -> None:
        self.network, self.address = network, address
        self._calls: list[_Call | _Stream] = []

    async def channel_ready(self) -> None:
        host = self.address.rpartition(":")[0]
        here = current_process().host
        network = self.network
        await network.until(
            lambda: self.address in network.endpoints and not network.is_unreachable(here, host)
        )
        await asyncio.sleep(network.delay_between_s(here, host))

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., _Call]:
        def begin(request: Any, timeout: float | None = None) -> _Call:
            raw = request_serializer(request)
            call = _Call(self, path, raw, response_deserializer, timeout)
            self._keep(call)
            return call

        return begin

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., _Stream]:
        def begin(requests: AsyncIterator[Any]) -> _Stream:
            call = _Stream(self, path, requests, (request_serializer, response_deserializer))
            self._keep(call)
            return call

        return begin

    def _keep(self, call: _Call | _Stream) -> None:
        self._calls = [each for each in self._calls if not each.done()]
        self._calls.append(call)

    async def close(self, grace: float | None = None) -> None:
        calls, self._calls = self._calls, []
        if grace and calls:
            await asyncio.sleep(grace)
        for call in calls:
            call.cancel()


class _Call:
    """One unary call."""

    def __init__(
        self, channel: SimChannel, path: str, raw: bytes, decode: Any, timeout: float | None
    ) -> None:
        network = channel.network
        self._timeout = timeout
        self._decode = decode
        self._reply: asyncio.Future[Any] = network.loop.create_future()
        self._trailing: tuple[tuple[str, str], ...] = ()
        self._network = network
        self._client = current_process()
        self._host = channel.address.rpartition(":")[0]
        entry = network.endpoints.get(channel.address)
        if entry is None:
            self._answer_later(_error(grpc.StatusCode.UNAVAILABLE, "refused"))
            return
        process, server = entry
        Pipe(network, self._client.host, process, self._serve).send((process, server, path, raw))
        process.on_kill.append(lambda: self._server_died(process))

    def done(self) -> bool:
        return self._reply.done()

    def cancel(self) -> None:
        self._reply.cancel()

    def _server_died(self, server: SimProcess) -> None:
        if not server.vanished and not self.done():
            self._answer_later(_error(grpc.StatusCode.UNAVAILABLE, "socket closed"))

    def _answer_later(self, outcome: Any) -> None:
        Pipe(self._network, self._host, self._client, self._answered).send((outcome, ()))

    def _serve(self, item: Any) -> None:
        _, server, path, raw = item
        method = server.method(path)

        async def handle() -> None:
            context = CallContext()
            outcome: Any
            try:
                reply = await method.unary_unary(method.request_deserializer(raw), context)
                outcome = method.response_serializer(reply)
            except AioRpcError as error:
                outcome = error
            except asyncio.CancelledError:
                outcome = _error(grpc.StatusCode.UNAVAILABLE, "the server is closing")
            Pipe(self._network, self._host, self._client, self._answered).send(
                (outcome, context.trailing)
            )

        server.spawn(handle())

    def _answered(self, item: Any) -> None:
        outcome, self._trailing = item
        if self._reply.done():
            return
        if isinstance(outcome, AioRpcError):
            self._reply.set_exception(outcome)
        else:
            self._reply.set_result(self._decode(outcome))

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
    """The client's end of a stream."""

    def __init__(
        self, channel: SimChannel, path: str, requests: AsyncIterator[Any], codec: tuple[Any, Any]
    ) -> None:
        network = channel.network
        self._network = network
        self._encode, self._decode = codec
        self._client = current_process()
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()
        self._cancelled = False
        self._sender: asyncio.Task[None] | None = None
        entry = network.endpoints.get(channel.address)
        if entry is None:
            self._incoming.put_nowait(_error(grpc.StatusCode.UNAVAILABLE, "refused"))
            return
        process, self._server = entry
        self._method = self._server.method(path)
        self._upward: asyncio.Queue[Any] = asyncio.Queue()
        self._up = Pipe(network, self._client.host, process, self._at_server)
        self._down = Pipe(network, process.host, self._client, self._incoming.put_nowait)
        self._handled = False
        lost = _error(grpc.StatusCode.UNAVAILABLE, "socket closed")
        self._client.on_kill.append(lambda: self._ended(self._client, self._up, _END))
        process.on_kill.append(lambda: self._ended(process, self._down, lost))
        self._sender = network.loop.create_task(self._send_all(requests))
        network.streams = [each for each in network.streams if not each.done()]
        network.streams.append(self)

    @property
    def client_host(self) -> str:
        return self._client.host

    def reset(self) -> None:
        """The connection breaks, as by a proxy: both ends see it."""
        self._up.send(_END)
        self._incoming.put_nowait(_error(grpc.StatusCode.UNAVAILABLE, "connection reset"))

    def done(self) -> bool:
        return self._cancelled or self._client.dead

    @staticmethod
    def _ended(process: SimProcess, pipe: Pipe, last: Any) -> None:
        if not process.vanished:
            pipe.send(last)

    async def _send_all(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            self._up.send(self._encode(request))
        self._up.send(_END)

    def _at_server(self, item: Any) -> None:
        self._upward.put_nowait(item)
        if not self._handled:
            self._handled = True
            self._server.spawn(self._handle())

    async def _handle(self) -> None:
        method = self._method

        def write(message: Any) -> None:
            self._down.send(method.response_serializer(message))

        try:
            await method.stream_stream(self._requests(), CallContext(write))
            self._down.send(_END)
        except AioRpcError as error:
            self._down.send(error)
        except asyncio.CancelledError:
            self._down.send(_error(grpc.StatusCode.UNAVAILABLE, "the server is closing"))

    async def _requests(self) -> AsyncIterator[Any]:
        while (item := await self._upward.get()) is not _END:
            yield self._method.request_deserializer(item)

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
        return self._decode(item)

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            if self._sender is not None:
                self._sender.cancel()
                self._up.send(_END)
            self._incoming.put_nowait(None)  # wakes who waits for the next message
