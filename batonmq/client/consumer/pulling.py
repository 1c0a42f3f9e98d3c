"""One pull: its subscription, its request to the current master, and its reply."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from batonmq.client.arguments import check_tags, check_text, check_topic_name
from batonmq.client.consumer.options import HELD_CHECK_MS
from batonmq.client.errors import ArgumentError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.failover import NOT_SERVING
from batonmq.protocol import properties as names
from batonmq.protocol.bodies import SQL92, TAG, SubscriptionData
from batonmq.protocol.codes import READ_REPLICA_FIELD, RequestCode, ResponseCode
from batonmq.protocol.errors import RemoteProtocolError, ResponseError
from batonmq.protocol.message import INFLATED_BODY_SIZE_MAX, MessageExt, MessageQueue
from batonmq.protocol.records.codec import decode_records
from batonmq.protocol.records.faults import CorruptRecord
from batonmq.protocol.sysflag import (
    COMPRESSED,
    COMPRESSION_MASK,
    PULL_COMMIT_OFFSET,
    PULL_SUBSCRIPTION,
    PULL_SUSPEND,
)
from batonmq.protocol.tags import java_string_hash
from batonmq.protocol.topic_name import RETRY_PREFIX
from batonmq.remoting.command import RemotingCommand


class PullStatus(Enum):
    FOUND = ResponseCode.SUCCESS
    NO_NEW_MSG = ResponseCode.PULL_NOT_FOUND
    NO_MATCHED_MSG = ResponseCode.PULL_RETRY_IMMEDIATELY
    OFFSET_ILLEGAL = ResponseCode.PULL_OFFSET_MOVED


STATUS_BY_CODE: dict[int, PullStatus] = {int(status.value): status for status in PullStatus}


@dataclass(frozen=True, slots=True)
class PullResult:
    """`next_begin_offset`: where the next pull continues, in all cases. The queue holds
    [`min_offset`, `max_offset`). `messages` are decompressed and filtered by tag. With
    OFFSET_ILLEGAL the offset of the pull is outside the queue; continue at `next_begin_offset`."""

    status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    messages: tuple[MessageExt, ...] = ()
    suggest_broker_id: int = 0


ALL = "*"


def build_subscription(
    topic: str, expression: str, version_ms: int, expression_type: str = TAG
) -> SubscriptionData:
    """`expression`: `*` or empty for all, tags joined by `||`, or an SQL92 condition. Raises
    ArgumentError for an invalid expression or type."""
    check_topic_name(topic)
    check_text("expression", expression)
    text = expression.strip()
    # `*` means all in both kinds: it needs no filter at the broker.
    if expression_type == SQL92 and text and text != ALL:
        return SubscriptionData(
            topic=topic, sub_string=text, expression_type=SQL92, sub_version=version_ms
        )
    if expression_type not in (TAG, SQL92):
        raise ArgumentError("expression_type", expression_type, f"allowed are {TAG} and {SQL92}")
    if not text or text == ALL:
        return SubscriptionData(topic=topic, sub_string=ALL, sub_version=version_ms)
    check_tags(text)
    tags = sorted({tag.strip() for tag in text.split("||")} - {""})
    if not tags:
        raise ArgumentError("expression", expression, "it names no tag: use '*' or 'a || b'")
    return SubscriptionData(
        topic=topic,
        sub_string=text,
        tags_set=tags,
        code_set=[java_string_hash(tag) for tag in tags],
        sub_version=version_ms,
    )


def wanted_only(
    messages: Iterable[MessageExt], subscription: SubscriptionData
) -> Sequence[MessageExt]:
    # Brokers compare hashes only, so that other tags may be among them.
    tags = frozenset(subscription.tags_set)
    if not tags:
        return list(messages)
    return [m for m in messages if m.properties.get(names.TAGS) in tags]


PULL_BYTES_MAX = 256 * 1024
"""Java's `pullBatchSizeInBytes`."""


@dataclass(frozen=True, slots=True)
class PullRequest:
    """`commit_offset`: progress to store with the pull, or None. `suspend_ms` 0: reply at once."""

    group: str
    queue: MessageQueue
    offset: int
    subscription: SubscriptionData
    max_messages: int = 32
    max_bytes: int = PULL_BYTES_MAX
    suspend_ms: int = 0
    commit_offset: int | None = None
    read_replica: bool = False
    """Sent to a slave, as the master suggested."""

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
            "expressionType": self.subscription.expression_type,
            "maxMsgBytes": str(self.max_bytes),
            "bname": self.queue.broker_name,
        }
        if self.read_replica:
            ext[READ_REPLICA_FIELD] = "true"
        return RemotingCommand.request(RequestCode.PULL_MESSAGE, ext)


def read_pull_reply(reply: RemotingCommand, request: PullRequest, address: str) -> PullResult:
    """Decodes the reply of a pull. Raises ResponseError for a refusal, RemoteProtocolError for an
    unreadable reply or record: then no message of the reply is delivered."""
    head = _head_of(reply, request, address)
    try:
        records = decode_records(reply.body) if head[0] is PullStatus.FOUND else []
        suggested = int(reply.ext.get("suggestWhichBrokerId", 0))
    except (CorruptRecord, ValueError) as error:
        raise _unreadable(error, request, address) from error
    messages, size = list[MessageExt](), 0
    for message in wanted_only(records, request.subscription):
        # R58: each of 32 small messages may inflate to 128 MiB. The rest comes with the next pull.
        if size > INFLATED_BODY_SIZE_MAX:
            head = (head[0], message.queue_offset, head[2], head[3])
            break
        for_reader(message, request.queue.broker_name)
        size += len(message.body)
        messages.append(message)
    return PullResult(*head, messages=tuple(messages), suggest_broker_id=suggested)


def _head_of(
    reply: RemotingCommand, request: PullRequest, address: str
) -> tuple[PullStatus, int, int, int]:
    """(status, next offset, min, max) of a reply. Raises as `read_pull_reply`."""
    status = STATUS_BY_CODE.get(reply.code)
    if status is None:
        raise ResponseError(reply.code, reply.remark, address)
    ext = reply.ext
    try:
        return status, int(ext["nextBeginOffset"]), int(ext["minOffset"]), int(ext["maxOffset"])
    except (KeyError, ValueError) as error:
        raise _unreadable(error, request, address) from error


def _unreadable(error: Exception, request: PullRequest, address: str) -> RemoteProtocolError:
    where = f"{address}, {request.queue} from {request.offset} on"
    return RemoteProtocolError(f"{where}: the answer to a pull cannot be read: {error!r}")


def for_reader(message: MessageExt, broker_name: str) -> None:
    """Decompresses the body, and restores the original topic of a retried message. A body that
    cannot be decompressed is delivered as it is: one bad message must not stop the queue."""
    message.broker_name = broker_name
    if message.sys_flag & COMPRESSED:
        try:
            message.body = message.uncompressed_body()
            message.sys_flag &= ~(COMPRESSED | COMPRESSION_MASK)
        except (ValueError, zlib.error):
            return  # `sys_flag` still says that it is compressed
    original = message.properties.get(names.RETRY_TOPIC)
    if original is not None and message.topic.startswith(RETRY_PREFIX):
        message.topic = original


SUSPEND_MS = 15_000
# A broker answers a damaged record with SYSTEM_ERROR until it has healed it (R24).
PULL_AGAIN = NOT_SERVING | {ResponseCode.SYSTEM_ERROR}


@dataclass(frozen=True, slots=True)
class PulledRecords:
    """A reply with undecoded messages. `records`: whole log records, as stored (compressed, and of
    any tag with the wanted hash). Other fields as in `PullResult`."""

    status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    records: bytes


async def pull_at_master(
    client: ClientInstance, request: PullRequest, *, deadline_ms: int, block: bool = False
) -> tuple[RemotingCommand, str]:
    """Pulls from the queue's master; returns its reply and address. Retries until the deadline.

    `block`: the broker holds an empty pull until a message arrives. Raises NoMasterError with the
    last reason, NoRouteError. Refusals for other reasons are returned."""

    def command(left_ms: int) -> RemotingCommand:
        # The answer "no new message" must arrive before the request times out.
        suspend_ms = min(SUSPEND_MS, max(left_ms - 200, 1)) if block else 0
        return replace(request, suspend_ms=suspend_ms).command()

    return await client.masters.invoke(
        request.queue.topic,
        request.queue.broker_name,
        command,
        deadline_ms=deadline_ms,
        retry_codes=PULL_AGAIN,
        held_check_ms=HELD_CHECK_MS if block else None,
        wait_for_topic=False,
    )


async def pull_records(
    client: ClientInstance, request: PullRequest, *, deadline_ms: int
) -> PulledRecords:
    """As `pull_at_master`, with undecoded messages. Raises as `read_pull_reply`."""
    reply, address = await pull_at_master(client, request, deadline_ms=deadline_ms)
    head = _head_of(reply, request, address)
    records = bytes(reply.body) if head[0] is PullStatus.FOUND else b""
    return PulledRecords(*head, records=records)
