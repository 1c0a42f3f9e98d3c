"""Who is in a consumer group, as its brokers say: the base of every rebalance."""

from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.runtime.clock import boot_ms

_CALL_MS = 3_000


class GroupMembers:
    """The members of a group for one rebalance: a broker is asked once, for all of its topics."""

    def __init__(self, client: ClientInstance, group: str) -> None:
        self._client = client
        self._group = group
        self._calls = QueueCalls(client)
        self._known: dict[str, list[str] | None] = {}

    async def ids(self, route: TopicRoute) -> list[str] | None:
        """None if no broker of the topic knows any. Raises as QueueCalls."""
        for broker_name, address in sorted(route.masters().items()):
            if broker_name not in self._known:
                self._known[broker_name] = await self._ask(route.topic, broker_name, address)
            ids = self._known[broker_name]
            if ids is not None:
                return ids
        return None

    async def _ask(self, topic: str, broker_name: str, address: str) -> list[str] | None:
        """A broker without this member (a new master, say) gets a heartbeat and is asked again."""
        ids: list[str] | None = None
        for attempt in range(2):
            ids = await self._calls.consumer_ids(
                topic, broker_name, self._group, deadline_ms=boot_ms() + _CALL_MS
            )
            if ids is not None and self._client.client_id in ids:
                break
            if attempt == 0:
                await self._client.heartbeats.send([address])
        return ids
