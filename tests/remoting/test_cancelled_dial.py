"""A caller that is cancelled while it waits for a connection ends, whenever that happens."""

import asyncio
from typing import Any

import pytest
import uvloop

from batonmq.protocol.errors import ConnectError
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer
from tests.shared.remoting_ends import dialling, serving
from tests.shared.waiting import until


@pytest.mark.parametrize("turns", range(8))
async def test_a_cancellation_that_meets_the_end_of_the_dial_is_not_swallowed(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Whoever swallows it continues, and who cancelled waits forever (`batonmq up` did)."""
    dialled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def dial(address: str) -> Any:
        return await dialled

    async with dialling(RemotingClient()) as client:
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
    async with serving(RemotingServer(Processors())) as address, dialling(HeldClient()) as client:
        early = await client.first_caller(address)
        client.close_connection(address)
        late = await client.connection(address)
        with pytest.raises(ConnectError, match="was ended"):
            await early
        assert client.live_connection(address) is late


async def test_a_caller_that_is_cancelled_in_the_turn_of_its_dial_is_cancelled() -> None:
    async with dialling(HeldClient()) as client:
        caller = await client.first_caller("127.0.0.1:1")
        client.close_connection("127.0.0.1:1")
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller


async def test_a_dial_that_is_ended_in_the_turn_of_its_connection_leaves_none_behind() -> None:
    """uvloop closes its transport without a `connection_lost`: the client waited for that when it
    closed, and a broker could not stop."""
    server, client = RemotingServer(Processors()), RemotingClient()
    async with serving(server) as address, dialling(client):
        client.on_connect = lambda _: client.close_connection(address)
        with pytest.raises(ConnectError, match="was ended"):
            await client.connection(address)
        assert not client.connections


@pytest.mark.parametrize("new_loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_a_port_that_no_host_has_cannot_be_reached(new_loop: Any) -> None:
    """A route may name one. uvloop dials its lower 16 bits; asyncio's own error for it would end a
    client's heartbeats."""

    async def dial() -> None:
        server, client = RemotingServer(Processors()), RemotingClient()
        async with serving(server) as address, dialling(client):
            listens = int(address.rpartition(":")[2])
            for port in (65_536 + listens, -1):
                with pytest.raises(ConnectError, match="1 to 65535 are allowed"):
                    await client.connection(f"127.0.0.1:{port}")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(dial())
