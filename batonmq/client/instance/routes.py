"""The routes of the topics that a client uses: kept, polled, and fetched at once after a failure.

A refusal that names the new master changes the routes without a name server.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable

from batonmq.client.errors import NoMasterError, NoNameServerError, NoRouteError
from batonmq.client.instance.connections import Connections
from batonmq.client.instance.topic_route import (
    MasterHints,
    TopicRoute,
    moved_masters,
    route_for_new_topic,
    topic_route,
)
from batonmq.process.clock import boot_ms
from batonmq.protocol.errors import BatonError
from batonmq.remoting.command import RemotingCommand

log = logging.getLogger(__name__)

RouteChanged = Callable[[TopicRoute | None, TopicRoute, frozenset[str]], None]
"""Given the old route, the new one, and the broker groups whose master has a new address."""


class RouteTable:
    def __init__(self, connections: Connections, changed: RouteChanged) -> None:
        self._connections = connections
        self._changed = changed
        self._routes: dict[str, TopicRoute] = {}
        self._hints = MasterHints()
        self._fetches: dict[str, asyncio.Task[TopicRoute]] = {}

    def all(self) -> list[TopicRoute]:
        return list(self._routes.values())

    def cached(self, topic: str) -> TopicRoute | None:
        return self._routes.get(topic)

    async def get(self, topic: str, *, deadline_ms: int | None = None) -> TopicRoute:
        """The known route, fetched if there is none. Raises NoRouteError, NoNameServerError."""
        route = self._routes.get(topic)
        return route or await self.refresh(topic, deadline_ms=deadline_ms)

    async def refresh(
        self, topic: str, *, deadline_ms: int | None = None, suspects: Collection[str] = ()
    ) -> TopicRoute:
        """Fetches the route from the name servers; concurrent callers share one fetch.

        `suspects`: addresses that just failed as masters; a name server that names others wins.
        Raises NoRouteError, NoNameServerError.
        """
        fetch = self._fetches.get(topic)
        if fetch is None:
            work = self._fetch(topic, frozenset(suspects))
            # Its failure is raised to each waiter; without waiters it is ignored.
            fetch = self._connections.spawn(work, log_failure=False)
            self._fetches[topic] = fetch
            fetch.add_done_callback(lambda done: self._fetches.pop(topic, None))
        left_ms = self._connections.options.request_timeout_ms
        if deadline_ms is not None:
            left_ms = deadline_ms - boot_ms()
        try:
            async with asyncio.timeout(max(left_ms, 1) / 1000):
                return await asyncio.shield(fetch)
        except TimeoutError:
            addresses = self._connections.name_server_addresses
            raise NoNameServerError([(each, "no answer in time") for each in addresses]) from None

    async def get_or_template(
        self, topic: str, template_topic: str, queue_nums: int, *, deadline_ms: int
    ) -> TopicRoute:
        """The route; for an unknown topic the one that the first send will create."""
        try:
            return await self.get(topic, deadline_ms=deadline_ms)
        except NoRouteError as unknown:
            name_servers = self._connections.name_servers
            try:
                data = await name_servers.route(template_topic, deadline_ms=deadline_ms)
            except NoRouteError:
                raise unknown from None
            return route_for_new_topic(topic, data, queue_nums)

    async def master(
        self,
        topic: str,
        broker_name: str,
        *,
        deadline_ms: int | None = None,
        failed_at: str | None = None,
    ) -> str:
        """The address of a group's master. `failed_at`: where a call just failed.

        Raises NoMasterError, NoRouteError, NoNameServerError.
        """
        if failed_at is None:
            route = await self.get(topic, deadline_ms=deadline_ms)
        else:
            route = await self.refresh(topic, deadline_ms=deadline_ms, suspects=(failed_at,))
        address = route.master_address(broker_name)
        if address is None:
            route = await self.refresh(topic, deadline_ms=deadline_ms)
            address = route.master_address(broker_name)
        if address is None:
            raise NoMasterError(broker_name)
        return address

    def hinted_master(self, broker_name: str, refusal: RemotingCommand) -> str | None:
        """The master that a refusal names, which every known route now names too; else None."""
        now_ms = boot_ms()
        address = self._hints.note(broker_name, refusal.ext, now_ms)
        if address is not None:
            for route in self.all():
                self._adopt(self._hints.applied_to(route, now_ms))
        return address

    def master_unreachable(self, address: str) -> None:
        """Nothing replies there, or its broker is no master: hints to it no longer count."""
        self._hints.unreachable(address)

    def forget(self, topic: str) -> None:
        self._routes.pop(topic, None)

    async def poll(self, used_topics: Callable[[], Iterable[str]]) -> None:
        """Refreshes the known routes, and those of the topics in use, again and again."""
        while True:
            await asyncio.sleep(self._connections.options.route_poll_ms / 1000)
            for topic in sorted({*used_topics(), *self._routes}):
                try:
                    await self.refresh(topic)
                except BatonError as error:
                    log.info("route_poll_failed topic=%s why=%s", topic, error)

    async def _fetch(self, topic: str, suspects: frozenset[str]) -> TopicRoute:
        connections = self._connections
        deadline_ms = boot_ms() + connections.options.request_timeout_ms
        data = await connections.name_servers.route(
            topic, deadline_ms=deadline_ms, suspects=suspects
        )
        route = self._hints.applied_to(topic_route(topic, data), boot_ms())
        self._adopt(route)
        return route

    def _adopt(self, route: TopicRoute) -> None:
        old = self._routes.get(route.topic)
        if old != route:
            self._routes[route.topic] = route
            self._changed(old, route, moved_masters(old, route))
