"""Certificates of a cluster: made, renewed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.output import when
from batonmq.mqctl.params import command, option
from batonmq.mqctl.target import Target, data_of

if TYPE_CHECKING:
    from batonmq.client.admin.admin import Admin
    from batonmq.mqctl.tls_probe import Port, PortState
    from batonmq.runtime.authority import Authority, NodeCertificate

ACTIONS = ("init", "rotate", "status")


@command("secure", controllers=True)
@click.argument("action", type=click.Choice(ACTIONS))
@click.argument(
    "folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path, file_okay=False)
)
@option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NAME@HOST,HOST",
    help="With init: a node and the hosts by which others dial it. May be repeated.",
)
@option(
    "--cluster", default="batonmq", show_default=True, help="With init: in the authority's name."
)
@option("--days", type=click.IntRange(1, 3650), default=397, show_default=True, help="Validity.")
async def secure(
    context: CommandContext,
    action: str,
    folder: Path | None,
    nodes: tuple[str, ...],
    cluster: str,
    days: int,
) -> None:
    """Make the certificates of a cluster, renew them, check its ports.

    `init` makes an authority, one file for each --node (certificate and key, mode 0600), and
    `admin.pem` for tools. A node is broker/GROUP/ID, controller/ID, or namesrv/NAME. It needs only
    its own file and `ca.pem`; keep `ca.key` off the servers. docs/security.md has the settings.

    `rotate` replaces every certificate. Servers take theirs within two seconds; open connections
    stay.

    `rotate` without DIR renews those of the local cluster. `status` dials every port, plain and
    with TLS. Exit code of status: 1 if a port does not answer or its certificate is not trusted, 3
    if a port between nodes takes plain connections.

    JSON: of init and rotate a list of file, names, hosts, notAfter (ms since 1970); of status a
    list of node, port, address, plain, tls (its version), verified, notAfter, refusal.
    """
    if action == "status":
        await _status(context)
        return
    if folder is None and action == "rotate":
        folder = _local_folder(context.target)
    if folder is None:
        raise click.UsageError("which folder? give DIR")
    _show(context, _make(action, folder, _nodes(nodes), cluster, days))


def _local_folder(target: Target) -> Path | None:
    """Of the cluster that is meant; one that was only started last is not."""
    if target.local is None or target.by_hint:
        return None
    return data_of(target.local.path) / "conf" / "tls"


def _make(
    action: str, folder: Path, nodes: list[tuple[str, list[str]]], cluster: str, days: int
) -> list[NodeCertificate]:
    from batonmq.runtime.extras import lacking
    from batonmq.runtime.tls import TlsError

    if missing := lacking("server"):
        raise CommandFailed(f"certificates are made with {missing}")
    from batonmq.runtime.authority import Authority

    authority = Authority(folder)
    try:
        return _init(authority, nodes, cluster, days) if action == "init" else authority.renew(days)
    except TlsError as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"{error.filename or folder}: {error.strerror}") from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _nodes(given: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    found = []
    for text in given:
        name, at, hosts = text.partition("@")
        if not at or not all(hosts.split(",")):
            raise click.UsageError(f"--node {text}: NAME@HOST is needed, as broker/broker-a/1@mq1")
        found.append((name, hosts.split(",")))
    return found


def _init(
    authority: Authority, nodes: list[tuple[str, list[str]]], cluster: str, days: int
) -> list[NodeCertificate]:
    from batonmq.runtime.authority import check_names, file_of

    if not nodes:
        raise click.UsageError("which nodes? give --node NAME@HOST for each")
    check_names([name for name, _ in nodes])
    authority.make(cluster)
    made = [authority.issue(file_of(name), [name], hosts, days) for name, hosts in nodes]
    return [*made, authority.issue("admin.pem", ["admin"], [], days)]


def _show(context: CommandContext, made: list[NodeCertificate]) -> None:
    if context.out.as_json:
        context.out.document(
            [
                {
                    "file": str(one.path),
                    "names": list(one.names),
                    "hosts": list(one.hosts),
                    "notAfter": one.ends_ms,
                }
                for one in made
            ]
        )
        return
    rows = [
        [one.path.name, " ".join(one.names), " ".join(one.hosts), when(one.ends_ms)] for one in made
    ]
    context.out.table(["File", "Names", "Hosts", "Ends"], rows)


async def _status(context: CommandContext) -> None:
    import asyncio

    from batonmq.mqctl.tls_probe import probe
    from batonmq.runtime.tls import TlsError

    async with context.admin() as admin:
        ports = await _ports(context, admin)
    tls, timeout_s = context.target.tls, context.timeout_ms / 1000
    try:
        states = await asyncio.gather(*(probe(port, tls, timeout_s) for port in ports))
    except TlsError as error:
        raise CommandFailed(str(error)) from error
    if any(state.port.kind != "remoting" and state.takes_plain for state in states):
        context.exit_code = 3
    if any(state.refusal for state in states):
        context.exit_code = 1
    _show_states(context, states)


async def _ports(context: CommandContext, admin: Admin) -> list[Port]:
    from batonmq.mqctl.tls_probe import Port

    found = [Port("namesrv", "remoting", address) for address in context.name_servers]
    for address in context.target.controllers:
        host, _, port = address.rpartition(":")
        for offset, kind in enumerate(("remoting", "grpc", "raft")):
            found.append(Port("controller", kind, f"{host}:{int(port) + offset}"))
    info = await admin.cluster.info()
    brokers = {
        (name, address)
        for name, data in info.broker_addr_table.items()
        for address in data.broker_addrs.values()
    }
    for name, address in sorted(brokers):
        host, _, port = address.rpartition(":")
        config = (await context.ask_each([address], admin.brokers.config)).get(address, {})
        found.append(Port(name, "remoting", address))
        found.append(Port(name, "remoting", f"{host}:{int(port) - 2}"))
        if ha_port := config.get("haListenPort"):
            ha_host = config.get("brokerIP2") or host
            found.append(Port(name, "ha", f"{ha_host}:{ha_port}"))
    return found


def _show_states(context: CommandContext, states: list[PortState]) -> None:
    if context.out.as_json:
        context.out.document(
            [
                {
                    "node": each.port.node,
                    "port": each.port.kind,
                    "address": each.port.address,
                    "plain": each.takes_plain,
                    "tls": each.takes_tls,
                    "verified": each.is_verified,
                    "notAfter": each.ends_ms,
                    "refusal": each.refusal,
                }
                for each in states
            ]
        )
        return
    rows = [
        [
            each.port.node,
            each.port.kind,
            each.port.address,
            "yes" if each.takes_plain else "no",
            each.takes_tls or "no",
            "yes" if each.is_verified else "no",
            when(each.ends_ms) if each.ends_ms else "",
            each.refusal,
        ]
        for each in states
    ]
    headings = ["Node", "Port", "Address", "Plain", "TLS", "Verified", "Ends", "Refused"]
    context.out.table(headings, rows)
