"""Both ends over loopback sockets, on the loop that production runs on."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple
from unittest.mock import Mock

import pytest

from batonmq.protocol.codes import LanguageCode, ResponseCode
from batonmq.protocol.errors import ConnectError, ResponseError
from batonmq.remoting.command import TYPE_BINARY, RemotingCommand
from batonmq.remoting.connection import UNANSWERED_MS, Connection, Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer
from batonmq.runtime.clock import boot_ms
from tests.shared.remoting_ends import dialling, handled, serving
from tests.shared.waiting import until


def echo(cmd: RemotingCommand, connection: Connection) -> RemotingCommand:
    return RemotingCommand.response_to(cmd, remark="echo", ext=dict(cmd.ext), body=cmd.body)


def never(cmd: RemotingCommand, connection: Connection) -> None:
    return None


class Pair(NamedTuple):
    server: RemotingServer
    client: RemotingClient
    address: str


@asynccontextmanager
async def open_pair(
    processors: Processors | None = None, of_client: Processors | None = None
) -> AsyncIterator[Pair]:
    """A server and a client, torn down together."""
    processors = processors or Processors()
    processors.register(10, echo)
    processors.register(11, never)
    server, client = RemotingServer(processors, name="test"), RemotingClient(of_client)
    async with serving(server) as address, dialling(client):
        yield Pair(server, client, address)


@pytest.fixture
def pair() -> AbstractAsyncContextManager[Pair]:
    return open_pair()


async def test_requests_responses_and_large_bodies(pair: Pair) -> None:
    for body in (b"", b"small", b"x" * 3_000_000):
        cmd = RemotingCommand.request(10, {"n": 1}, body)
        answer = await pair.client.invoke(pair.address, cmd)
        assert (answer.code, answer.remark, answer.ext) == (0, "echo", {"n": "1"})
        assert answer.body == body and answer.language == LanguageCode.PYTHON
    binary = RemotingCommand(10, ext={"n": "1"}, serialize_type=TYPE_BINARY)
    assert (await pair.client.invoke(pair.address, binary)).ext == {"n": "1"}
    assert len(pair.server.connections) == 1


async def test_many_requests_at_once_find_their_own_answers(pair: Pair) -> None:

    async def one(n: int) -> bytes:
        cmd = RemotingCommand.request(10, body=b"%d" % n)
        return (await pair.client.invoke(pair.address, cmd)).body

    assert await asyncio.gather(*map(one, range(500))) == [b"%d" % n for n in range(500)]
    assert len(pair.server.connections) == 1, "all shared one dial"


async def test_a_server_answers_late_and_originates_requests_of_its_own() -> None:
    """While a client's request is open, the server asks that client on the same connection."""

    async def ask_back(cmd: RemotingCommand, connection: Connection) -> RemotingCommand:
        answer = await connection.invoke(RemotingCommand.request(40, body=b"who?"), 1000)
        return RemotingCommand.response_to(cmd, body=answer.body)

    def who(cmd: RemotingCommand, connection: Connection) -> RemotingCommand:
        return RemotingCommand.response_to(cmd, body=cmd.body + b" me")

    server, client = Processors(), Processors()
    server.register(12, ask_back)
    client.register(40, who)
    async with open_pair(server, client) as pair:
        answer = await pair.client.call(pair.address, RemotingCommand.request(12))
        assert answer.body == b"who? me"


async def test_async_handlers_fail_like_others(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(cmd: RemotingCommand, connection: Connection) -> RemotingCommand:
        raise KeyError("a bug")

    async with open_pair(handled(12, fail)) as pair:
        with pytest.raises(ResponseError, match="KeyError") as caught:
            await pair.client.call(pair.address, RemotingCommand.request(12))
        assert caught.value.code == ResponseCode.SYSTEM_ERROR
        await pair.client.call(pair.address, RemotingCommand.request(10))
    assert "request_failed code=12" in caplog.text


async def test_a_cancelled_waiter_leaves_nothing_behind(pair: Pair) -> None:
    connection = await pair.client.connection(pair.address)
    waiter = asyncio.ensure_future(connection.invoke(RemotingCommand.request(11), 60_000))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert len(connection._pending) == 0


async def test_oneway_reaches_the_handler_and_nothing_comes_back() -> None:
    got: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def take(cmd: RemotingCommand, connection: Connection) -> RemotingCommand:
        got.set_result(cmd.body)
        return RemotingCommand.response_to(cmd)

    async with open_pair(handled(12, take)) as pair:
        await pair.client.oneway(pair.address, RemotingCommand.request(12, body=b"x"))
        assert await got == b"x"
        await pair.client.call(pair.address, RemotingCommand.request(10))


async def test_a_malformed_frame_ends_one_connection_while_others_live(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """Nonsense, an oversized length and a cut frame on three sockets beside a good client."""
    await pair.client.call(pair.address, RemotingCommand.request(10))
    host, port = pair.address.split(":")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x7f\xff\xff\xff\x00\x00\x00\x01"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        try:
            assert await reader.read() == b""
        except ConnectionResetError:
            pass
        writer.close()
    gone = asyncio.Event()
    pair.server.on_disconnect = lambda _: gone.set()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x00\x00\x00\x40\x00\x00\x00\x10{")
    writer.write_eof()
    await gone.wait()
    writer.close()
    assert len(pair.server.connections) == 1
    await pair.client.call(pair.address, RemotingCommand.request(10))
    lines = [r.getMessage() for r in caplog.records if "connection_dropped" in r.getMessage()]
    assert len(lines) == 3
    assert "over the limit" in lines[0] and "over the limit" in lines[1]
    assert "cut off after 9 bytes" in lines[2]


async def test_idle_connections_are_closed_and_dialled_again(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    await pair.client.call(pair.address, RemotingCommand.request(10))
    first = pair.client.live_connection(pair.address)
    assert first is not None
    gone = asyncio.Event()
    first.on_close.append(lambda _: gone.set())
    pair.server.close_idle(boot_ms() + 119_000)
    assert len(pair.server.connections) == 1
    pair.server.close_idle(boot_ms() + 120_001)
    await gone.wait()
    assert pair.client.live_connection(pair.address) is None
    await pair.client.call(pair.address, RemotingCommand.request(10))
    assert pair.client.live_connection(pair.address) is not first
    assert "connection_idle" in caplog.text


async def test_r8_an_idle_check_after_a_stall_closes_nobody(pair: Pair) -> None:
    """The check comes a minute late: everyone seems silent because we were."""
    await pair.client.call(pair.address, RemotingCommand.request(10))
    (connection,) = pair.server.connections
    connection.last_active_ms -= 500_000
    pair.server._next_idle_check_ms = boot_ms() - 60_000
    pair.server._idle_check()
    assert not connection.closed
    pair.server._next_idle_check_ms = boot_ms()
    pair.server._idle_check()
    assert connection.closed


async def test_hooks_see_connections_come_and_go(pair: Pair) -> None:
    events: list[str] = []
    pair.server.on_connect = lambda c: events.append(f"+{c.peer}")
    gone = asyncio.Event()

    def left(connection: Connection) -> None:
        events.append(f"-{connection.peer}")
        gone.set()

    pair.server.on_disconnect = left
    connection = await pair.client.connection(pair.address)
    await connection.invoke(RemotingCommand.request(10))
    pair.client.close_connection(pair.address)
    await gone.wait()
    assert events == [f"+{connection.local}", f"-{connection.local}"]


async def test_both_ends_let_go_of_a_host_that_acknowledges_nothing(pair: Pair) -> None:
    await pair.client.invoke(pair.address, RemotingCommand.request(10))
    ours = await pair.client.connection(pair.address)
    (theirs,) = pair.server.connections
    for connection in (ours, theirs):
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        kept = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert kept == UNANSWERED_MS


async def test_a_dial_that_fails_says_why_to_all_who_wait(pair: Pair) -> None:
    dead = pair.address
    await pair.server.close()
    calls = [pair.client.invoke(dead, RemotingCommand.request(10)) for _ in range(3)]
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, ConnectError) and not result.sent
        assert "refused" in str(result)
    with pytest.raises(ConnectError, match="host:port"):
        await pair.client.connection("nowhere")


async def test_closing_the_server_ends_open_requests_with_a_connect_error() -> None:
    arrived = asyncio.Event()

    def take(cmd: RemotingCommand, connection: Connection) -> None:
        arrived.set()

    async with open_pair(handled(12, take)) as pair:
        waiting = asyncio.ensure_future(
            pair.client.invoke(pair.address, RemotingCommand.request(12), 60_000)
        )
        await arrived.wait()
        await pair.server.close()
        with pytest.raises(ConnectError) as caught:
            await waiting
        assert caught.value.sent


async def test_closing_ends_handlers_that_still_run() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def hang(cmd: RemotingCommand, connection: Connection) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with open_pair(handled(12, hang)) as pair:
        await pair.client.oneway(pair.address, RemotingCommand.request(12))
        await started.wait()
    assert ended.is_set()


async def test_a_closed_client_says_so() -> None:
    client = RemotingClient()
    await client.close()
    with pytest.raises(ConnectError, match="closed"):
        await client.invoke("127.0.0.1:1", RemotingCommand.request(10))


async def test_one_server_listens_on_several_ports(pair: Pair) -> None:
    vip = await pair.server.listen("127.0.0.1", 0)
    for address in (pair.address, f"127.0.0.1:{vip}"):
        await pair.client.call(address, RemotingCommand.request(10))
    with pytest.raises(OSError):
        await pair.server.listen("127.0.0.1", vip)


async def test_a_connection_that_ends_late_does_not_take_its_successor_along(pair: Pair) -> None:
    old = await pair.client.connection(pair.address)
    old._mark_closed("its peer has ended")
    new = await pair.client.connection(pair.address)
    ended = asyncio.Event()
    old.on_close.append(lambda _: ended.set())
    old.drop()
    await ended.wait()
    assert pair.client.live_connection(pair.address) is new is not old


async def test_r34_many_idle_connections_are_closed_over_several_turns_and_who_speaks_is_kept() -> (
    None
):
    server = RemotingServer(Processors(), name="many")
    idle = [Mock(last_active_ms=0, peer=str(number)) for number in range(300)]
    server.connections = set(idle)
    server.close_idle(1_000_000)
    closed = [one for one in idle if one.close.called]
    assert 0 < len(closed) < 300
    speaks = next(one for one in idle if not one.close.called)
    speaks.last_active_ms = 1_000_000
    await until(lambda: sum(one.close.called for one in idle) >= 299)
    assert not speaks.close.called
