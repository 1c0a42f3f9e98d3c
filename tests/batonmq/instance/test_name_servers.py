"""Which name servers are asked for a route, and when all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from batonmq.client.errors import NoNameServerError
from batonmq.client.instance.master_calls import MasterCalls
from batonmq.client.instance.name_servers import NameServers
from batonmq.client.instance.routes import RouteTable
from batonmq.protocol.bodies import QueueData, TopicRouteData
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import ConnectError, ResponseError
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.clock import boot_ms


class Remoting:
    """Every server that is not `down`, and does not refuse, has the same route."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.down: set[str] = set()
        self.refusing: set[str] = set()
        self.route = TopicRouteData()

    async def invoke(
        self, address: str, request: RemotingCommand, timeout_ms: float
    ) -> RemotingCommand:
        self.asked.append(address)
        if address in self.down:
            raise ConnectError(address, "refused")
        if address in self.refusing:
            return RemotingCommand.response_to(request, ResponseCode.NO_PERMISSION, "no such user")
        return RemotingCommand.response_to(request, body=self.route.encode())


async def test_a_route_of_a_billion_queues_is_not_used() -> None:
    """Each would become an object. A name server believes what brokers register."""
    remoting = Remoting()
    remoting.route.queue_datas = [QueueData(broker_name="b", write_queue_nums=1 << 30)]
    servers = NameServers(("h:1",), remoting)  # type: ignore[arg-type]
    with pytest.raises(NoNameServerError, match="route has 1073741824 queues"):
        await servers.route("T", deadline_ms=boot_ms() + 1000)


def test_a_look_asks_one_name_server_and_the_next_look_another_one() -> None:
    async def looks() -> list[str]:
        remoting = Remoting()
        servers = NameServers(("h:1", "h:2", "h:3"), remoting)  # type: ignore[arg-type]
        for _ in range(3):
            await servers.route("T", deadline_ms=boot_ms() + 1000, by_turns=True)
        remoting.down.add("h:2")
        await servers.route("T", deadline_ms=boot_ms() + 1000, by_turns=True)
        return remoting.asked

    assert asyncio.run(looks()) == ["h:2", "h:3", "h:1", "h:2", "h:3"]


def test_only_a_silence_that_is_not_meant_has_all_name_servers_asked() -> None:
    async def asked(held_check_ms: int | None) -> str:
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def never(*_: object) -> RemotingCommand:
            await asyncio.Event().wait()
            raise AssertionError

        def look(_: str, *, by_turns: bool = False, **__: object) -> None:
            if not found.done():
                found.set_result("one" if by_turns else "all")

        routes = Mock(refresh=AsyncMock(side_effect=look))
        connections = Mock(running=True, spawn=asyncio.ensure_future)
        connections.options.suspicion_ms = 1
        connections.remoting.invoke = never
        calls = MasterCalls(connections, routes)
        call = asyncio.ensure_future(
            calls.invoke_once("T", "b", "h:9", Mock(), 9, held_check_ms=held_check_ms)
        )
        which = await found
        calls.close()
        call.cancel()
        return which

    assert asyncio.run(asked(1)) == "one"
    assert asyncio.run(asked(None)) == "all"


async def test_a_refusal_is_final_unless_another_server_answers_or_the_route_is_known() -> None:
    def spawn(work: Coroutine[Any, Any, Any], **_: object) -> asyncio.Task[Any]:
        return asyncio.ensure_future(work)

    remoting = Remoting()
    servers = NameServers(("h:1", "h:2", "h:3"), remoting)  # type: ignore[arg-type]
    remoting.down, remoting.refusing = {"h:1"}, {"h:2"}
    await servers.route("T", deadline_ms=boot_ms() + 60_000)
    remoting.refusing.add("h:3")
    remoting.asked.clear()
    options = Mock(request_timeout_ms=60_000)
    routes = RouteTable(Mock(name_servers=servers, options=options, spawn=spawn), Mock())
    with pytest.raises(ResponseError, match="no such user"):
        await routes.refresh("T")
    assert sorted(remoting.asked) == ["h:1", "h:2", "h:3"], "each once"
    remoting.refusing.clear()
    route = await routes.refresh("T")
    remoting.refusing = {"h:2", "h:3"}
    with pytest.raises(NoNameServerError, match="NO_PERMISSION"):
        await routes.refresh("T")
    assert await routes.get("T") == route
