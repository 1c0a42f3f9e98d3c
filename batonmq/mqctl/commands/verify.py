"""Whether the commit log of a store is whole: every record with both its CRCs, file by file."""

import asyncio
from pathlib import Path
from typing import Any, Final

import click

from batonmq.mqctl.context import CommandContext
from batonmq.mqctl.output import BAD, GOOD, WaitLine
from batonmq.mqctl.params import FOLDER, SECONDS, command, option
from batonmq.mqctl.store_check import Verdict, segments_of, size_of, verify
from batonmq.runtime.clock import boot_s
from batonmq.runtime.words import counted

DAMAGES_SHOWN: Final = 20


@command("verifyStore")
@click.argument("store", metavar="DIR", type=FOLDER)
@option("--rate", type=SECONDS, metavar="MIB", help="Read at most so many MiB a second.")
async def verify_store(context: CommandContext, store: Path, rate: float | None) -> None:
    """DIR is a broker's data folder (with commitlog/ in it), of a BatonMQ or RocketMQ broker, also
    of one that runs. Checked are the CRCs of body and properties, lengths, and that each record
    names its own offset. Exit code: 0 whole, 1 damaged.

    JSON: store, healthy, files, bytes, records, beginOffset, endOffset, tailBytes (behind the last
    whole record, of a writer that runs or crashed), damages (file, offset, bytes, what), truncated
    (file, bytes: what was cut from the log and kept)."""
    log = store / "commitlog" if (store / "commitlog").is_dir() else store
    segments = segments_of(log)
    if not segments:
        raise click.UsageError(f"{store}: no commit log is there (files named by 20 digits)")
    verdict = Verdict()
    total = sum(map(size_of, segments))
    began_s = boot_s()
    with WaitLine("") as progress:
        # The file `abort` is there while a broker runs, and after one that was killed.
        for done in verify(segments, verdict, is_open=(log.parent / "abort").exists()):
            progress.say(f"{done >> 20} of {total >> 20} MiB, damaged: {len(verdict.damages)} ...")
            if rate is not None:
                ahead_s = began_s + verdict.read / (rate * (1 << 20)) - boot_s()
                await asyncio.sleep(max(0.0, ahead_s))
    kept = [file for file in (log.parent / "truncated").rglob("*") if file.is_file()]
    verdict.kept = sorted((str(file), size_of(file)) for file in kept)
    context.exit_code = 1 if verdict.damages else 0
    if not context.out.wrote_json(_document(store, verdict)):
        _show(context, verdict)


def _document(store: Path, verdict: Verdict) -> dict[str, Any]:
    return {
        "store": str(store),
        "healthy": not verdict.damages,
        "files": verdict.files,
        "bytes": verdict.size,
        "records": verdict.records,
        "beginOffset": verdict.begin,
        "endOffset": verdict.end,
        "tailBytes": verdict.tail,
        "damages": [
            {"file": each.file, "offset": each.offset, "bytes": each.size, "what": each.what}
            for each in verdict.damages
        ],
        "truncated": [{"file": file, "bytes": size} for file, size in verdict.kept],
    }


def _show(context: CommandContext, verdict: Verdict) -> None:
    out = context.out
    for each in verdict.damages[:DAMAGES_SHOWN]:
        out.line(
            f"- {each.file} at offset {each.offset}, {counted(each.size, 'byte')}: {each.what}",
            style=BAD,
        )
    if len(verdict.damages) > DAMAGES_SHOWN:
        out.line(f"- and {len(verdict.damages) - DAMAGES_SHOWN} more; --json has all", style=BAD)
    out.line(
        f"{counted(verdict.records, 'record')} in {counted(verdict.files, 'file')},"
        f" offsets {verdict.begin} to {verdict.end}"
    )
    if verdict.tail:
        out.line(
            f"behind them {counted(verdict.tail, 'byte')} without a whole record: a write is under"
            " way, or was at a crash"
        )
    if verdict.kept:
        size = sum(size for _, size in verdict.kept)
        files = counted(len(verdict.kept), "file")
        out.line(f"cut from this log and kept: {counted(size, 'byte')} in {files}")
        for file, _ in verdict.kept[:DAMAGES_SHOWN]:
            out.line(f"  {file}")
    if verdict.damages:
        out.line("damaged: let the broker copy its master again, see docs/operating.md", style=BAD)
    else:
        out.line("whole", style=GOOD)
