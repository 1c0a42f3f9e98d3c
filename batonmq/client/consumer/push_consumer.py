"""A consumer that calls a listener with each message of its topics.

The members of a group share a topic's queues. Each computes its own share, every 20 s, when a
broker reports a change of members, and when a route changes. Progress is committed only up to the
first unconsumed message, so after a crash or a failover some messages are delivered again, and none
is skipped. Origin: DefaultMQPushConsumerImpl, RebalanceImpl.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from itertools import groupby
from operator import attrgetter

from batonmq.client.arguments import check_call
from batonmq.client.consumer.concurrent_service import ConcurrentService
from batonmq.client.consumer.consume_service import ConsumeService
from batonmq.client.consumer.listener import Listener, ListenerCall
from batonmq.client.consumer.member_calls import MemberState, answer
from batonmq.client.consumer.member_stats import MemberStats
from batonmq.client.consumer.membership import Rebalances
from batonmq.client.consumer.offset_store import LocalOffsetStore, OffsetStore, RemoteOffsetStore
from batonmq.client.consumer.options import (
    ConsumeFromWhere,
    ConsumeType,
    MessageModel,
    PushConsumerOptions,
)
from batonmq.client.consumer.orderly_service import OrderlyService
from batonmq.client.consumer.pulling import ALL
from batonmq.client.consumer.queue_calls import QueueCalls
from batonmq.client.consumer.queue_reader import QueueReader, Reading
from batonmq.client.consumer.rebalance import RebalancePlan
from batonmq.client.consumer.subscriber import Subscriber
from batonmq.client.errors import (
    ClientClosedError,
    ClientError,
    NoMasterError,
    NoRouteError,
    UnsupportedByBrokerError,
)
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.connections import ClientOptions
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.bodies import TAG
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.topic_name import RETRY_PREFIX, retry_topic
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.clock import boot_ms, wall_ms
from batonmq.runtime.turns import gather_apart, gather_some, to_the_end

log = logging.getLogger(__name__)

_CALL_MS = 3_000


class PushConsumer(Subscriber):
    """Call `subscribe`, then `start` inside a running loop; `close` leaves the queues to other
    members.

    The listener is called as `listener(messages, context)`; see `Listener`."""

    consume_type = ConsumeType.PASSIVELY

    def __init__(
        self,
        group: str,
        listener: Listener,
        *,
        orderly: bool = False,
        name_servers: str | Sequence[str] | None = None,
        options: PushConsumerOptions | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        """`orderly`: one call at a time per queue, in order (needs a broker with queue locks).
        `client`: an instance to share, started and closed by its owner, with at most one
        consumer per group that shares its queues. Raises MessageIllegalError for a bad group name,
        ArgumentError for a bad listener."""
        check_call("listener", listener, ("messages", "context"))
        self.options = given = options or PushConsumerOptions()
        super().__init__(group, name_servers, client, client_options, given.from_where, given.model)
        self._orderly = orderly
        self._listener = listener
        self._calls = QueueCalls(self._client)
        self._readers: dict[MessageQueue, QueueReader] = {}
        self._offsets: OffsetStore = RemoteOffsetStore(self._client, group)
        if given.model is MessageModel.BROADCASTING:
            instance = self._client.options.instance_name or "DEFAULT"
            self._offsets = LocalOffsetStore(given.offset_dir, instance, group)
        self._stats = MemberStats()
        self._service: ConsumeService | None = None
        self._listener_call: ListenerCall | None = None
        self._rebalances = Rebalances(self._client, group, given.model, given.rebalance_ms)
        self._rebalancing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._started_ms = 0

    @property
    def client_id(self) -> str:
        """The name by which brokers know this member."""
        return self._client.client_id

    @property
    def shares_queues(self) -> bool:
        return self._model is MessageModel.CLUSTERING

    @property
    def assigned_queues(self) -> tuple[MessageQueue, ...]:
        """The queues that this member consumes now, ascending."""
        return tuple(sorted(self._readers))

    def subscribe(self, topic: str, expression: str = ALL, *, expression_type: str = TAG) -> None:
        """Adds or replaces a subscription. `expression`: `*` or `TagA || TagB`; with SQL92 a
        condition such as `a > 3 AND colour = 'blue'`, which brokers check at the start."""
        self._subscribe(topic, expression, expression_type)
        self._rebalances.soon()
        if self._running:  # brokers filter by the subscriptions of the last heartbeat
            self._client.spawn(self._client.heartbeats.send())

    def unsubscribe(self, topic: str) -> None:
        """The next rebalance, which follows at once, gives the topic's queues up."""
        self._subscriptions.pop(topic, None)
        self._rebalances.soon()

    async def start(self) -> None:
        """Returns after the first rebalance. Topics may be created later.

        Raises NoNameServerError, UnsupportedByBrokerError (orderly without queue locks),
        ResponseError for an SQL92 expression that a broker refuses, and BatonError for an
        unreadable offset file."""
        if self._running:
            return
        if not self._subscriptions:
            raise ClientError(f"consumer {self.group} has no subscription: call subscribe() first")
        await self._offsets.load()
        # Broadcasting members send nothing back, so there are no retries to read.
        if self.options.model is MessageModel.CLUSTERING:
            self._subscribe(retry_topic(self.group), ALL)
        await super().start()
        self._started_ms = wall_ms()
        try:
            await self._start_consuming()
        except BaseException:
            await self.close()
            raise

    async def _start_consuming(self) -> None:
        model, consume = self.options.model, self.options.consume
        hook, threads = self._client.options.hook, consume.concurrency
        self._listener_call = ListenerCall(self.group, self._listener, threads, self._stats, hook)
        kind = OrderlyService if self._orderly else ConcurrentService
        self._service = kind(
            self._client, self.group, self._listener_call, self._offsets, model, consume
        )
        self._service.start()
        for topic in sorted(self._subscriptions):
            try:
                await self._client.routes.refresh(topic)
            except NoRouteError as error:
                # The heartbeat below creates the retry topic.
                if not topic.startswith(RETRY_PREFIX):
                    log.warning("topic_awaited group=%s reason=%s", self.group, error)
            else:
                await self._calls.check_subscription(self.group, self._subscriptions[topic])
        # Before the rebalance: brokers list only members whose heartbeat they have.
        await self._client.heartbeats.send()
        settled = await self._rebalance()
        self._tasks = [
            self._client.spawn(self._rebalances.repeat(self._rebalance_again, settled=settled)),
            self._client.spawn(self._offsets.persist_forever(self.options.persist_ms)),
        ]

    async def close(self) -> None:
        """Stops pulling, lets listener calls end, stores the offsets, leaves the group. If a
        broadcasting consumer cannot store its offsets, OSError is raised after all of that. Raises
        ClientError in a listener, as it would wait for that."""
        if self._listener_call is not None and self._listener_call.is_called_by_this_task:
            raise ClientError(
                f"consumer {self.group}: close() waits for the listener that calls it: set an event"
                " in the listener, and close where the consumer was started"
            )
        await super().close()

    async def _close(self) -> None:
        service, self._service = self._service, None
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []
        try:
            async with self._rebalancing:  # a call of `rebalance` may be under way
                if service is not None:
                    # Stop pulling first: calls in progress may still commit while the service
                    # closes.
                    await gather_some(reader.pause() for reader in list(self._readers.values()))
                    await service.close()
                    await self._give_up(list(self._readers), service)
        finally:
            if self._listener_call is not None:
                self._listener_call.close()
                self._listener_call = None
            await super()._close()

    def route_changed(self, route: TopicRoute) -> None:
        if route.topic in self._subscriptions:
            self._rebalances.route_changed(route)

    def masters_moved(self, broker_names: Collection[str]) -> None:
        self._offsets.resend(q for q in self._readers if q.broker_name in broker_names)

    def members_changed(self, group: str) -> None:
        if group == self.group:
            self._rebalances.soon()

    async def asked(self, request: RemotingCommand) -> RemotingCommand | None:
        data, listener = self.consumer_data(), self._listener_call
        if listener is None:
            return await super().asked(request)
        properties = {
            "PROP_CLIENT_VERSION": "V5_3_3",
            "PROP_CONSUMEORDERLY": str(self._orderly).lower(),
            "PROP_CONSUMER_START_TIMESTAMP": str(self._started_ms),
            "PROP_CONSUME_TYPE": data.consume_type,
            "PROP_NAMESERVER_ADDR": ";".join(self._client.name_server_addresses),
            "PROP_THREADPOOL_CORE_SIZE": str(self.options.consume.concurrency),
        }
        state = MemberState(
            self._readers, self._offsets, listener, data, properties, self._stats, self._orderly
        )
        return await answer(state, request)

    async def rebalance(self) -> None:
        """Computes this member's share of the queues now."""
        if self._service is None:
            raise ClientClosedError(f"consumer {self.group}")
        await self._rebalance()

    async def _rebalance_again(self) -> bool:
        try:
            return await self._rebalance()
        except UnsupportedByBrokerError as error:
            log.error("rebalance_failed group=%s reason=%s", self.group, error)
            return True  # a quick repetition would fail, too

    async def _rebalance(self) -> bool:
        """Rebalances all topics; returns whether it is complete. Raises
        UnsupportedByBrokerError."""
        async with self._rebalancing:
            self._rebalances.begins()
            gone = [q for q in self._readers if q.topic not in self._subscriptions]
            now_ms = boot_ms()
            expired = [q for q, reader in self._readers.items() if reader.is_expired(now_ms)]
            for queue in expired:
                log.error(
                    "queue_expired group=%s queue=%s: it is read again from its stored offset",
                    self.group,
                    queue,
                )
            if (gone or expired) and self._service is not None:
                await self._give_up(sorted({*gone, *expired}), self._service)
            return await self._rebalances.of_topics(
                self._subscriptions, self._readers, self._change
            )

    async def _change(self, topic: str, plan: RebalancePlan) -> bool:
        service = self._service  # `_close` may take it away meanwhile
        if service is None:
            return True
        await self._give_up(plan.give_up, service)
        return await self._take_up_all(plan.take_up, service)

    async def _take_up_all(self, queues: Sequence[MessageQueue], service: ConsumeService) -> bool:
        """Takes up queues, of each broker group concurrently. Returns whether all were taken up."""
        silent: set[str] = set()
        return all(
            await gather_apart(
                (self._take_up(queue, service, silent) for queue in list(some))
                for _, some in groupby(queues, attrgetter("broker_name"))
            )
        )

    async def _take_up(
        self, queue: MessageQueue, service: ConsumeService, silent: set[str]
    ) -> bool:
        """`silent` collects broker groups without a master, which are not asked again in this
        rebalance."""
        if queue.broker_name in silent:
            return False
        try:
            start = await self._start_offset(queue)
        except (BatonError, OSError) as error:  # a broadcasting member stores offsets itself
            # Each further queue of that group would wait for its time-out as well.
            if isinstance(error, NoMasterError):
                silent.add(queue.broker_name)
            log.warning("queue_not_taken_up queue=%s reason=%s", queue, error)
            return False
        shared = Reading(
            self._client,
            self.group,
            self._subscriptions.get,
            self._offsets,
            self.options.pull,
            service.arrived,
            orderly=self._orderly,
            commits=self.options.model is MessageModel.CLUSTERING,
            stats=self._stats,
        )
        return await to_the_end(self._begin(QueueReader(shared, queue, start), service))

    async def _begin(self, reader: QueueReader, service: ConsumeService) -> bool:
        # Must finish even if this consumer is closed meanwhile: a queue that is locked at its
        # broker but not in `_readers` would stay locked until the lock expires.
        if not await service.acquire(reader):
            return False
        self._readers[reader.queue] = reader
        reader.start()
        return True

    async def _give_up(self, queues: Sequence[MessageQueue], service: ConsumeService) -> None:
        """Gives up these queues: once this returns, this member commits nothing for them."""
        readers = [self._readers.pop(queue) for queue in queues]
        if readers:
            # Nothing else stops them now, if this consumer is closed meanwhile.
            await to_the_end(self._hand_over(readers, service))

    async def _hand_over(self, readers: Sequence[QueueReader], service: ConsumeService) -> None:
        await gather_some(reader.stop() for reader in readers)
        # Before the queues are unlocked: the next owner then locks them, and begins there.
        await self._offsets.release([reader.queue for reader in readers])
        await service.release(readers)

    async def _start_offset(self, queue: MessageQueue) -> int:
        """Where to begin. If the group has no offset and does not begin at the first message, the
        offset is stored before the first pull, or the next owner would begin at a later end."""
        deadline_ms = boot_ms() + _CALL_MS
        offset = await self._offsets.read(queue, deadline_ms=deadline_ms)
        if offset is not None:
            return offset
        if queue.topic.startswith(RETRY_PREFIX):
            return 0  # whatever `from_where` says: they are retries of this group's messages
        where, start_ms = self.options.from_where, self.options.start_timestamp_ms
        offset = await self._calls.first_offset(queue, where, start_ms, deadline_ms=deadline_ms)
        if where is not ConsumeFromWhere.FIRST:
            await self._offsets.place(queue, offset, deadline_ms=deadline_ms)
        return offset
