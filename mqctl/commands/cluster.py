"""Brokers and their figures. Origin: ClusterListSubCommand, BrokerStatusSubCommand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from mqctl.output import BAD, DIM, GOOD, Cell, plain
from mqctl.params import command, option
from mqctl.session import CommandFailed, Session

if TYPE_CHECKING:
    from protocol.bodies import ClusterInfo

MASTER_ID = 0


@command("clusterList", interval=True)
@option("-m", "--moreStats", "more_stats", is_flag=True, help="Totals of yesterday and today.")
@option("-c", "--clusterName", "cluster_name", metavar="NAME", help="Only this cluster.")
async def cluster_list(session: Session, more_stats: bool, cluster_name: str | None) -> None:
    """Clusters and their brokers, with rates.

    JSON: RocketMQ's ClusterInfo (brokerAddrTable, clusterAddrTable), with -m also runtimeInfo:
    address to figures.
    """
    async with session.admin() as admin:

        async def once() -> None:
            info = only_cluster(await admin.cluster_info(), cluster_name)
            if session.out.as_json and not more_stats:
                session.out.document(plain(info))
                return
            figures = await session.ask_each(broker_addresses(info), admin.broker_runtime_info)
            if session.out.as_json:
                session.out.document({**plain(info), "runtimeInfo": figures})
            elif more_stats:
                _show_totals(session, info, figures)
            else:
                _show_rates(session, info, figures)

        await session.again_and_again(once)


def only_cluster(info: ClusterInfo, cluster_name: str | None) -> ClusterInfo:
    """Raises CommandFailed for a cluster that the name server does not know."""
    if cluster_name is None:
        return info
    names = info.cluster_addr_table.get(cluster_name)
    if names is None:
        known = ", ".join(sorted(info.cluster_addr_table)) or "none"
        raise CommandFailed(f"no cluster {cluster_name}: the name server knows {known}")
    return type(info)(
        broker_addr_table={n: d for n, d in info.broker_addr_table.items() if n in names},
        cluster_addr_table={cluster_name: names},
    )


def broker_addresses(info: ClusterInfo) -> list[str]:
    """All addresses, by broker name and id."""
    return [address for _, _, _, address in _brokers(info)]


def _brokers(info: ClusterInfo) -> list[tuple[str, str, int, str]]:
    """(cluster, broker name, id, address), ascending."""
    return sorted(
        (data.cluster, name, broker_id, address)
        for name, data in info.broker_addr_table.items()
        for broker_id, address in data.broker_addrs.items()
    )


def _show_rates(
    session: Session, info: ClusterInfo, figures: Mapping[str, Mapping[str, str]]
) -> None:
    rows: list[Sequence[object]] = []
    for cluster, name, broker_id, address in _brokers(info):
        found = figures.get(address)
        role = Cell.of("MASTER", GOOD) if broker_id == MASTER_ID else Cell.of("SLAVE", DIM)
        row: list[object] = [cluster, name, broker_id, address, role]
        if found is None:
            row += [Cell.of("no answer", BAD), "", "", "", ""]
        else:
            row += [
                found.get("brokerVersionDesc", ""),
                _first(found.get("putTps", "")),
                _first(found.get("getTransferredTps", "")),
                _percent(found.get("commitLogDiskRatio", "")),
                found.get("brokerActive", ""),
            ]
        rows.append(row)
    headings = [
        "Cluster", "Broker", "ID", "Address", "Role", "Version", "In TPS", "Out TPS", "Disk",
        "Active",
    ]  # fmt: skip
    session.out.table(headings, rows)


def _show_totals(
    session: Session, info: ClusterInfo, figures: Mapping[str, Mapping[str, str]]
) -> None:
    rows: list[Sequence[object]] = []
    for cluster, name, broker_id, address in _brokers(info):
        found = figures.get(address, {})

        def total(what: str, start: str, end: str, found: Mapping[str, str] = found) -> str:
            low, high = found.get(f"{what}Total{start}"), found.get(f"{what}Total{end}")
            return str(int(high) - int(low)) if low and high else ""

        rows.append(
            [
                cluster,
                name,
                broker_id,
                address,
                total("msgPut", "YesterdayMorning", "TodayMorning"),
                total("msgGet", "YesterdayMorning", "TodayMorning"),
                total("msgPut", "TodayMorning", "TodayNow"),
                total("msgGet", "TodayMorning", "TodayNow"),
            ]
        )
    headings = [
        "Cluster", "Broker", "ID", "Address", "In Yesterday", "Out Yesterday", "In Today",
        "Out Today",
    ]  # fmt: skip
    session.out.table(headings, rows)


@command("brokerStatus")
@option("-b", "--brokerAddr", "broker_addr", metavar="HOST:PORT", help="One broker.")
@option("-c", "--clusterName", "cluster_name", metavar="NAME", help="All brokers of a cluster.")
async def broker_status(
    session: Session, broker_addr: str | None, cluster_name: str | None
) -> None:
    """Runtime figures of brokers.

    JSON: RocketMQ's KVTable ({"table": {...}}) of the broker of -b, else address to KVTable.
    """
    if broker_addr and cluster_name:
        raise click.UsageError("give -b or -c, not both")
    async with session.admin() as admin:
        if broker_addr:
            table = await admin.broker_runtime_info(broker_addr)
            if session.out.as_json:
                session.out.document({"table": table})
            else:
                session.out.fields(sorted(table.items()))
            return
        info = only_cluster(await admin.cluster_info(), cluster_name)
        tables = await session.ask_each(broker_addresses(info), admin.broker_runtime_info)
    if session.out.as_json:
        session.out.document({address: {"table": table} for address, table in tables.items()})
        return
    for address, table in tables.items():
        session.out.line(address, style="bold")
        session.out.fields(sorted(table.items()))
        session.out.line()


def _first(numbers: str) -> str:
    return numbers.split()[0] if numbers.split() else ""


def _percent(ratio: str) -> str:
    try:
        return f"{float(ratio):.0%}"
    except ValueError:
        return ""
