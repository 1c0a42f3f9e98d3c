"""Typed requests of consumers to the masters of broker groups."""

from collections.abc import Sequence

from batonmq.client.arguments import check_queue
from batonmq.client.consumer.options import ConsumeFromWhere
from batonmq.client.errors import UnsupportedByBrokerError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.protocol.bodies import (
    TAG,
    CheckClientRequestBody,
    EpochEntryCache,
    GetConsumerListByGroupResponseBody,
    LockBatchRequestBody,
    LockBatchResponseBody,
    SubscriptionData,
)
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import ResponseError
from batonmq.protocol.message import MessageExt, MessageQueue
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.clock import boot_ms

_CHECK_MS = 3_000


class QueueCalls:
    """Requests about offsets, epochs, members and locks. They are retried during a failover.

    All methods raise NoMasterError when no master replied before the deadline, and ResponseError
    when it refused."""

    def __init__(self, client: ClientInstance) -> None:
        self._client = client

    async def _invoke(
        self,
        topic: str,
        broker_name: str,
        code: RequestCode,
        ext: dict[str, str],
        deadline_ms: int,
        *,
        body: bytes = b"",
        also: frozenset[int] = frozenset(),
        unsupported: tuple[str, str] | None = None,
    ) -> RemotingCommand:
        """Returns a reply with code 0 or one of `also`. `unsupported`: subject and advice of the
        error for REQUEST_CODE_NOT_SUPPORTED (3)."""
        reply, address = await self._client.masters.invoke(
            topic,
            broker_name,
            lambda left_ms: RemotingCommand.request(code, ext, body),
            deadline_ms=deadline_ms,
        )
        if reply.code == ResponseCode.SUCCESS or reply.code in also:
            return reply
        if unsupported is not None and reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            what, advice = unsupported
            raise UnsupportedByBrokerError(what, code, address, advice)
        raise ResponseError(reply.code, reply.remark, address)

    async def _ask(
        self,
        queue: MessageQueue,
        code: RequestCode,
        ext: dict[str, str],
        deadline_ms: int,
        *,
        also: frozenset[int] = frozenset(),
    ) -> RemotingCommand:
        check_queue(queue)
        full = {
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "bname": queue.broker_name,
            **ext,
        }
        return await self._invoke(
            queue.topic, queue.broker_name, code, full, deadline_ms, also=also
        )

    async def committed_offset(
        self, group: str, queue: MessageQueue, *, deadline_ms: int
    ) -> int | None:
        """The group's offset; None if it has none."""
        reply = await self._ask(
            queue,
            RequestCode.QUERY_CONSUMER_OFFSET,
            {"consumerGroup": group},
            deadline_ms,
            also=frozenset({ResponseCode.QUERY_NOT_FOUND}),
        )
        return reply.require_int("offset") if reply.code == ResponseCode.SUCCESS else None

    async def commit_offset(
        self, group: str, queue: MessageQueue, offset: int, *, deadline_ms: int
    ) -> None:
        """Stores the group's progress: the next offset to be read."""
        ext = {"consumerGroup": group, "commitOffset": str(offset)}
        await self._ask(queue, RequestCode.UPDATE_CONSUMER_OFFSET, ext, deadline_ms)

    async def max_offset(
        self, queue: MessageQueue, *, deadline_ms: int, committed: bool = True
    ) -> int:
        """Exclusive end of the queue. Not `committed`: a master of ours includes unconfirmed
        messages, which no consumer may have yet; a Java broker does not."""
        ext = {} if committed else {"committed": "false"}
        reply = await self._ask(queue, RequestCode.GET_MAX_OFFSET, ext, deadline_ms)
        return reply.require_int("offset")

    async def min_offset(self, queue: MessageQueue, *, deadline_ms: int) -> int:
        reply = await self._ask(queue, RequestCode.GET_MIN_OFFSET, {}, deadline_ms)
        return reply.require_int("offset")

    async def offset_by_time(
        self, queue: MessageQueue, timestamp_ms: int, *, deadline_ms: int
    ) -> int:
        """The first offset stored at or after the wall-clock time."""
        ext = {"timestamp": str(timestamp_ms)}
        reply = await self._ask(queue, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, ext, deadline_ms)
        return reply.require_int("offset")

    async def first_offset(
        self, queue: MessageQueue, where: ConsumeFromWhere, start_ms: int, *, deadline_ms: int
    ) -> int:
        """Where a group without an offset begins. `start_ms`: for TIMESTAMP."""
        if where is ConsumeFromWhere.LAST:
            return await self.max_offset(queue, deadline_ms=deadline_ms)
        if where is ConsumeFromWhere.FIRST:
            return await self.min_offset(queue, deadline_ms=deadline_ms)
        return await self.offset_by_time(queue, start_ms, deadline_ms=deadline_ms)

    async def epochs(
        self, topic: str, broker_name: str, *, deadline_ms: int
    ) -> EpochEntryCache | None:
        """The epochs of the broker group's log; None outside controller mode."""
        reply, _ = await self._client.masters.invoke(
            topic,
            broker_name,
            lambda left_ms: RemotingCommand.request(RequestCode.GET_BROKER_EPOCH_CACHE),
            deadline_ms=deadline_ms,
        )
        # Brokers outside controller mode refuse the request.
        return EpochEntryCache.decode(reply.body) if reply.code == ResponseCode.SUCCESS else None

    async def consumer_ids(
        self, topic: str, broker_name: str, group: str, *, deadline_ms: int
    ) -> list[str] | None:
        """Client ids of the group's members at that broker; None if it has none."""
        reply, _ = await self._client.masters.invoke(
            topic,
            broker_name,
            lambda left_ms: RemotingCommand.request(
                RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group}
            ),
            deadline_ms=deadline_ms,
        )
        # Brokers refuse the request for a group without members.
        if reply.code != ResponseCode.SUCCESS:
            return None
        # An empty list lacks the asking member itself, so it counts as no answer.
        return list(GetConsumerListByGroupResponseBody.decode(reply.body).consumer_id_list) or None

    async def lock_queues(
        self, group: str, queues: Sequence[MessageQueue], *, deadline_ms: int
    ) -> frozenset[MessageQueue]:
        """Locks queues of one topic and broker group for 60 s; returns those that this client holds
        now. Raises UnsupportedByBrokerError if the broker does not serve locks."""
        reply = await self._locking(RequestCode.LOCK_BATCH_MQ, group, queues, deadline_ms)
        return frozenset(LockBatchResponseBody.decode(reply.body).lock_ok_mq_set)

    async def unlock_queues(
        self, group: str, queues: Sequence[MessageQueue], *, deadline_ms: int
    ) -> None:
        await self._locking(RequestCode.UNLOCK_BATCH_MQ, group, queues, deadline_ms)

    async def _locking(
        self, code: RequestCode, group: str, queues: Sequence[MessageQueue], deadline_ms: int
    ) -> RemotingCommand:
        body = LockBatchRequestBody(
            consumer_group=group, client_id=self._client.client_id, mq_set=list(queues)
        )
        unsupported = (
            f"orderly consumption by group {group} needs queue locks",
            "use a concurrent listener (orderly=False), or a broker that serves locks",
        )
        topic, name = queues[0].topic, queues[0].broker_name
        return await self._invoke(
            topic, name, code, {}, deadline_ms, body=body.encode(), unsupported=unsupported
        )

    async def check_subscription(self, group: str, subscription: SubscriptionData) -> None:
        """Asks every master of the topic to check an SQL92 expression (CHECK_CLIENT_CONFIG, 46);
        tags need no check. Raises ResponseError with the broker's reason."""
        if subscription.expression_type == TAG:
            return
        route = await self._client.routes.get(subscription.topic)
        body = CheckClientRequestBody(
            client_id=self._client.client_id, group=group, subscription_data=subscription
        ).encode()
        # Each has a compiler of its own, and may be of another version.
        for broker_name in sorted(route.masters()):
            await self._invoke(
                subscription.topic,
                broker_name,
                RequestCode.CHECK_CLIENT_CONFIG,
                {},
                boot_ms() + _CHECK_MS,
                body=body,
                unsupported=(f"group {group} filters by SQL92", "filter by tags"),
            )

    async def send_back(
        self,
        group: str,
        message: MessageExt,
        delay_level: int,
        max_reconsume_times: int,
        *,
        deadline_ms: int,
    ) -> None:
        """Returns an unconsumed message to its broker, which delivers it again by the retry topic.
        Raises UnsupportedByBrokerError."""
        ext = {
            "offset": str(message.physical_offset),
            "group": group,
            "delayLevel": str(delay_level),
            "originMsgId": message.msg_id,
            "originTopic": message.topic,
            "unitMode": "false",
            "maxReconsumeTimes": str(max_reconsume_times),
            "bname": message.broker_name,
        }
        await self._invoke(
            message.topic,
            message.broker_name,
            RequestCode.CONSUMER_SEND_MSG_BACK,
            ext,
            deadline_ms,
            unsupported=(f"sending messages of group {group} back", ""),
        )
