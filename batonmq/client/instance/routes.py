"""The routes of the topics that a client uses: cached, polled, and fetched at once after a failure.

A refusal that names the new master updates the routes without a name server.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from batonmq.client.errors import ClientClosedError, NoMasterError, NoNameServerError
from batonmq.client.instance.connections import Connections
from batonmq.client.instance.topic_route import MasterHints, TopicRoute, moved_masters, topic_route
from batonmq.protocol.errors import BatonError, ResponseError
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.turns import for_each

log = logging.getLogger(__name__)

HINTED_AT_ONCE = 128


class RouteListener:
    def route_changed(self, route: TopicRoute) -> None:
        """A route is new or has changed."""

    def masters_moved(self, moved: Mapping[str, str], known: Collection[str], topic: str) -> None:
        """These masters (broker name -> address) are new or have another address. Reported once for
        all topics; `topic` is the first. `known`: broker groups that were known before, with or
        without a master."""

    def masters_left(self, addresses: Collection[str]) -> None:
        """No route names these addresses as masters any more."""


class RouteTable:
    def __init__(self, connections: Connections, listener: RouteListener) -> None:
        self._connections = connections
        self._listener = listener
        self._routes: dict[str, TopicRoute] = {}
        self._masters: dict[str, str | None] = {}
        """Known broker group -> master by the newest route. That may come from a name server that
        lags, so it is used only to notice changes."""
        self._named: Counter[str] = Counter()
        """Master's address -> how many routes name it."""
        self._hints = MasterHints()
        self._fetches: dict[str, asyncio.Task[TopicRoute]] = {}

    def all(self) -> list[TopicRoute]:
        return list(self._routes.values())

    def master_of(self, broker_name: str) -> str | None:
        """The group's master by the newest route of any topic."""
        return self._masters.get(broker_name)

    def is_master(self, address: str) -> bool:
        """Whether any known route names this address as a master."""
        return self._named[address] > 0

    def cached(self, topic: str) -> TopicRoute | None:
        return self._routes.get(topic)

    async def get(self, topic: str, *, deadline_ms: int | None = None) -> TopicRoute:
        """The known route, fetched if there is none. Raises NoRouteError, NoNameServerError."""
        route = self._routes.get(topic)
        return route or await self.refresh(topic, deadline_ms=deadline_ms)

    async def refresh(
        self,
        topic: str,
        *,
        deadline_ms: int | None = None,
        suspects: Collection[str] = (),
        by_turns: bool = False,
    ) -> TopicRoute:
        """Fetches the route from the name servers; concurrent callers share one fetch.

        `suspects`: addresses that just failed as masters; a name server that names others wins.
        `by_turns`: from another name server each time, so that one that lags does no lasting harm.
        Raises NoRouteError, NoNameServerError; ResponseError if this user may not see a topic
        whose route was never known."""
        fetch = self._fetches.get(topic)
        if fetch is None:
            work = self._fetch(topic, frozenset(suspects), by_turns)
            # Each waiter gets the failure; without waiters it is ignored.
            fetch = self._connections.spawn(work, log_failure=False)
            self._fetches[topic] = fetch
            fetch.add_done_callback(lambda done: self._fetches.pop(topic, None))
        left_ms = self._connections.options.request_timeout_ms
        if deadline_ms is not None:
            left_ms = deadline_ms - boot_ms()
        # Who gives up waiting must not end the fetch for the others.
        ended, _ = await asyncio.wait((fetch,), timeout=max(left_ms, 1) / 1000)
        if not ended:
            addresses = self._connections.name_server_addresses
            raise NoNameServerError([(each, "no answer in time") for each in addresses])
        if fetch.cancelled():
            raise ClientClosedError("the client")
        return fetch.result()

    async def master(
        self,
        topic: str,
        broker_name: str,
        *,
        deadline_ms: int | None = None,
        failed_at: str | None = None,
    ) -> str:
        """The address of a group's master. `failed_at`: an address where a call just failed. Raises
        NoMasterError, NoRouteError, NoNameServerError."""
        if failed_at is None:
            route = await self.get(topic, deadline_ms=deadline_ms)
        else:
            route = await self.refresh(topic, deadline_ms=deadline_ms, suspects=(failed_at,))
        address = route.master_address(broker_name)
        # The known route may be from before the election.
        if address is None:
            route = await self.refresh(topic, deadline_ms=deadline_ms)
            address = route.master_address(broker_name)
        if address is None:
            raise NoMasterError(broker_name)
        return address

    def hinted_master(self, topic: str, broker_name: str, refusal: RemotingCommand) -> str | None:
        """Updates the topic's route with the master that a refusal names, and returns it; else
        None. All other routes are updated in the next turns of the loop."""
        address = self._hints.note(broker_name, refusal.ext, boot_ms())
        if address is not None:
            # This send needs its route now. The others follow in slices: there may be thousands.
            is_news = self._masters.get(broker_name) != address
            self._apply_hints(topic)
            if is_news:
                for_each(list(self._routes), self._apply_hints, HINTED_AT_ONCE)
        return address

    def _apply_hints(self, topic: str) -> None:
        route = self._routes.get(topic)
        if route is not None:
            self._adopt(self._hints.applied_to(route, boot_ms()))

    def master_unreachable(self, address: str) -> None:
        """The address does not reply or is not master: drops hints that name it."""
        self._hints.unreachable(address)

    def forget(self, topic: str) -> None:
        route = self._routes.pop(topic, None)
        if route is not None:
            self._named.subtract(route.masters().values())

    async def poll(self, used_topics: Callable[[], Iterable[str]]) -> None:
        """Refreshes the known routes, and those of the topics in use, periodically."""
        while True:
            await asyncio.sleep(self._connections.options.route_poll_ms / 1000)
            # One after the other: a poll of many topics must not crowd out sends.
            for topic in sorted({*used_topics(), *self._routes}):
                try:
                    await self.refresh(topic)
                except BatonError as error:
                    log.info("route_poll_failed topic=%s reason=%s", topic, error)

    async def _fetch(self, topic: str, suspects: frozenset[str], by_turns: bool) -> TopicRoute:
        connections = self._connections
        deadline_ms = boot_ms() + connections.options.request_timeout_ms
        try:
            data = await connections.name_servers.route(
                topic, deadline_ms=deadline_ms, suspects=suspects, by_turns=by_turns
            )
        except ResponseError as error:
            if topic not in self._routes:
                raise
            # Keep a known route: rights may just be changing.
            raise NoNameServerError([(error.address, str(error))]) from error
        route = self._hints.applied_to(topic_route(topic, data), boot_ms())
        self._adopt(route)
        return route

    def _adopt(self, route: TopicRoute) -> None:
        before = self._routes.get(route.topic)
        if before == route:
            return
        self._routes[route.topic] = route
        self._named.update(route.masters().values())
        moved = moved_masters(self._masters, route)
        known = [name for name in moved if name in self._masters]
        self._masters |= {name: route.master_address(name) for name in route.brokers}
        if moved:
            self._listener.masters_moved(moved, known, route.topic)
        if before is not None:
            self._leave(before, route)
        self._listener.route_changed(route)

    def _leave(self, before: TopicRoute, route: TopicRoute) -> None:
        named = before.masters()
        self._named.subtract(named.values())
        left = {
            address
            for name, address in named.items()
            # A group without a master is no news: the old one may still be it.
            if not self.is_master(address) and route.master_address(name) is not None
        }
        if left:
            self._listener.masters_left(left)
