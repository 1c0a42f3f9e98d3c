"""Replication: sets, connections, epochs. Origin: tools.command.ha, GetBrokerEpochSubCommand."""

from collections.abc import Sequence

import click

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.cluster import only_cluster
from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.output import BAD, plain, when, yes_or_no
from batonmq.mqctl.params import command, exclusive, option, yes_option
from batonmq.mqctl.routes import every_broker, masters_to_read
from batonmq.protocol.bodies import (
    BrokerReplicasInfo,
    EpochEntryCache,
    HAConnectionRuntimeInfo,
    HARuntimeInfo,
    ReplicasInfo,
)
from batonmq.protocol.codes import LONG_MAX
from batonmq.runtime.words import counted


@command("getSyncStateSet", controllers=True, interval=True)
@option("-b", "--brokerName", help="One broker group.")
@option("-c", "--clusterName", help="All groups of a cluster.")
async def get_sync_state_set(
    context: CommandContext, broker_name: str | None, cluster_name: str | None
) -> None:
    """JSON: RocketMQ's BrokerReplicasInfo (replicasInfoTable: broker name to masterBrokerId,
    masterAddress, masterEpoch, syncStateSetEpoch, inSyncReplicas, notInSyncReplicas)."""
    exclusive(("-b", broker_name), ("-c", cluster_name))
    async with context.controller() as (admin, controller):
        names = [broker_name] if broker_name else await _groups(context, admin, cluster_name)
        # A group whose brokers are all dead is in no route, and known to the controllers only.
        every = not (broker_name or cluster_name)
        found = await controller.sync_state_data(names, every=every)
        missing = sorted(set(names) - set(found.replicas_info_table))
        if missing:
            raise CommandFailed(f"the controller knows no broker group {', '.join(missing)}")
        show_replicas(context, found)


async def _groups(context: CommandContext, admin: Admin, cluster_name: str | None) -> list[str]:
    """Names of the broker groups; without a name server the user has to say."""
    if not context.target.name_servers:
        raise click.UsageError("which group? give -b NAME, or -n with the name servers")
    info = await admin.cluster.info()
    if cluster_name is not None:
        info = only_cluster(info, cluster_name)
    if not info.broker_addr_table:
        raise CommandFailed("the name server knows no broker group: give -b NAME")
    return sorted(info.broker_addr_table)


def show_replicas(context: CommandContext, found: BrokerReplicasInfo) -> None:
    """The table, or the body as JSON."""
    if context.out.wrote_json(plain(found)):
        return
    for n, (name, info) in enumerate(sorted(found.replicas_info_table.items())):
        if n:
            context.out.line()
        _show_group(context, name, info)


def _show_group(context: CommandContext, name: str, info: ReplicasInfo) -> None:
    master = info.master_address or "none"
    context.out.line(
        f"{name}: master {master}, masterEpoch {info.master_epoch},"
        f" syncStateSetEpoch {info.sync_state_set_epoch}",
        style="bold" if info.master_address else BAD,
    )
    rows: list[Sequence[object]] = []
    for replicas, is_in in ((info.in_sync_replicas, True), (info.not_in_sync_replicas, False)):
        for replica in sorted(replicas, key=lambda r: r.broker_id):
            role = "MASTER" if replica.broker_id == info.master_broker_id else "SLAVE"
            cells = yes_or_no(is_in), yes_or_no(replica.alive)
            rows.append([replica.broker_id, replica.broker_address, role, *cells])
    context.out.table(["ID", "Address", "Role", "In Sync", "Alive"], rows)


@command("haStatus", interval=True)
@option("-b", "--brokerAddr", metavar="HOST:PORT", help="One broker.")
@option("-c", "--clusterName", help="All masters of a cluster.")
async def ha_status(
    context: CommandContext, broker_addr: str | None, cluster_name: str | None
) -> None:
    """JSON: RocketMQ's HARuntimeInfo of the broker of -b, else address to HARuntimeInfo."""
    exclusive(("-b", broker_addr), ("-c", cluster_name))
    async with context.admin() as admin:
        if broker_addr:
            status = await admin.brokers.ha_status(broker_addr)
            if not context.out.wrote_json(plain(status)):
                _show_ha(context, broker_addr, status)
            return
        masters = (await masters_to_read(context, admin, cluster_name)).values()
        found = await context.ask_each(masters, admin.brokers.ha_status)
        if context.out.wrote_json({address: plain(one) for address, one in found.items()}):
            return
        for address, one in found.items():
            _show_ha(context, address, one)


def _show_ha(context: CommandContext, address: str, status: HARuntimeInfo) -> None:
    if status.master:
        context.out.line(
            f"{address}: master, log end {status.master_commit_log_max_offset},"
            f" {counted(status.in_sync_slave_nums, 'slave')} in sync",
            style="bold",
        )
        headings = ["Slave", "Acked Offset", "Diff", "In Sync", "Bytes/s", "Transfer From"]
        context.out.table(headings, [_slave(each) for each in status.ha_connection_info])
        return
    client = status.ha_client_runtime_info
    context.out.line(f"{address}: slave", style="bold")
    context.out.fields(
        [
            ("Master", client.master_addr or "none"),
            ("Log end", client.max_offset),
            ("Master flushed to", client.master_flush_offset),
            ("Bytes/s", client.transferred_byte_in_second),
            ("Last read", when(client.last_read_timestamp)),
            ("Last write", when(client.last_write_timestamp)),
        ]
    )


def _slave(c: HAConnectionRuntimeInfo) -> list[object]:
    slave = f"{c.slave_name} ({c.addr})" if c.slave_name else c.addr
    return [slave, c.slave_ack_offset, c.diff, yes_or_no(c.in_sync), c.transferred_byte_in_second,
            c.transfer_from_where]  # fmt: skip


@command("getBrokerEpoch", interval=True)
@option("-b", "--brokerName", help="One broker group.")
@option("-c", "--clusterName", help="All groups of a cluster.")
async def get_broker_epoch(
    context: CommandContext, broker_name: str | None, cluster_name: str | None
) -> None:
    """JSON: a list of RocketMQ's EpochEntryCache (clusterName, brokerName, brokerId, epochList,
    maxOffset), one for each replica that answers."""
    exclusive(("-b", broker_name), ("-c", cluster_name))
    async with context.admin() as admin:
        addresses = await every_broker(context, admin, cluster_name, broker_name)
        found = await context.ask_each(addresses, admin.brokers.epochs)
        if context.out.wrote_json([plain(cache) for cache in found.values()]):
            return
        rows = [row for address, cache in found.items() for row in _epochs(address, cache)]
        headings = ["Broker", "ID", "Address", "Epoch", "Start Offset", "End Offset"]
        context.out.table(headings, rows)


def _epochs(address: str, cache: EpochEntryCache) -> list[Sequence[object]]:
    """The open end of the last epoch is shown as the log's end."""
    rows: list[Sequence[object]] = []
    for entry in cache.epoch_list:
        end = cache.max_offset if entry.end_offset == LONG_MAX else entry.end_offset
        replica = (cache.broker_name, cache.broker_id, address)
        rows.append([*replica, entry.epoch, entry.start_offset, end])
    return rows


@command("repairReplica", writes=True)
@option("-b", "--brokerAddr", metavar="HOST:PORT", required=True, help="The broker.")
@yes_option
async def repair_replica(context: CommandContext, broker_addr: str, yes: bool) -> None:
    """A suspect replica heals by itself as soon as it follows a master. Where there is none,
    because every replica is suspect, this declares its log good enough: damage at its end is cut
    off (kept in the folder truncated of its store), and it may be elected. What it lacks is lost
    then.

    JSON: {"brokerAddr", "suspect", "done"}."""
    async with context.admin() as admin:
        suspect = (await admin.brokers.runtime_info(broker_addr)).get("suspect", "")
        if not suspect:
            raise CommandFailed(f"{broker_addr} is not suspect: there is nothing to repair")
        context.confirm(
            f"{broker_addr} is suspect: {suspect}; what its log lacks is lost",
            yes=yes,
            question="Trust its log all the same?",
        )
        # With the reason that was shown: the broker refuses if it has another one by now.
        done = await admin.brokers.repair(broker_addr, suspect)
    document = {"brokerAddr": broker_addr, "suspect": suspect, "done": done}
    context.out.result(document, f"{broker_addr}: {done}")
