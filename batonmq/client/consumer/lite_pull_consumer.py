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

from batonmq.client.consumer.membership import GroupMembers, Rebalances, by_topic
from batonmq.client.consumer.options import ConsumeFromWhere, MessageModel
from batonmq.client.consumer.pull_consumer import PullConsumer
from batonmq.client.consumer.pulling import ALL
from batonmq.client.consumer.rebalance import plan_rebalance
from batonmq.client.errors import ClientError, NoRouteError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.connections import ClientOptions
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.bodies import TAG
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import MessageExt, MessageQueue
from batonmq.runtime.turns import gather_some, in_turns, is_set_within

log = logging.getLogger(__name__)

QueuesChanged = Callable[[Sequence[MessageQueue]], Awaitable[None] | None]
"""Called with the queues (ascending) that this member got or is about to give up."""


@dataclass(frozen=True, slots=True)
class LitePullOptions:
    """`auto_commit_ms`: how often progress is committed; None: only by `commit()`."""

    from_where: ConsumeFromWhere = ConsumeFromWhere.LAST
    auto_commit_ms: int | None = 5_000
    rebalance_ms: int = 20_000


class LitePullConsumer(PullConsumer):
    """Call `subscribe`, then `start` inside a running loop, then `poll` or `async for`. Or call
    `assign` instead of `subscribe` to choose the queues."""

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
        self._processed: dict[MessageQueue, int] = {}
        self._committed: dict[MessageQueue, int] = {}
        self._rebalances = Rebalances(self.options.rebalance_ms)
        self._tasks: list[asyncio.Task[None]] = []

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
        await super().assign(queues, expression)
        self._processed, self._committed = {}, {}

    async def start(self) -> None:
        """Returns after the first rebalance. Topics may be created later. Raises NoNameServerError,
        and ResponseError for an SQL92 expression that a broker refuses."""
        if self._running:
            return
        await super().start()
        if self.options.auto_commit_ms is not None:
            self._tasks.append(
                self._client.spawn(self._commit_forever(self.options.auto_commit_ms))
            )
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

    async def close(self) -> None:
        """Commits the processed messages, unless `auto_commit_ms` is None, and leaves the group."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._running and self._shared:
            await self._give_up(list(self._positions))
        elif self._running and self.options.auto_commit_ms is not None:
            await self._store(self._processed)
        await super().close()

    async def poll(self, timeout_ms: int = 1000, *, max_messages: int = 32) -> list[MessageExt]:
        """As `PullConsumer.poll`, but without queues it returns nothing after the timeout. Messages
        of earlier calls count as processed."""
        self._check_running()
        # The program asks for more: it has processed what it got.
        self._processed |= self._moved
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
        # A new master may lack the last second of progress, so commit it again.
        kept = self._committed.items()
        self._committed = {at: end for at, end in kept if at.broker_name not in broker_names}

    def route_changed(self, route: TopicRoute) -> None:
        if route.topic in self._shared:
            self._rebalances.soon()

    async def _commit_forever(self, interval_ms: int) -> None:
        while True:
            await asyncio.sleep(interval_ms / 1000)
            await self._store(dict(self._processed))

    async def _store(self, offsets: dict[MessageQueue, int]) -> None:
        """Commits the offsets that are not committed yet; stops at a failure, to be repeated later.
        Skips queues that were given up since."""
        async for queue, offset in in_turns(offsets.items()):
            if self._committed.get(queue) == offset or queue not in self._positions:
                continue
            try:
                await self.commit({queue: offset})
            except BatonError as error:
                log.warning("offset_not_stored queue=%s reason=%s", queue, error)
                return
            self._committed[queue] = offset

    async def _rebalance(self) -> bool:
        """Rebalances all topics; returns whether it is complete."""
        self._rebalances.begins()
        held = by_topic(self._positions)
        settled = True
        members = GroupMembers(self._client, self.group)
        for topic in sorted(self._shared):
            try:
                settled &= await self._rebalance_topic(topic, held.get(topic, ()), members)
            except BatonError as error:
                log.warning("rebalance_failed topic=%s reason=%s", topic, error)
                settled = False
        return settled

    async def _rebalance_topic(
        self, topic: str, held: Collection[MessageQueue], members: GroupMembers
    ) -> bool:
        route = await self._client.routes.get(topic)
        ids = await members.ids(route)
        plan = plan_rebalance(
            held=held,
            queues=route.subscribe_queues,
            client_ids=ids,
            own_id=self._client.client_id,
            model=MessageModel.CLUSTERING,
        )
        await self._give_up(plan.give_up)
        await self._take_up(plan.take_up)
        return ids is not None

    async def _take_up(self, queues: Collection[MessageQueue]) -> None:
        if not queues:
            return
        positions = await gather_some(self._place(queue) for queue in queues)
        self._begin_at(zip(queues, positions, strict=True))
        await _tell(self._on_assigned, queues)

    async def _place(self, queue: MessageQueue) -> int:
        """The first position. A position at the end of the queue is always committed, or the next
        owner would begin at a later end."""
        offset = await self.committed(queue)
        if offset is not None:
            return offset
        if self.options.from_where is ConsumeFromWhere.FIRST:
            return await self.min_offset(queue)
        offset = await self.max_offset(queue)
        await self.commit({queue: offset})
        return offset

    async def _give_up(self, queues: Collection[MessageQueue]) -> None:
        """Gives up these queues: once this returns, this member commits nothing for them."""
        if not queues:
            return
        gone = set(queues)
        # First, so that `poll` returns no more of them while the callback runs.
        await self._forget(gone)
        await _tell(self._on_revoked, queues)
        if self.options.auto_commit_ms is not None:
            await self._store({q: at for q, at in self._processed.items() if q in gone})
        for queue in gone:
            for table in (self._positions, self._processed, self._moved, self._committed):
                table.pop(queue, None)
            self._paused.discard(queue)
        await self._forget(gone)  # `seek` and `resume` may have begun to read it again


async def _tell(callback: QueuesChanged | None, queues: Collection[MessageQueue]) -> None:
    if callback is None:
        return
    try:
        waiting = callback(sorted(queues))
        if waiting is not None:
            await waiting
    except Exception:
        log.exception("rebalance_callback_failed")
