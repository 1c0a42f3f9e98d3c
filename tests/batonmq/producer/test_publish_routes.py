"""Routes of topics that the first send creates."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from batonmq.client.errors import NoRouteError
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.client.producer.outgoing import NewTopic
from batonmq.client.producer.publish_routes import PublishRoutes
from batonmq.protocol.bodies import BrokerData, TopicRouteData

OWN = TopicRoute("New", (), (), {"b": {0: "h:2"}}, {})


class Routes:
    """No name server knows the topic before `created`."""

    def __init__(self) -> None:
        self.created = False

    def cached(self, topic: str) -> TopicRoute | None:
        return OWN if self.created else None

    async def get(self, topic: str, **_: object) -> TopicRoute:
        return await self.refresh(topic)

    async def refresh(self, topic: str, **_: object) -> TopicRoute:
        if not self.created:
            raise NoRouteError(topic, ())
        return OWN


async def template(topic: str, **_: object) -> TopicRouteData:
    assert topic == "TBW102"
    return TopicRouteData(broker_datas=[BrokerData(broker_name="b", broker_addrs={0: "h:1"})])


def publish_routes(
    routes: Routes,
    tasks: list[asyncio.Task[None]],
    template: Callable[..., Awaitable[TopicRouteData]] = template,
) -> PublishRoutes:
    def spawn(work: Any) -> None:
        tasks.append(asyncio.get_running_loop().create_task(work))

    async def announced(addresses: object) -> None: ...

    client: Any = SimpleNamespace(
        routes=routes,
        spawn=spawn,
        heartbeats=SimpleNamespace(send=announced),
        name_servers=SimpleNamespace(route=template),
    )
    return PublishRoutes(client, NewTopic("TBW102", 4))


@pytest.mark.parametrize("created", [True, False], ids=["registered", "not registered yet"])
async def test_a_send_that_was_stored_replaces_the_template_once_the_topic_has_a_route(
    created: bool,
) -> None:
    routes, tasks = Routes(), list[asyncio.Task[None]]()
    made = publish_routes(routes, tasks)
    assert (await made.get("New", 0)).master_address("b") == "h:1"
    routes.created = created
    made.stored("New")
    await asyncio.gather(*tasks)
    assert made.is_template("New") is not created
    assert (await made.get("New", 0)).master_address("b") == ("h:2" if created else "h:1")
    await asyncio.gather(*tasks)


async def test_a_route_that_comes_while_the_template_is_fetched_is_used() -> None:
    routes, tasks = Routes(), list[asyncio.Task[None]]()

    async def late(topic: str, **_: object) -> TopicRouteData:
        routes.created = True
        return await template(topic)

    made = publish_routes(routes, tasks, late)
    assert await made.get("New", 0) is OWN and not made.is_template("New")
    await asyncio.gather(*tasks)
