"""Which broker groups a POP consumer asks."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from batonmq import MessageQueue, NoNameServerError, NoRouteError, PopConsumer
from batonmq.client.instance.topic_route import TopicRoute


def route(masters: Collection[str], readable: Collection[str] = "ab") -> TopicRoute:
    """Of the groups a and b; without a master a group has a slave only."""
    brokers = {name: {0 if name in masters else 2: f"{name}:1"} for name in "ab"}
    queues = tuple(MessageQueue("T", name, 0) for name in readable)
    return TopicRoute("T", (), queues, brokers, {})


@pytest.mark.parametrize(
    ("known", "fetched", "asked"),
    [
        (route("ab"), None, ["a", "b"]),
        (route("b"), route("ab"), ["a", "b"]),
        (route("b"), route("b"), ["b"]),
        (route("b"), None, ["b"]),
        (route(""), route(""), ["a", "b"]),
        (route("ab", readable="a"), None, ["a"]),
        (route("ab", readable=""), None, None),
    ],
    ids=[
        "all have masters",
        "an election is over",
        "an election is under way",
        "no name server answers",
        "no group has a master: elections are waited for",
        "a group that is not read, as those of replica routes",
        "none may be read",
    ],
)
def test_a_route_from_within_a_failover_is_not_kept_until_the_next_poll(
    known: TopicRoute, fetched: TopicRoute | None, asked: list[str] | None
) -> None:
    consumer = PopConsumer("g", name_servers=["h:1"])

    async def get(topic: str, **_: object) -> TopicRoute:
        return known

    async def refresh(topic: str, **_: object) -> TopicRoute:
        if fetched is None:
            raise NoNameServerError(())
        return fetched

    routes: Any = consumer.client.routes
    routes.get, routes.refresh = get, refresh
    if asked is None:
        with pytest.raises(NoRouteError, match="no broker lets it be read"):
            asyncio.run(consumer._groups_of("T", 0))
    else:
        assert asyncio.run(consumer._groups_of("T", 0)) == asked
