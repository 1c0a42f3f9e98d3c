"""All that is known of one topic or one consumer group, from the masters and the routes."""

from typing import Any

import click

from batonmq.client.admin.admin import Admin
from batonmq.mqctl.commands.groups import group_configs
from batonmq.mqctl.commands.topic import topic_settings
from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.output import for_people, plain
from batonmq.mqctl.params import command, complete
from batonmq.mqctl.routes import masters_to_read


def _names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    what = "groups" if ctx.params.get("kind") == "group" else "topics"
    return complete(what)(ctx, parameter, incomplete)


@command("describe", interval=True)
@click.argument("kind", type=click.Choice(["topic", "group"]))
@click.argument("name", shell_complete=_names)
async def describe(context: CommandContext, kind: str, name: str) -> None:
    """JSON of a topic: topic, brokers (broker name to RocketMQ's TopicConfig, and messages,
    lastUpdateTimestamp), groups (name to diff). JSON of a group: consumerGroup, brokers (broker
    name to RocketMQ's SubscriptionGroupConfig), members, topics (name to diff)."""
    async with context.admin() as admin:
        found = await (_topic if kind == "topic" else _group)(context, admin, name)
    if context.out.wrote_json(found):
        return
    for broker, settings in found["brokers"].items():
        context.out.line(broker, style="bold")
        known = {key: value for key, value in settings.items() if value not in ({}, None)}
        context.out.fields([(key, for_people(key, value)) for key, value in known.items()])
        context.out.line()
    if kind == "group":
        context.out.fields([("Members", ", ".join(found["members"]) or "none")])
        context.out.line()
    others = "groups" if kind == "topic" else "topics"
    rows = [[other, diff] for other, diff in found[others].items()]
    context.out.table([others[:-1].capitalize(), "Diff"], rows)


async def _topic(context: CommandContext, admin: Admin, topic: str) -> dict[str, Any]:
    """Raises CommandFailed for one that no master has."""
    masters = await masters_to_read(context, admin)
    brokers = await topic_settings(context, admin, topic, masters)
    for queue in await admin.topics.stats(topic):
        broker = brokers.setdefault(queue.queue.broker_name, {})
        broker["messages"] = broker.get("messages", 0) + queue.max_offset - queue.min_offset
        latest = max(broker.get("lastUpdateTimestamp", 0), queue.last_update_ms)
        broker["lastUpdateTimestamp"] = latest
    groups = [each.group for each in await admin.topics.traffic(topic) if each.group is not None]
    progress = admin.consumer_groups.progress
    lags = {group: (await progress(group, topic, masters)).lag for group in groups}
    return {"topic": topic, "brokers": brokers, "groups": lags}


async def _group(context: CommandContext, admin: Admin, group: str) -> dict[str, Any]:
    """Raises CommandFailed for one that no master knows."""
    masters = await masters_to_read(context, admin)
    configs = await group_configs(admin, group, masters)
    brokers = {name: plain(config) for name, config in configs.items()}
    progress = await admin.consumer_groups.progress(group, masters=masters)
    if not brokers and not progress.queues and not progress.members:
        raise CommandFailed(f"no consumer group {group}: `mqctl consumerProgress` shows the others")
    topics: dict[str, int] = {}
    for queue in progress.queues:
        topics[queue.queue.topic] = topics.get(queue.queue.topic, 0) + queue.lag
    return {
        "consumerGroup": group,
        "brokers": brokers,
        "members": list(progress.members),
        "topics": topics,
    }
