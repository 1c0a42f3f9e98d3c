"""Messages: send, read, find. Origin: tools.command.message."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import click

from mqctl.output import BAD, GOOD, Cell, Progress, when
from mqctl.params import Timestamp, command, option
from mqctl.session import CommandFailed, Session

if TYPE_CHECKING:
    from batonmq.admin import Admin
    from batonmq.pull_consumer import PullConsumer
    from protocol.message import MessageExt, MessageQueue

PRODUCER_GROUP = "mqctl_producer"
CONSUMER_GROUP = "TOOLS_CONSUMER"
PULL_MAX = 32
LONG_MAX = (1 << 63) - 1


@command("sendMessage")
@option("-t", "--topic", "topic", required=True, help="Topic name.")
@option("-p", "--body", "body", required=True, metavar="TEXT", help="The body, as UTF-8.")
@option("-k", "--key", "keys", default="", metavar="KEYS", help="Keys, separated by spaces.")
@option("-c", "--tags", "tags", default="", metavar="TAG", help="Tag.")
@option("-b", "--broker", "broker", metavar="NAME", help="Send to this broker group.")
@option("-i", "--qid", "queue_id", type=click.IntRange(min=0), help="Send to this queue (with -b).")
@option("--property", "properties", multiple=True, metavar="KEY=VALUE", help="May be repeated.")
async def send_message(
    session: Session,
    topic: str,
    body: str,
    keys: str,
    tags: str,
    broker: str | None,
    queue_id: int | None,
    properties: Sequence[str],
) -> None:
    """Send one message. Ends with 1 if it was not acknowledged by every replica that counts.

    JSON: RocketMQ's SendResult (sendStatus, msgId, offsetMsgId, messageQueue, queueOffset).
    """
    if queue_id is not None and broker is None:
        raise click.UsageError("-i names a queue of one broker group: give -b as well")
    from batonmq import producer
    from protocol.message import Message

    message = Message.of(topic, body, tags=tags, keys=keys)
    for text in properties:
        name, separator, value = text.partition("=")
        if not (name and separator):
            raise click.UsageError(f"--property {text!r}: KEY=VALUE is needed")
        message.properties[name] = value
    options = producer.ProducerOptions(send_timeout_ms=session.timeout_ms)
    async with producer.Producer(
        PRODUCER_GROUP, name_servers=session.name_servers, options=options
    ) as sender:
        selector = _on_broker(broker, queue_id) if broker is not None else None
        result = await sender.send(message, selector=selector)
    if session.out.as_json:
        session.out.document(
            {
                "sendStatus": str(result.status),
                "msgId": result.msg_id,
                "offsetMsgId": result.offset_msg_id,
                "messageQueue": {
                    "topic": result.queue.topic,
                    "brokerName": result.queue.broker_name,
                    "queueId": result.queue.queue_id,
                },
                "queueOffset": result.queue_offset,
            }
        )
    else:
        status = Cell.of(str(result.status), GOOD if result.acknowledged else BAD)
        row = [result.queue.broker_name, result.queue.queue_id, result.queue_offset, status,
               result.msg_id, result.offset_msg_id]  # fmt: skip
        headings = ["Broker", "QID", "Queue Offset", "Send Result", "MsgId", "OffsetMsgId"]
        session.out.table(headings, [row])
    if not result.acknowledged:
        session.complain(
            f"stored but not acknowledged by every replica ({result.status}): it may be lost in a"
            " failover; see `mqctl getSyncStateSet`"
        )


def _on_broker(
    broker: str, queue_id: int | None
) -> Callable[[Sequence[MessageQueue], Any], MessageQueue]:
    """Chooses among the queues of one broker group. Raises CommandFailed if there is none."""

    def choose(queues: Sequence[MessageQueue], message: Any) -> MessageQueue:
        for queue in queues:
            if queue.broker_name == broker and queue_id in (None, queue.queue_id):
                return queue
        wanted = broker if queue_id is None else f"{broker}:{queue_id}"
        known = ", ".join(f"{q.broker_name}:{q.queue_id}" for q in queues)
        raise CommandFailed(f"no writable queue {wanted}: the topic has {known}")

    return choose


@command("consumeMessage")
@option("-t", "--topic", "topic", required=True, help="Topic name.")
@option("-b", "--brokerName", "broker_name", metavar="NAME", help="Only this broker group.")
@option("-i", "--queueId", "queue_id", type=click.IntRange(min=0), help="Only this queue (with -b)")
@option("-o", "--offset", "offset", type=click.IntRange(min=0), help="From this offset (with -i).")
@option("-g", "--consumerGroup", "consumer_group", default=CONSUMER_GROUP, show_default=True,
        metavar="GROUP", help="Reads as this group; commits nothing.")  # fmt: skip
@option("-s", "--beginTimestamp", "begin_ms", type=Timestamp(), default=0,
        help="Stored at or after: ms, or yyyy-MM-dd#HH:mm:ss:SSS.")  # fmt: skip
@option("-e", "--endTimestamp", "end_ms", type=Timestamp(), default=LONG_MAX,
        help="Stored at or before.")  # fmt: skip
@option("-c", "--MessageNumber", "message_number", type=click.IntRange(min=1),
        default=128, show_default=True, help="At most so many.")  # fmt: skip
async def consume_message(
    session: Session,
    topic: str,
    broker_name: str | None,
    queue_id: int | None,
    offset: int | None,
    consumer_group: str,
    begin_ms: int,
    end_ms: int,
    message_number: int,
) -> None:
    """Read what a topic holds now, without committing.

    JSON: a list of messages with the names of RocketMQ's MessageExt; body is the text, or null
    with bodyBase64 for what is no UTF-8.
    """
    if queue_id is not None and broker_name is None:
        raise click.UsageError("-i names a queue of one broker group: give -b as well")
    if offset is not None and queue_id is None:
        raise click.UsageError("-o is an offset in one queue: give -b and -i as well")
    if begin_ms > end_ms:
        raise click.UsageError("-s is later than -e: nothing lies between")
    from batonmq import pull_consumer

    documents: list[dict[str, Any]] = []
    count = 0
    async with pull_consumer.PullConsumer(
        consumer_group, name_servers=session.name_servers
    ) as consumer:
        queues = _wanted(
            await consumer.fetch_queues(topic, timeout_ms=session.timeout_ms), broker_name, queue_id
        )
        reader = _Reader(consumer, begin_ms, end_ms, session.timeout_ms)
        with Progress(f"reading {len(queues)} queues of {topic} ...") as progress:
            for queue in queues:
                async with aclosing(reader.read(queue, offset)) as messages:
                    async for message in messages:
                        count += 1
                        if session.out.as_json:
                            documents.append(message_document(message))
                            progress.say(f"{count} messages ...")
                        else:
                            progress.say("")
                            _show_message(session, message)
                        if count >= message_number:
                            break
                if count >= message_number:
                    break
    if session.out.as_json:
        session.out.document(documents)
    elif not count:
        session.out.line(f"no message in {len(queues)} queues of {topic}")


def _wanted(
    queues: Sequence[MessageQueue], broker_name: str | None, queue_id: int | None
) -> list[MessageQueue]:
    found = [
        queue
        for queue in queues
        if broker_name in (None, queue.broker_name) and queue_id in (None, queue.queue_id)
    ]
    if not found:
        known = ", ".join(f"{q.broker_name}:{q.queue_id}" for q in queues) or "none"
        raise CommandFailed(f"no such queue: those that can be read are {known}")
    return found


class _Reader:
    """Reads what is in a queue, stored in [`begin_ms`, `end_ms`], up to its end of now."""

    def __init__(self, consumer: PullConsumer, begin_ms: int, end_ms: int, timeout_ms: int) -> None:
        self._consumer = consumer
        self._begin_ms = begin_ms
        self._end_ms = end_ms
        self._timeout_ms = timeout_ms

    async def read(
        self, queue: MessageQueue, first: int | None
    ) -> AsyncGenerator[MessageExt, None]:
        timeout_ms = self._timeout_ms
        end = await self._consumer.max_offset(queue, timeout_ms=timeout_ms)
        offset = max(first or 0, await self._consumer.min_offset(queue, timeout_ms=timeout_ms))
        if self._begin_ms > 0:
            by_time = await self._consumer.offset_by_time(
                queue, self._begin_ms, timeout_ms=timeout_ms
            )
            offset = max(offset, by_time)
        while offset < end:
            result = await self._consumer.pull(
                queue, offset, min(PULL_MAX, end - offset), timeout_ms=timeout_ms
            )
            for message in result.messages:
                if message.queue_offset >= end or message.store_timestamp > self._end_ms:
                    return
                if message.store_timestamp >= self._begin_ms:
                    yield message
            if result.next_begin_offset <= offset:
                return
            offset = result.next_begin_offset


@command("queryMsgById")
@option("-i", "--msgId", "msg_ids", required=True, metavar="ID",
        help="Offset message id, or a producer's own id with -t; several with commas.")  # fmt: skip
@option("-t", "--topic", "topic", help="Topic name.")
async def query_msg_by_id(session: Session, msg_ids: str, topic: str | None) -> None:
    """Find a message by its id.

    An offset id names the broker that stored it; if that one does not answer, the masters of now
    are asked. JSON: the message with the names of RocketMQ's MessageExt, a list for several ids.
    """
    wanted = [part.strip() for part in msg_ids.split(",") if part.strip()]
    if not wanted:
        raise click.UsageError("-i is empty")
    found: list[MessageExt] = []
    async with session.admin() as admin:
        for msg_id in wanted:
            message = await _by_id(admin, msg_id, topic)
            if message is None:
                session.complain(f"no message {msg_id}" + (f" in topic {topic}" if topic else ""))
            else:
                found.append(message)
    if session.out.as_json:
        documents = [message_document(message) for message in found]
        if len(wanted) > 1:
            session.out.document(documents)
        elif documents:
            session.out.document(documents[0])
        return
    for message in found:
        _show_message(session, message)


async def _by_id(admin: Admin, msg_id: str, topic: str | None) -> MessageExt | None:
    if _names_a_broker(msg_id):
        return await _by_offset_id(admin, msg_id, topic or "")
    if topic is None:
        raise click.UsageError(
            f"{msg_id} is no offset message id; to find a producer's own id give the topic with -t"
        )
    return await admin.message_by_unique_key(topic, msg_id)


def _names_a_broker(msg_id: str) -> bool:
    """Both ids are hex of one length; a producer's has its process id where the port would be."""
    from protocol.message_id import decode_offset_msg_id, split_address

    try:
        return 0 < split_address(decode_offset_msg_id(msg_id)[0])[1] < 65536
    except ValueError:
        return False


async def _by_offset_id(admin: Admin, msg_id: str, topic: str) -> MessageExt | None:
    """Logs of a group are the same bytes on every replica: the master of now holds it as well."""
    from protocol.errors import BatonError, ConnectError, RequestTimeoutError
    from protocol.message_id import (
        decode_offset_msg_id,
        encode_offset_msg_id,
        host_bytes,
        split_address,
    )

    try:
        return await admin.message_by_id(msg_id, topic)
    except (ConnectError, RequestTimeoutError):
        info = await admin.cluster_info()
        _, offset = decode_offset_msg_id(msg_id)
        for data in info.broker_addr_table.values():
            for address in data.broker_addrs.values():
                there = encode_offset_msg_id(host_bytes(*split_address(address)), offset)
                try:
                    message = await admin.message_by_id(there, topic)
                except (BatonError, ValueError):
                    continue
                if message is not None and message.msg_id.upper() == msg_id.upper():
                    return message
        raise


@command("queryMsgByKey")
@option("-t", "--topic", "topic", required=True, help="Topic name.")
@option("-k", "--msgKey", "msg_key", required=True, metavar="KEY",
        help="A key of the message, or its producer's id.")  # fmt: skip
@option("-b", "--beginTimestamp", "begin_ms", type=Timestamp(), default=0,
        help="Stored at or after: ms, or yyyy-MM-dd#HH:mm:ss:SSS.")  # fmt: skip
@option("-e", "--endTimestamp", "end_ms", type=Timestamp(), default=LONG_MAX,
        help="Stored at or before.")  # fmt: skip
@option("-m", "--maxNum", "max_num", type=click.IntRange(min=1), default=64, show_default=True,
        help="At most so many.")  # fmt: skip
async def query_msg_by_key(
    session: Session, topic: str, msg_key: str, begin_ms: int, end_ms: int, max_num: int
) -> None:
    """Find messages by key.

    JSON: a list of messages with the names of RocketMQ's MessageExt. Finding none ends with 1.
    """
    async with session.admin() as admin:
        found = await admin.messages_by_key(
            topic, msg_key, max_messages=max_num, begin_ms=begin_ms, end_ms=end_ms
        )
        if not found:
            unique = await admin.message_by_unique_key(topic, msg_key)
            if unique is not None and begin_ms <= unique.store_timestamp <= end_ms:
                found = [unique]
    if session.out.as_json:
        session.out.document([message_document(message) for message in found])
    elif found:
        rows = [
            [m.uniq_key, m.broker_name, m.queue_id, m.queue_offset, m.keys, m.tags,
             when(m.store_timestamp), m.msg_id]
            for m in found
        ]  # fmt: skip
        headings = ["MsgId", "Broker", "QID", "Queue Offset", "Keys", "Tags", "Stored",
                    "OffsetMsgId"]  # fmt: skip
        session.out.table(headings, rows)
    if not found:
        session.complain(f"no message with key {msg_key} in topic {topic}")


def message_document(message: MessageExt) -> dict[str, Any]:
    """The names of RocketMQ's MessageExt; `msgId` is the producer's id, as its client shows it."""
    body, text = _body(message)
    return {
        "topic": message.topic,
        "brokerName": message.broker_name or None,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "msgId": message.uniq_key,
        "offsetMsgId": message.msg_id,
        "keys": message.keys or None,
        "tags": message.tags or None,
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "bornTimestamp": message.born_timestamp,
        "bornHost": message.born_host,
        "storeTimestamp": message.store_timestamp,
        "storeHost": message.store_host,
        "storeSize": message.store_size,
        "commitLogOffset": message.physical_offset,
        "bodyCRC": message.body_crc,
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        "properties": dict(message.properties),
        "body": text,
        **({} if text is not None else {"bodyBase64": base64.b64encode(body).decode()}),
    }


def _body(message: MessageExt) -> tuple[bytes, str | None]:
    """The bytes, and the text if they are UTF-8. What cannot be unpacked is given as stored."""
    import zlib

    try:
        body = message.uncompressed_body()
    except (ValueError, zlib.error):
        return message.body, None
    try:
        return body, body.decode()
    except UnicodeDecodeError:
        return body, None


def _show_message(session: Session, message: MessageExt) -> None:
    body, text = _body(message)
    session.out.fields(
        [
            ("MsgId", message.uniq_key),
            ("OffsetMsgId", message.msg_id),
            ("Topic", message.topic),
            ("Queue", f"{message.broker_name}:{message.queue_id}".lstrip(":")),
            ("Queue offset", message.queue_offset),
            ("Log offset", message.physical_offset),
            ("Tags", message.tags),
            ("Keys", message.keys),
            ("Born", f"{when(message.born_timestamp)} at {message.born_host}"),
            ("Stored", f"{when(message.store_timestamp)} at {message.store_host}"),
            ("Reconsume times", message.reconsume_times),
            ("Properties", ", ".join(f"{k}={v}" for k, v in sorted(message.properties.items()))),
            ("Body", text if text is not None else f"{len(body)} bytes, hex {body[:64].hex()}"),
        ]
    )
    session.out.line()
