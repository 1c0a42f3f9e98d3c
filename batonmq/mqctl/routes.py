"""Brokers and masters for commands: those that name servers know, and those that they do not.

A broker that may not serve, such as a slave of a group without a master, is in no route: only the
controllers and `cluster.json` know it then.
"""

import asyncio
from collections.abc import Collection, Mapping
from typing import Final

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.cluster import masters_of, only_cluster, only_group
from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.output import note
from batonmq.protocol.bodies import ClusterInfo, ReplicasInfo
from batonmq.protocol.errors import BatonError

CONTROLLERS_S: Final = 1.0
"""So long a table waits for what only controllers know, and for brokers that only they know: all of
these may hang."""
Brokers = list[tuple[str, str, int, str]]
"""(cluster, broker name, id, address), ascending."""


def brokers_of(info: ClusterInfo) -> Brokers:
    return sorted(
        (data.cluster, name, broker_id, address)
        for name, data in info.broker_addr_table.items()
        for broker_id, address in data.broker_addrs.items()
    )


def broker_addresses(info: ClusterInfo) -> list[str]:
    """All addresses, by broker name and id."""
    return [address for *_, address in brokers_of(info)]


async def not_registered(
    context: CommandContext, admin: Admin, info: ClusterInfo
) -> tuple[Brokers, Brokers]:
    """Replicas that the controllers or cluster.json know and no route has, but for those that were
    removed or are of another cluster. The second ones are of groups that are dead or were removed:
    no plan has them, and no replica lives. `info`: of all clusters. Id 0: not known."""
    table, clusters = info.broker_addr_table, info.cluster_addr_table
    local = context.target.local
    planned = {address: name for name, address in (local.brokers if local is not None else ())}
    found = {address: (name, 0) for address, name in planned.items()}
    only = next(iter(clusters), "") if len(clusters) < 2 else ""
    known_as = dict.fromkeys(planned.values(), only)
    try:
        if context.target.controllers:
            controller = admin.controller(context.target.controllers)
            names = sorted({*table, *planned.values()})
            async with asyncio.timeout(CONTROLLERS_S):
                known = (await controller.sync_state_data(names, every=True)).replicas_info_table
            for name in groups_of_others(known, info, planned.values()):
                del known[name]
            found |= {
                replica.broker_address: (name, replica.broker_id)
                for name, group in known.items()
                for replica in group.replicas
                # A dead replica that is in no plan was removed. Without a plan it may only be down.
                if replica.alive
                or replica.broker_address in found
                or not planned
                or (name in table and name not in planned.values())
            }
            known_as |= {
                name: group.cluster_name or only
                for name, group in known.items()
                if any(replica.alive for replica in group.replicas)
            }
    except (BatonError, TimeoutError):
        pass  # `mqctl health` says so
    known_as |= {name: data.cluster for name, data in table.items()}
    routed = set(broker_addresses(info))
    away = sorted(
        (known_as.get(name, only), name, broker_id, address)
        for address, (name, broker_id) in found.items()
        if address not in routed
    )
    unsure = [each for each in away if each[1] not in known_as]
    return [each for each in away if each not in unsure], unsure


def groups_of_others(
    known: Mapping[str, ReplicasInfo], routes: ClusterInfo, planned: Collection[str]
) -> list[str]:
    """Groups of another cluster that has the same controllers, as these record it."""
    named = {*planned, *routes.broker_addr_table}
    clusters = {None, "", *routes.cluster_addr_table}
    return [
        name
        for name, group in known.items()
        if len(clusters) > 1 and name not in named and group.cluster_name not in clusters
    ]


def _note_unsure(unsure: Brokers) -> None:
    for name in dict.fromkeys(name for _, name, *_ in unsure):
        note(
            f"note: {name} is skipped: only the controllers know it, and none of its brokers runs;"
            " `mqctl health` says more"
        )


async def every_broker(
    context: CommandContext,
    admin: Admin,
    cluster_name: str | None = None,
    broker_name: str | None = None,
) -> list[str]:
    """Addresses of the brokers of one cluster, of one broker group, or of all, also of those that
    no route has. Raises ClientError for an unknown name."""
    info = await admin.cluster.info()
    away, unsure = await not_registered(context, admin, info)
    if broker_name is None:
        _note_unsure(unsure)
    else:
        away += unsure
    found = [
        address
        for cluster, name, _, address in (*brokers_of(info), *away)
        if cluster_name in (None, cluster) and broker_name in (None, name)
    ]
    if not found and cluster_name is not None:
        only_cluster(info, cluster_name)
    elif not found and broker_name is not None:
        only_group(info, broker_name)
    return found


def left_out(name: str) -> str:
    """That a broker group has no master, for people."""
    return f"{name} has no master and is left out: `mqctl health` says why"


def masters_and_others(
    info: ClusterInfo, away: Brokers, cluster_name: str | None = None
) -> tuple[dict[str, str], list[str]]:
    """Broker name -> its master, and the broker groups without one, ascending. `info`: of all
    clusters; `away`: the first ones of `not_registered`. Raises ClientError for an unknown name."""
    lost = {name for cluster, name, *_ in away if cluster_name in (None, cluster)}
    found, without = masters_of(only_cluster(info, cluster_name) if cluster_name else info)
    return found, sorted({*without, *lost} - found.keys())


async def _masters(
    context: CommandContext, admin: Admin, cluster_name: str | None
) -> tuple[dict[str, str], list[str]]:
    info = await admin.cluster.info()
    away, unsure = await not_registered(context, admin, info)
    _note_unsure(unsure)
    return masters_and_others(info, away, cluster_name)


async def masters_to_read(
    context: CommandContext, admin: Admin, cluster_name: str | None = None
) -> dict[str, str]:
    """Broker name -> its master. A group without one is reported and left out: the others are
    looked at when one has failed. Raises CommandFailed if no group has a master, ClientError for an
    unknown name."""
    found, without = await _masters(context, admin, cluster_name)
    if not found:
        raise CommandFailed("no broker group has a master: `mqctl health` says why")
    for name in without:
        context.complain(left_out(name))
    return found


async def check_masters(
    context: CommandContext, admin: Admin, cluster_name: str | None = None
) -> None:
    """Before a change at all masters. Raises CommandFailed if a group has none: once it has one
    again it would lack the change, and nothing would say so."""
    _, without = await _masters(context, admin, cluster_name)
    if without:
        raise CommandFailed(
            f"nothing was changed: {', '.join(without)} would lack it, without a master now;"
            " `mqctl health` says why"
        )
