"""Whether the commit log of a store is whole, from its files: every record with both its CRCs.

Reads what brokers of ours and Java brokers write, also while one runs.
"""

import os
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from batonmq.protocol.layout import RECORD_HEAD
from batonmq.protocol.records.codec import scan_in_file
from batonmq.protocol.records.faults import CorruptRecord, RecordFault
from batonmq.protocol.records.search import OFFSET_END, candidates, is_record
from batonmq.runtime.durable_file import data_extents, is_zero

WINDOW_BYTES = 1 << 20
SEGMENT_NAME: Final = re.compile(r"\d{20}")
"""Of a file of a commit log or of a queue."""


@dataclass(frozen=True, slots=True)
class BadBytes:
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
    damages: list[BadBytes] = field(default_factory=list)
    read: int = 0
    """Bytes that were read from the disk: less than `size` in a sparse file."""
    kept: list[tuple[str, int]] = field(default_factory=list)
    """(file, bytes) that were cut from the log and kept in `truncated/`."""


def segments_of(folder: Path) -> list[Path]:
    """The files of a commit log or of a queue, oldest first; none if there is no such folder.
    Raises OSError if it may not be read."""
    try:
        return sorted(file for file in folder.iterdir() if SEGMENT_NAME.fullmatch(file.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def size_of(path: Path) -> int:
    """0 of a file that a running broker has removed meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def verify(segments: list[Path], verdict: Verdict, *, is_open: bool) -> Iterator[int]:
    """Fills `verdict`; yields how many bytes are done, again and again.

    `is_open`: the last bytes may belong to a write that was not finished."""
    verdict.begin = verdict.end = int(segments[0].name)
    done = 0
    for path in segments:
        base = int(path.name)
        if base != verdict.end and path is not segments[0]:
            what = "no file of the log holds this part" if base > verdict.end else "files overlap"
            verdict.damages.append(BadBytes(str(path), verdict.end, base - verdict.end, what))
        verdict.end = base
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # a running broker has expired it
            continue
        try:
            file = _File(fd, path, base, os.fstat(fd).st_size, verdict)
            verdict.files += 1
            verdict.size += file.size
            may_end = path is segments[-1]
            for position in _verify_file(file, verdict, may_end=may_end, is_open=is_open):
                yield done + position
            done += file.size
            yield done
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class _File:
    """One file of the log. It is read with pread: a bad sector, or a file that its broker cuts
    meanwhile, would end a process that has it mapped."""

    fd: int
    path: Path
    base: int
    size: int
    verdict: Verdict

    def read(self, position: int, size: int) -> bytes:
        data = os.pread(self.fd, size, position)
        self.verdict.read += len(data)
        return data


def _verify_file(file: _File, verdict: Verdict, *, may_end: bool, is_open: bool) -> Iterator[int]:
    """Yields positions. `may_end`: the log may end within this file."""
    position = 0
    while position < file.size:
        what = ""
        try:
            yield from _good_records(file, position, verdict)
            return
        except CorruptRecord as error:
            what = error.what
        except OSError as error:
            what = f"cannot be read: {error.strerror}"
        position = verdict.end - file.base
        following, used = yield from _next_record(file, position)
        if following is None and may_end:
            if used and is_open:
                verdict.tail = used
            elif used:
                verdict.damages.append(BadBytes(str(file.path), verdict.end, used, what))
            return
        end = file.size if following is None else following
        verdict.damages.append(BadBytes(str(file.path), verdict.end, end - position, what))
        position, verdict.end = end, file.base + end


def _good_records(file: _File, position: int, verdict: Verdict) -> Iterator[int]:
    """Steps over whole records; yields the position behind each window of them.

    Raises CorruptRecord or OSError for what is at `verdict.end`."""
    most = WINDOW_BYTES
    verdict.end = file.base + position
    while position < file.size:
        window = file.read(position, most)
        at = 0
        while at < len(window):
            offset = file.base + position + at
            head = scan_in_file(window, at, offset, file.base + file.size, check_crc=True)
            if head is None:
                break
            verdict.records += head.kind == "message"
            at += head.size
            verdict.end = offset + head.size
        # Not even one record, and this was all there is.
        if at == 0 and len(window) < most:
            raise CorruptRecord(RecordFault.NOT_WHOLE)
        most = WINDOW_BYTES if at else 2 * most  # a record that is larger than the window
        position += at
        yield position


def _next_record(file: _File, position: int) -> Generator[int, None, tuple[int | None, int]]:
    """Yields positions. Returns where the next whole record behind `position` begins, None if none
    does, and how many bytes there are from `position` up to the last one that is not zero. What
    cannot be read holds no record, and counts as used."""
    used = 0
    for at, end in data_extents(file.fd, file.size, position):
        while at < end:
            try:
                window = file.read(at, WINDOW_BYTES)
                # Allocated ahead: a new segment is 1 GiB of zeros, and they may be in the cache.
                if not is_zero(window):
                    used = max(used, at - position + len(window.rstrip(b"\0")))
                    if (found := _record_in(file, window, at, position)) is not None:
                        return found, used
            except OSError:
                used = file.size - position
            # Windows overlap: a record is known by its first bytes, which may lie across their
            # border.
            at += WINDOW_BYTES - OFFSET_END
            yield at
    return None, used


def _record_in(file: _File, window: bytes, at: int, behind: int) -> int | None:
    """Where the first whole record begins that is behind `behind`, in the window at `at`."""
    for found in candidates(window, file.base + at):
        (size,) = RECORD_HEAD.only("size").unpack_from(window, found)
        begin = at + found
        fits = begin > behind and 0 < size <= file.size - begin
        if fits and is_record(file.read(begin, size), 0, file.base + begin):
            return begin
    return None
