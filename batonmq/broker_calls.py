"""The consumer's requests to a broker, typed. Each goes to one address or to a group's master."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from batonmq.client_instance import ClientInstance
from batonmq.errors import UnsupportedByBrokerError
from batonmq.pull_result import STATUS_BY_CODE, PullResult, PullStatus
from batonmq.subscription import wanted_only
from protocol import properties as names
from protocol.bodies import (
    GetConsumerListByGroupResponseBody,
    LockBatchRequestBody,
    LockBatchResponseBody,
    SubscriptionData,
)
from protocol.codes import RequestCode, ResponseCode
from protocol.errors import ResponseError
from protocol.message import MessageExt, MessageQueue
from protocol.record import decode_records
from protocol.sysflag import (
    COMPRESSED,
    COMPRESSION_MASK,
    PULL_COMMIT_OFFSET,
    PULL_SUBSCRIPTION,
    PULL_SUSPEND,
)
from protocol.topic_name import RETRY_PREFIX
from remoting.command import RemotingCommand

PULL_BYTES_MAX = 256 * 1024


@dataclass(frozen=True, slots=True)
class PullRequest:
    """`commit_offset`: progress to store on the way, or None. `suspend_ms` 0: answer at once."""

    group: str
    queue: MessageQueue
    offset: int
    subscription: SubscriptionData
    max_messages: int = 32
    max_bytes: int = PULL_BYTES_MAX
    suspend_ms: int = 0
    commit_offset: int | None = None

    def command(self) -> RemotingCommand:
        sys_flag = PULL_SUBSCRIPTION
        if self.suspend_ms > 0:
            sys_flag |= PULL_SUSPEND
        if self.commit_offset is not None:
            sys_flag |= PULL_COMMIT_OFFSET
        ext = {
            "consumerGroup": self.group,
            "topic": self.queue.topic,
            "queueId": str(self.queue.queue_id),
            "queueOffset": str(self.offset),
            "maxMsgNums": str(self.max_messages),
            "sysFlag": str(sys_flag),
            "commitOffset": str(self.commit_offset or 0),
            "suspendTimeoutMillis": str(self.suspend_ms),
            "subscription": self.subscription.sub_string,
            "subVersion": str(self.subscription.sub_version),
            "expressionType": "TAG",
            "maxMsgBytes": str(self.max_bytes),
            "bname": self.queue.broker_name,
        }
        return RemotingCommand.request(RequestCode.PULL_MESSAGE, ext)


async def pull(
    client: ClientInstance, address: str, request: PullRequest, *, timeout_ms: int
) -> PullResult:
    """Raises ResponseError for codes but 0, 19, 20, 21; ConnectError, RequestTimeoutError."""
    reply = await client.remoting.invoke(address, request.command(), timeout_ms)
    return read_pull_reply(reply, request, address)


def read_pull_reply(reply: RemotingCommand, request: PullRequest, address: str) -> PullResult:
    status = STATUS_BY_CODE.get(reply.code)
    if status is None:
        raise ResponseError(reply.code, reply.remark, address)
    messages: Sequence[MessageExt] = ()
    if status is PullStatus.FOUND:
        messages = wanted_only(decode_records(reply.body), request.subscription)
        for message in messages:
            _for_reader(message, request.queue.broker_name)
    return PullResult(
        status=status,
        next_begin_offset=int(reply.ext["nextBeginOffset"]),
        min_offset=int(reply.ext["minOffset"]),
        max_offset=int(reply.ext["maxOffset"]),
        messages=tuple(messages),
        suggest_broker_id=int(reply.ext.get("suggestWhichBrokerId", 0)),
    )


def _for_reader(message: MessageExt, broker_name: str) -> None:
    """Decompresses the body and undoes the detour over a retry topic.

    A body that cannot be decompressed (another codec, or garbage that its producer sent) is
    handed over as it is, with its flag: one odd message must not stop the queue.
    """
    message.broker_name = broker_name
    if message.sys_flag & COMPRESSED:
        try:
            message.body = message.uncompressed_body()
            message.sys_flag &= ~(COMPRESSED | COMPRESSION_MASK)
        except (ValueError, zlib.error):
            return
    original = message.properties.get(names.RETRY_TOPIC)
    if original is not None and message.topic.startswith(RETRY_PREFIX):
        message.topic = original


class QueueCalls:
    """Offsets and members of a group, asked from the masters; bridges failovers up to a deadline.

    All methods raise NoMasterError when no master answered in time, ResponseError when it said
    no, NoRouteError and NoNameServerError.
    """

    def __init__(self, client: ClientInstance) -> None:
        self._client = client

    async def _ask(
        self,
        queue: MessageQueue,
        code: RequestCode,
        ext: dict[str, str],
        deadline_ms: int,
        *,
        also: frozenset[int] = frozenset(),
    ) -> RemotingCommand:
        full = {
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "bname": queue.broker_name,
            **ext,
        }
        reply = await self._client.invoke_at_master(
            queue.topic,
            queue.broker_name,
            lambda: RemotingCommand.request(code, full),
            deadline_ms=deadline_ms,
        )
        if reply.code != ResponseCode.SUCCESS and reply.code not in also:
            raise ResponseError(reply.code, reply.remark, queue.broker_name)
        return reply

    async def committed_offset(
        self, group: str, queue: MessageQueue, *, deadline_ms: int
    ) -> int | None:
        """Where the group goes on, None if it has no offset there."""
        reply = await self._ask(
            queue,
            RequestCode.QUERY_CONSUMER_OFFSET,
            {"consumerGroup": group},
            deadline_ms,
            also=frozenset({ResponseCode.QUERY_NOT_FOUND}),
        )
        return int(reply.ext["offset"]) if reply.code == ResponseCode.SUCCESS else None

    async def commit_offset(
        self, group: str, queue: MessageQueue, offset: int, *, deadline_ms: int
    ) -> None:
        """Stores the group's progress: the next offset to be read."""
        ext = {"consumerGroup": group, "commitOffset": str(offset)}
        await self._ask(queue, RequestCode.UPDATE_CONSUMER_OFFSET, ext, deadline_ms)

    async def max_offset(self, queue: MessageQueue, *, deadline_ms: int) -> int:
        """Exclusive end of the queue."""
        reply = await self._ask(queue, RequestCode.GET_MAX_OFFSET, {}, deadline_ms)
        return int(reply.ext["offset"])

    async def min_offset(self, queue: MessageQueue, *, deadline_ms: int) -> int:
        reply = await self._ask(queue, RequestCode.GET_MIN_OFFSET, {}, deadline_ms)
        return int(reply.ext["offset"])

    async def offset_by_time(
        self, queue: MessageQueue, timestamp_ms: int, *, deadline_ms: int
    ) -> int:
        """The first offset stored at or after the wall-clock time."""
        ext = {"timestamp": str(timestamp_ms)}
        reply = await self._ask(queue, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, ext, deadline_ms)
        return int(reply.ext["offset"])

    async def earliest_store_time(self, queue: MessageQueue, *, deadline_ms: int) -> int:
        """Wall-clock ms of the oldest message kept, -1 if there is none."""
        reply = await self._ask(queue, RequestCode.GET_EARLIEST_MSG_STORETIME, {}, deadline_ms)
        return int(reply.ext["timestamp"])

    async def consumer_ids(
        self, topic: str, broker_name: str, group: str, *, deadline_ms: int
    ) -> list[str] | None:
        """Client ids of the group's members as that broker knows them, None if it knows none."""
        reply = await self._client.invoke_at_master(
            topic,
            broker_name,
            lambda: RemotingCommand.request(
                RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group}
            ),
            deadline_ms=deadline_ms,
        )
        if reply.code != ResponseCode.SUCCESS:
            return None
        return list(GetConsumerListByGroupResponseBody.decode(reply.body).consumer_id_list) or None

    async def lock_queues(
        self, topic: str, broker_name: str, group: str, queues: Sequence[MessageQueue],
        *, deadline_ms: int,
    ) -> frozenset[MessageQueue]:  # fmt: skip
        """Those of `queues` (all on that broker) whose lock this client now holds, for 60 s.

        Raises UnsupportedByBrokerError if the broker does not serve locks.
        """
        reply = await self._locking(
            RequestCode.LOCK_BATCH_MQ, topic, broker_name, group, queues, deadline_ms
        )
        return frozenset(LockBatchResponseBody.decode(reply.body).lock_ok_mq_set)

    async def unlock_queues(
        self, topic: str, broker_name: str, group: str, queues: Sequence[MessageQueue],
        *, deadline_ms: int,
    ) -> None:  # fmt: skip
        await self._locking(
            RequestCode.UNLOCK_BATCH_MQ, topic, broker_name, group, queues, deadline_ms
        )

    async def _locking(
        self,
        code: RequestCode,
        topic: str,
        broker_name: str,
        group: str,
        queues: Sequence[MessageQueue],
        deadline_ms: int,
    ) -> RemotingCommand:
        body = LockBatchRequestBody(
            consumer_group=group, client_id=self._client.client_id, mq_set=list(queues)
        ).encode()
        reply = await self._client.invoke_at_master(
            topic,
            broker_name,
            lambda: RemotingCommand.request(code, {}, body),
            deadline_ms=deadline_ms,
        )
        if reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise UnsupportedByBrokerError(
                f"orderly consumption by group {group} needs queue locks",
                code,
                broker_name,
                "use a concurrent listener (orderly=False), or a broker that serves locks",
            )
        if reply.code != ResponseCode.SUCCESS:
            raise ResponseError(reply.code, reply.remark, broker_name)
        return reply

    async def send_back(
        self,
        group: str,
        message: MessageExt,
        delay_level: int,
        max_reconsume_times: int,
        *,
        deadline_ms: int,
    ) -> None:
        """Hands a message that failed back to its broker, to come again from the retry topic.

        Raises UnsupportedByBrokerError if the broker does not serve it.
        """
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
        reply = await self._client.invoke_at_master(
            message.topic,
            message.broker_name,
            lambda: RemotingCommand.request(RequestCode.CONSUMER_SEND_MSG_BACK, ext),
            deadline_ms=deadline_ms,
        )
        if reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise UnsupportedByBrokerError(
                f"sending messages of group {group} back",
                RequestCode.CONSUMER_SEND_MSG_BACK,
                message.broker_name,
            )
        if reply.code != ResponseCode.SUCCESS:
            raise ResponseError(reply.code, reply.remark, message.broker_name)
