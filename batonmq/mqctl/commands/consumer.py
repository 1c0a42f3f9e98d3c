"""How far consumer groups are, who consumes, and where a group continues.

Origin: ConsumerProgressSubCommand, ConsumerConnectionSubCommand, ResetOffsetByTimeCommand,
SkipAccumulationSubCommand.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import click

from batonmq.client.admin.types import GroupProgress
from batonmq.mqctl.commands.groups import CONNECTION
from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.output import BAD, Cell, plain, plain_queue, when
from batonmq.mqctl.params import INDEX, TIME, command, dry_run_option, option, yes_option
from batonmq.mqctl.routes import masters_to_read
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.topic_name import SYSTEM_GROUPS
from batonmq.runtime.words import counted

LAG_MANY = 10_000
"""Shown in red, as `mqctl verdict` counts a group as far behind from here."""
QUEUE = {"topic": "Topic", "brokerName": "Broker", "queueId": "QID"}


@command("consumerProgress", interval=True)
@option("-g", "--groupName", metavar="GROUP", help="One group, queue by queue.")
@option("-t", "--topicName", metavar="TOPIC", help="Only this topic.")
@option("--system", is_flag=True, help="The groups of the brokers themselves, too.")
async def consumer_progress(
    context: CommandContext, group_name: str | None, topic_name: str | None, system: bool
) -> None:
    """JSON: consumerGroup, consumerIdList, diffTotal, inflightTotal, and offsetTable: the entries
    of RocketMQ's ConsumeStats with their queue (topic, brokerName, queueId, brokerOffset,
    consumerOffset, pullOffset, lastTimestamp, diff, inflight: what members have pulled and not
    consumed); without -g {"groupList": [...]} of those."""
    async with context.admin() as admin:
        masters = await masters_to_read(context, admin)
        groups = admin.consumer_groups
        if group_name:
            parts = await context.ask_each(
                masters, lambda name: groups.progress(group_name, topic_name, {name: masters[name]})
            )
            found = {group_name: _joined(group_name, parts.values())}
        else:
            names = await context.ask_each(
                masters, lambda name: groups.names({name: masters[name]})
            )
            answer = {name: masters[name] for name in names}
            found = {
                group: await groups.progress(group, topic_name, answer)
                for group in sorted({group for part in names.values() for group in part})
                if system or group not in SYSTEM_GROUPS
            }
        # Of a mistyped group brokers say the same as of a new one: no offset, no member. Only the
        # list of groups tells them apart, if it is whole.
        is_empty = group_name and not (found[group_name].queues or found[group_name].members)
        if is_empty and not context.failed:
            known = await groups.names()
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


def _joined(group: str, parts: Iterable[GroupProgress]) -> GroupProgress:
    """What several masters say of a group."""
    parts = list(parts)
    queues = sorted((each for part in parts for each in part.queues), key=lambda each: each.queue)
    members = sorted({member for part in parts for member in part.members})
    return GroupProgress(group, tuple(queues), tuple(members))


@command("consumerConnection", interval=True)
@option("-g", "--consumerGroup", required=True, metavar="GROUP", help="Consumer group.")
async def consumer_connection(context: CommandContext, consumer_group: str) -> None:
    """JSON: RocketMQ's ConsumerConnection. Exit code 1 if no member is connected."""
    async with context.admin() as admin:
        masters = await masters_to_read(context, admin)
        found = await admin.consumer_groups.connections(consumer_group, masters)
    if found is None:
        raise CommandFailed(f"no member of group {consumer_group} is connected")
    if context.out.wrote_json(plain(found)):
        return
    context.out.records([plain(each) for each in found.connection_set], CONNECTION)
    context.out.line()
    subscriptions = sorted(found.subscription_table.items())
    context.out.table(
        ["Topic", "Type", "Expression"],
        [[topic, each.expression_type, each.sub_string] for topic, each in subscriptions],
    )
    context.out.line()
    context.out.fields(
        [
            ("Consume type", found.consume_type),
            ("Message model", found.message_model),
            ("Consume from", found.consume_from_where),
        ]
    )


@command("resetOffset", writes=True)
@option("-g", "--group", required=True, metavar="GROUP", help="Consumer group.")
@option("-t", "--topic", required=True, help="Topic name.")
@option("-s", "--timestamp", "timestamp_ms", type=TIME, help="Store time; 0: the beginning.")
@option("-b", "--brokerName", metavar="NAME", help="With -q and -o: one queue of this group.")
@option("-q", "--queueId", type=INDEX, help="Queue number.")
@option("-o", "--offset", type=INDEX, help="Offset of the next message.")
@dry_run_option
@yes_option
async def reset_offset(
    context: CommandContext,
    group: str,
    topic: str,
    timestamp_ms: int | None,
    broker_name: str | None,
    queue_id: int | None,
    offset: int | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Running members follow at once. JSON: RocketMQ's ResetOffsetBody, {"offsetTable": [...]} with
    the queue and offset of each; with --dry-run also before: where the group is (null: nowhere)."""
    queue = None
    if broker_name is not None and queue_id is not None and offset is not None:
        queue = (broker_name, queue_id, offset)
    elif (broker_name, queue_id, offset) != (None, None, None):
        raise click.UsageError("one queue needs all of -b, -q and -o")
    if (queue is None) == (timestamp_ms is None):
        raise click.UsageError("say where to continue: -s TIME, or -b, -q and -o")
    await _reset(context, group, topic, timestamp_ms or 0, queue, dry_run=dry_run, yes=yes)


@command("skip", writes=True)
@option("-g", "--group", required=True, metavar="GROUP", help="Consumer group.")
@option("-t", "--topic", required=True, help="Topic name.")
@dry_run_option
@yes_option
async def skip(context: CommandContext, group: str, topic: str, dry_run: bool, yes: bool) -> None:
    """JSON: as resetOffset."""
    # RocketMQ's time for the end of each queue.
    await _reset(context, group, topic, -1, None, dry_run=dry_run, yes=yes)


async def _reset(
    context: CommandContext,
    group: str,
    topic: str,
    timestamp_ms: int,
    queue: tuple[str, int, int] | None,
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    async with context.admin() as admin:
        if queue is None:  # once it has a master, the same command does the rest
            await masters_to_read(context, admin)
        found = await admin.consumer_groups.preview_reset(group, topic, timestamp_ms, queue)
        if dry_run:
            _show_preview(context, found)
            return
        # Where the group would begin in a queue without an offset is not known.
        moved = [then - now for now, then in found.values() if now is not None]
        skipped = counted(sum(n for n in moved if n > 0), "message")
        context.confirm(
            f"group {group} in {topic}, {counted(len(found), 'queue')}:"
            f" {skipped} skipped, {-sum(n for n in moved if n < 0)} read again",
            yes=yes,
        )
        offsets = await admin.consumer_groups.reset_offsets(group, topic, timestamp_ms, queue)
    queues = [{**plain_queue(q), "offset": at} for q, at in offsets.items()]
    context.out.records(queues, {**QUEUE, "offset": "Offset"}, key="offsetTable")


def _show_preview(
    context: CommandContext, found: Mapping[MessageQueue, tuple[int | None, int]]
) -> None:
    table = [{**plain_queue(q), "before": now, "offset": then} for q, (now, then) in found.items()]
    if context.out.wrote_json({"dryRun": True, "offsetTable": table}):
        return
    rows = [
        [q.topic, q.broker_name, q.queue_id, "" if now is None else now, then, _moved(now, then)]
        for q, (now, then) in found.items()
    ]
    context.out.table(["Topic", "Broker", "QID", "Now", "Then", "Effect"], rows)
    context.out.line("nothing was changed")


def _moved(now: int | None, then: int) -> str:
    if now is None or now == then:
        return ""
    return f"{then - now} skipped" if then > now else f"{now - then} again"


def _document(progress: GroupProgress) -> dict[str, Any]:
    return {
        "consumerGroup": progress.group,
        "consumerIdList": list(progress.members),
        "diffTotal": progress.lag,
        "inflightTotal": progress.in_flight,
        "offsetTable": [
            {
                **plain_queue(q.queue),
                "brokerOffset": q.broker_offset,
                "consumerOffset": q.consumer_offset,
                "pullOffset": q.pull_offset,
                "lastTimestamp": q.last_consumed_ms,
                "diff": q.lag,
                "inflight": q.in_flight,
            }
            for q in progress.queues
        ],
    }


def _show_group(context: CommandContext, progress: GroupProgress) -> None:
    headings = ["Topic", "Broker", "QID", "Broker Offset", "Consumer Offset", "Diff", "Inflight",
                "Last Time"]  # fmt: skip
    rows = [
        [q.queue.topic, q.queue.broker_name, q.queue.queue_id, q.broker_offset,
         q.consumer_offset, _lag(q.lag), q.in_flight, when(q.last_consumed_ms)]
        for q in progress.queues
    ]  # fmt: skip
    context.out.table(headings, rows)
    context.out.line()
    context.out.fields(
        [
            ("Members", ", ".join(progress.members) or "none"),
            ("Diff total", progress.lag),
            ("In flight", progress.in_flight),
        ]
    )


def _lag(lag: int) -> str:
    return str(lag) if lag <= 0 else Cell.of(lag, BAD if lag > LAG_MANY else "yellow")
