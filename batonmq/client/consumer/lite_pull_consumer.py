"""A pull consumer whose group shares the queues: `async for message in consumer`.

All members, Java's too, compute their shares in the same way. A message counts as processed when
the program asks for the next one. Progress is committed every `auto_commit_ms`, when another member
gets a queue, and at the end. So a message is delivered at least once, and again if the program dies
while processing it. Origin: DefaultLitePullConsumerImpl (subscribe mode).
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from batonmq.client.arguments import CheckedOptions
from batonmq.client.consumer.membership import Rebalances
from batonmq.client.consumer.options import ConsumeFromWhere, MessageModel
from batonmq.client.consumer.pull_consumer import PullConsumer
from batonmq.client.consumer.pulling import ALL
from batonmq.client.consumer.rebalance import RebalancePlan
from batonmq.client.errors import ClientError, NoRouteError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.connections import ClientOptions
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.bodies import TAG
from batonmq.protocol.message import MessageExt, MessageQueue
from batonmq.runtime.turns import gather_some, is_set_within

log = logging.getLogger(__name__)

QueuesChanged = Callable[[Sequence[MessageQueue]], Awaitable[None] | None]
"""Called with the queues (ascending) that this member got or is about to give up."""


@dataclass(frozen=True, slots=True)
class LitePullOptions(CheckedOptions):
    """`auto_commit_ms`: how often progress is committed; None: only by `commit()`."""

    from_where: ConsumeFromWhere = ConsumeFromWhere.LAST
    auto_commit_ms: int | None = 5_000
    rebalance_ms: int = 20_000


class LitePullConsumer(PullConsumer):
    """Call `subscribe`, then `start` inside a running loop, then `poll` or `async for`. Or call
    `assign` instead of `subscribe` to choose the queues. `close` commits the processed
    messages, unless `auto_commit_ms` is None, and leaves the group."""

    def __init__(
        self,
        group: str,
        *,
        name_servers: str | Sequence[str] | None = None,
        options: LitePullOptions | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
        on_assigned: QueuesChanged | None = None,
        on_revoked: QueuesChanged | None = None,
    ) -> None:
        """`on_revoked` is called while this member may still commit. Exceptions of callbacks are
        logged. Errors as `PullConsumer`."""
        self.options = options or LitePullOptions()
        super().__init__(
            group,
            name_servers=name_servers,
            client=client,
            client_options=client_options,
            from_where=self.options.from_where,
        )
        self._on_assigned, self._on_revoked = on_assigned, on_revoked
        self._shared: set[str] = set()
        self._rebalances = Rebalances(
            self._client, group, MessageModel.CLUSTERING, self.options.rebalance_ms
        )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def shares_queues(self) -> bool:
        return bool(self._shared)

    @property
    def assigned_queues(self) -> tuple[MessageQueue, ...]:
        """The queues that this member reads now, ascending."""
        return tuple(sorted(self._positions))

    def subscribe(self, topic: str, expression: str = ALL, *, expression_type: str = TAG) -> None:
        """Shares the topic's queues with the group. Call it before `start`, or it raises
        ClientError. Expressions as in `PushConsumer.subscribe`."""
        if self._running:
            raise ClientError(f"consumer {self.group} is running: subscribe before start()")
        self._subscribe(topic, expression, expression_type)
        self._shared.add(topic)

    async def assign(self, queues: Iterable[MessageQueue], expression: str = ALL) -> None:
        """As `PullConsumer.assign`. Raises ClientError after `subscribe`."""
        if self._shared:
            raise ClientError(f"consumer {self.group} has subscribed: its queues are shared out")
        if self.options.auto_commit_ms is not None:
            await self._offsets.release(list(self._positions))
        await super().assign(queues, expression)

    def _advice(self) -> str:
        if self._shared:
            return "the group shares its queues out, and assigned_queues has those of this member"
        return "call assign(), or subscribe() before start()"

    async def start(self) -> None:
        """Returns after the first rebalance. Topics may be created later. Raises NoNameServerError,
        and ResponseError for an SQL92 expression that a broker refuses."""
        if self._running:
            return
        await super().start()
        if self.options.auto_commit_ms is not None:
            persisting = self._offsets.persist_forever(self.options.auto_commit_ms)
            self._tasks.append(self._client.spawn(persisting))
        if not self._shared:
            return
        try:
            for topic in sorted(self._shared):
                with contextlib.suppress(NoRouteError):  # it may be created later
                    await self._client.routes.refresh(topic)
                    await self._calls.check_subscription(self.group, self._subscriptions[topic])
            await self._client.heartbeats.send()
            settled = await self._rebalance()
        except BaseException:
            await self.close()
            raise
        loop = self._rebalances.repeat(self._rebalance, settled=settled)
        self._tasks.append(self._client.spawn(loop))

    async def _close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Before it leaves the group: then the next owners find the offsets.
        if self._running and self._shared:
            await self._give_up(list(self._positions))
        elif self._running and self.options.auto_commit_ms is not None:
            await self._offsets.release(list(self._positions))
        await super()._close()

    async def poll(self, timeout_ms: int = 1000, *, max_messages: int = 32) -> list[MessageExt]:
        """As `PullConsumer.poll`, but without queues it returns nothing after the timeout. Messages
        of earlier calls count as processed."""
        self._check_running()
        # The program asks for more: it has processed what it got.
        if self.options.auto_commit_ms is not None:
            for queue, offset in self._moved.items():
                # Not where it began: that could replace a newer offset, of a reset say.
                if self._offsets.known(queue) != offset:
                    self._offsets.reset(queue, offset)
        self._moved = {}
        if self._shared and not self._positions:
            self._changed.clear()
            await is_set_within(self._changed, timeout_ms / 1000)
        if self._shared and not self._positions:
            return []
        return await super().poll(timeout_ms, max_messages=max_messages)

    async def __aiter__(self) -> AsyncIterator[MessageExt]:
        """Yields messages one by one, without end. A message counts as processed when the next one
        is requested. Raises as `poll`."""
        while True:
            # One at a time: all messages of a poll count as processed together, at the next one.
            for message in await self.poll(max_messages=1):
                yield message

    def members_changed(self, group: str) -> None:
        if group == self.group:
            self._rebalances.soon()

    def masters_moved(self, broker_names: Collection[str]) -> None:
        self._offsets.resend(q for q in self._positions if q.broker_name in broker_names)

    def route_changed(self, route: TopicRoute) -> None:
        if route.topic in self._shared:
            self._rebalances.route_changed(route)

    async def _rebalance(self) -> bool:
        """Rebalances all topics; returns whether it is complete."""
        self._rebalances.begins()
        return await self._rebalances.of_topics(self._shared, self._positions, self._change)

    async def _change(self, topic: str, plan: RebalancePlan) -> bool:
        await self._give_up(plan.give_up)
        await self._take_up(plan.take_up)
        return True

    async def _take_up(self, queues: Collection[MessageQueue]) -> None:
        if not queues:
            return
        positions = await gather_some(self._place(queue) for queue in queues)
        self._begin_at(zip(queues, positions, strict=True))
        await _call(self._on_assigned, queues)

    async def _place(self, queue: MessageQueue) -> int:
        """The first position. A position at the end of the queue is always committed, or the next
        owner would begin at a later end."""
        offset = await self._first_position(queue)
        # 0 may be no offset either, but the broker's answer while the first message is in memory.
        is_stored = bool(self._offsets.known(queue))
        if not is_stored and self.options.from_where is not ConsumeFromWhere.FIRST:
            await self.commit({queue: offset})
        return offset

    async def _give_up(self, queues: Collection[MessageQueue]) -> None:
        """Gives up these queues: once this returns, this member commits nothing for them."""
        if not queues:
            return
        gone = set(queues)
        # First, so that `poll` returns no more of them while the callback runs.
        await self._forget(gone)
        await _call(self._on_revoked, queues)
        for queue in gone:
            for table in (self._positions, self._moved):
                table.pop(queue, None)
            self._paused.discard(queue)
        # After them: a `poll` meanwhile notes no more progress, which would be stored too late.
        if self.options.auto_commit_ms is not None:
            await self._offsets.release(gone)
        await self._forget(gone)  # `seek` and `resume` may have begun to read it again


async def _call(callback: QueuesChanged | None, queues: Collection[MessageQueue]) -> None:
    if callback is None:
        return
    try:
        waiting = callback(sorted(queues))
        if waiting is not None:
            await waiting
    except Exception:
        log.exception("rebalance_callback_failed")
