"""Replication: sets, connections, epochs. Origin: tools.command.ha, GetBrokerEpochSubCommand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from mqctl.commands.cluster import broker_addresses, only_cluster
from mqctl.output import BAD, GOOD, Cell, plain, when
from mqctl.params import command, option
from mqctl.session import CommandFailed, Session

if TYPE_CHECKING:
    from batonmq.admin import Admin
    from protocol.bodies import (
        BrokerReplicasInfo,
        EpochEntryCache,
        HARuntimeInfo,
        ReplicaIdentity,
        ReplicasInfo,
    )

LONG_MAX = (1 << 63) - 1


@command("getSyncStateSet", controllers=True, interval=True)
@option("-b", "--brokerName", "broker_name", metavar="NAME", help="One broker group.")
@option("-c", "--clusterName", "cluster_name", metavar="NAME", help="All groups of a cluster.")
async def get_sync_state_set(
    session: Session, broker_name: str | None, cluster_name: str | None
) -> None:
    """Master and in-sync replicas, from the controllers.

    JSON: RocketMQ's BrokerReplicasInfo (replicasInfoTable: broker name to masterBrokerId,
    masterAddress, masterEpoch, syncStateSetEpoch, inSyncReplicas, notInSyncReplicas).
    """
    if broker_name and cluster_name:
        raise click.UsageError("give -b or -c, not both")
    async with session.controller() as (admin, controller):

        async def once() -> None:
            names = [broker_name] if broker_name else await _groups(session, admin, cluster_name)
            found = await controller.sync_state_data(names)
            missing = sorted(set(names) - set(found.replicas_info_table))
            if missing:
                raise CommandFailed(f"the controller knows no broker group {', '.join(missing)}")
            show_replicas(session, found)

        await session.again_and_again(once)


async def _groups(session: Session, admin: Admin, cluster_name: str | None) -> list[str]:
    """Names of the broker groups; without a name server the user has to say."""
    if not session.target.name_servers:
        raise click.UsageError("which group? give -b NAME, or -n with the name servers")
    info = only_cluster(await admin.cluster_info(), cluster_name)
    if not info.broker_addr_table:
        raise CommandFailed("the name server knows no broker group: give -b NAME")
    return sorted(info.broker_addr_table)


def show_replicas(session: Session, found: BrokerReplicasInfo) -> None:
    """The table, or the body as JSON."""
    if session.out.as_json:
        session.out.document(plain(found))
        return
    for n, (name, info) in enumerate(sorted(found.replicas_info_table.items())):
        if n:
            session.out.line()
        _show_group(session, name, info)


def _show_group(session: Session, name: str, info: ReplicasInfo) -> None:
    master = info.master_address or "nobody"
    session.out.line(
        f"{name}: master {master}, masterEpoch {info.master_epoch},"
        f" syncStateSetEpoch {info.sync_state_set_epoch}",
        style="bold" if info.master_address else BAD,
    )
    rows: list[Sequence[object]] = []

    def add(replicas: Sequence[ReplicaIdentity], in_sync: Cell) -> None:
        for replica in sorted(replicas, key=lambda r: r.broker_id):
            is_master = replica.broker_id == info.master_broker_id
            alive = Cell.of("yes", GOOD) if replica.alive else Cell.of("no", BAD)
            role = "MASTER" if is_master else "SLAVE"
            rows.append([replica.broker_id, replica.broker_address, role, in_sync, alive])

    add(info.in_sync_replicas, Cell.of("yes", GOOD))
    add(info.not_in_sync_replicas, Cell.of("no", BAD))
    session.out.table(["ID", "Address", "Role", "In Sync", "Alive"], rows)


@command("haStatus", interval=True)
@option("-b", "--brokerAddr", "broker_addr", metavar="HOST:PORT", help="One broker.")
@option("-c", "--clusterName", "cluster_name", metavar="NAME", help="All masters of a cluster.")
async def ha_status(session: Session, broker_addr: str | None, cluster_name: str | None) -> None:
    """What masters have sent to their slaves.

    JSON: RocketMQ's HARuntimeInfo of the broker of -b, else address to HARuntimeInfo.
    """
    if broker_addr and cluster_name:
        raise click.UsageError("give -b or -c, not both")
    async with session.admin() as admin:

        async def once() -> None:
            if broker_addr:
                status = await admin.broker_ha_status(broker_addr)
                if session.out.as_json:
                    session.out.document(plain(status))
                else:
                    _show_ha(session, broker_addr, status)
                return
            masters = (await admin.masters(cluster_name)).values()
            found = await session.ask_each(masters, admin.broker_ha_status)
            if session.out.as_json:
                session.out.document({address: plain(one) for address, one in found.items()})
                return
            for address, one in found.items():
                _show_ha(session, address, one)

        await session.again_and_again(once)


def _show_ha(session: Session, address: str, status: HARuntimeInfo) -> None:
    if status.master:
        session.out.line(
            f"{address}: master, log end {status.master_commit_log_max_offset},"
            f" {status.in_sync_slave_nums} slaves in sync",
            style="bold",
        )
        rows = [
            [c.addr, c.slave_ack_offset, c.diff,
             Cell.of("yes", GOOD) if c.in_sync else Cell.of("no", BAD),
             c.transferred_byte_in_second, c.transfer_from_where]
            for c in status.ha_connection_info
        ]  # fmt: skip
        headings = ["Slave", "Acked Offset", "Diff", "In Sync", "Bytes/s", "Transfer From"]
        session.out.table(headings, rows)
        return
    client = status.ha_client_runtime_info
    session.out.line(f"{address}: slave", style="bold")
    session.out.fields(
        [
            ("Master", client.master_addr or "none"),
            ("Log end", client.max_offset),
            ("Master flushed to", client.master_flush_offset),
            ("Bytes/s", client.transferred_byte_in_second),
            ("Last read", when(client.last_read_timestamp)),
            ("Last write", when(client.last_write_timestamp)),
        ]
    )


@command("getBrokerEpoch", interval=True)
@option("-b", "--brokerName", "broker_name", metavar="NAME", help="One broker group.")
@option("-c", "--clusterName", "cluster_name", metavar="NAME", help="All groups of a cluster.")
async def get_broker_epoch(
    session: Session, broker_name: str | None, cluster_name: str | None
) -> None:
    """The epochs in the log of each replica.

    JSON: a list of RocketMQ's EpochEntryCache (clusterName, brokerName, brokerId, epochList,
    maxOffset), one for each replica that is registered.
    """
    if broker_name and cluster_name:
        raise click.UsageError("give -b or -c, not both")
    async with session.admin() as admin:

        async def once() -> None:
            info = only_cluster(await admin.cluster_info(), cluster_name)
            if broker_name:
                if broker_name not in info.broker_addr_table:
                    known = ", ".join(sorted(info.broker_addr_table)) or "none"
                    raise CommandFailed(
                        f"no broker group {broker_name}: the name server knows {known}"
                    )
                info.broker_addr_table = {broker_name: info.broker_addr_table[broker_name]}
            found = await session.ask_each(broker_addresses(info), admin.broker_epoch)
            if session.out.as_json:
                session.out.document([plain(cache) for cache in found.values()])
                return
            rows = [row for address, cache in found.items() for row in _epochs(address, cache)]
            headings = ["Broker", "ID", "Address", "Epoch", "Start Offset", "End Offset"]
            session.out.table(headings, rows)

        await session.again_and_again(once)


def _epochs(address: str, cache: EpochEntryCache) -> list[Sequence[object]]:
    """The open end of the last epoch is shown as the log's end."""
    return [
        [cache.broker_name, cache.broker_id, address, entry.epoch, entry.start_offset,
         cache.max_offset if entry.end_offset == LONG_MAX else entry.end_offset]
        for entry in cache.epoch_list
    ]  # fmt: skip
