"""The members of a consumer group, as its brokers report them, and when to rebalance."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.message import MessageQueue
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.turns import is_set_within

log = logging.getLogger(__name__)

_CALL_MS = 3_000
_UNSETTLED_MS = 1_000
"""Pause before an incomplete rebalance is repeated."""


class GroupMembers:
    """The members of a group during one rebalance: each broker is asked once, for all topics."""

    def __init__(self, client: ClientInstance, group: str) -> None:
        self._client = client
        self._group = group
        self._calls = QueueCalls(client)
        self._known: dict[str, list[str] | None] = {}

    async def ids(self, route: TopicRoute) -> list[str] | None:
        """The client ids of the members; None if no broker of the topic knows any. Raises as
        QueueCalls."""
        for broker_name, address in sorted(route.masters().items()):
            if broker_name not in self._known:
                self._known[broker_name] = await self._ask(route.topic, broker_name, address)
            ids = self._known[broker_name]
            if ids is not None:
                return ids
        return None

    async def _ask(self, topic: str, broker_name: str, address: str) -> list[str] | None:
        """Asks one broker. If it does not list this member (a new master, say), sends a heartbeat
        and asks again."""
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


class Rebalances:
    """When a member rebalances: every `period_ms`, after `soon`, and sooner if incomplete."""

    def __init__(self, period_ms: int) -> None:
        self._period_ms = period_ms
        self._wanted = asyncio.Event()

    def soon(self) -> None:
        self._wanted.set()

    def begins(self) -> None:
        """A rebalance begins: it serves all calls of `soon` up to now."""
        self._wanted.clear()

    async def repeat(self, rebalance: Callable[[], Awaitable[bool]], *, settled: bool) -> None:
        """Rebalances until it is cancelled. `settled`: whether the last one was complete."""
        while True:
            pause_ms = self._period_ms if settled else _UNSETTLED_MS
            await is_set_within(self._wanted, pause_ms / 1000)
            try:
                settled = await rebalance()
            # Any error: if this loop ended, no member would take over the queues of one that left.
            except Exception:
                log.exception("rebalance_failed")
                settled = False


def by_topic(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    found: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        found.setdefault(queue.topic, []).append(queue)
    return found
