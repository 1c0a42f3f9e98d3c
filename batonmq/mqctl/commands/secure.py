"""Certificates of a cluster: made, renewed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.output import when
from batonmq.mqctl.params import command, option

if TYPE_CHECKING:
    from batonmq.runtime.authority import Authority, NodeCertificate

ACTIONS = ("init", "rotate")


@command("secure")
@click.argument("action", type=click.Choice(ACTIONS))
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
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
    folder: Path,
    nodes: tuple[str, ...],
    cluster: str,
    days: int,
) -> None:
    """Make the certificates of a cluster in DIR (init), renew them (rotate).

    `init` makes an authority, one file for each --node (certificate and key, mode 0600), and
    `admin.pem` for tools. A node is broker/GROUP/ID, controller/ID, or namesrv/NAME. It needs only
    its own file and `ca.pem`; keep `ca.key` off the servers. docs/security.md has the settings.

    `rotate` replaces every certificate. Servers take theirs within two seconds; open connections
    stay.

    JSON: list of file, names, hosts, notAfter (ms since 1970).
    """
    from batonmq.runtime.extras import lacking
    from batonmq.runtime.tls import TlsError

    if missing := lacking("server"):
        raise CommandFailed(f"certificates are made with {missing}")
    from batonmq.runtime.authority import Authority

    try:
        authority = Authority(folder)
        made = (
            _init(authority, _nodes(nodes), cluster, days)
            if action == "init"
            else authority.renew(days)
        )
    except TlsError as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"{error.filename or folder}: {error.strerror}") from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    _show(context, made)


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
