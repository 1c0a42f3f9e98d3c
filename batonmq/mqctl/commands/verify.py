"""Whether the commit log of a store is whole: every record with both its CRCs, file by file."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from batonmq.mqctl.context import CommandContext
from batonmq.mqctl.output import BAD, GOOD, Progress
from batonmq.mqctl.params import command

_SEGMENT_NAME: Final = re.compile(r"\d{20}")
_SEARCH_BYTES: Final = 1 << 20
_PROGRESS_BYTES: Final = 16 << 20
DAMAGES_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Damage:
    """`size` bytes of `file`, from log offset `offset` on, are no whole records, or missing."""

    file: str
    offset: int
    size: int
    what: str


@dataclass(slots=True)
class Verdict:
    """What was found. `end`: log offset behind the last whole record; `tail`: bytes behind it that
    a writer may have left unfinished (only while it runs, or after its crash)."""

    files: int = 0
    size: int = 0
    records: int = 0
    begin: int = 0
    end: int = 0
    tail: int = 0
    damages: list[Damage] = field(default_factory=list)
    kept: list[tuple[str, int]] = field(default_factory=list)
    """(file, bytes) that were cut from the log and kept in `truncated/`."""


@command("verifyStore")
@click.argument(
    "store", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
async def verify_store(context: CommandContext, store: Path) -> None:
    """Check every record of a store's commit log, from its files alone.

    DIR is a broker's data folder (with commitlog/ in it), of a BatonMQ or RocketMQ broker, also of
    one that runs. Checked are the CRCs of body and properties, lengths, and that each record names
    its own offset. Exit code: 0 whole, 1 damaged.

    JSON: store, healthy, files, bytes, records, beginOffset, endOffset, tailBytes (behind the last
    whole record, of a writer that runs or crashed), damages (file, offset, bytes, what), truncated
    (file, bytes: what was cut from the log and kept).
    """
    log = store / "commitlog" if (store / "commitlog").is_dir() else store
    segments = sorted(file for file in log.iterdir() if _SEGMENT_NAME.fullmatch(file.name))
    if not segments:
        raise click.UsageError(f"{store}: no commit log is there (files named by 20 digits)")
    verdict = Verdict()
    total = sum(file.stat().st_size for file in segments)
    with Progress("") as progress:
        for done in verify(segments, verdict, is_open=(log.parent / "abort").exists()):
            progress.say(f"{done >> 20} of {total >> 20} MiB, {len(verdict.damages)} damages ...")
    kept = sorted(file for file in (log.parent / "truncated").rglob("*") if file.is_file())
    verdict.kept = [(str(file), file.stat().st_size) for file in kept]
    context.exit_code = 1 if verdict.damages else 0
    if context.out.as_json:
        context.out.document(_document(store, verdict))
    else:
        _show(context, verdict)


def verify(segments: list[Path], verdict: Verdict, *, is_open: bool) -> Iterator[int]:
    """Fills `verdict`; yields how many bytes are done, again and again.

    `is_open`: the last bytes may belong to a write that was not finished.
    """
    verdict.begin = verdict.end = int(segments[0].name)
    done = 0
    for file in segments:
        base, size = int(file.name), file.stat().st_size
        if base != verdict.end and file is not segments[0]:
            what = "no file of the log holds this part" if base > verdict.end else "files overlap"
            verdict.damages.append(Damage(str(file), verdict.end, base - verdict.end, what))
        verdict.end = base
        verdict.files += 1
        verdict.size += size
        if size:
            with (
                file.open("rb") as opened,
                mmap.mmap(opened.fileno(), size, prot=mmap.PROT_READ) as data,
            ):
                is_last = file is segments[-1]
                for position in _verify_file(data, file, base, verdict, is_last, is_open):
                    yield done + position
        done += size
        yield done


def _verify_file(
    data: mmap.mmap, file: Path, base: int, verdict: Verdict, is_last: bool, is_open: bool
) -> Iterator[int]:
    from batonmq.protocol.records.codec import scan_in_file
    from batonmq.protocol.records.faults import CorruptRecord, Fault

    view, size, position, said = memoryview(data), len(data), 0, 0
    try:
        while position < size:
            what = Fault.NOT_WHOLE.text()
            try:
                head = scan_in_file(view, position, base + position, base + size, check_crc=True)
            except CorruptRecord as error:
                head, what = None, error.what
            if head is not None:
                verdict.records += head.kind == "message"
                position += head.size
                verdict.end = base + position
                if position - said >= _PROGRESS_BYTES:
                    said = position
                    yield position
                continue
            following = _next_record(data, view, base, position + 1)
            if following is None and is_last:
                used = _used_from(data, position)
                if used and is_open:
                    verdict.tail = used
                elif used:
                    verdict.damages.append(Damage(str(file), base + position, used, what))
                return
            end = size if following is None else following
            verdict.damages.append(Damage(str(file), base + position, end - position, what))
            position, verdict.end = end, base + end
    finally:
        view.release()


def _next_record(data: mmap.mmap, view: memoryview, base: int, position: int) -> int | None:
    """Where the next whole record of the file begins."""
    from batonmq.protocol.records.search import OFFSET_END, candidates, is_record

    while position < len(data):
        window = data[position : position + _SEARCH_BYTES + OFFSET_END]
        for at in candidates(window, base + position):
            if is_record(view, position + at, base + position + at):
                return position + at
        position += _SEARCH_BYTES
    return None


def _used_from(data: mmap.mmap, position: int) -> int:
    """How many bytes there are from `position` up to the last one that is not zero."""
    for start in range(len(data) - 1 - (len(data) - 1) % _SEARCH_BYTES, -1, -_SEARCH_BYTES):
        begin = max(start, position)
        used = data[begin : start + _SEARCH_BYTES].rstrip(b"\0")
        if used:
            return begin + len(used) - position
        if start <= position:
            break
    return 0


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
            f"- {each.file} at offset {each.offset}, {each.size} bytes: {each.what}", style=BAD
        )
    if len(verdict.damages) > DAMAGES_SHOWN:
        out.line(f"- and {len(verdict.damages) - DAMAGES_SHOWN} more; --json has all", style=BAD)
    out.line(
        f"{verdict.records} records in {verdict.files} files,"
        f" offsets {verdict.begin} to {verdict.end}"
    )
    if verdict.tail:
        out.line(
            f"{verdict.tail} bytes behind them are no whole record: a write is under way, or was at"
            " a crash"
        )
    if verdict.kept:
        size = sum(size for _, size in verdict.kept)
        out.line(f"{size} bytes that were cut from this log are kept in {len(verdict.kept)} files:")
        for file, _ in verdict.kept[:DAMAGES_SHOWN]:
            out.line(f"  {file}")
    if verdict.damages:
        out.line("damaged: let the broker copy its master again, see docs/operating.md", style=BAD)
    else:
        out.line("whole", style=GOOD)
