"""Topics: list, route, offsets, change, delete. Origin: tools.command.topic."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.types import TopicChanges
from batonmq.mqctl.commands.cluster import own_id
from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.output import WaitLine, plain, plain_queue
from batonmq.mqctl.params import INDEX, TRUE_OR_FALSE, command, option, yes_option
from batonmq.mqctl.routes import check_masters, masters_to_read
from batonmq.protocol.errors import BatonError
from batonmq.protocol.topic_name import is_retry_or_dlq, is_system_topic
from batonmq.runtime.words import counted


@command("topicList")
@option("-c", "--clusterModel", is_flag=True, help="With cluster and groups.")
async def topic_list(context: CommandContext, cluster_model: bool) -> None:
    """JSON: RocketMQ's TopicList ({"topicList": [...]}); with -c the entries are objects with
    clusterName, topic, consumerGroup."""
    async with context.admin() as admin:
        topics = await admin.topics.names()
        if not cluster_model:
            if not context.out.wrote_json({"topicList": topics}):
                context.out.table(["Topic"], [[topic] for topic in topics])
            return
        rows = await _with_groups(context, admin, topics)
    columns = {"clusterName": "Cluster", "topic": "Topic", "consumerGroup": "Consumer Group"}
    records = [dict(zip(columns, row, strict=True)) for row in rows]
    context.out.records(records, columns, key="topicList")


async def _with_groups(
    context: CommandContext, admin: Admin, topics: Sequence[str]
) -> list[list[str]]:
    """[cluster, topic, group or nothing], for each group that has offsets in the topic."""
    groups: dict[str, set[str]] = {}
    masters = (await masters_to_read(context, admin)).values()
    for offsets in (await context.ask_each(masters, admin.consumer_groups.offsets)).values():
        for key in offsets:
            topic, _, group = key.rpartition("@")
            groups.setdefault(topic, set()).add(group)
    with WaitLine(f"asking for the routes of {counted(len(topics), 'topic')} ..."):
        routes = await context.ask_each(topics, admin.topics.route)
    return [
        [cluster, topic, group]
        for topic, route in routes.items()
        for cluster in sorted({data.cluster for data in route.broker_datas})
        for group in sorted(groups.get(topic, ())) or [""]
    ]


@command("topicRoute")
@option("-t", "--topic", required=True, help="Topic name.")
@option("-l", "--list", "as_list", is_flag=True, help="One line per broker group.")
async def topic_route(context: CommandContext, topic: str, as_list: bool) -> None:
    """JSON: RocketMQ's TopicRouteData (brokerDatas, queueDatas)."""
    async with context.admin() as admin:
        route = await admin.topics.route(topic)
        addresses = [a for data in route.broker_datas for a in data.broker_addrs.values()]
        # Routes name a master 0: its own id is only in its figures, which cost a request each.
        wants_ids = not (context.out.as_json or as_list)
        figures = await context.ask_each(addresses, admin.brokers.runtime_info) if wants_ids else {}
    if context.out.wrote_json(plain(route)):
        return
    clusters = {data.broker_name: data.cluster for data in route.broker_datas}
    queues = [
        [clusters.get(name := q.broker_name, ""), name, q.read_queue_nums, q.write_queue_nums, perm]
        for q in sorted(route.queue_datas, key=lambda q: q.broker_name)
        for perm in (_perm(q.perm),)
    ]
    context.out.table(["Cluster", "Broker", "Read Queues", "Write Queues", "Perm"], queues)
    if as_list:
        return
    brokers = sorted(
        [data.broker_name, str(own_id(broker_id, figures.get(address))), address, role]
        for data in route.broker_datas
        for broker_id, address in data.broker_addrs.items()
        for role in ("SLAVE" if broker_id else "MASTER",)
    )
    context.out.line()
    context.out.table(["Broker", "ID", "Address", "Role"], brokers)


@command("topicStatus", interval=True)
@option("-t", "--topic", required=True, help="Topic name.")
async def topic_status(context: CommandContext, topic: str) -> None:
    """JSON: {"offsetTable": [...]}, the entries of RocketMQ's TopicStatsTable with their queue
    (topic, brokerName, queueId, minOffset, maxOffset, lastUpdateTimestamp)."""
    async with context.admin() as admin:
        await masters_to_read(context, admin)  # `stats` leaves out groups without a master
        stats = await admin.topics.stats(topic)
    queues = [
        {
            **plain_queue(s.queue),
            "minOffset": s.min_offset,
            "maxOffset": s.max_offset,
            "lastUpdateTimestamp": s.last_update_ms,
        }
        for s in stats
    ]
    columns = {
        "brokerName": "Broker",
        "queueId": "QID",
        "minOffset": "Min Offset",
        "maxOffset": "Max Offset",
        "lastUpdateTimestamp": "Last Updated",
    }
    context.out.records(queues, columns, key="offsetTable")


@command("statsAll", interval=True)
@option("-t", "--topic", help="Only this topic; default: all but the brokers' own.")
@option(
    "-a", "--activeTopic", is_flag=True, help="Only what had traffic today, or waits for its group."
)
async def stats_all(context: CommandContext, topic: str | None, active_topic: bool) -> None:
    """A second in the last minute, and in the last 24 hours; brokers count from their start.
    JSON: {"topics": [...]} of topic, group (null: what came in), tps, day, diff (null without a
    group)."""
    async with context.admin() as admin:
        masters = await masters_to_read(context, admin)
        names = [topic] if topic else await admin.topics.names()
        if topic is None:
            # Retry and dead-letter topics belong to one group each: consumerProgress and dlq.
            names = [n for n in names if not is_system_topic(n) and not is_retry_or_dlq(n)]

        async def lag_of(name: str, group: str | None) -> int | None:
            if group is None:
                return None
            return (await admin.consumer_groups.progress(group, name, masters)).lag

        found = (await context.ask_each(names, admin.topics.traffic)).values()
        all_of = {(each.topic, each.group): each for traffic in found for each in traffic}
        lags = await context.ask_each(all_of, lambda key: lag_of(*key))
    rows = [
        (traffic, lags[key])
        for key, traffic in all_of.items()
        if key in lags and (not active_topic or traffic.tps or traffic.day or lags[key])
    ]
    table = [
        {"topic": t.topic, "group": t.group, "tps": t.tps, "day": t.day, "diff": lag}
        for t, lag in rows
    ]
    if context.out.wrote_json({"topics": table}):
        return
    context.out.table(
        ["Topic", "Group", "TPS", "Last 24 h", "Diff"],
        [
            [t.topic, t.group or "(in)", f"{t.tps:.2f}", t.day, "" if lag is None else lag]
            for t, lag in rows
        ],
    )


@command("updateTopic", writes=True)
@option("-t", "--topic", required=True, help="Topic name.")
@option("-c", "--clusterName", help="On all masters of a cluster.")
@option("-b", "--brokerAddr", metavar="HOST:PORT", help="On one broker.")
@option("-r", "--readQueueNums", type=INDEX, help="Queues that may be read.")
@option("-w", "--writeQueueNums", type=INDEX, help="Queues that may be written.")
@option("-p", "--perm", type=click.Choice(["2", "4", "6"]), help="2 write, 4 read, 6 both.")
@option("-o", "--order", type=TRUE_OR_FALSE, help="true: ordered topic.")
@option("-u", "--unit", type=TRUE_OR_FALSE, help="true: unit topic.")
@option("-s", "--hasUnitSub", type=TRUE_OR_FALSE, help="true: has unit subscriptions.")
@option("-a", "--attributes", metavar="LIST", help="+key=value,-key ...")
@option("--force", is_flag=True, help="Also if queues with messages would not be read.")
async def update_topic(
    context: CommandContext,
    topic: str,
    cluster_name: str | None,
    broker_addr: str | None,
    force: bool,
    **settings: Any,
) -> None:
    """A new topic has 8 queues to read and to write, and perm 6, unless given.

    JSON: RocketMQ's TopicConfig as it is now at the first broker, brokerAddrs: broker name to the
    master where it was done, and topicConfigs: broker name to TopicConfig."""
    if (cluster_name is None) == (broker_addr is None):
        raise click.UsageError("give either -c (all masters of a cluster) or -b (one broker)")
    perm = settings.pop("perm")
    changes = TopicChanges(
        attributes=_attributes(settings.pop("attributes")),
        perm=int(perm) if perm is not None else None,
        **settings,
    )
    async with context.admin() as admin:
        if cluster_name:
            await check_masters(context, admin, cluster_name)
        done = await admin.topics.change(
            topic, changes, cluster=cluster_name, broker=broker_addr, force=force
        )
    configs = {name: plain(changed.config) for name, changed in done.items()}
    addresses = {name: changed.address for name, changed in done.items()}
    first = next(iter(configs.values()))
    if context.out.wrote_json({**first, "brokerAddrs": addresses, "topicConfigs": configs}):
        return
    for name, changed in done.items():
        at = name if name == changed.address else f"{name} ({changed.address})"
        config = changed.config
        context.out.line(
            f"topic {topic} on {at}: {config.read_queue_nums} read queues,"
            f" {config.write_queue_nums} write queues, {_perm(config.perm)}"
            + "".join(f", {key}={value}" for key, value in sorted(config.attributes.items()))
        )


def _attributes(text: str | None) -> dict[str, str]:
    """`+a=b,-c` -> {"+a": "b", "-c": ""}. Raises click.UsageError."""
    found: dict[str, str] = {}
    for part in filter(None, (text or "").split(",")):
        if not re.fullmatch(r"\+[^+=-][^=]*=[^=]+|-[^+=-][^=]*", part):
            raise click.UsageError(f"-a {part!r}: +key=value sets, -key takes away")
        key, _, value = part.partition("=")
        if key in found:
            raise click.UsageError(f"-a names {key} twice")
        found[key] = value
    return found


@command("deleteTopic", writes=True)
@option("-t", "--topic", required=True, help="Topic name.")
@option("-c", "--clusterName", required=True, help="Its cluster.")
@yes_option
async def delete_topic(context: CommandContext, topic: str, cluster_name: str, yes: bool) -> None:
    """It shows what is lost, and asks.

    JSON: topicName, clusterName, and brokerAddrs: broker name to the master where it was done."""
    async with context.admin() as admin:
        await check_masters(context, admin, cluster_name)
        context.confirm(await _what_is_deleted(admin, topic, cluster_name), yes=yes)
        done = await admin.topics.delete(topic, cluster_name)
    where = ", ".join(f"{name} ({address})" for name, address in done.items())
    context.out.result(
        {"topicName": topic, "clusterName": cluster_name, "brokerAddrs": done},
        f"topic {topic} deleted from {where} and from the name servers",
    )


async def _what_is_deleted(admin: Admin, topic: str, cluster: str) -> str:
    try:
        queues = await admin.topics.stats(topic)
        traffic = await admin.topics.traffic(topic)
    except BatonError:  # the deletion says what is wrong
        return f"delete topic {topic} from cluster {cluster}"
    held = sum(queue.max_offset - queue.min_offset for queue in queues)
    groups = ", ".join(each.group for each in traffic if each.group is not None) or "no group"
    return (
        f"delete topic {topic} from cluster {cluster}: {counted(held, 'message')} in"
        f" {counted(len(queues), 'queue')}, read by {groups}"
    )


@command("getTopicConfig", interval=True)
@option("-t", "--topic", required=True, help="Topic name.")
async def get_topic_config(context: CommandContext, topic: str) -> None:
    """JSON: broker name to RocketMQ's TopicConfig."""
    async with context.admin() as admin:
        masters = await masters_to_read(context, admin)
        found = await topic_settings(context, admin, topic, masters)
    context.out.settings(found)


async def topic_settings(
    context: CommandContext, admin: Admin, topic: str, masters: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Broker name -> RocketMQ's TopicConfig. Raises CommandFailed for one that no master has."""
    known = await context.ask_each(masters, lambda name: admin.topics.config(masters[name], topic))
    found = {name: plain(config) for name, config in known.items() if config is not None}
    if not found:
        raise CommandFailed(f"no topic {topic}: `mqctl topicList` shows those that are there")
    return found


def _perm(perm: int) -> str:
    """RocketMQ's bits as it shows them: 4 read, 2 write, 1 inherit."""
    return ("R" if perm & 4 else "-") + ("W" if perm & 2 else "-") + ("X" if perm & 1 else "-")
