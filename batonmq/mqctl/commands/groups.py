"""Settings of consumer groups, who produces, and how far the groups of a broker are.

Origin: UpdateSubGroupSubCommand, DeleteSubscriptionGroupCommand, GetConsumerConfigSubCommand,
ProducerConnectionSubCommand, BrokerConsumeStatsSubCommad.
"""

from typing import Any

import click
from msgspec.structs import replace

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.types import QueueProgress
from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.output import plain
from batonmq.mqctl.params import COUNT, INDEX, TRUE_OR_FALSE, command, exclusive, option, yes_option
from batonmq.mqctl.routes import check_masters, masters_to_read
from batonmq.protocol.bodies import SubscriptionGroupConfig
from batonmq.runtime.words import counted

CONNECTION = {
    "clientId": "Client",
    "clientAddr": "Address",
    "language": "Language",
    "version": "Version",
}
"""Members of RocketMQ's Connection that are shown, and their headings."""


@command("getConsumerConfig", interval=True)
@option("-g", "--groupName", required=True, metavar="GROUP", help="Consumer group.")
async def get_consumer_config(context: CommandContext, group_name: str) -> None:
    """JSON: broker name to RocketMQ's SubscriptionGroupConfig."""
    async with context.admin() as admin:
        masters = await masters_to_read(context, admin)
        known = await group_configs(admin, group_name, masters)
    if not known:
        raise CommandFailed(f"no settings of {group_name}: `mqctl consumerProgress` shows groups")
    context.out.settings({name: plain(config) for name, config in known.items()})


async def group_configs(
    admin: Admin, group: str, masters: dict[str, str]
) -> dict[str, SubscriptionGroupConfig]:
    """Broker name -> the settings of the group, where it has some."""
    found = {}
    for name, address in masters.items():
        table = (await admin.consumer_groups.settings(address)).subscription_group_table
        if group in table:
            found[name] = table[group]
    return found


@command("updateSubGroup", writes=True)
@option("-g", "--groupName", required=True, metavar="GROUP", help="Consumer group.")
@option("-c", "--clusterName", help="On all masters of a cluster.")
@option("-b", "--brokerAddr", metavar="HOST:PORT", help="On one broker.")
@option("-s", "--consumeEnable", type=TRUE_OR_FALSE, help="false: it may not read.")
@option("-m", "--consumeFromMinEnable", type=TRUE_OR_FALSE, help="Kept, without effect.")
@option("-d", "--consumeBroadcastEnable", type=TRUE_OR_FALSE, help="false: no broadcasting.")
@option("-o", "--consumeMessageOrderly", type=TRUE_OR_FALSE, help="true: in order.")
@option("-q", "--retryQueueNums", type=INDEX, help="Queues of its retry topic.")
@option("-r", "--retryMaxTimes", type=INDEX, help="Tries before a message is a dead letter.")
@option("-i", "--brokerId", type=INDEX, help="Replica that it reads from.")
@option("-w", "--whichBrokerWhenConsumeSlowly", type=INDEX, help="The same, if it is far behind.")
@option("-a", "--notifyConsumerIdsChanged", type=TRUE_OR_FALSE, help="Tell members of changes.")
async def update_sub_group(
    context: CommandContext,
    group_name: str,
    cluster_name: str | None,
    broker_addr: str | None,
    notify_consumer_ids_changed: bool | None,
    **settings: Any,
) -> None:
    """JSON: broker name to RocketMQ's SubscriptionGroupConfig as it is now."""
    if (cluster_name is None) == (broker_addr is None):
        raise click.UsageError("give either -c (all masters of a cluster) or -b (one broker)")
    # RocketMQ's option lacks the last word of its setting.
    settings["notify_consumer_ids_changed_enable"] = notify_consumer_ids_changed
    changes = {name: value for name, value in settings.items() if value is not None}
    async with context.admin() as admin:
        if cluster_name:
            await check_masters(context, admin, cluster_name)
        masters = await admin.cluster.targets(cluster_name, broker_addr)
        known = await group_configs(admin, group_name, masters)
        made = {}
        for name, address in masters.items():
            # A broker replaces all settings of a group at once: what was not given has to be sent
            # as it is, or it would fall back to its default. Masters may differ in it.
            before = known.get(name, SubscriptionGroupConfig(group_name=group_name))
            # Brokers refuse attributes in a request, as Java does.
            made[name] = replace(before, attributes={}, **changes)
            await admin.consumer_groups.update(made[name], broker=address)
    found = {name: plain(config) for name, config in made.items()}
    if context.out.wrote_json(found):
        return
    for name, config in found.items():
        shown = ", ".join(
            f"{key}={value}" for key, value in config.items() if value not in ({}, None)
        )
        context.out.line(f"{name}: {shown}")


@command("deleteSubGroup", writes=True)
@option("-g", "--groupName", required=True, metavar="GROUP", help="Consumer group.")
@option("-c", "--clusterName", help="From all masters of a cluster.")
@option("-b", "--brokerAddr", metavar="HOST:PORT", help="From one broker.")
@option("-r", "--removeOffset", is_flag=True, help="Its offsets as well.")
@yes_option
async def delete_sub_group(
    context: CommandContext,
    group_name: str,
    cluster_name: str | None,
    broker_addr: str | None,
    remove_offset: bool,
    yes: bool,
) -> None:
    """It shows who is connected and what waits, and asks. A member that stays connected makes the
    group again with its next heartbeat.

    JSON: groupName, removeOffset, brokerAddrs (broker name to the master where it was done)."""
    if (cluster_name is None) == (broker_addr is None):
        raise click.UsageError("give either -c (all masters of a cluster) or -b (one broker)")
    async with context.admin() as admin:
        if cluster_name:
            await check_masters(context, admin, cluster_name)
        # Only those that are to delete it: another group without a master must not stop -b.
        masters = await admin.cluster.targets(cluster_name, broker_addr)
        progress = await admin.consumer_groups.progress(group_name, masters=masters)
        # A broker deletes a group that it does not know without a word.
        if not progress.queues and group_name not in await admin.consumer_groups.names(masters):
            raise CommandFailed(f"no consumer group {group_name}: nothing was deleted")
        offsets = "and its offsets" if remove_offset else "and keep its offsets"
        context.confirm(
            f"delete group {group_name} {offsets};"
            f" connected: {counted(len(progress.members), 'member')},"
            f" waiting: {counted(progress.lag, 'message')}",
            yes=yes,
        )
        done = await admin.consumer_groups.delete(
            group_name, cluster=cluster_name, broker=broker_addr, with_offsets=remove_offset
        )
    context.out.result(
        {"groupName": group_name, "removeOffset": remove_offset, "brokerAddrs": done},
        f"group {group_name} deleted from {', '.join(done.values())}",
    )


@command("producerConnection", interval=True)
@option("-g", "--producerGroup", required=True, metavar="GROUP", help="Producer group.")
async def producer_connection(context: CommandContext, producer_group: str) -> None:
    """Exit code 1 if there is none.

    JSON: RocketMQ's ProducerConnection ({"connectionSet": [...]})."""
    async with context.admin() as admin:
        masters = await masters_to_read(context, admin)
        found = await admin.consumer_groups.producers(producer_group, masters)
    if not found:
        raise CommandFailed(f"no producer of group {producer_group} is connected")
    context.out.records([plain(each) for each in found], CONNECTION, key="connectionSet")


@command("brokerConsumeStats", interval=True)
@option("-b", "--brokerAddr", metavar="HOST:PORT", help="One broker; default: all masters.")
@option("-c", "--clusterName", help="All masters of a cluster.")
@option("-l", "--level", type=INDEX, default=0, help="Only queues that are so far behind.")
@option("--top", type=COUNT, help="Only so many, the furthest behind first.")
async def broker_consume_stats(
    context: CommandContext,
    broker_addr: str | None,
    cluster_name: str | None,
    level: int,
    top: int | None,
) -> None:
    """JSON: {"queues": [...]} of broker, topic, consumerGroup, queueId, brokerOffset,
    consumerOffset, diff, lastTimestamp."""
    exclusive(("-b", broker_addr), ("-c", cluster_name))
    async with context.admin() as admin:
        if broker_addr is not None:
            masters = {broker_addr: broker_addr}
        else:
            masters = await masters_to_read(context, admin, cluster_name)

        async def progress(name: str) -> dict[str, list[QueueProgress]]:
            return await admin.consumer_groups.progress_of_broker(masters[name])

        found = await context.ask_each(masters, progress)
    queues = [
        _queue_document(name, group, queue)
        for name, groups in found.items()
        for group, of_group in groups.items()
        for queue in of_group
        if queue.lag >= level
    ]
    # Without --top in the order of brokers and groups, as mqadmin prints them.
    if top is not None:
        queues = sorted(queues, key=lambda queue: -queue["diff"])[:top]
    columns = {
        "broker": "Broker",
        "topic": "Topic",
        "consumerGroup": "Group",
        "queueId": "QID",
        "brokerOffset": "Broker Offset",
        "consumerOffset": "Consumer Offset",
        "diff": "Diff",
        "lastTimestamp": "Last Time",
    }
    context.out.records(queues, columns, key="queues")


def _queue_document(name: str, group: str, q: QueueProgress) -> dict[str, Any]:
    return {
        "broker": name,
        "topic": q.queue.topic,
        "consumerGroup": group,
        "queueId": q.queue.queue_id,
        "brokerOffset": q.broker_offset,
        "consumerOffset": q.consumer_offset,
        "diff": q.lag,
        "lastTimestamp": q.last_consumed_ms,
    }
