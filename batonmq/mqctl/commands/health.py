"""Whether the cluster is healthy. Exit code: 0 it is, 3 degraded, 1 down."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

import click

from batonmq.mqctl.context import CommandContext, reason
from batonmq.mqctl.health import EXIT_CODES, Findings, Problem, no_cluster, poll, poll_classic
from batonmq.mqctl.output import BAD, DIM, GOOD, Cell, when
from batonmq.mqctl.params import SECONDS, command, option
from batonmq.mqctl.target import Target, data_of, has_ended
from batonmq.protocol.codes import MASTER_ID
from batonmq.runtime.clock import boot_ms, wall_ms

NAMED_MAX = 10  # groups in the last line


@command("health", controllers=True, timeout_s=0.45)
@option("-w", "--watch", is_flag=True, help="Look again until healthy, or ctrl-C.")
@option("-i", "--interval", "every_s", type=SECONDS, default=0.5, help="With --watch: how often.")
@option("--within", "within_s", type=SECONDS, help="With --watch: give up after so long.")
@option("--classic", is_flag=True, help="The cluster has no controllers.")
async def health(
    context: CommandContext, watch: bool, every_s: float, within_s: float | None, classic: bool
) -> None:
    """ok (exit code 0): every node answers, every broker group has a master that name servers route
    to, every replica is in the set, the controllers have one leader. degraded (3): all groups take
    writes, but something is wrong. down (1): a group takes no writes, or its state is unknown; also
    a local cluster that has ended: --watch waits for one to start. With --classic name servers and
    brokers are asked, and no controller. A node that hangs is waited for twice --timeout at most.

    JSON: healthy, state, groupsDown, cluster, problems, nextSteps (one for each problem), notes,
    controllerLeaderAddress, nameServers, controllers, brokers (address, alive), replicasInfoTable
    as getSyncStateSet; with --watch one document a line."""
    if within_s is not None and not watch:
        raise click.UsageError("--within goes with --watch")
    reports = _Reports(context, watch=watch, within_s=within_s)
    while (why := _nowhere(context.target, waits=watch)) is not None:
        if reports.show(no_cluster(why)):
            return
        await asyncio.sleep(every_s)
        context.forget_target()
    if classic:
        async with context.admin() as admin:
            while True:
                if reports.show(await poll_classic(admin)):
                    return
                await asyncio.sleep(every_s)
    async with context.controller() as (admin, controller):
        context.name_servers  # noqa: B018  wrong usage if they are not known
        expected = context.target.local.brokers if context.target.local else ()
        while True:
            findings = await poll(admin, controller, expected)
            if reports.show(replace(findings, cluster=str(context.target))):
                return
            await asyncio.sleep(every_s)


class _Reports:
    """Prints findings, with `watch` those that differ from the last ones, until the end."""

    def __init__(self, context: CommandContext, *, watch: bool, within_s: float | None) -> None:
        self._context = context
        self._watch = watch
        self._deadline_ms = None if within_s is None else boot_ms() + int(within_s * 1000)
        self._shown: list[str] | None = None
        context.out.compact = watch

    def show(self, findings: Findings) -> bool:
        """Shows a round of findings; returns whether it was the last round."""
        out = self._context.out
        problems: Sequence[str] = findings.problems()
        self._context.exit_code = EXIT_CODES[findings.state]
        if out.as_json:
            out.document(findings.document())
        elif not self._watch:
            _show(self._context, findings)
        elif problems != self._shown or sys.stdout.isatty():  # a terminal is redrawn each time
            out.clear()
            out.line(when(wall_ms()))
            _show(self._context, findings)
            self._shown = [*problems]
        if not self._watch or not problems:
            return True
        return self._deadline_ms is not None and boot_ms() >= self._deadline_ms


def _nowhere(target: Target, *, waits: bool) -> Problem | None:
    """Why there is no cluster to check, else None. Without addresses that is wrong usage."""
    if target.name_servers or target.controllers:
        return None
    if target.ended is not None:
        again = f"batonmq up --data {data_of(target.ended)}"
        return Problem.of(has_ended(target.ended), again, is_down=True)
    none = Problem.of("no cluster runs here yet", "batonmq up", is_down=True)
    return none if waits else None


def _show(context: CommandContext, findings: Findings) -> None:
    problems = findings.problems()
    if findings.nowhere:
        context.out.line(findings.nowhere, style=BAD)
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
            has_problems = bool(answer.log is not None and answer.log.problems)
            note = "leader" if answer.is_leader else ""
            add("controller", address, "see below" if has_problems else None, note)
    left = findings.left
    for address, broker in findings.brokers.items():
        if address not in left:
            add("broker", address, broker.why or ("see below" if broker.problems else None))
    for name in findings.groups:
        info = findings.replicas.replicas_info_table.get(name)
        if findings.classic:
            addresses = findings.routes.broker_addr_table[name].broker_addrs
            master = addresses.get(MASTER_ID)
            slaves = [f"slave {i} {a}" for i, a in sorted(addresses.items()) if i != MASTER_ID]
            note = ", ".join([f"master {master or 'none'}", *(slaves or ["no slave"])])
            add("group", name, None if master else note, note)
            continue
        if info is None:
            why = findings.replicas_error
            add("group", name, f"not known: {why}" if why else "unknown to the controllers")
            continue
        whole = len(info.in_sync_replicas) + len(info.not_in_sync_replicas)
        whole -= len(findings.removed(name))
        note = (
            f"master {info.master_address or 'none'}, epoch {info.master_epoch},"
            f" {len(info.in_sync_replicas)} of {whole} in sync"
        )
        bad = any(problem.startswith(f"{name}: ") for problem in problems)
        add("group", name, note if bad else None, note)
    context.out.table(["What", "Which", "State", "Note"], rows)
    context.out.line()
    _show_problems(context, findings)


def _show_problems(context: CommandContext, findings: Findings) -> None:
    problems = findings.problems()
    said: set[str] = set()
    for problem in problems:
        context.out.line(f"- {problem}", style=BAD)
        if problem.next_step not in ("", *said):  # the same once
            context.out.line(f"  {problem.next_step}")
            said.add(problem.next_step)
    local = context.target.local
    notes = findings.notes()
    if local is not None and not local.supervised:
        notes.append(
            "`batonmq up` of this cluster has ended: a process that ends is not started again"
        )
    for note in notes:
        context.out.line(f"note: {note}", style=DIM)
    if not problems:
        context.out.line("healthy", style=GOOD)
    else:
        what = "all groups take writes"
        if findings.state == "down":
            names = findings.groups_down
            more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
            which = f"{', '.join(names[:NAMED_MAX])}{more}: " if names else ""
            what = f"{which}no writes are taken, or the state is unknown"
        context.out.line(f"{findings.state}: {what}", style=BAD)
