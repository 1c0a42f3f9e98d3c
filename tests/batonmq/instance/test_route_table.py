"""Which addresses the known routes name as masters."""

import asyncio
from unittest.mock import Mock

import pytest

from batonmq.client.errors import ClientClosedError, NoNameServerError, NoRouteError
from batonmq.client.instance.connections import Connections
from batonmq.client.instance.routes import RouteTable
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.errors import ResponseError
from tests.shared.waiting import until


def route(topic: str, master: str | None) -> TopicRoute:
    return TopicRoute(topic, (), (), {"b": {0: master} if master else {2: "h:9"}}, {})


def test_a_stale_route_takes_no_master_from_the_other_topics() -> None:
    listener = Mock()
    routes = RouteTable(Mock(), listener)
    for topic, master in (("A", "new:1"), ("B", "new:1"), ("C", "old:1")):
        routes._adopt(route(topic, master))
    assert routes.is_master("new:1") and routes.is_master("old:1")
    listener.masters_left.assert_not_called()


def test_a_master_is_left_once_the_last_route_names_another() -> None:
    listener = Mock()
    routes = RouteTable(Mock(), listener)
    for topic in ("A", "B"):
        routes._adopt(route(topic, "old:1"))
    routes._adopt(route("A", "new:1"))
    assert routes.is_master("old:1")
    listener.masters_left.assert_not_called()
    routes._adopt(route("B", "new:1"))
    assert not routes.is_master("old:1")
    listener.masters_left.assert_called_once_with({"old:1"})


def test_a_master_without_a_successor_is_not_left() -> None:
    listener = Mock()
    routes = RouteTable(Mock(), listener)
    routes._adopt(route("A", "old:1"))
    routes._adopt(route("A", None))
    assert not routes.is_master("old:1")
    listener.masters_left.assert_not_called()


def test_a_poll_that_fails_is_followed_by_the_next_one() -> None:
    """Whatever failed: no name server answered, one refused, a topic is gone."""
    failures = [NoNameServerError(()), ResponseError(1, "busy", "ns"), NoRouteError("A", ())]
    asked = []

    class Failing(RouteTable):
        async def refresh(self, topic: str, **_: object) -> TopicRoute:
            asked.append(topic)
            if not failures:
                raise asyncio.CancelledError
            raise failures.pop()

    routes = Failing(Mock(options=Mock(route_poll_ms=0)), Mock())
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(routes.poll(lambda: ["A", "B"]))
    assert asked == ["A", "B", "A", "B"]


def test_a_forgotten_route_names_no_master() -> None:
    routes = RouteTable(Mock(), Mock())
    routes._adopt(route("A", "h:1"))
    routes._adopt(route("B", "h:1"))
    routes.forget("A")
    assert routes.is_master("h:1")
    routes.forget("B")
    routes.forget("B")
    assert not routes.is_master("h:1")


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_who_waits_for_a_route_when_the_client_closes_is_told_so(is_cancelled: bool) -> None:
    """It is not cancelled itself, or whoever it works for would be left waiting."""
    servers = Mock()
    servers.route = lambda *_, **__: asyncio.get_running_loop().create_future()
    connections = Connections("127.0.0.1:1")
    connections._name_servers = servers
    caller = asyncio.create_task(RouteTable(connections, Mock()).get("T"))
    await until(lambda: connections._tasks)
    closing = asyncio.create_task(connections.disconnect())
    await until(lambda: not connections._tasks or caller.done())
    if is_cancelled:
        assert caller.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else ClientClosedError):
        await caller
    await closing
