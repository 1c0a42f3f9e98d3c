"""Brokers and masters as name servers know them, for commands that look."""

from __future__ import annotations

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.cluster import only_cluster, only_group
from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.protocol.bodies import ClusterInfo
from batonmq.protocol.codes import MASTER_ID


async def cluster_of(
    admin: Admin, cluster_name: str | None = None, broker_name: str | None = None
) -> ClusterInfo:
    """Of one cluster, of one broker group, or of all. Raises ClientError for an unknown name."""
    info = await admin.cluster.info()
    if cluster_name is not None:
        info = only_cluster(info, cluster_name)
    return info if broker_name is None else only_group(info, broker_name)


def brokers_of(info: ClusterInfo) -> list[tuple[str, str, int, str]]:
    """(cluster, broker name, id, address), ascending."""
    return sorted(
        (data.cluster, name, broker_id, address)
        for name, data in info.broker_addr_table.items()
        for broker_id, address in data.broker_addrs.items()
    )


def broker_addresses(info: ClusterInfo) -> list[str]:
    """All addresses, by broker name and id."""
    return [address for *_, address in brokers_of(info)]


def left_out(name: str) -> str:
    """That a broker group has no master, for people."""
    return f"{name} has no master and is left out: `mqctl health` says why"


async def without_master(admin: Admin, topic: str) -> list[str]:
    """The broker groups with the topic that have no master now, ascending: `topics.stats` leaves
    them out."""
    brokers = (await admin.topics.route(topic)).broker_datas
    return sorted(data.broker_name for data in brokers if MASTER_ID not in data.broker_addrs)


async def masters_to_read(
    context: CommandContext, admin: Admin, cluster_name: str | None = None
) -> dict[str, str]:
    """Broker name -> its master. A group without one is reported and left out: the others are
    looked at when one has failed. What changes something takes `admin.cluster.masters`, which
    refuses then. Raises CommandFailed if no group has a master, ClientError for an unknown name."""
    table = (await cluster_of(admin, cluster_name)).broker_addr_table
    masters = {name: data.broker_addrs.get(MASTER_ID) for name, data in sorted(table.items())}
    found = {name: address for name, address in masters.items() if address is not None}
    if not found:
        raise CommandFailed("no broker group has a master: `mqctl health` says why")
    for name in masters.keys() - found.keys():
        context.complain(left_out(name))
    return found
