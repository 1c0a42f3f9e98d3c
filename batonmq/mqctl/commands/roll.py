"""A rolling restart or upgrade, one process after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from zlib import crc32

import click

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.controller_admin import ControllerAdmin
from batonmq.mqctl import roll_backends
from batonmq.mqctl.commands.election import move_away
from batonmq.mqctl.context import CommandContext, CommandFailed, disk_failures
from batonmq.mqctl.health import Findings, poll
from batonmq.mqctl.output import BAD, GOOD, Output, still_lacking
from batonmq.mqctl.params import FILE, NEW_FILE, SECONDS, command, exclusive, option
from batonmq.mqctl.roll import (
    Doubt,
    Roll,
    RollFile,
    RollNode,
    check_may_restart,
    check_whole,
    committed_index,
    is_master,
    is_newer,
    next_node,
    nodes_of,
)
from batonmq.mqctl.roll_backends import Backend, UpBackend
from batonmq.mqctl.target import contexts_file, data_of
from batonmq.protocol.errors import BatonError
from batonmq.runtime.clock import boot_ms, wall_ms
from batonmq.runtime.lock_file import FolderLock, FolderLockedError
from batonmq.runtime.words import counted

STOPPED: Final = 3
"""Exit code of a roll that stopped at a doubt."""


@command("roll", controllers=True, writes=True)
@option(
    "--by",
    type=click.Choice(["up", "systemd", "compose"]),
    help="What runs the processes. Default: up, if `batonmq up` runs the cluster.",
)
@option(
    "--python",
    "python",
    type=FILE,
    metavar="PATH",
    help="With up: the interpreter of the installation to go to.",
)
@option("--ssh", "ssh", is_flag=True, help="With systemd: on each host by ssh.")
@option(
    "--restartWith",
    metavar="COMMAND",
    help="A command of your own, such as 'ssh {host} systemctl restart batonmq@{kind}'.",
)
@option("--compose", default="docker compose", metavar="COMMAND", help="Compose and its options.")
@option("--controllersApart", is_flag=True, help="Controllers run outside of name servers.")
@option("--within", "within_s", type=SECONDS, default=120.0, help="For one process to be well.")
@option("--state", type=NEW_FILE, help="Where the progress is kept.")
@option("--dry-run", is_flag=True, help="Show the order and the commands only.")
async def roll(
    context: CommandContext,
    by: str | None,
    python: Path | None,
    ssh: bool,
    restart_with: str | None,
    compose: str,
    controllers_apart: bool,
    within_s: float,
    state: Path | None,
    dry_run: bool,
) -> None:
    """Slaves first, then the master, which hands over before; then name servers with their
    controllers, the leader last. Before each, the whole cluster must be well, and keep a copy in
    sync and a majority without this process; after each, it waits until that is so again. At the
    first doubt it stops, and says what to do: the same command continues there. Exit code: 0 all
    are restarted, 1 failed, 3 stopped at a doubt.

    JSON: rolled, skipped (done before), left (names), doubt, nextStep ("" if there is none); with
    --dry-run order (name, how) as well."""
    exclusive(("--by", by), ("--restartWith", restart_with))
    async with _shown(context, within_s) as work:
        backend = await _backend(context, by, python, ssh, restart_with, compose, within_s)
        await work.load_nodes(embedded=not controllers_apart)
        if dry_run:
            await work.show_order(backend)
        else:
            path = state or state_file(context)
            with alone(path):
                await work.roll(backend, path)


async def restart_one(context: CommandContext, address: str, within_s: float) -> None:
    """Restarts one process of a cluster of `batonmq up` as `roll` does, and shows the same."""
    async with _shown(context, within_s) as work:
        backend = up_backend(context, within_s)
        await work.load_nodes(embedded=True)
        await work.restart_one(address, backend)


@asynccontextmanager
async def _shown(context: CommandContext, within_s: float) -> AsyncIterator[RollWork]:
    """What was done is shown at the end, and at a doubt."""
    async with context.controller() as (admin, controller):
        work = RollWork(context, admin, controller, within_s)
        try:
            yield work
        except Doubt as doubt:
            work.doubt = doubt
            context.exit_code = STOPPED
        work.show()


@asynccontextmanager
async def rolling(context: CommandContext, within_s: float) -> AsyncIterator[RollWork]:
    """Of a cluster of `batonmq up`. Raises Doubt."""
    async with context.controller() as (admin, controller):
        work = RollWork(context, admin, controller, within_s)
        await work.load_nodes(embedded=True)
        yield work


def doubt_document(doubt: Doubt | None) -> dict[str, str]:
    if doubt is None:
        return {"doubt": "", "nextStep": ""}
    return {"doubt": str(doubt), "nextStep": doubt.next_step}


def show_doubt(out: Output, doubt: Doubt, then: str) -> None:
    """`then`: what comes after the next step."""
    out.line(f"stopped: {doubt}", style=BAD)
    out.line(f"  next: {doubt.next_step}")
    if then:
        out.line(f"  {then}")


async def _backend(
    context: CommandContext,
    by: str | None,
    python: Path | None,
    ssh: bool,
    restart_with: str | None,
    compose: str,
    within_s: float,
) -> Backend:
    local = context.target.local
    # Its supervisor would start a process again that something else has just stopped.
    if by is None and restart_with is None and local is not None:
        by = "up"
    if python is not None and by != "up":
        raise click.UsageError("--python belongs to a cluster of `batonmq up`")
    if restart_with is not None:
        return roll_backends.CommandBackend(restart_with, within_s)
    if by == "up":
        return up_backend(context, within_s, python)
    if by == "systemd":
        template = roll_backends.SYSTEMD_BY_SSH if ssh else roll_backends.SYSTEMD
        return roll_backends.CommandBackend(template, within_s)
    if by == "compose":
        return await roll_backends.compose_backend(compose, within_s)
    raise click.UsageError("what runs the processes? give --by, or --restartWith COMMAND")


def up_backend(context: CommandContext, within_s: float, python: Path | None = None) -> Backend:
    local = context.target.local
    if local is None:
        raise click.UsageError("no `batonmq up` runs here: set BATONMQ_DATA to its folder")
    return UpBackend(local.path, python, within_s)


def state_file(context: CommandContext) -> Path:
    """In the data folder of the cluster, or beside the contexts that mqctl keeps."""
    if context.target.local is not None:
        return data_of(context.target.local.path) / "run" / "roll.json"
    kept = contexts_file()
    if kept is None:
        raise click.UsageError("there is no home folder to keep the progress in: give --state FILE")
    # By the controllers, in any order: they are what a cluster keeps when brokers come and go.
    number = crc32(";".join(sorted(context.controllers)).encode())
    return kept.with_name(f"roll-{number:08x}.json")


@contextmanager
def alone(state: Path) -> Iterator[None]:
    """No other command restarts processes of this cluster meanwhile. Raises CommandFailed."""
    lock = FolderLock(state.with_suffix(".lock"))
    try:
        with disk_failures(state):
            state.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
    except FolderLockedError as error:
        raise CommandFailed(f"another roll of this cluster runs: {error}") from error
    try:
        yield
    finally:
        lock.release()


@dataclass(slots=True)
class RollWork:
    context: CommandContext
    admin: Admin
    controller: ControllerAdmin
    within_s: float
    nodes: list[RollNode] = field(default_factory=list)
    rolled: list[str] = field(default_factory=list)
    _skipped: list[str] = field(default_factory=list)
    _order: list[dict[str, str]] | None = None
    doubt: Doubt | None = None

    async def load_nodes(self, *, embedded: bool) -> None:
        """Raises Doubt."""
        context = self.context
        findings = await self._look()
        self.nodes = nodes_of(
            findings, context.name_servers, context.controllers, embedded=embedded
        )

    async def _look(self) -> Findings:
        local = self.context.target.local
        return await poll(self.admin, self.controller, local.brokers if local else ())

    async def wait(self, check: Callable[[Findings], None]) -> Findings:
        """The findings that `check` takes. Raises its Doubt if none come in time."""
        found: Findings | None = None
        doubt: Doubt | None = None

        async def lacks() -> str:
            nonlocal found, doubt
            found = doubt = None
            found = await self._look()
            try:
                check(found)
            except Doubt as raised:
                doubt = raised
            return str(doubt or "")

        lacking = await still_lacking(lacks, self.within_s, "waiting")
        if found is None or lacking:
            raise doubt or Doubt(lacking)
        return found

    async def show_order(self, backend: Backend) -> None:
        """Raises Doubt if the first restart would be refused, or a command cannot be made."""
        findings = await self._look()
        self._order = []
        done: list[str] = []
        while (node := next_node(findings, self.nodes, done)) is not None:
            self._order.append({"name": node.name, "how": backend.describe(node)})
            done.append(node.name)
        # Of each, not only of the first: who plans a night wants to know before it.
        for node in self.nodes:
            check_may_restart(findings, self.nodes, node)

    async def restart_one(self, address: str, backend: Backend) -> None:
        """Raises Doubt, and CommandFailed if no process is at `address`."""
        found = [node for node in self.nodes if address in (node.address, node.controller)]
        if not found:
            check_whole(await self._look())  # else the controllers may not name all of them
            known = ", ".join(node.address for node in self.nodes)
            raise CommandFailed(f"no process of this cluster is at {address}; there are {known}")
        await self._restart(found[0], backend)
        self.rolled.append(found[0].name)

    async def roll(self, backend: Backend, state: Path) -> None:
        """Raises Doubt, and CommandFailed for a disk that does not keep the progress."""
        with disk_failures(state):
            await self._roll_all(backend, RollFile(state))

    async def restart_these(
        self, chosen: Sequence[RollNode], backend: Backend, *, controllers_first: bool
    ) -> None:
        """In the order of a roll, or name servers before brokers; without a file of its progress.
        Raises Doubt."""
        findings = await self.wait(check_whole)
        brokers = [node for node in chosen if node.kind == "broker"]
        servers = [node for node in chosen if node.kind != "broker"]
        for part in (servers, brokers) if controllers_first else (brokers, servers):
            while (node := next_node(findings, part, self.rolled)) is not None:
                findings = await self._restart(node, backend)
                self.rolled.append(node.name)

    async def _roll_all(self, backend: Backend, file: RollFile) -> None:
        roll = file.begin(backend.how, wall_ms())
        self._skipped = [node.name for node in self.nodes if node.name in roll.done]
        findings = await self._look()
        while (node := next_node(findings, self.nodes, roll.done)) is not None:
            findings = await self.wait(check_whole)
            # A run that was killed between the restart and the note of it restarts nothing twice.
            if backend.is_chosen(node) and await self._is_done(node, roll):
                self._skipped.append(node.name)
            else:
                findings = await self._restart(node, backend)
                self.rolled.append(node.name)
            # Kept before the next restart: the same command continues from here.
            roll.done.append(node.name)
            file.store(roll)
        file.end()

    async def _is_done(self, node: RollNode, roll: Roll) -> bool:
        """Whether a broker was restarted since the roll began, by this command before it ended, or
        by somebody else."""
        if node.kind != "broker":  # the others report no time of their start
            return False
        try:
            return is_newer(await self.admin.brokers.runtime_info(node.address), roll.started_ms)
        except BatonError:
            return False

    async def _restart(self, node: RollNode, backend: Backend) -> Findings:
        findings = await self.wait(lambda found: check_may_restart(found, self.nodes, node))
        if is_master(findings, node):
            self.context.out.say(f"{node.name}: its master moves away")
            await move_away(self.context, self.admin, self.controller, node.address)
            findings = await self.wait(lambda found: check_may_restart(found, self.nodes, node))
        # A controller that is back must have applied at least what was committed before.
        floor = committed_index(findings)
        began_ms = boot_ms()
        self.context.out.say(f"{node.name}: {backend.describe(node)}")
        try:
            await backend.restart(node)
            findings = await self.wait(lambda found: check_whole(found, floor))
        except Doubt:
            # Its next start, by anybody, is of the version that worked.
            backend.undo(node)
            raise
        self.context.out.say(
            f"{node.name}: all is well after {(boot_ms() - began_ms) / 1000:.1f} s"
        )
        return findings

    def show(self) -> None:
        done = {*self.rolled, *self._skipped}
        left = [node.name for node in self.nodes if node.name not in done]
        out = self.context.out
        done_and_left = {"rolled": self.rolled, "skipped": self._skipped, "left": left}
        order = {} if self._order is None else {"order": self._order}
        if out.wrote_json({**done_and_left, **doubt_document(self.doubt), **order}):
            return
        for number, step in enumerate(self._order or (), 1):
            out.line(f"{number}. {step['name']}: {step['how']}")
        if self.doubt is not None:
            then = "then the same command continues with what is left"
            show_doubt(out, self.doubt, then if self._order is None else "")
        elif self._order is None:
            text = f"{counted(len(self.rolled), 'process')} restarted"
            if self._skipped:
                text += f", {counted(len(self._skipped), 'process')} before"
            out.line(text, style=GOOD)
