"""A caller that is cancelled while it waits for a connection ends, whenever that happens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop

from batonmq.protocol.errors import ConnectError
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer
from tests.shared.waiting import until


@pytest.mark.parametrize("turns", range(8))
async def test_a_cancellation_that_meets_the_end_of_the_dial_is_not_swallowed(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Whoever swallows it continues, and who cancelled waits forever (`batonmq up` did)."""
    client = RemotingClient(name="test")
    dialled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def dial(address: str) -> Any:
        return await dialled

    monkeypatch.setattr(client, "_dial", dial)
    caller = asyncio.create_task(client.connection("127.0.0.1:1", timeout_ms=10_000))
    for _ in range(4):
        await asyncio.sleep(0)
    dialled.set_result(object())
    for _ in range(turns):
        await asyncio.sleep(0)
    if caller.cancel():
        with pytest.raises(asyncio.CancelledError):
            await caller
    await client.close()


class HeldClient(RemotingClient):
    """Its first dial does not end by itself."""

    dials = 0

    async def _dial(self, address: str) -> Connection:
        self.dials += 1
        if self.dials == 1:
            await asyncio.get_running_loop().create_future()
        return await super()._dial(address)

    async def first_caller(self, address: str) -> asyncio.Task[Connection]:
        caller = asyncio.create_task(self.connection(address, timeout_ms=10_000))
        await until(lambda: self.dials)
        return caller


async def test_who_comes_in_the_turn_of_a_cancelled_dial_gets_a_fresh_one() -> None:
    """Its server answers again: only those who waited for the old dial are told that it ended."""
    server, client = RemotingServer(Processors(), name="test"), HeldClient(name="test")
    address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    early = await client.first_caller(address)
    client.close_connection(address)
    late = await client.connection(address)
    with pytest.raises(ConnectError, match="was ended"):
        await early
    assert client.live_connection(address) is late
    await client.close()
    await server.close()


async def test_a_caller_that_is_cancelled_in_the_turn_of_its_dial_is_cancelled() -> None:
    client = HeldClient(name="test")
    caller = await client.first_caller("127.0.0.1:1")
    client.close_connection("127.0.0.1:1")
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await client.close()


def test_a_dial_that_is_ended_in_the_turn_of_its_connection_leaves_none_behind() -> None:
    """uvloop closes its transport without a `connection_lost`: the client waited for that when it
    closed, and a broker could not stop."""

    async def run() -> None:
        server, client = RemotingServer(Processors(), name="test"), RemotingClient(name="test")
        address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
        client.on_connect = lambda _: client.close_connection(address)
        with pytest.raises(ConnectError, match="was ended"):
            await client.connection(address)
        assert not client.connections
        await client.close()
        await server.close()

    uvloop.run(run())


@pytest.mark.parametrize("new_loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_a_port_that_no_host_has_cannot_be_reached(new_loop: Any) -> None:
    """A route may name one. uvloop dials its lower 16 bits; asyncio's own error for it would end a
    client's heartbeats."""

    async def dial() -> None:
        server, client = RemotingServer(Processors(), name="test"), RemotingClient()
        listens = await server.listen("127.0.0.1", 0)
        try:
            for port in (65_536 + listens, -1):
                with pytest.raises(ConnectError, match="1 to 65535 are allowed"):
                    await client.connection(f"127.0.0.1:{port}")
        finally:
            await client.close()
            await server.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(dial())
