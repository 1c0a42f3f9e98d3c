"""A consumer for programs that pull: by queue and offset, or by polling assigned queues.

There is no rebalance: the program assigns queues, and commits when it has processed the messages.
Origin: DefaultMQPullConsumer, DefaultLitePullConsumer (assign mode).
"""

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from batonmq.client.consumer.options import ConsumeFromWhere, ConsumeType
from batonmq.client.consumer.pulling import (
    ALL,
    SUSPEND_MS,
    PullRequest,
    PullResult,
    PullStatus,
    build_subscription,
    pull_at_master,
    read_pull_reply,
)
from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.consumer.subscriber import Receiver
from batonmq.client.errors import ClientError, NoRouteError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.connections import ClientOptions
from batonmq.process.clock import boot_ms, wall_ms
from batonmq.process.turns import gather_some
from batonmq.protocol.bodies import SubscriptionData
from batonmq.protocol.message import MessageExt, MessageQueue


class PullConsumer(Receiver):
    """Methods raise NoMasterError, NoRouteError, NoNameServerError when a queue's broker cannot be
    reached in time, ResponseError when it refuses."""

    consume_type = ConsumeType.ACTIVELY

    def __init__(
        self,
        group: str,
        *,
        name_servers: str | Sequence[str] | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
        from_where: ConsumeFromWhere = ConsumeFromWhere.FIRST,
    ) -> None:
        """`from_where`: where `poll` begins on a queue that the group has no offset for (FIRST or
        LAST)."""
        super().__init__(group, name_servers, client, client_options, from_where)
        self._calls = QueueCalls(self._client)
        self._assigned: tuple[MessageQueue, ...] = ()
        self._positions: dict[MessageQueue, int] = {}
        self._fetches: dict[MessageQueue, asyncio.Task[PullResult]] = {}
        self._ready: dict[MessageQueue, list[MessageExt]] = {}
        self._paused: set[MessageQueue] = set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Commits nothing: what was polled and not committed is delivered again."""
        await self._cancel_fetches(list(self._fetches))
        await super().close()

    async def fetch_queues(self, topic: str, *, timeout_ms: int = 3000) -> tuple[MessageQueue, ...]:
        """The topic's readable queues, ascending."""
        self._check_running()
        route = await self._client.routes.refresh(topic, deadline_ms=boot_ms() + timeout_ms)
        return route.subscribe_queues

    async def max_offset(self, queue: MessageQueue, *, timeout_ms: int = 3000) -> int:
        """Exclusive end of what may be read."""
        self._check_running()
        return await self._calls.max_offset(queue, deadline_ms=boot_ms() + timeout_ms)

    async def min_offset(self, queue: MessageQueue, *, timeout_ms: int = 3000) -> int:
        self._check_running()
        return await self._calls.min_offset(queue, deadline_ms=boot_ms() + timeout_ms)

    async def offset_by_time(
        self, queue: MessageQueue, timestamp_ms: int, *, timeout_ms: int = 3000
    ) -> int:
        """The first offset stored at or after the wall-clock time."""
        self._check_running()
        deadline_ms = boot_ms() + timeout_ms
        return await self._calls.offset_by_time(queue, timestamp_ms, deadline_ms=deadline_ms)

    async def committed(self, queue: MessageQueue, *, timeout_ms: int = 3000) -> int | None:
        """The group's stored offset, None if there is none."""
        self._check_running()
        deadline_ms = boot_ms() + timeout_ms
        return await self._calls.committed_offset(self.group, queue, deadline_ms=deadline_ms)

    async def commit(
        self,
        offsets: dict[MessageQueue, int] | None = None,
        *,
        timeout_ms: int = 3000,
    ) -> None:
        """Stores offsets at the brokers; default: the positions behind what `poll` returned."""
        self._check_running()
        deadline_ms = boot_ms() + timeout_ms
        for queue, offset in sorted((self._positions if offsets is None else offsets).items()):
            await self._calls.commit_offset(self.group, queue, offset, deadline_ms=deadline_ms)

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_messages: int = 32,
        *,
        expression: str = ALL,
        timeout_ms: int = 3000,
        block: bool = False,
    ) -> PullResult:
        """One reply for [`offset`, …) of the queue, at most `max_messages`.

        With `block` an empty pull is held by the broker until a message arrives, at most
        `timeout_ms`; else the status is NO_NEW_MSG at once. Retries within `timeout_ms`.
        """
        self._check_running()
        began_ms, deadline_ms = wall_ms(), boot_ms() + timeout_ms
        subscription = await self._subscribed(queue.topic, expression)
        result = await self._pull(
            queue, offset, max_messages, subscription, deadline_ms, block=block
        )
        self._note_received(result.messages, began_ms)
        return result

    async def _pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_messages: int,
        subscription: SubscriptionData,
        deadline_ms: int,
        *,
        block: bool,
    ) -> PullResult:
        request = PullRequest(self.group, queue, offset, subscription, max_messages)
        reply, address = await pull_at_master(
            self._client, request, deadline_ms=deadline_ms, block=block
        )
        return read_pull_reply(reply, request, address)

    async def _subscribed(self, topic: str, expression: str) -> SubscriptionData:
        known = self._subscriptions.get(topic)
        wanted = build_subscription(topic, expression, wall_ms())
        if known is not None and known.sub_string == wanted.sub_string:
            return known
        self._subscriptions[topic] = wanted
        # A broker serves pulls of a group only after its heartbeat.
        route = await self._client.routes.get(topic)
        await self._client.heartbeats.send(route.masters().values())
        return wanted

    async def assign(self, queues: Iterable[MessageQueue], expression: str = ALL) -> None:
        """Replaces what `poll` reads. Positions begin at the committed offsets, or `from_where`."""
        self._check_running()
        wanted = tuple(sorted(set(queues)))
        await self._cancel_fetches(list(self._fetches))
        for topic in sorted({q.topic for q in wanted}):
            await self._subscribed(topic, expression)
        positions = await gather_some(self._first_position(q) for q in wanted)
        self._assigned = wanted
        self._positions = dict(zip(wanted, positions, strict=True))
        self._ready.clear()
        self._paused.clear()

    def position(self, queue: MessageQueue) -> int:
        """The offset behind the last message that `poll` returned of an assigned queue."""
        if queue not in self._positions:
            raise ClientError(f"{queue} is not assigned to this consumer: call assign() first")
        return self._positions[queue]

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """`poll` continues at `offset` of this assigned queue."""
        self.position(queue)
        await self._cancel_fetches([queue])
        self._ready.pop(queue, None)
        self._positions[queue] = offset

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """`poll` returns nothing of these assigned queues until `resume`; their positions stay."""
        for queue in queues:
            self.position(queue)
            self._paused.add(queue)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """`poll` goes on with these queues where it was."""
        self._paused.difference_update(queues)
        self._has_changed()

    def _has_changed(self) -> None:
        """Wakes a `poll` that waits: it may read other queues now."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def poll(self, timeout_ms: int = 1000, *, max_messages: int = 32) -> list[MessageExt]:
        """Messages of one or more assigned queues, each queue's in order; empty after the timeout.

        The queues are pulled between calls, too, so a message that arrives then is returned at
        once. A queue whose broker cannot be reached raises only if no other queue has any.
        """
        self._check_running()
        if not self._assigned:
            raise ClientError("no queue is assigned: call assign() first")
        began_ms, deadline_ms = wall_ms(), boot_ms() + timeout_ms
        while True:
            ready = self._take_ready(max_messages)
            if ready:
                self._note_received(ready, began_ms)
                return ready
            self._start_fetches(max_messages)
            left_ms = deadline_ms - boot_ms()
            if left_ms <= 0:
                return []
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                done, _ = await asyncio.wait(
                    [*self._fetches.values(), changed],
                    timeout=left_ms / 1000,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                changed.cancel()
            self._collect(done)

    def _start_fetches(self, max_messages: int) -> None:
        for queue in self._assigned:
            if not (queue in self._fetches or queue in self._ready or queue in self._paused):
                self._fetches[queue] = asyncio.get_running_loop().create_task(
                    self._pull(
                        queue,
                        self._positions[queue],
                        max_messages,
                        self._subscriptions[queue.topic],
                        boot_ms() + 2 * SUSPEND_MS,
                        block=True,
                    )
                )

    def _collect(self, done: Collection[asyncio.Future[Any]]) -> None:
        errors: list[BaseException] = []
        for queue, fetch in list(self._fetches.items()):
            if fetch not in done:
                continue
            del self._fetches[queue]
            error = fetch.exception()
            if error is not None:
                errors.append(error)
                continue
            result = fetch.result()
            if result.status is PullStatus.FOUND and result.messages:
                self._ready[queue] = list(result.messages)
            else:
                self._positions[queue] = result.next_begin_offset
        if errors and not self._ready:
            raise errors[0]

    def _take_ready(self, max_messages: int) -> list[MessageExt]:
        taken: list[MessageExt] = []
        for queue in [queue for queue in self._ready if queue not in self._paused]:
            room = max_messages - len(taken)
            if room <= 0:
                break
            messages = self._ready[queue]
            part, rest = messages[:room], messages[room:]
            taken += part
            self._positions[queue] = part[-1].queue_offset + 1
            if rest:
                self._ready[queue] = rest
            else:
                del self._ready[queue]
        return taken

    async def _first_position(self, queue: MessageQueue) -> int:
        offset = await self.committed(queue)
        if offset is not None:
            return offset
        if self._from_where is ConsumeFromWhere.LAST:
            return await self.max_offset(queue)
        return await self.min_offset(queue)

    async def _cancel_fetches(self, queues: Iterable[MessageQueue]) -> None:
        fetches = [f for q in queues if (f := self._fetches.pop(q, None)) is not None]
        for fetch in fetches:
            fetch.cancel()
        with contextlib.suppress(NoRouteError):
            await asyncio.gather(*fetches, return_exceptions=True)
