"""Sockets that a service manager holds for a server while that is away (sd_listen_fds)."""

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from batonmq.protocol.codes import ResponseCode
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer
from batonmq.runtime import service_manager
from batonmq.runtime.service_manager import LISTEN_FDS, LISTEN_PID, held_listener
from batonmq.runtime.sockets import listening_socket


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with listening_socket("127.0.0.1", 0) as listener:
        monkeypatch.setattr(service_manager, "LISTEN_FDS_START", listener.fileno())
        monkeypatch.setenv(LISTEN_FDS, "1")
        monkeypatch.setenv(LISTEN_PID, str(os.getpid()))
        yield listener


def test_who_dials_while_no_server_is_there_is_answered_by_the_next_one(
    held: socket.socket,
) -> None:
    port = held.getsockname()[1]
    address = f"127.0.0.1:{port}"

    async def two_lives() -> list[int]:
        codes = []
        for _ in range(2):
            client = RemotingClient()
            await client.connection(address)
            call = asyncio.ensure_future(client.invoke(address, RemotingCommand.request(1), 10_000))
            server = RemotingServer(Processors())
            assert await server.listen("127.0.0.1", port) == port
            codes.append((await call).code)
            await server.close()
            await client.close()
        return codes

    assert asyncio.run(two_lives()) == [ResponseCode.REQUEST_CODE_NOT_SUPPORTED] * 2


def test_only_the_named_process_and_port_get_it(
    held: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = held.getsockname()[1]
    assert held_listener(port + 1) is None
    mine = held_listener(port)
    assert mine is not None and mine.getsockname() == held.getsockname()
    mine.close()
    monkeypatch.setenv(LISTEN_PID, str(os.getpid() + 1))
    assert held_listener(port) is None
    monkeypatch.setenv(LISTEN_PID, str(os.getpid()))
    monkeypatch.setenv(LISTEN_FDS, "many")
    assert held_listener(port) is None
