"""A pull consumer: `pull` by queue and offset, or `poll` of assigned queues.

There is no rebalance: the program assigns queues, and commits when it has processed the messages.
Origin: DefaultMQPullConsumer, DefaultLitePullConsumer (assign mode).
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice

from batonmq.client.arguments import check_number, check_queue, checked_queues
from batonmq.client.consumer.offset_store import RemoteOffsetStore
from batonmq.client.consumer.options import ConsumeFromWhere, ConsumeType
from batonmq.client.consumer.pulling import (
    ALL,
    SUSPEND_MS,
    PullRequest,
    PullResult,
    build_subscription,
    pull_at_master,
    read_pull_reply,
)
from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.consumer.subscriber import Receiver
from batonmq.client.errors import ClientError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.connections import ClientOptions
from batonmq.protocol.bodies import SubscriptionData
from batonmq.protocol.message import MessageExt, MessageQueue
from batonmq.runtime.clock import boot_ms, wall_ms
from batonmq.runtime.turns import GATHERED_AT_ONCE, Pace, gather_some, in_turns, is_set_within

_FETCHED_AT_ONCE = 32
"""Per queue, also by a `poll` for less: one message each would cost a request each."""


class PullConsumer(Receiver):
    """Methods raise NoMasterError, NoRouteError, NoNameServerError when a queue's broker cannot be
    reached in time, ResponseError when it refuses. `close` does not commit: polled messages
    that were not committed are delivered again."""

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
        self._offsets = RemoteOffsetStore(self._client, group)
        self._positions: dict[MessageQueue, int] = {}
        self._moved: dict[MessageQueue, int] = {}
        """Positions that changed since a subclass last emptied this."""
        self._due: dict[MessageQueue, None] = {}
        """Queues without messages and without a fetch; some may be paused."""
        self._fetches: dict[MessageQueue, asyncio.Task[PullResult]] = {}
        self._done: deque[MessageQueue] = deque()
        """Queues whose fetch has ended."""
        self._ready: OrderedDict[MessageQueue, list[MessageExt]] = OrderedDict()
        self._aside: dict[MessageQueue, list[MessageExt]] = {}
        """As `_ready`, for paused queues."""
        self._paused: set[MessageQueue] = set()
        self._changed = asyncio.Event()

    async def _close(self) -> None:
        await self._forget(list(self._fetches))
        await super()._close()

    async def fetch_queues(self, topic: str, *, timeout_ms: int = 3000) -> tuple[MessageQueue, ...]:
        """The topic's readable queues, ascending."""
        self._check_running()
        route = await self._client.routes.refresh(topic, deadline_ms=boot_ms() + timeout_ms)
        return route.subscribe_queues

    async def max_offset(self, queue: MessageQueue, *, timeout_ms: int = 3000) -> int:
        """Exclusive end of the readable messages."""
        self._check_running()
        return await self._calls.max_offset(queue, deadline_ms=boot_ms() + timeout_ms)

    async def min_offset(self, queue: MessageQueue, *, timeout_ms: int = 3000) -> int:
        """The offset of the first message that is kept."""
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
        """The group's stored offset; None if there is none."""
        self._check_running()
        deadline_ms = boot_ms() + timeout_ms
        return await self._calls.committed_offset(self.group, queue, deadline_ms=deadline_ms)

    async def commit(
        self, offsets: dict[MessageQueue, int] | None = None, *, timeout_ms: int = 3000
    ) -> None:
        """Stores offsets at the brokers; by default the positions after the messages that `poll`
        returned."""
        self._check_running()
        for queue, offset in (offsets or {}).items():
            check_queue(queue)
            check_number("offset", offset, 0)
        deadline_ms = boot_ms() + timeout_ms
        await gather_some(
            self._offsets.place(queue, offset, deadline_ms=deadline_ms)
            for queue, offset in sorted((self._positions if offsets is None else offsets).items())
        )

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
        """Pulls at most `max_messages` from `offset` on.

        Without messages: with `block` the broker holds the pull until one arrives, at most
        `timeout_ms`; else the status is NO_NEW_MSG at once. Retries within `timeout_ms`."""
        self._check_running()
        check_queue(queue)
        check_number("offset", offset, 0)
        check_number("max_messages", max_messages, 1)
        began_ms, deadline_ms = wall_ms(), boot_ms() + timeout_ms
        await self._subscribe_all([queue.topic], expression)
        subscription = self._subscriptions[queue.topic]
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

    async def _subscribe_all(self, topics: Iterable[str], expression: str) -> None:
        """Subscribes to topics, and sends heartbeats: a broker serves only groups that it knows."""
        changed = []
        async for topic in in_turns(topics):
            known = self._subscriptions.get(topic)
            wanted = build_subscription(topic, expression, wall_ms())
            if known is None or known.sub_string != wanted.sub_string:
                self._subscriptions[topic] = wanted
                changed.append(topic)
        routes = await gather_some(map(self._client.routes.get, changed))
        if routes:
            await self._client.heartbeats.send({a for r in routes for a in r.masters().values()})

    async def assign(self, queues: Iterable[MessageQueue], expression: str = ALL) -> None:
        """Sets the queues that `poll` reads. Positions begin at the committed offsets, or by
        `from_where`."""
        self._check_running()
        wanted = sorted(set(checked_queues(queues)))
        await self._forget(list(self._fetches))
        await self._subscribe_all(sorted({queue.topic for queue in wanted}), expression)
        positions = await gather_some(map(self._first_position, wanted))
        # Again: `poll` may have been called while the brokers were asked.
        await self._forget(list(self._positions))
        self._positions, self._moved = {}, {}
        self._paused.clear()
        self._begin_at(zip(wanted, positions, strict=True))

    def _begin_at(self, positions: Iterable[tuple[MessageQueue, int]]) -> None:
        new = dict(positions)
        self._positions |= new
        self._moved |= new
        self._due |= dict.fromkeys(new)
        self._changed.set()

    def _move(self, queue: MessageQueue, offset: int) -> None:
        """`poll` has returned everything below `offset`, or must skip it."""
        self._positions[queue] = self._moved[queue] = offset

    def _advice(self) -> str:
        """How a queue comes to this consumer."""
        return "call assign() first"

    def position(self, queue: MessageQueue) -> int:
        """The offset after the last message that `poll` returned from an assigned queue."""
        if queue not in self._positions:
            raise ClientError(f"{queue} is not assigned to this consumer: {self._advice()}")
        return self._positions[queue]

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Makes `poll` continue at `offset` of this assigned queue, or at the nearest offset that
        the queue has."""
        check_number("offset", offset, 0)
        await self._forget([queue])
        # After the wait: a rebalance may have given the queue away meanwhile.
        self.position(queue)
        self._move(queue, offset)
        self._due[queue] = None

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Makes `poll` skip these assigned queues until `resume`; their positions stay."""
        for queue in checked_queues(queues):
            self.position(queue)
            self._paused.add(queue)
            if queue in self._ready:
                self._aside[queue] = self._ready.pop(queue)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Lets `poll` read these queues again, from their positions."""
        for queue in queues:
            self._paused.discard(queue)
            if queue in self._aside:
                self._ready[queue] = self._aside.pop(queue)
            elif queue in self._positions:
                self._due[queue] = None
        self._changed.set()

    async def poll(self, timeout_ms: int = 1000, *, max_messages: int = 32) -> list[MessageExt]:
        """Returns messages of assigned queues, in order within a queue; empty after the timeout.

        Queues are pulled between calls, too, so a message that arrives then is returned at once. An
        unreachable broker raises only if no other queue has messages."""
        self._check_running()
        if not self._positions:
            raise ClientError(f"no queue is assigned: {self._advice()}")
        check_number("timeout_ms", timeout_ms, 0)
        check_number("max_messages", max_messages, 1)
        began_ms, deadline_ms = wall_ms(), boot_ms() + timeout_ms
        while True:
            self._changed.clear()
            await self._collect()
            ready = self._take_ready(max_messages)
            if ready:
                self._note_received(ready, began_ms)
                return ready
            await self._start_fetches(max(max_messages, _FETCHED_AT_ONCE))
            left_ms = deadline_ms - boot_ms()
            if left_ms <= 0:
                return []
            await is_set_within(self._changed, left_ms / 1000)

    async def _start_fetches(self, max_messages: int) -> None:
        """Starts a fetch for each due queue, a few per turn."""
        pace = Pace(GATHERED_AT_ONCE)
        while self._due:
            queue, _ = self._due.popitem()
            # One that is paused comes back to `_due` with `resume`.
            if queue not in self._fetches and queue not in self._paused:
                pull = self._pull(
                    queue,
                    self._positions[queue],
                    max_messages,
                    self._subscriptions[queue.topic],
                    # The broker holds it for one of them; the other is for a failover.
                    boot_ms() + 2 * SUSPEND_MS,
                    block=True,
                )
                fetch = self._fetches[queue] = asyncio.get_running_loop().create_task(pull)
                fetch.add_done_callback(partial(self._ended, queue))
            await pace.step()

    def _ended(self, queue: MessageQueue, fetch: asyncio.Task[PullResult]) -> None:
        if self._fetches.get(queue) is fetch:
            self._done.append(queue)
            self._changed.set()

    async def _collect(self) -> None:
        errors: list[BaseException] = []
        pace = Pace()
        while self._done:
            queue = self._done.popleft()
            fetch = self._fetches.get(queue)
            # It was given up since it ended, and may have a successor.
            if fetch is None or not fetch.done():
                continue
            del self._fetches[queue]
            error = fetch.exception()
            if error is None and fetch.result().messages:
                found = self._aside if queue in self._paused else self._ready
                found[queue] = list(fetch.result().messages)
            elif error is None:
                # Messages that no tag matches are skipped, or they would be read each time.
                self._move(queue, fetch.result().next_begin_offset)
                self._due[queue] = None
            else:
                errors.append(error)
                self._due[queue] = None
            await pace.step()
        if errors and not self._ready:
            raise errors[0]

    def _take_ready(self, max_messages: int) -> list[MessageExt]:
        taken: list[MessageExt] = []
        while self._ready and len(taken) < max_messages:
            queue = next(iter(self._ready))
            messages, left = self._ready[queue], max_messages - len(taken)
            part, rest = messages[:left], messages[left:]
            taken += part
            self._move(queue, part[-1].queue_offset + 1)
            if rest:
                self._ready[queue] = rest
            else:
                del self._ready[queue]
                self._due[queue] = None
        return taken

    async def _first_position(self, queue: MessageQueue) -> int:
        deadline_ms = boot_ms() + 3000
        offset = await self._offsets.read(queue, deadline_ms=deadline_ms)
        if offset is not None:
            return offset
        return await self._calls.first_offset(queue, self._from_where, 0, deadline_ms=deadline_ms)

    async def _forget(self, queues: Iterable[MessageQueue]) -> None:
        """Cancels the fetches of these queues and drops their messages."""
        left = iter(queues)
        while some := list(islice(left, GATHERED_AT_ONCE)):
            for queue in some:
                for table in (self._due, self._ready, self._aside):
                    table.pop(queue, None)
            fetches = [self._fetches.pop(queue) for queue in some if queue in self._fetches]
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)
