"""How far consumer groups are. Origin: ConsumerProgressSubCommand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.output import BAD, Cell, when
from batonmq.mqctl.params import command, option

if TYPE_CHECKING:
    from batonmq.client.admin.types import GroupProgress, QueueProgress


@command("consumerProgress")
@option("-g", "--groupName", metavar="GROUP", help="One group, queue by queue.")
@option("-t", "--topicName", metavar="TOPIC", help="Only this topic.")
async def consumer_progress(
    context: CommandContext, group_name: str | None, topic_name: str | None
) -> None:
    """How far consumer groups are behind.

    JSON: consumerGroup, consumerIdList, diffTotal, and offsetTable: the entries of RocketMQ's
    ConsumeStats with their queue (topic, brokerName, queueId, brokerOffset, consumerOffset,
    lastTimestamp, diff); without -g {"groupList": [...]} of those.
    """
    async with context.admin() as admin:
        names = [group_name] if group_name else await admin.consumer_groups.names()
        found = {name: await admin.consumer_groups.progress(name, topic_name) for name in names}
        if group_name and not _seen(found[group_name]):
            known = await admin.consumer_groups.names()
            if group_name not in known:
                raise CommandFailed(
                    f"no consumer group {group_name}: the brokers know {', '.join(known) or 'none'}"
                )
    if context.out.as_json:
        documents = [_document(progress) for progress in found.values()]
        context.out.document(documents[0] if group_name else {"groupList": documents})
    elif group_name:
        _show_group(context, found[group_name])
    else:
        rows = [
            [name, len(progress.members), len(progress.queues), _lag(progress.lag)]
            for name, progress in found.items()
        ]
        context.out.table(["Group", "Members", "Queues", "Diff Total"], rows)


def _seen(progress: GroupProgress) -> bool:
    return bool(progress.queues or progress.members)


def _document(progress: GroupProgress) -> dict[str, Any]:
    return {
        "consumerGroup": progress.group,
        "consumerIdList": list(progress.members),
        "diffTotal": progress.lag,
        "offsetTable": [
            {
                "topic": q.queue.topic,
                "brokerName": q.queue.broker_name,
                "queueId": q.queue.queue_id,
                "brokerOffset": q.broker_offset,
                "consumerOffset": q.consumer_offset,
                "lastTimestamp": q.last_consumed_ms,
                "diff": q.lag,
            }
            for q in progress.queues
        ],
    }


def _show_group(context: CommandContext, progress: GroupProgress) -> None:
    headings = ["Topic", "Broker", "QID", "Broker Offset", "Consumer Offset", "Diff", "Last Time"]
    context.out.table(headings, [_row(each) for each in progress.queues])
    context.out.line()
    context.out.fields(
        [("Members", ", ".join(progress.members) or "none"), ("Diff total", progress.lag)]
    )


def _row(q: QueueProgress) -> list[object]:
    return [q.queue.topic, q.queue.broker_name, q.queue.queue_id, q.broker_offset,
            q.consumer_offset, _lag(q.lag), when(q.last_consumed_ms)]  # fmt: skip


def _lag(lag: int) -> str:
    return str(lag) if lag <= 0 else Cell.of(lag, BAD if lag > 10_000 else "yellow")
