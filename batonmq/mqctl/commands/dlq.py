"""Dead letters: messages that a consumer group failed on too often, in the topic `%DLQ%GROUP`."""

import click

from batonmq.client.errors import NoRouteError
from batonmq.client.producer.producer import Producer
from batonmq.mqctl.commands.message import (
    PRODUCER_GROUP,
    MessageReader,
    message_document,
    show_messages,
)
from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.params import COUNT, command, complete, dry_run_option, option, yes_option
from batonmq.mqctl.routes import masters_to_read
from batonmq.protocol import properties as names
from batonmq.protocol.codes import LONG_MAX
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import Message, MessageExt
from batonmq.protocol.topic_name import DLQ_PREFIX, TOOLS_CONSUMER, dlq_topic

#: What the broker put into the message; a resent one begins with none of it.
_OF_THE_BROKER = (
    names.CRC32, names.DELAY, names.DLQ_ORIGIN_TOPIC, names.DLQ_ORIGIN_MESSAGE_ID,
    names.MAX_OFFSET, names.MIN_OFFSET, names.MAX_RECONSUME_TIMES, names.ORIGIN_MESSAGE_ID,
    names.REAL_QID, names.REAL_TOPIC, names.RECONSUME_TIME, names.RETRY_TOPIC, names.UNIQ_KEY,
    names.WAIT, names.CLUSTER, names.MSG_REGION, names.TRACE_ON, names.PGROUP,
)  # fmt: skip


@command("dlq", writes=True, timeout_s=10.0)
@click.argument("action", type=click.Choice(["list", "show", "resend"]))
@click.argument("group", required=False, shell_complete=complete("groups"))
@option("-k", "--key", "keys", multiple=True, metavar="KEY", help="Only messages with this key.")
@option("-m", "--maxNum", type=COUNT, default=64, help="At most so many, the newest first.")
@dry_run_option
@yes_option
async def dlq(
    context: CommandContext,
    action: str,
    group: str | None,
    keys: tuple[str, ...],
    max_num: int,
    dry_run: bool,
    yes: bool,
) -> None:
    """A resent message goes to the topic that it came from, so every group of that topic gets it.
    The dead letter stays where it is.

    JSON: of list {"groups": [...]} of consumerGroup, messages, lastTimestamp; of show and resend a
    list of messages with the names of RocketMQ's MessageExt, of resend with toTopic and sendStatus.
    """
    if action == "list":
        await _list(context)
        return
    if group is None:
        raise click.UsageError(f"dlq {action} needs a GROUP; `mqctl dlq list` shows them")
    found = await _dead_letters(context, group, keys, max_num)
    if action == "show":
        show_messages(context, found)
        return
    await _resend(context, group, found, dry_run=dry_run, yes=yes)


async def _list(context: CommandContext) -> None:
    async with context.admin() as admin:
        topics = [name for name in await admin.topics.names() if name.startswith(DLQ_PREFIX)]
        await masters_to_read(context, admin)  # `stats` leaves out groups without a master
        found = await context.ask_each(topics, admin.topics.stats)
    records = [
        {
            "consumerGroup": topic.removeprefix(DLQ_PREFIX),
            "messages": sum(queue.max_offset - queue.min_offset for queue in queues),
            "lastTimestamp": max((queue.last_update_ms for queue in queues), default=0),
        }
        for topic, queues in found.items()
    ]
    columns = {"consumerGroup": "Group", "messages": "Messages", "lastTimestamp": "Last"}
    context.out.records(records, columns, key="groups")


async def _dead_letters(
    context: CommandContext, group: str, keys: tuple[str, ...], most: int
) -> list[MessageExt]:
    """The newest that match, oldest first. Raises CommandFailed if there is none."""
    found: list[MessageExt] = []
    async with context.consumer(TOOLS_CONSUMER) as consumer:
        reader = MessageReader(consumer, 0, LONG_MAX, context.timeout_ms)
        try:
            queues = await consumer.fetch_queues(dlq_topic(group), timeout_ms=context.timeout_ms)
        except NoRouteError:  # a broker makes the topic with the first dead letter
            raise CommandFailed(
                f"no name server knows {dlq_topic(group)}: the group has no dead letters, or its"
                " brokers are away (mqctl health)"
            ) from None
        for queue in queues:
            end = await consumer.max_offset(queue, timeout_ms=context.timeout_ms)
            first = 0 if keys else max(0, end - most)
            async for message in reader.read(queue, first, end):
                if not keys or set(keys) & set(message.keys.split()):
                    found.append(message)
    found.sort(key=lambda message: message.store_timestamp)
    if not found:
        raise CommandFailed(f"group {group} has no such dead letters")
    return found[-most:]


def _again(letter: MessageExt) -> Message | None:
    """The message for its own topic; None if it does not name one."""
    has = letter.properties.get
    topic = has(names.DLQ_ORIGIN_TOPIC) or has(names.RETRY_TOPIC)
    if not topic:
        return None
    message = Message.of(topic, letter.uncompressed_body(), tags=letter.tags, keys=letter.keys)
    for name, value in letter.properties.items():
        if name not in (*_OF_THE_BROKER, names.TAGS, names.KEYS):
            message.properties[name] = value
    message.flag = letter.flag
    return message


async def _send(
    context: CommandContext, sender: Producer, letter: MessageExt, message: Message
) -> str:
    """Its status; "" if it failed. The command then continues with the next letter and lists what
    was sent: after an error alone, a second run would send the earlier letters twice."""
    try:
        result = await sender.send(message)
    except BatonError as error:
        context.complain(f"{letter.uniq_key}: {error}")
        return ""
    if not result.acknowledged:
        context.complain(f"{letter.uniq_key}: not acknowledged by every replica ({result.status})")
    return str(result.status)


async def _resend(
    context: CommandContext, group: str, letters: list[MessageExt], *, dry_run: bool, yes: bool
) -> None:
    whole = [(letter, _again(letter)) for letter in letters]
    topics = sorted({message.topic for _, message in whole if message is not None})
    if not dry_run:
        context.confirm(
            f"send {len(letters)} dead letters of {group} to {', '.join(topics) or 'no topic'}:"
            " every group of that topic gets them",
            yes=yes,
        )
    sent: list[str] = []
    async with context.producer(PRODUCER_GROUP) as sender:
        for letter, message in whole:
            if message is None:
                context.complain(f"{letter.uniq_key}: it does not name the topic that it came from")
                sent.append("")  # each letter has its result, in their order
            elif dry_run:
                sent.append("DRY_RUN")
            else:
                sent.append(await _send(context, sender, letter, message))
    records = [
        {
            **message_document(letter),
            "toTopic": message.topic if message is not None else None,
            "sendStatus": status or None,
        }
        for (letter, message), status in zip(whole, sent, strict=True)
    ]
    columns = {
        "msgId": "MsgId",
        "keys": "Keys",
        "storeTimestamp": "Stored",
        "toTopic": "To",
        "sendStatus": "Result",
    }
    context.out.records(records, columns)
    if dry_run and not context.out.as_json:
        context.out.line("nothing was sent")
