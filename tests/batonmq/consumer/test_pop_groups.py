"""Which broker groups a POP consumer asks, and what it does without one of them."""

import asyncio
from collections.abc import Collection
from typing import Any

import pytest
from fake_cluster import FakeCluster

from batonmq import MessageQueue, NoMasterError, NoNameServerError, NoRouteError, PopConsumer
from batonmq.client.consumer import pop_consumer
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.runtime.clock import boot_ms
from tests.records import message


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


@pytest.mark.parametrize(("has_messages", "down_ms"), [(True, 60_000), (True, 0), (False, 60_000)])
async def test_a_group_without_a_master_keeps_no_message_of_the_others_away(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, has_messages: bool, down_ms: int
) -> None:
    """After a while it is asked in its turn again, also while the others have messages."""
    monkeypatch.setattr(pop_consumer, "_DOWN_MS", down_ms)
    limits_ms: list[int] = []
    asked: list[str] = []

    async def pop(_: object, name: str, fields: object, poll_ms: int, until_ms: int) -> Any:
        limits_ms.append(until_ms - boot_ms())
        asked.append(name)
        if name != "b":
            raise NoMasterError(name, "all its brokers are down")
        return [message(0)] * has_messages

    async def groups_of(topic: str, deadline_ms: int) -> list[str]:
        return ["a", "b", "c"]

    async with PopConsumer("g", name_servers=cluster.name_server_addresses) as consumer:
        await consumer.subscribe("T")
        faked: Any = consumer
        faked._pop, faked._groups_of = pop, groups_of
        if has_messages:
            for _ in range(4):
                assert await consumer.receive("T") == [message(0)]
            assert max(limits_ms) <= 3000, "of the 15 s that a message may take to come"
            assert asked == list("abbcbb" if down_ms else "abbcabab")
        else:
            for _ in range(2):
                with pytest.raises(NoMasterError, match="all its brokers are down"):
                    await consumer.receive("T", timeout_ms=0)
            assert asked == ["a", "b", "c", "b", "c"], "one is enough when the time is over"
