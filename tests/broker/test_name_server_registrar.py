"""A broker registers again, also where the connection leads nowhere any more."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from batonmq.broker import name_server_registrar
from batonmq.broker.name_server_registrar import NameServerRegistrar
from batonmq.protocol.codes import RequestCode
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer


class _Registration:
    """As much of a `Registration` as the registrar touches."""

    def request(self) -> RemotingCommand:
        return RemotingCommand.request(RequestCode.REGISTER_BROKER)

    def farewell(self) -> RemotingCommand:
        return RemotingCommand.request(RequestCode.UNREGISTER_BROKER)


def test_a_name_server_that_does_not_answer_is_dialled_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(name_server_registrar, "RPC_TIMEOUT_MS", 20)
    monkeypatch.setattr(name_server_registrar, "RETRY_MS", 1)

    async def scenario() -> None:
        registered: list[Connection] = []
        answered = asyncio.Event()

        def register(cmd: RemotingCommand, connection: Connection) -> RemotingCommand | None:
            registered.append(connection)
            if connection is registered[0]:
                return None  # this one leads nowhere
            answered.set()
            return RemotingCommand.response_to(cmd)

        processors = Processors()
        processors.register(RequestCode.REGISTER_BROKER, register)
        processors.register(
            RequestCode.UNREGISTER_BROKER, lambda cmd, _: RemotingCommand.response_to(cmd)
        )
        server, client = RemotingServer(processors, name="namesrv"), RemotingClient(None)
        address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
        registrar = NameServerRegistrar(client, (address,), 60_000, _Registration)
        registrar.start()
        await asyncio.wait_for(answered.wait(), 10)
        await registrar.close()
        await client.close()
        await server.close()
        assert registered[-1] is not registered[0]

    uvloop.run(scenario())
