"""Brokers and their figures. Origin: ClusterListSubCommand, BrokerStatusSubCommand."""

from collections.abc import Mapping, Sequence

import click

from batonmq.client.admin.cluster import only_cluster
from batonmq.mqctl.context import CommandContext, answered, ask_all
from batonmq.mqctl.output import BAD, DIM, GOOD, Cell, plain
from batonmq.mqctl.params import command, exclusive, option
from batonmq.mqctl.routes import Brokers, broker_addresses, brokers_of, every_broker, not_registered
from batonmq.protocol.bodies import PROBLEMS_KEY, ClusterInfo
from batonmq.protocol.codes import MASTER_ID


@command("clusterList", interval=True)
@option("-m", "--moreStats", is_flag=True, help="Totals of yesterday and today.")
@option("-c", "--clusterName", help="Only this cluster.")
async def cluster_list(context: CommandContext, more_stats: bool, cluster_name: str | None) -> None:
    """JSON: RocketMQ's ClusterInfo (brokerAddrTable, clusterAddrTable), with -m also runtimeInfo:
    address to figures."""
    async with context.admin() as admin:
        every = await admin.cluster.info()
        info = every if cluster_name is None else only_cluster(every, cluster_name)
        if context.out.as_json and not more_stats:
            context.out.document(plain(info))
            return
        figures = await context.ask_each(broker_addresses(info), admin.brokers.runtime_info)
        if context.out.as_json:
            context.out.document({**plain(info), "runtimeInfo": figures})
        elif more_stats:
            _show_totals(context, info, figures)
        else:
            ours, unsure = await not_registered(context, admin, every)
            away = [each for each in sorted(ours + unsure) if cluster_name in (None, each[0])]
            # One that answers is no dead machine: it may not serve, as without a master.
            answers = await ask_all([each[-1] for each in away], admin.brokers.runtime_info)
            figures |= answered(answers)
            _show_rates(context, info, figures, away)


def _show_rates(
    context: CommandContext,
    info: ClusterInfo,
    figures: Mapping[str, Mapping[str, str]],
    away: Brokers,
) -> None:
    """`away`: brokers that no route has."""
    rows: list[Sequence[object]] = []
    for each in (*brokers_of(info), *away):
        cluster, name, broker_id, address = each
        found, is_away = figures.get(address), each in away
        is_master = broker_id == MASTER_ID and not is_away
        role = Cell.of("MASTER", GOOD) if is_master else Cell.of("SLAVE", DIM)
        if is_away:
            role = Cell.of(found.get("brokerRole", "").upper() if found else "away", BAD)
        row: list[object] = [cluster, name, own_id(broker_id, found), address, role]
        if found is None:
            row += ["" if is_away else Cell.of("no answer", BAD), "", "", "", ""]
        else:
            refuses = "refuses writes" in found.get(PROBLEMS_KEY, "")  # also for its disk
            takes = {"true": Cell.of("no", BAD) if refuses else "yes", "false": Cell.of("no", BAD)}
            row += [
                found.get("brokerVersionDesc", ""),
                first_rate(found.get("putTps", "")),
                first_rate(found.get("getTransferredTps", "")),
                percent(found.get("commitLogDiskRatio", "")),
                takes.get(found.get("brokerActive", ""), "") if is_master else "",
            ]
        rows.append(row)
    headings = [
        "Cluster", "Broker", "ID", "Address", "Role", "Version", "In/s", "Out/s", "Disk", "Writes",
    ]  # fmt: skip
    context.out.table(headings, rows)


def _show_totals(
    context: CommandContext, info: ClusterInfo, figures: Mapping[str, Mapping[str, str]]
) -> None:
    rows: list[Sequence[object]] = []
    for cluster, name, broker_id, address in brokers_of(info):
        found = figures.get(address, {})

        def total(what: str, start: str, end: str, found: Mapping[str, str] = found) -> str:
            low, high = found.get(f"{what}Total{start}"), found.get(f"{what}Total{end}")
            return str(int(high) - int(low)) if low and high else ""

        days = ("YesterdayMorning", "TodayMorning"), ("TodayMorning", "TodayNow")
        totals = [total(what, *day) for day in days for what in ("msgPut", "msgGet")]
        rows.append([cluster, name, own_id(broker_id, found), address, *totals])
    headings = [
        "Cluster", "Broker", "ID", "Address", "In Yesterday", "Out Yesterday", "In Today",
        "Out Today",
    ]  # fmt: skip
    context.out.table(headings, rows)


@command("brokerStatus")
@option("-b", "--brokerAddr", metavar="HOST:PORT", help="One broker.")
@option("-c", "--clusterName", help="All brokers of a cluster.")
async def broker_status(
    context: CommandContext, broker_addr: str | None, cluster_name: str | None
) -> None:
    """JSON: RocketMQ's KVTable ({"table": {...}}) of the broker of -b, else address to KVTable."""
    exclusive(("-b", broker_addr), ("-c", cluster_name))
    async with context.admin() as admin:
        if broker_addr:
            table = await admin.brokers.runtime_info(broker_addr)
            if not context.out.wrote_json({"table": table}):
                context.out.fields(sorted(table.items()))
            return
        addresses = await every_broker(context, admin, cluster_name)
        tables = await context.ask_each(addresses, admin.brokers.runtime_info)
    if not context.out.wrote_json({address: {"table": table} for address, table in tables.items()}):
        context.out.settings(tables)


@command("getBrokerConfig")
@option("-b", "--brokerAddr", metavar="HOST:PORT", help="One broker.")
@option("-c", "--clusterName", help="All brokers of a cluster.")
async def get_broker_config(
    context: CommandContext, broker_addr: str | None, cluster_name: str | None
) -> None:
    """JSON: address to settings."""
    exclusive(("-b", broker_addr), ("-c", cluster_name))
    async with context.admin() as admin:
        addresses = (
            [broker_addr] if broker_addr else await every_broker(context, admin, cluster_name)
        )
        found = await context.ask_each(addresses, admin.brokers.config)
    context.out.settings(found)


@command("updateBrokerConfig", writes=True)
@option("-b", "--brokerAddr", metavar="HOST:PORT", help="One broker.")
@option("-c", "--clusterName", help="All brokers of a cluster.")
@option("-k", "--key", required=True, help="Setting.")
@option("-v", "--value", required=True, help="Its new value.")
async def update_broker_config(
    context: CommandContext, broker_addr: str | None, cluster_name: str | None, key: str, value: str
) -> None:
    """A setting is one broker's own: with -c all members get it, slaves, too. It outlasts a
    restart.

    JSON: the setting, and addresses: where it was changed."""
    if (cluster_name is None) == (broker_addr is None):
        raise click.UsageError("give either -c (all brokers of a cluster) or -b (one broker)")
    async with context.admin() as admin:

        async def change(address: str) -> str:
            return await admin.brokers.update_config(address, {key: value})

        addresses = (
            [broker_addr] if broker_addr else await every_broker(context, admin, cluster_name)
        )
        done = await context.ask_each(addresses, change)
    if context.out.wrote_json({"key": key, "value": value, "addresses": list(done)}):
        return
    for address, warning in done.items():
        context.out.line(f"{address}: {key}={value}" + (f" ({warning})" if warning else ""))


def own_id(broker_id: int, found: Mapping[str, str] | None) -> object:
    """The id that the controllers gave a broker, from its figures: in routes a master is 0. `-` if
    it does not answer."""
    if found is None:
        return broker_id or "-"
    return found.get("brokerId", broker_id)


def first_rate(numbers: str) -> str:
    """The first of several rates, short."""
    try:
        rate = float(numbers.split()[0])
    except (ValueError, IndexError):
        return ""
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def percent(ratio: str) -> str:
    try:
        return f"{float(ratio):.0%}"
    except ValueError:
        return ""
