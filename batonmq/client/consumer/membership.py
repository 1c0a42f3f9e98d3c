"""Who is in a consumer group, as its brokers say: the base of every rebalance."""

from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.process.clock import boot_ms

_CALL_MS = 3_000


async def member_ids(client: ClientInstance, group: str, route: TopicRoute) -> list[str] | None:
    """The group's members, None if no broker of the topic knows any. A broker without this one (a
    new master, say) gets a heartbeat and is asked again. Raises as QueueCalls."""
    calls = QueueCalls(client)
    for broker_name, address in sorted(route.masters().items()):
        ids: list[str] | None = None
        for attempt in range(2):
            ids = await calls.consumer_ids(
                route.topic, broker_name, group, deadline_ms=boot_ms() + _CALL_MS
            )
            if ids is not None and client.client_id in ids:
                return ids
            if attempt == 0:
                await client.heartbeats.send([address])
        if ids is not None:
            return ids
    return None
