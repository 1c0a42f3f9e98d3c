"""A backup of a broker's store, also while it runs, and a store made of it."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from batonmq.client.admin.admin import Admin
from batonmq.mqctl import backup as backups
from batonmq.mqctl.backup import Manifest, StoreSource, back_up, back_up_to_stream, check_log
from batonmq.mqctl.commands.election import elect
from batonmq.mqctl.context import CommandContext, CommandFailed, disk_failures
from batonmq.mqctl.output import GOOD, WaitLine, note, still_lacking, when
from batonmq.mqctl.params import FOLDER, PLACE, SECONDS, command, option
from batonmq.protocol.bodies import BrokerReplicasInfo
from batonmq.protocol.codes import MASTER_ID
from batonmq.protocol.errors import BatonError
from batonmq.runtime.clock import boot_ms, wall_ms
from batonmq.runtime.lock_file import FolderLock, FolderLockedError
from batonmq.runtime.words import counted

STREAM = Path("-")
POLL_S = 0.2
LEVEL_MS = 10_000
SURE_MS = 5000


@command("backup")
@click.argument("store", metavar="STORE", type=FOLDER)
@click.argument("target", metavar="DIR|-", type=PLACE)
@option("-b", "--brokerAddr", metavar="HOST:PORT", help="The broker that runs on this store.")
async def backup(
    context: CommandContext, store: Path, target: Path, broker_addr: str | None
) -> None:
    """STORE is the broker's data folder, on this machine; it is only read. Every message that was
    acknowledged before the command began is in the backup, with topics, groups, consumer offsets
    and epochs. A running broker is asked for its confirmOffset: -b names it, unless `batonmq up`
    runs it here. To a folder that has a backup of the same history only new bytes are added; - is a
    tar stream on standard output. The copy is checked record by record before it counts.

    A slave that is behind its master gives a whole backup up to what it has confirmed, and exit
    code 1: what was acknowledged above that is not in it.

    JSON (on standard error with -): source, target, beginOffset, endOffset, newBytes, behindBytes,
    segments."""
    lock, is_stopped = FolderLock(store / "lock"), True
    try:
        with disk_failures(store / "lock"):
            lock.acquire()  # so that it stays stopped
    except FolderLockedError:
        is_stopped = False
    try:
        with disk_failures(target):
            manifest, facts = await _copy(
                context, store, target, broker_addr, is_stopped=is_stopped
            )
    finally:
        lock.release()
    # With -, standard output is the stream.
    _show(context, manifest, store, target, facts, to_stderr=target == STREAM)


async def _copy(
    context: CommandContext, store: Path, target: Path, address: str | None, *, is_stopped: bool
) -> tuple[Manifest, dict[str, Any]]:
    """The backup, and of it newBytes and behindBytes. Raises BackupError, OSError."""
    source = StoreSource(store)
    with _private_files(), WaitLine("") as progress:
        done = _progress(progress)
        if is_stopped:
            end, behind = source.checked_end(done), 0
        else:
            end, behind = await _confirmed(context, store, address)
        if target != STREAM:
            manifest, added = back_up(source, target, end, wall_ms(), done)
            return manifest, {"newBytes": added, "behindBytes": behind}
        if sys.stdout.isatty():
            raise click.UsageError("a tar stream is nothing for a terminal: add | or >")
        check_log(source.segments(end), end, is_open=True)  # a stream cannot be taken back
        manifest = back_up_to_stream(source, sys.stdout.buffer, end, wall_ms(), done)
        sys.stdout.buffer.flush()
        return manifest, {"newBytes": manifest.end - manifest.begin, "behindBytes": behind}


def _progress(line: WaitLine) -> Callable[[int], None]:
    return lambda count: line.say(f"{count >> 20} MiB ...")


@contextmanager
def _private_files() -> Iterator[None]:
    """What is written is for its owner only: log and tables have messages and secrets of users."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


async def _confirmed(context: CommandContext, store: Path, address: str | None) -> tuple[int, int]:
    """(confirmOffset of the broker that runs on the store, what its master confirmed beyond it).
    A slave that has caught up has all that was confirmed when the command began. Raises
    CommandFailed, BatonError."""
    address = address or _address_here(context, store)
    async with context.admin() as admin:
        wanted = 0
        members = await _members_with(admin, address)
        master = members.get(MASTER_ID)
        if not members:
            note(
                f"no route has {address}: whether its master confirmed more than this copy has is"
                " not known; give the registered address (mqctl clusterList)"
            )
        elif master is None:
            context.complain(
                f"the group of {address} has no master now: this copy may lack what one confirmed"
            )
        elif master != address:
            try:
                wanted = await _confirm_offset(admin, master)
            except (BatonError, CommandFailed):
                context.complain(
                    f"{master} is master and does not answer: this copy may lack what it confirmed"
                )
        deadline_ms = boot_ms() + LEVEL_MS
        while True:  # a slave learns each confirmOffset a moment after its master
            end = await _confirm_offset(admin, address)
            if end >= wanted or boot_ms() >= deadline_ms:
                break
            await asyncio.sleep(POLL_S)
    behind = max(0, wanted - end)
    if behind:
        context.complain(
            f"{address} is {counted(behind, 'byte')} behind its master: messages that were"
            f" acknowledged since are not in this backup, which ends at {end}. Take another"
            " replica, or repeat later"
        )
    return end, behind


async def _members_with(admin: Admin, address: str) -> dict[int, str]:
    """The addresses of that broker's group, by id. None if no route has that address, as one that
    is not the registered one."""
    for group in (await admin.cluster.info()).broker_addr_table.values():
        if address in group.broker_addrs.values():
            return group.broker_addrs
    return {}


async def _confirm_offset(admin: Admin, address: str) -> int:
    confirmed = (await admin.brokers.runtime_info(address)).get("confirmOffset", "")
    if not confirmed.isdecimal():
        raise CommandFailed(f"{address} does not report its confirmOffset: it is no broker of ours")
    return int(confirmed)


def _address_here(context: CommandContext, store: Path) -> str:
    """Of the broker of `batonmq up` with that data folder. Raises click.UsageError."""
    local = context.target.local
    if local is not None:
        try:
            for node in json.loads(local.path.read_text())["brokers"]:
                if Path(node["dataDir"]).resolve() == store.resolve():
                    return str(node["address"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
    raise click.UsageError(f"a broker runs on {store}: which one? give -b HOST:PORT")


@command("restore", controllers=True, writes=True)
@click.argument("source", metavar="DIR|-", type=PLACE)
@click.argument("stores", metavar="STORE...", nargs=-1, required=True, type=PLACE)
@option(
    "--elect",
    is_flag=True,
    help="All disks of the group are gone: make the broker that starts on the first STORE master.",
)
@option("--within", "within_s", type=SECONDS, default=600.0, help="With --elect: how long to wait.")
async def restore(
    context: CommandContext, source: Path, stores: tuple[Path, ...], elect: bool, within_s: float
) -> None:
    """Each STORE must be missing or empty. The backup is read whole and checked before one appears.
    To the controllers each is a new replica: a living group fills it as any other one, and a group
    without a master takes it only by an operator (docs/backup.md).

    --elect is that operator, for a group whose disks are all gone. Give the stores of all its
    brokers on this machine, so that none starts empty and is elected first. Start the group when
    the command says so; it waits for the broker on the first STORE, and elects it. If the
    controllers still record the lost replicas, it names the unclean election that is needed.

    Users and rights are those of the backup, so it names its users: what was revoked since counts
    again.

    JSON: source, target (the first), targets, beginOffset, endOffset, segments, users (their
    names); on standard error with --elect, whose document is electMaster's."""
    if source == STREAM and len(stores) > 1:
        raise click.UsageError("a stream is read once: give one STORE")
    with _private_files(), WaitLine("") as progress:
        done = _progress(progress)
        for store in stores:
            with disk_failures(store):
                if source == STREAM:
                    manifest = backups.restore_from_stream(sys.stdin.buffer, store, done)
                else:
                    manifest = backups.restore(source, store, done)
    users = backups.users_in(manifest)
    more = {"targets": [str(each) for each in stores], "users": users}
    _show(context, manifest, source, stores[0], more, to_stderr=elect)
    if users:
        note(
            f"users and rights are those of {when(manifest.made_at_ms)}; what was revoked since"
            f" counts again: {', '.join(users)}"
        )
    if elect:
        note("start the controllers and the brokers of the group now")
        await _elect_restored(context, stores[0], within_s)


async def _elect_restored(context: CommandContext, store: Path, within_s: float) -> None:
    """Waits until the broker on that store has its id, and elects it. Raises CommandFailed."""
    taken_ms = 0

    async def lacks() -> str:
        nonlocal taken_ms
        who = _identity(store)
        if who is None:
            return f"no broker has started on {store}"
        context.forget_target()  # a cluster that starts names itself late
        try:
            async with context.controller() as (admin, controller):
                taken = _taken(await controller.sync_state_data([who[1]]), who)
                if not taken:
                    await elect(context, admin, controller, who)
        except click.UsageError as error:  # it may not be heard yet
            return str(error)
        taken_ms = taken_ms or boot_ms()
        # Controllers that have just started count all they recorded as alive.
        if taken and boot_ms() - taken_ms > SURE_MS:
            raise CommandFailed(taken)
        return taken

    if found := await still_lacking(lacks, within_s, f"waiting for the broker on {store}", POLL_S):
        raise CommandFailed(f"not elected within {within_s:g} s: {' '.join(found.split())}")


def _identity(store: Path) -> tuple[str, str, int] | None:
    """(cluster, group, id) of the broker on that store; None until the controllers gave the id."""
    try:
        cluster, group, broker_id = (store / "brokerIdentity").read_text().split("#")
        return cluster, group, int(broker_id)
    except (OSError, ValueError):
        return None


def _taken(found: BrokerReplicasInfo, who: tuple[str, str, int]) -> str:
    """What to do if the record of the group has others in its set; "" if it has none."""
    cluster, group, broker_id = who
    info = found.replicas_info_table.get(group)
    others = [] if info is None else info.in_sync_replicas
    if not others or (info is not None and info.master_broker_id == broker_id):
        return ""
    if living := [each for each in others if each.alive]:
        return (
            f"{group} has a set already, with broker {living[0].broker_id} at"
            f" {living[0].broker_address}: what it lacks of the backup is not in the group. If its"
            " store was empty, stop all brokers of the group, `batonmq moveAside` their stores, and"
            " restore all of them"
        )
    silent = ", ".join(str(each.broker_id) for each in others)
    return (
        f"the controllers still record broker {silent} of {group} in sync. If their disks are gone"
        f" and none of them runs: mqctl electMaster -bn {group} -b {broker_id} -c {cluster}"
        " --unclean --cut-later-acks"
    )


def _show(
    context: CommandContext,
    manifest: Manifest,
    source: Path,
    target: Path,
    more: dict[str, Any],
    *,
    to_stderr: bool,
) -> None:
    document = {
        "source": str(source),
        "target": str(target),
        "beginOffset": manifest.begin,
        "endOffset": manifest.end,
        "segments": len(manifest.segments),
        **more,
    }
    names = ", ".join(more.get("targets", [str(target)]))
    tables = counted(len(manifest.tables), "table")
    text = f"{names}: the log from {manifest.begin} to {manifest.end}, {tables}"
    if "newBytes" in more:
        text += f", {counted(more['newBytes'], 'new byte')}"
    if to_stderr:
        click.echo(json.dumps(document) if context.out.as_json else text, err=True)
    else:
        context.out.result(document, text, style=GOOD)
