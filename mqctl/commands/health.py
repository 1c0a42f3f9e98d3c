"""Is the cluster well? The exit code tells: 0 healthy, 1 not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from mqctl.output import BAD, GOOD, Cell, when
from mqctl.params import command, option
from mqctl.session import Session, reason

if TYPE_CHECKING:
    from mqctl.health import Findings
    from mqctl.target import Target


@command("health", controllers=True)
@option("-w", "--watch", "watch", is_flag=True, help="Look again until healthy, or ctrl-C.")
@option("-i", "--interval", "every_s", type=click.FloatRange(min=0, min_open=True), default=0.5,
        show_default=True, metavar="SECONDS", help="With --watch: how often.")  # fmt: skip
@option("--within", "within_s", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
        help="With --watch: give up after so long, exit code 1.")  # fmt: skip
async def health(session: Session, watch: bool, every_s: float, within_s: float | None) -> None:
    """Check nodes, masters, sets, and who leads the controllers.

    Healthy: every node answers, every broker group has a master that name servers route to, every
    replica is in the set, the controllers have one leader. The exit code tells: 0 healthy, 1 not.
    A local cluster that has ended is not healthy; --watch waits for one to start.

    JSON: healthy, problems, controllerLeaderAddress,
    nameServers, controllers, brokers (address, alive), replicasInfoTable as getSyncStateSet; with
    --watch one document a line.
    """
    if within_s is not None and not watch:
        raise click.UsageError("--within goes with --watch")
    import asyncio

    from batonmq.clock import boot_ms, wall_ms
    from mqctl.health import look, no_cluster

    deadline_ms = None if within_s is None else boot_ms() + int(within_s * 1000)
    session.out.compact = watch
    session.failed = True
    shown: list[str] | None = None

    def tell(findings: Findings) -> bool:
        """Shows what was found; whether that is the end of it."""
        nonlocal shown
        problems = findings.problems()
        session.failed = bool(problems)
        if session.out.as_json:
            session.out.document(findings.document())
        elif not watch:
            _show(session, findings, problems)
        elif problems != shown or _redraws():
            session.out.clear()
            session.out.line(when(wall_ms()))
            _show(session, findings, problems)
            shown = problems
        if not watch or not problems:
            return True
        return deadline_ms is not None and boot_ms() >= deadline_ms

    while (why := _nowhere(session.target, waits=watch)) is not None:
        if tell(no_cluster(why)):
            return
        await asyncio.sleep(every_s)
        session.look_again()
    async with session.controller() as (admin, controller):
        session.name_servers  # noqa: B018  wrong usage if they are not known
        expected = session.target.local.brokers if session.target.local else ()
        while True:
            if tell(await look(admin, controller, expected)):
                return
            await asyncio.sleep(every_s)


def _nowhere(target: Target, *, waits: bool) -> str | None:
    """Why there is nobody to ask, where that is a finding; None to go on, or into wrong usage."""
    if target.name_servers or target.controllers:
        return None
    if target.stale:
        return "; ".join(f"the cluster of {path} has ended" for path in target.stale)
    return "no cluster runs here yet" if waits else None


def _why_unknown(findings: Findings) -> str:
    if findings.replicas_error is None:
        return "unknown to the controllers"
    if not findings.leader:
        return "not known: no controller leads that could tell"
    return f"not known: {findings.replicas_error}"


def _redraws() -> bool:
    """A terminal is drawn anew each time; elsewhere only what changed is printed."""
    import sys

    return sys.stdout.isatty()


def _show(session: Session, findings: Findings, problems: Sequence[str]) -> None:
    if findings.nowhere:
        session.out.line(findings.nowhere, style=BAD)
        return
    rows: list[Sequence[object]] = []

    def add(kind: str, subject: str, why: str | None, note: str = "") -> None:
        state = Cell.of("ok", GOOD) if why is None else Cell.of("FAILED", BAD)
        rows.append([kind, subject, state, note if why is None else why])

    for address, why in findings.name_servers.items():
        add("name server", address, why)
    for address, answer in findings.controllers.items():
        if isinstance(answer, Exception):
            add("controller", address, reason(address, answer))
        else:
            unwell = bool(answer.log is not None and answer.log.problems)
            note = "leader" if answer.is_leader else ""
            add("controller", address, "see below" if unwell else None, note)
    for address, why in findings.brokers.items():
        add("broker", address, why)
    for name in findings.groups:
        info = findings.replicas.replicas_info_table.get(name)
        if info is None:
            add("group", name, _why_unknown(findings))
            continue
        whole = len(info.in_sync_replicas) + len(info.not_in_sync_replicas)
        note = (
            f"master {info.master_address or 'nobody'}, epoch {info.master_epoch},"
            f" {len(info.in_sync_replicas)} of {whole} in sync"
        )
        bad = any(problem.startswith(f"{name}: ") for problem in problems)
        add("group", name, note if bad else None, note)
    session.out.table(["What", "Which", "State", "Note"], rows)
    session.out.line()
    if problems:
        for problem in problems:
            session.out.line(f"- {problem}", style=BAD)
    else:
        session.out.line("healthy", style=GOOD)
