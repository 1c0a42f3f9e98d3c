"""A backup of a broker's store, also while it runs, and a store made of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.output import GOOD, WaitLine
from batonmq.mqctl.params import command, option

if TYPE_CHECKING:
    from batonmq.mqctl.backup import Manifest
    from batonmq.runtime.lock_file import FolderLock

STREAM = Path("-")


@command("backup")
@click.argument(
    "store", metavar="STORE", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.argument("target", metavar="DIR|-", type=click.Path(path_type=Path))
@option("-b", "--brokerAddr", metavar="HOST:PORT", help="The broker that runs on this store.")
async def backup(
    context: CommandContext, store: Path, target: Path, broker_addr: str | None
) -> None:
    """Copy a broker's store up to a confirmed offset, also while it runs.

    STORE is the broker's data folder, on this machine; it is only read. Every message that was
    acknowledged before the command began is in the backup, with topics, groups, consumer offsets
    and epochs. A running broker is asked for its confirmOffset: -b names it, unless `batonmq up`
    runs it here. To a folder that has a backup of the same history only new bytes are added; - is a
    tar stream on standard output. The copy is checked record by record before it counts.

    JSON (on standard error with -): source, target, beginOffset, endOffset, newBytes, segments.
    """
    from batonmq.mqctl.backup import BackupError

    lock = _lock_of(store)
    try:
        manifest, added = await _copy(
            context, store, target, broker_addr, is_stopped=lock is not None
        )
    except BackupError as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"{error.filename or target}: {error.strerror}") from error
    finally:
        if lock is not None:
            lock.release()
    _show(context, manifest, store, target, {"newBytes": added})


async def _copy(
    context: CommandContext, store: Path, target: Path, address: str | None, *, is_stopped: bool
) -> tuple[Manifest, int]:
    """The backup, and its new bytes of the log. Raises BackupError, OSError."""
    from batonmq.mqctl.backup import StoreSource, back_up, back_up_to_stream, check_below
    from batonmq.runtime.clock import wall_ms

    source = StoreSource(store)
    with WaitLine("") as progress:

        def done(count: int) -> None:
            progress.say(f"{count >> 20} MiB ...")

        if is_stopped:
            end = source.checked_end(done)
        else:
            end = await _confirmed(context, store, address)
        if target != STREAM:
            return back_up(source, target, end, wall_ms(), done)
        if sys.stdout.isatty():
            raise click.UsageError("a tar stream is nothing for a terminal: add | or >")
        check_below(source.segments(end), end)  # a stream cannot be taken back
        manifest = back_up_to_stream(source, sys.stdout.buffer, end, wall_ms(), done)
        sys.stdout.buffer.flush()
        return manifest, manifest.end - manifest.begin


def _lock_of(store: Path) -> FolderLock | None:
    """The lock of a stopped store, so that it stays stopped; None if a broker runs on it."""
    from batonmq.runtime.lock_file import FolderLock, FolderLockedError

    lock = FolderLock(store / "lock")
    try:
        lock.acquire()
    except FolderLockedError:
        return None
    except OSError as error:
        raise CommandFailed(f"{store / 'lock'}: {error.strerror}") from error
    return lock


async def _confirmed(context: CommandContext, store: Path, address: str | None) -> int:
    """confirmOffset of the broker that runs on the store. Raises CommandFailed, BatonError."""
    address = address or _address_here(context, store)
    async with context.admin() as admin:
        facts = await admin.brokers.runtime_info(address)
    confirmed = facts.get("confirmOffset", "")
    if not confirmed.isdecimal():
        raise CommandFailed(f"{address} does not report its confirmOffset: it is no broker of ours")
    return int(confirmed)


def _address_here(context: CommandContext, store: Path) -> str:
    """Of the broker of `batonmq up` with that data folder. Raises click.UsageError."""
    import json

    local = context.target.local
    if local is not None:
        try:
            for node in json.loads(local.path.read_text())["brokers"]:
                if Path(node["dataDir"]).resolve() == store.resolve():
                    return str(node["address"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
    raise click.UsageError(f"a broker runs on {store}: which one? give -b HOST:PORT")


@command("restore")
@click.argument("source", metavar="DIR|-", type=click.Path(path_type=Path))
@click.argument("store", metavar="STORE", type=click.Path(path_type=Path))
async def restore(context: CommandContext, source: Path, store: Path) -> None:
    """Make a store of a backup, for a broker that starts on it.

    STORE must be missing or empty. The backup is read whole and checked before STORE appears. To
    the controllers it is a new replica: a living group fills it as any other one, and a group
    without a master takes it only by `mqctl electMaster` (docs/backup.md).

    JSON: source, target, beginOffset, endOffset, segments.
    """
    from batonmq.mqctl import backup as backups

    try:
        with WaitLine("") as progress:

            def done(count: int) -> None:
                progress.say(f"{count >> 20} MiB ...")

            if source == STREAM:
                manifest = backups.restore_from_stream(sys.stdin.buffer, store, done)
            else:
                manifest = backups.restore(source, store, done)
    except backups.BackupError as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"{error.filename or store}: {error.strerror}") from error
    _show(context, manifest, source, store, {})


def _show(
    context: CommandContext, manifest: Manifest, source: Path, target: Path, more: dict[str, Any]
) -> None:
    import json

    document = {
        "source": str(source),
        "target": str(target),
        "beginOffset": manifest.begin,
        "endOffset": manifest.end,
        "segments": len(manifest.segments),
        **more,
    }
    text = (
        f"{target}: the log from {manifest.begin} to {manifest.end}, {len(manifest.tables)} tables"
    )
    if "newBytes" in more:
        text += f", {more['newBytes']} new bytes"
    if target == STREAM:  # standard output is the stream
        click.echo(json.dumps(document) if context.out.as_json else text, err=True)
    elif context.out.as_json:
        context.out.document(document)
    else:
        context.out.line(text, style=GOOD)
