"""The routes for sends, also to topics that do not exist yet.

A topic that no name server knows gets the template topic's route; the first stored send creates the
topic, and its own route replaces the template.
"""

from collections.abc import Collection

from batonmq.client.errors import NoNameServerError, NoRouteError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.topic_route import TopicRoute, route_for_new_topic
from batonmq.client.producer.outgoing import NewTopic
from batonmq.protocol.errors import ResponseError


class PublishRoutes:
    def __init__(self, client: ClientInstance, new_topic: NewTopic) -> None:
        self._client = client
        self._new_topic = new_topic
        self._templates: dict[str, TopicRoute] = {}
        self._announced: dict[str, TopicRoute] = {}

    async def get(self, topic: str, deadline_ms: int) -> TopicRoute:
        """The known route; for an unknown topic the template's. Raises NoRouteError,
        NoNameServerError, ResponseError."""
        template = self._templates.get(topic)
        if template is not None:
            return template
        routes = self._client.routes
        try:
            route = await routes.get(topic, deadline_ms=deadline_ms)
        except NoRouteError as unknown:
            new = self._new_topic
            name_servers = self._client.name_servers
            try:
                data = await name_servers.route(new.template, deadline_ms=deadline_ms)
            except NoRouteError:
                raise unknown from None
            own = routes.cached(topic)  # it may have come meanwhile
            if own is None:
                own = self._templates[topic] = route_for_new_topic(topic, data, new.queue_nums)
            route = own
        # Brokers must know a producer to ask it about transactions, and to push replies to it.
        if self._announced.get(topic) is not route:
            self._announced[topic] = route
            self._client.spawn(self._client.heartbeats.send(route.masters().values()))
        return route

    async def refresh(self, topic: str, deadline_ms: int, suspects: Collection[str]) -> TopicRoute:
        """Fetches the route again after a failed try. `suspects`: addresses that failed as masters.
        Raises NoRouteError, NoNameServerError."""
        routes = self._client.routes
        try:
            return await routes.refresh(topic, deadline_ms=deadline_ms, suspects=suspects)
        except NoRouteError:
            template = self._templates.pop(topic, None)
            if template is None:
                raise
        except NoNameServerError:
            # The master may be back before a name server is.
            cached = routes.cached(topic)
            if cached is None:
                raise
            return cached
        # The topic does not exist yet, but the template's route has the new master.
        try:
            return await self.get(topic, deadline_ms)
        except (NoRouteError, NoNameServerError, ResponseError):
            self._templates[topic] = template
            return template

    def is_template(self, topic: str) -> bool:
        return topic in self._templates

    def stored(self, topic: str) -> None:
        """A send was stored, so the topic exists now: fetches its own route."""
        if topic in self._templates:
            self._client.spawn(self._learn_created(topic))

    def changed(self, topic: str) -> None:
        """The topic has a route of its own."""
        self._templates.pop(topic, None)

    async def _learn_created(self, topic: str) -> None:
        try:
            await self._client.routes.refresh(topic)
        except (NoRouteError, NoNameServerError, ResponseError):
            return  # not registered yet; the next stored send tries again
        self._templates.pop(topic, None)
