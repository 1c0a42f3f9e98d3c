"""What a stranger may open at the gRPC port of a controller, and who keeps a place (R58)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import struct
from collections.abc import AsyncIterator, Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from test_admission import registration
from test_remoting_endpoint import Endpoint, endpoint, serving

from batonmq.controller.endpoints import grpc_endpoint, grpc_places
from batonmq.controller.endpoints.grpc_places import GrpcPlaces
from batonmq.controller.watch import SESSIONS_OF_ID_MAX, STRANGERS_MAX
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1 import controller_pb2_grpc as pb_grpc
from batonmq.protocol.codes import ResponseCode
from batonmq.runtime import tasks
from batonmq.runtime.sockets import CannotListenError
from tests.shared.waiting import until

__all__ = ["endpoint"]

SERVICE = b"/baton.controller.v1.ControllerService/"
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
WINDOW = 4
"""The setting of how many bytes of an answer may come before any is read."""
ONE_CHANNEL_EACH = (("grpc.use_local_subchannel_pool", 1),)


class RawClient:
    """HTTP/2 by hand: it minds no limit that the server sets."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._stream = 1
        self.streams_allowed = 0

    @classmethod
    async def dial(cls, port: int, settings: bytes = b"") -> RawClient:
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0, settings)
        client.writer.write(hello)
        return client

    def open_stream(self, method: bytes = b"BrokerSession") -> None:
        """A call that sends nothing yet."""
        fields = {
            b":method": b"POST",
            b":scheme": b"http",
            b":path": SERVICE + method,
            b":authority": b"x",
            b"te": b"trailers",
            b"content-type": b"application/grpc",
        }
        block = b"".join(
            b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
            for name, value in fields.items()
        )
        self.writer.write(_frame(HEADERS, 4, self._stream, block))
        self._stream += 2

    def ask(self, method: bytes) -> None:
        """A call with an empty request."""
        self.open_stream(method)
        self.writer.write(_frame(DATA, 1, self._stream - 2, bytes(5)))

    async def refused(self, count: int) -> None:
        """Returns once so many streams were reset."""
        while count:
            head = await self._reader.readexactly(9)
            size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
            payload = await self._reader.readexactly(size)
            if kind == SETTINGS and not flags & 1:
                settings = dict(struct.iter_unpack(">HI", payload))
                self.streams_allowed = settings.get(3, 0)
                self.writer.write(_frame(SETTINGS, 1, 0, b""))
            count -= kind == RST_STREAM

    async def settled(self) -> None:
        """Returns once the server has begun to speak HTTP/2."""
        async with asyncio.timeout(20):
            await self._reader.readexactly(9)

    async def ended(self) -> bool:
        """Whether the server ends the connection, in 20 s at most."""
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                await self._reader.read()
        self.writer.close()
        return True


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


class Caller:
    """A session over a connection of its own."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.channel = grpc.aio.insecure_channel(
            endpoint.service.config.self_peer.grpc_address, options=ONE_CHANNEL_EACH
        )
        self.call: Any = pb_grpc.ControllerServiceStub(self.channel).BrokerSession()

    async def hello(self, name: str, broker_id: int, incarnation: str) -> Caller:
        hello = pb.Hello(broker_name=name, broker_id=broker_id, incarnation=incarnation)
        await self.call.write(pb.BrokerMessage(hello=hello))
        return self

    async def ended(self) -> grpc.StatusCode:
        """How it ended."""
        async with asyncio.timeout(20):
            try:
                while await self.call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError:
                pass
            code: grpc.StatusCode = await self.call.code()
        return code

    async def beats(self) -> None:
        """It lives: a heartbeat is answered."""
        await self.call.write(pb.BrokerMessage(heartbeat=pb.Heartbeat(sequence=1)))
        async with asyncio.timeout(20):
            while (await self.call.read()).WhichOneof("kind") != "answer":
                pass


Dial = Callable[[], Caller]


@pytest.fixture
@contextlib.asynccontextmanager
async def dialled(tmp_path: Path) -> AsyncIterator[tuple[Endpoint, Dial]]:
    """A controller, and a function that makes a caller, ended behind it."""
    callers: list[Caller] = []

    def dial() -> Caller:
        callers.append(Caller(endpoint))
        return callers[-1]

    async with serving(tmp_path) as endpoint:
        yield endpoint, dial
        for caller in callers:
            await caller.channel.close()


def set_option(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    options = dict(grpc_endpoint._SERVER_OPTIONS) | {name: value}
    monkeypatch.setattr(grpc_endpoint, "_SERVER_OPTIONS", tuple(options.items()))


async def test_r58_a_connection_opens_a_limited_number_of_streams(dialled):
    endpoint, dial = dialled
    client = await RawClient.dial(endpoint.service.config.self_peer.grpc_port)
    for _ in range(200):
        client.open_stream()
    async with asyncio.timeout(20):
        await client.refused(200 - grpc_endpoint._STREAMS_MAX)
    assert client.streams_allowed == grpc_endpoint._STREAMS_MAX
    await (await dial().hello("a", 1, "life")).beats()
    client.writer.close()


async def test_r58_streams_without_hello_end_the_oldest_first(dialled, monkeypatch):
    monkeypatch.setattr(grpc_endpoint, "_HELLOS_AWAITED_MAX", 2)
    endpoint, dial = dialled
    awaited = endpoint.service._grpc_endpoint._hellos.awaited
    silent = []
    for number in range(3):
        silent.append(dial())
        before = set(awaited)
        await until(lambda before=before: set(awaited) - before)
        assert len(awaited) == min(number + 1, 3)
    assert await silent[0].ended() is grpc.StatusCode.DEADLINE_EXCEEDED
    await (await silent[2].hello("a", 1, "life")).beats()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("", grpc.StatusCode.DEADLINE_EXCEEDED),
        ("x" * grpc_endpoint._MESSAGE_SIZE_MAX, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["without Hello", "with a large one"],
)
async def test_r58_a_stream_ends(dialled, monkeypatch, name, code):
    if not name:
        monkeypatch.setattr(grpc_endpoint, "_HELLO_S", 0.01)
    _endpoint, dial = dialled
    caller = dial()
    if name:
        await caller.hello(name, 1, "life")
    assert await caller.ended() is code


async def test_r58_histories_that_are_not_read_are_few(dialled):
    """Each takes up to 8 MiB until its caller reads it."""
    endpoint, _ = dialled
    histories = endpoint.service._grpc_endpoint._histories
    port = endpoint.service.config.self_peer.grpc_port
    never_reads = await RawClient.dial(port, struct.pack(">HI", WINDOW, 0))
    for _ in range(2 * grpc_endpoint._HISTORIES_MAX):
        never_reads.ask(b"GetHistory")
    await until(lambda: histories._of_host["127.0.0.1"] == grpc_endpoint._HISTORIES_MAX)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        history = pb_grpc.ControllerServiceStub(channel).GetHistory
        refused = (await history(pb.GetHistoryRequest())).status
        assert refused.code == ResponseCode.SYSTEM_BUSY and "on their way" in refused.remark
        never_reads.writer.close()
        await until(lambda: not histories._of_host)
        assert (await history(pb.GetHistoryRequest())).status.code == ResponseCode.SUCCESS


async def test_r58_sessions_of_strangers_take_no_place_of_a_registered_broker(dialled):
    endpoint, dial = dialled
    requests, sessions = endpoint.service.requests, endpoint.service.sessions
    assert (await requests.submit(registration("a"))).ok
    own = await dial().hello("a", 1, "life")
    await own.beats()
    for number in range(STRANGERS_MAX):
        await dial().hello(f"s{number}", 1, "life")
    await until(lambda: len(sessions) == STRANGERS_MAX + 1)
    refused = await dial().hello("one-more", 1, "life")
    assert await refused.ended() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await (await dial().hello("a", 1, "life")).beats()
    await own.beats()
    newer = [await dial().hello("a", 1, "life") for _ in range(SESSIONS_OF_ID_MAX)]
    await newer[-1].beats()
    assert await own.ended() is not None
    assert len(list(sessions.of_group("a"))) <= SESSIONS_OF_ID_MAX + 1


async def _admitted(endpoint: Endpoint) -> Caller:
    """gRPC gives a place back a moment after it closed the connection: a broker dials again."""
    while True:
        caller = Caller(endpoint)
        try:
            await caller.hello("b", 1, "life")
            await caller.beats()
        except grpc.aio.AioRpcError:
            await caller.channel.close()
        else:
            return caller


async def test_r58_connections_are_limited_and_a_broker_keeps_and_gets_its_place(
    tmp_path, monkeypatch
):
    """1 a registered broker has a session. 2 strangers take all places that are left: the next
    connection is refused. 3 the oldest of them are shut down, and another broker comes in."""
    monkeypatch.setattr(grpc_places, "_CONNECTIONS_MAX", 16)
    set_option(monkeypatch, "grpc.max_connection_idle_ms", 600_000)
    async with serving(tmp_path) as endpoint:
        port = endpoint.service.config.self_peer.grpc_port
        places = endpoint.service._grpc_endpoint._places
        for name in ("a", "b"):
            assert (await endpoint.service.requests.submit(registration(name))).ok
        own = await Caller(endpoint).hello("a", 1, "life")
        await own.beats()
        strangers = [await RawClient.dial(port) for _ in range(15)]
        for stranger in strangers:
            await stranger.settled()
        assert await (await RawClient.dial(port)).ended()
        await places.close_excess(port)
        for stranger in strangers[:11]:
            assert await stranger.ended()
        other = await _admitted(endpoint)
        await own.beats()
        for caller in (own, other):
            await caller.channel.close()
        for stranger in strangers:
            stranger.writer.close()


@pytest.mark.parametrize("short", [OSError(errno.EMFILE, "too many"), RuntimeError("no thread")])
async def test_r58_a_process_without_descriptors_looks_for_strangers_again(monkeypatch, short):
    looks = Mock(side_effect=chain((short,), repeat([])))
    monkeypatch.setattr(grpc_places, "accepted_at", looks)
    monkeypatch.setattr(grpc_places, "descriptors_in_use", lambda: 1 << 20)
    monkeypatch.setattr(grpc_places, "_CHECK_S", 0)
    watching = asyncio.create_task(GrpcPlaces(tuple).watch(1))
    await until(lambda: looks.call_count > 1 or watching.done())
    assert watching.cancel()


async def test_r54_the_watch_over_connections_goes_on_after_any_error(tmp_path, monkeypatch):
    failures: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failures.append(context["exception"])
    )
    looks = Mock(side_effect=chain((LookupError("a peer without a name"),), repeat([])))
    monkeypatch.setattr(grpc_places, "accepted_at", looks)
    monkeypatch.setattr(grpc_places, "descriptors_in_use", lambda: 1 << 20)
    monkeypatch.setattr(grpc_places, "_CHECK_S", 0)
    monkeypatch.setattr(tasks, "AGAIN_S", 0)
    async with serving(tmp_path):
        await until(lambda: looks.call_count > 1)
    assert [type(failure) for failure in failures] == [LookupError]


@pytest.mark.parametrize("bound", [Mock(return_value=0), Mock(side_effect=RuntimeError("in use"))])
async def test_a_grpc_port_that_cannot_be_bound_is_named(monkeypatch, bound):
    """gRPC reports that in two ways."""
    monkeypatch.setattr(grpc_endpoint, "check_port_free", lambda host, port: None)
    monkeypatch.setattr(grpc.aio, "server", lambda **_: Mock(add_insecure_port=bound))
    unbound = grpc_endpoint.GrpcEndpoint(*(Mock() for _ in range(5)))
    with pytest.raises(CannotListenError, match="9879"):
        await unbound.listen("127.0.0.1:9879")


async def test_r58_a_connection_without_a_call_ends(tmp_path, monkeypatch):
    set_option(monkeypatch, "grpc.max_connection_idle_ms", 1)
    async with serving(tmp_path) as endpoint:
        client = await RawClient.dial(endpoint.service.config.self_peer.grpc_port)
        assert await client.ended()
