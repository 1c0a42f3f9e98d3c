"""Messages: send, read, find. Origin: tools.command.message."""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import click

from batonmq.client.admin.admin import Admin
from batonmq.client.consumer.pull_consumer import PullConsumer
from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.output import BAD, GOOD, Cell, WaitLine, note, plain_queue, when
from batonmq.mqctl.params import (
    COUNT,
    INDEX,
    TIME,
    command,
    complete,
    option,
    stored_from,
    stored_until,
)
from batonmq.mqctl.routes import broker_addresses
from batonmq.protocol.codes import LONG_MAX
from batonmq.protocol.errors import BatonError, ConnectError, RequestTimeoutError
from batonmq.protocol.message import Message, MessageExt, MessageQueue
from batonmq.protocol.message_id import (
    decode_offset_msg_id,
    encode_offset_msg_id,
    host_bytes,
    split_address,
)
from batonmq.protocol.topic_name import TOOLS_CONSUMER
from batonmq.runtime.words import counted

PRODUCER_GROUP = "mqctl_producer"
PULL_MAX = 32
TAIL_S = 0.5


@command("sendMessage", writes=True)
@option("-t", "--topic", required=True, help="Topic name.")
@option("-p", "--body", required=True, metavar="TEXT", help="The body, as UTF-8.")
@option("-k", "--key", "keys", default="", metavar="KEYS", help="Keys, separated by spaces.")
@option("-c", "--tags", default="", metavar="TAG", help="Tag.")
@option("-b", "--broker", help="Send to this broker group.")
@option("-i", "--qid", "queue_id", type=INDEX, help="Send to this queue (with -b).")
@option("--property", "properties", multiple=True, metavar="KEY=VALUE", help="May be repeated.")
async def send_message(
    context: CommandContext,
    topic: str,
    body: str,
    keys: str,
    tags: str,
    broker: str | None,
    queue_id: int | None,
    properties: Sequence[str],
) -> None:
    """Ends with 1 if it was not acknowledged by every replica that counts.

    JSON: RocketMQ's SendResult (sendStatus, msgId, offsetMsgId, messageQueue, queueOffset)."""
    if queue_id is not None and broker is None:
        raise click.UsageError("-i names a queue of one broker group: give -b as well")
    message = Message.of(topic, body, tags=tags, keys=keys)
    message.properties.update(map(_property, properties))
    async with context.producer(PRODUCER_GROUP) as sender:
        selector = _on_broker(broker, queue_id) if broker is not None else None
        result = await sender.send(message, selector=selector)
    document = {
        "sendStatus": str(result.status),
        "msgId": result.msg_id,
        "offsetMsgId": result.offset_msg_id,
        "messageQueue": plain_queue(result.queue),
        "queueOffset": result.queue_offset,
    }
    if not context.out.wrote_json(document):
        headings = ["Broker", "QID", "Queue Offset", "Send Result", "MsgId", "OffsetMsgId"]
        queue, status = result.queue, Cell.of(result.status, GOOD if result.acknowledged else BAD)
        row = [queue.broker_name, queue.queue_id, result.queue_offset, status,
               result.msg_id, result.offset_msg_id]  # fmt: skip
        context.out.table(headings, [row])
    if not result.acknowledged:
        context.complain(
            f"stored but not acknowledged by every replica ({result.status}): it may be lost in a"
            " failover; see `mqctl getSyncStateSet`"
        )


def _property(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise click.UsageError(f"--property {text!r}: KEY=VALUE is needed")
    return name, value


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
@option("-t", "--topic", required=True, help="Topic name.")
@option("-b", "--brokerName", help="Only this broker group.")
@option("-i", "--queueId", type=INDEX, help="Only this queue (with -b)")
@option("-o", "--offset", type=INDEX, help="From this offset (with -i).")
@option(
    "-g",
    "--consumerGroup",
    default=TOOLS_CONSUMER,
    show_default=True,
    metavar="GROUP",
    help="Reads as this group; commits nothing.",
)
@stored_from("-s")
@stored_until
@option("-c", "--MessageNumber", type=COUNT, default=128, help="At most so many.")
async def consume_message(
    context: CommandContext,
    topic: str,
    broker_name: str | None,
    queue_id: int | None,
    offset: int | None,
    consumer_group: str,
    begin_ms: int,
    end_ms: int,
    message_number: int,
) -> None:
    """JSON: a list of messages with the names of RocketMQ's MessageExt; body is the text, or null
    with bodyBase64 for what is no UTF-8."""
    if queue_id is not None and broker_name is None:
        raise click.UsageError("-i names a queue of one broker group: give -b as well")
    if offset is not None and queue_id is None:
        raise click.UsageError("-o is an offset in one queue: give -b and -i as well")
    if begin_ms > end_ms:
        raise click.UsageError("-s is later than -e: nothing lies between")
    async with context.consumer(consumer_group) as consumer:
        queues = _wanted(
            await consumer.fetch_queues(topic, timeout_ms=context.timeout_ms), broker_name, queue_id
        )
        reader = MessageReader(consumer, begin_ms, end_ms, context.timeout_ms)
        messages = _first(context, message_number, reader, queues, offset)
        with WaitLine(f"reading {counted(len(queues), 'queue')} of {topic} ...") as progress:
            count = await _show_messages(context, progress, messages)
    if not count and not context.out.as_json:
        context.out.line(f"no message in {counted(len(queues), 'queue')} of {topic}")


async def _show_messages(
    context: CommandContext, progress: WaitLine, messages: AsyncGenerator[MessageExt, None]
) -> int:
    """Each as it arrives, or one document of all at the end; returns how many."""
    documents: list[dict[str, Any]] = []
    count = 0
    async with aclosing(messages):
        async for message in messages:
            count += 1
            if context.out.as_json:
                documents.append(message_document(message))
                progress.say(f"{counted(count, 'message')} ...")
            else:
                progress.say("")
                show_message(context, message)
    if context.out.as_json:
        context.out.document(documents)
    return count


async def _first(
    context: CommandContext,
    count: int,
    reader: MessageReader,
    queues: Sequence[MessageQueue],
    offset: int | None,
) -> AsyncGenerator[MessageExt, None]:
    """At most `count` messages, queue by queue. A queue that cannot be read is reported: with
    --json, what the others hold would be lost over it."""
    for queue in queues:
        try:
            async with aclosing(reader.read(queue, offset)) as messages:
                async for message in messages:
                    yield message
                    count -= 1
                    if count == 0:
                        return
        except BatonError as error:
            context.complain(f"{queue.broker_name}:{queue.queue_id}: {error}")


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


@dataclass(slots=True)
class MessageReader:
    """Reads what is in a queue, stored in [`begin_ms`, `end_ms`], up to its end of now."""

    consumer: PullConsumer
    begin_ms: int
    end_ms: int
    timeout_ms: int

    async def read(
        self, queue: MessageQueue, first: int | None, end: int | None = None
    ) -> AsyncGenerator[MessageExt, None]:
        timeout_ms = self.timeout_ms
        if end is None:
            end = await self.consumer.max_offset(queue, timeout_ms=timeout_ms)
        # What has expired is no error to a reader: it begins with what is left.
        offset = max(first or 0, await self.consumer.min_offset(queue, timeout_ms=timeout_ms))
        if self.begin_ms > 0:
            by_time = await self.consumer.offset_by_time(
                queue, self.begin_ms, timeout_ms=timeout_ms
            )
            offset = max(offset, by_time)
        while offset < end:
            result = await self.consumer.pull(
                queue, offset, min(PULL_MAX, end - offset), timeout_ms=timeout_ms
            )
            for message in result.messages:
                if message.queue_offset >= end or message.store_timestamp > self.end_ms:
                    return
                if message.store_timestamp >= self.begin_ms:
                    yield message
            # The broker would answer the same again.
            if result.next_begin_offset <= offset:
                return
            offset = result.next_begin_offset


@command("tail")
@click.argument("topic", shell_complete=complete("topics"))
@click.option("-f", "--follow", is_flag=True, help="Continue as messages come, until ctrl-C.")
@option("--last", type=COUNT, default=10, help="Begin with the last so many.")
@option("--since", "since_ms", type=TIME, help="Begin there: 10m, or a time.")
async def tail(
    context: CommandContext, topic: str, follow: bool, last: int, since_ms: int | None
) -> None:
    """Nothing is committed. JSON: one message a line, as in consumeMessage."""
    context.out.compact = True  # it never knows whether a message was the last one
    if follow:
        context.interval_s = TAIL_S  # ctrl-C is the usual end
    async with context.consumer(TOOLS_CONSUMER) as consumer:
        reader = MessageReader(consumer, since_ms or 0, LONG_MAX, context.timeout_ms)
        read: dict[MessageQueue, int] = {}
        found: list[MessageExt] = []
        for queue in await consumer.fetch_queues(topic, timeout_ms=context.timeout_ms):
            end = await consumer.max_offset(queue, timeout_ms=context.timeout_ms)
            # Noted before it is read: what comes meanwhile is shown by the first look that follows.
            read[queue] = end
            first = 0 if since_ms is not None else max(0, end - last)
            found += [message async for message in reader.read(queue, first, end)]
        found.sort(key=lambda message: message.store_timestamp)
        _tail_lines(context, found if since_ms is not None else found[-last:])
        lost = False
        while follow:
            await asyncio.sleep(TAIL_S)
            try:
                # Each time: a topic may get queues, and a group another master.
                queues = await consumer.fetch_queues(topic, timeout_ms=context.timeout_ms)
                for queue in queues:
                    new = [message async for message in reader.read(queue, read.get(queue, 0))]
                    read[queue] = max([read.get(queue, 0), *(m.queue_offset + 1 for m in new)])
                    _tail_lines(context, new)
                lost = False
            except BatonError as error:  # a failover: the next look finds the new master
                if not lost:
                    note(f"note: {error}")
                lost = True


def _tail_lines(context: CommandContext, messages: Sequence[MessageExt]) -> None:
    for message in messages:
        if context.out.as_json:
            context.out.document(message_document(message))
            continue
        body, text = _body(message)
        shown = text if text is not None and text.isprintable() else repr(body[:200])
        named = " ".join(part for part in (message.tags, message.keys) if part)
        at = f"{message.broker_name}:{message.queue_id}:{message.queue_offset}".lstrip(":")
        context.out.line(f"{when(message.store_timestamp)}  {at}  {named}  {shown}")


@command("queryMsgById")
@option(
    "-i",
    "--msgId",
    "msg_ids",
    required=True,
    metavar="ID",
    help="Offset message id, or a producer's own id with -t; several with commas.",
)
@option("-t", "--topic", help="Topic name.")
async def query_msg_by_id(context: CommandContext, msg_ids: str, topic: str | None) -> None:
    """An offset id names the broker that stored it; if that one does not answer, the masters of now
    are asked. JSON: the message with the names of RocketMQ's MessageExt, a list for several ids."""
    wanted = [part.strip() for part in msg_ids.split(",") if part.strip()]
    if not wanted:
        raise click.UsageError("-i is empty")
    found: list[MessageExt] = []
    async with context.admin() as admin:
        for msg_id in wanted:
            message = await _by_id(admin, msg_id, topic)
            if message is not None:
                found.append(message)
                continue
            why = f"no message {msg_id}" + (f" in topic {topic}" if topic else "")
            if len(wanted) == 1:
                raise CommandFailed(why)
            context.complain(why)
    if context.out.as_json and len(wanted) == 1:
        context.out.document(message_document(found[0]))
    else:
        show_messages(context, found)


async def _by_id(admin: Admin, msg_id: str, topic: str | None) -> MessageExt | None:
    if _names_a_broker(msg_id):
        return await _by_offset_id(admin, msg_id, topic or "")
    if topic is None:
        raise click.UsageError(
            f"{msg_id} is no offset message id; to find a producer's own id give the topic with -t"
        )
    return await admin.messages.by_unique_key(topic, msg_id)


def _names_a_broker(msg_id: str) -> bool:
    """Both ids are hex of one length; a producer's has its process id where the port would be."""
    try:
        return 0 < split_address(decode_offset_msg_id(msg_id)[0])[1] < 65536
    except ValueError:
        return False


async def _by_offset_id(admin: Admin, msg_id: str, topic: str) -> MessageExt | None:
    """Logs of a group are the same bytes on every replica: the master of now holds it as well."""
    try:
        return await admin.messages.by_id(msg_id, topic)
    except (ConnectError, RequestTimeoutError):
        _, offset = decode_offset_msg_id(msg_id)
        for address in broker_addresses(await admin.cluster.info()):
            there = encode_offset_msg_id(host_bytes(*split_address(address)), offset)
            try:
                message = await admin.messages.by_id(there, topic)
            except (BatonError, ValueError):
                continue
            # Another group has another message there: the record itself names its broker.
            if message is not None and message.msg_id.upper() == msg_id.upper():
                return message
        raise


@command("queryMsgByOffset")
@option("-t", "--topic", required=True, help="Topic name.")
@option("-b", "--brokerName", required=True, help="Broker group.")
@option("-i", "--queueId", type=INDEX, required=True, help="Queue number.")
@option("-o", "--offset", type=INDEX, required=True, help="Offset in the queue.")
async def query_msg_by_offset(
    context: CommandContext, topic: str, broker_name: str, queue_id: int, offset: int
) -> None:
    """By time: consumeMessage -s, tail --since.

    JSON: the message with the names of RocketMQ's MessageExt."""
    async with context.consumer(TOOLS_CONSUMER) as consumer:
        queues = await consumer.fetch_queues(topic, timeout_ms=context.timeout_ms)
        (queue,) = _wanted(queues, broker_name, queue_id)
        reader = MessageReader(consumer, 0, LONG_MAX, context.timeout_ms)
        found = [message async for message in reader.read(queue, offset, offset + 1)]
    if not found or found[0].queue_offset != offset:
        raise CommandFailed(f"no message at offset {offset} of {topic} {broker_name}:{queue_id}")
    if not context.out.wrote_json(message_document(found[0])):
        show_message(context, found[0])


@command("queryMsgByKey")
@option("-t", "--topic", required=True, help="Topic name.")
@option(
    "-k",
    "--msgKey",
    required=True,
    metavar="KEY",
    help="A key of the message, or its producer's id.",
)
@stored_from("-b")
@stored_until
@option("-m", "--maxNum", type=COUNT, default=64, help="At most so many.")
async def query_msg_by_key(
    context: CommandContext, topic: str, msg_key: str, begin_ms: int, end_ms: int, max_num: int
) -> None:
    """JSON: a list of messages with the names of RocketMQ's MessageExt. Finding none ends with
    1."""
    async with context.admin() as admin:
        found = await admin.messages.by_key(
            topic, msg_key, max_messages=max_num, begin_ms=begin_ms, end_ms=end_ms
        )
        if not found:
            unique = await admin.messages.by_unique_key(topic, msg_key)
            if unique is not None and begin_ms <= unique.store_timestamp <= end_ms:
                found = [unique]
    columns = {
        "msgId": "MsgId",
        "brokerName": "Broker",
        "queueId": "QID",
        "queueOffset": "Queue Offset",
        "keys": "Keys",
        "tags": "Tags",
        "storeTimestamp": "Stored",
        "offsetMsgId": "OffsetMsgId",
    }
    if found or context.out.as_json:
        context.out.records([message_document(message) for message in found], columns)
    if not found:
        context.complain(f"no message with key {msg_key} in topic {topic}")


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
    try:
        body = message.uncompressed_body()
    except (ValueError, zlib.error):
        return message.body, None
    try:
        return body, body.decode()
    except UnicodeDecodeError:
        return body, None


def show_messages(context: CommandContext, messages: Sequence[MessageExt]) -> None:
    """One document of all, or each with its fields."""
    if context.out.wrote_json([message_document(message) for message in messages]):
        return
    for message in messages:
        show_message(context, message)


def show_message(context: CommandContext, message: MessageExt) -> None:
    body, text = _body(message)
    if text is None:
        text = f"{counted(len(body), 'byte')}, hex {body[:64].hex()}"
    context.out.fields(
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
            ("Body", text),
        ]
    )
    context.out.line()
