"""A suspect replica is trusted again (R17): the last resort where nobody else has what it lacks."""

from __future__ import annotations

import sys

import click

from mqctl.params import command, option
from mqctl.session import CommandFailed, Session


@command("repairReplica")
@option("-b", "--brokerAddr", "broker_addr", metavar="HOST:PORT", required=True, help="The broker.")
@option("-y", "--yes", "yes", is_flag=True, help="Do not ask for confirmation.")
async def repair_replica(session: Session, broker_addr: str, yes: bool) -> None:
    """Trust the log of a suspect replica again.

    A suspect replica heals by itself as soon as it follows a master. Where there is none, because
    every replica is suspect, this says that its log is good enough: damage at its end is cut off
    (kept in the folder truncated of its store), and it may be elected. What it lacks is lost then.

    JSON: {"brokerAddr", "suspect", "done"}.
    """
    async with session.admin() as admin:
        suspect = (await admin.broker_runtime_info(broker_addr)).get("suspect", "")
        if not suspect:
            raise CommandFailed(f"{broker_addr} is not suspect: there is nothing to repair")
        if not yes:
            click.echo(f"{broker_addr} is suspect: {suspect}", err=True)
            if not sys.stdin.isatty():
                raise CommandFailed("nothing was done: no terminal to confirm it on, give --yes")
            if not click.confirm("Trust its log all the same? What it lacks is lost", err=True):
                raise CommandFailed("nothing was done")
        done = await admin.repair_replica(broker_addr, suspect)
        if session.out.as_json:
            session.out.document({"brokerAddr": broker_addr, "suspect": suspect, "done": done})
        else:
            session.out.line(f"{broker_addr}: {done}")
