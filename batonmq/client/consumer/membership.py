"""The members of a consumer group, as its brokers report them, and when to rebalance."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from batonmq.client.consumer.options import MessageModel
from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.consumer.rebalance import RebalancePlan, plan_rebalance
from batonmq.client.errors import NoRouteError, UnsupportedByBrokerError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.topic_name import RETRY_PREFIX
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.turns import is_set_within

log = logging.getLogger(__name__)

_CALL_MS = 3_000
_UNSETTLED_MS = 1_000
"""Pause before an incomplete rebalance is repeated."""


Change = Callable[[str, RebalancePlan], Awaitable[bool]]
"""Gives up and takes up queues of a topic; returns whether it took up all."""


class Rebalances:
    """When a member rebalances: every `period_ms`, after `soon`, and sooner if incomplete."""

    def __init__(
        self, client: ClientInstance, group: str, model: MessageModel, period_ms: int
    ) -> None:
        self._client, self._group, self._model = client, group, model
        self._calls = QueueCalls(client)
        self._period_ms = period_ms
        self._wanted = asyncio.Event()
        self._queues: dict[str, tuple[MessageQueue, ...]] = {}

    def soon(self) -> None:
        self._wanted.set()

    def begins(self) -> None:
        """A rebalance begins: it serves all calls of `soon` up to now."""
        self._wanted.clear()

    def route_changed(self, route: TopicRoute) -> None:
        # Another master of the same queues moves none of them.
        if self._queues.get(route.topic) != route.subscribe_queues:
            self.soon()

    async def of_topics(
        self, topics: Iterable[str], held: Iterable[MessageQueue], change: Change
    ) -> bool:
        """Rebalances these topics of a member that holds these queues; returns whether it is
        complete. Raises UnsupportedByBrokerError."""
        of_topic: dict[str, list[MessageQueue]] = {}
        for queue in held:
            of_topic.setdefault(queue.topic, []).append(queue)
        # One table for all topics: a broker is asked for the members once.
        settled, known = True, dict[str, list[str] | None]()
        for topic in sorted(topics):
            try:
                route = await self._client.routes.get(topic)
                clustering = self._model is MessageModel.CLUSTERING
                ids = await self._ids(route, known) if clustering else []
                self._queues[topic] = queues = route.subscribe_queues
                own_id, mine = self._client.client_id, of_topic.get(topic, ())
                plan = plan_rebalance(mine, queues, ids, own_id, self._model)
                if plan.changed:
                    log.info("rebalanced group=%s topic=%s %s", self._group, topic, plan)
                settled &= await change(topic, plan) and ids is not None
            except UnsupportedByBrokerError:
                raise
            except NoRouteError:
                # Without a retry topic there are no retries yet; any other topic is waited for.
                settled &= topic.startswith(RETRY_PREFIX)
            except BatonError as error:
                log.warning("rebalance_failed topic=%s reason=%s", topic, error)
                settled = False
        return settled

    async def _ids(self, route: TopicRoute, known: dict[str, list[str] | None]) -> list[str] | None:
        """The client ids of the group's members; None if no broker of the topic knows any. `known`:
        those of the brokers asked before in this rebalance."""
        for broker_name, address in sorted(route.masters().items()):
            if broker_name not in known:
                known[broker_name] = await self._ask(route.topic, broker_name, address)
            if (ids := known[broker_name]) is not None:
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

    async def repeat(self, rebalance: Callable[[], Awaitable[bool]], *, settled: bool) -> None:
        """Rebalances until it is cancelled. `settled`: whether the last one was complete."""
        while True:
            # A broker's notice of a change may be lost, so the period is an upper bound.
            pause_ms = self._period_ms if settled else _UNSETTLED_MS
            await is_set_within(self._wanted, pause_ms / 1000)
            try:
                settled = await rebalance()
            # Any error: if this loop ended, no member would take over the queues of one that left.
            except Exception:
                log.exception("rebalance_failed")
                settled = False
