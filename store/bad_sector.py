"""A page of the log at which the run before ended, because the disk could not read it (R24).

`process.read_faults` noted it. Here it is read by `pread`, which gives an error and no signal. If
it still cannot be read, the log is suspect from the record that the page cuts, and the page is
overwritten with zeros: the disk then gives another sector for it, nobody dies of it again, and that
record is refused by its CRC like any other damage, named, and fetched from the master.
"""

from __future__ import annotations

import logging
import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from batonmq.process import disk
from batonmq.process.durable_file import remove_file, write_all
from batonmq.process.read_faults import ReadFault
from batonmq.store.commit_log import CommitLog
from batonmq.store.config import StoreConfig
from batonmq.store.errors import StoreFormatError
from batonmq.store.log_scan import whole_records_end
from batonmq.store.suspicion import SuspectMark, Suspicion

log = logging.getLogger(__name__)

_PAGE: Final = mmap.PAGESIZE
_PAGES_LOOKED_AT: Final = 256  # bad sectors come in groups


def fault_note(root: Path) -> Path:
    """Where a process notes at which page it died."""
    return root / "read_fault"


def mend(config: StoreConfig, mark: SuspectMark) -> int | None:
    """Before the log is opened: the offset of the first byte that cannot be read, made readable as
    zeros; None if there is none. Raises OSError, StoreFormatError if it cannot be written either.
    """
    note = fault_note(config.root)
    if not note.exists():
        return None
    fault = ReadFault.read(note)
    path = Path(fault.file if fault is not None else "")
    is_in_log = path.parent.resolve() == config.commit_log_folder.resolve()
    if fault is None or not (is_in_log and path.name.isdigit() and path.exists()):
        log.warning("read_fault_elsewhere fault=%s", fault)
        remove_file(note)
        return None
    fd = disk.open(path, os.O_RDWR)
    try:
        bad = _bad_pages(fd, fault.position - fault.position % _PAGE)
        size = os.fstat(fd).st_size
        if size < config.mapped_file_size_commit_log:
            bad.insert(0, size)
        if bad:
            _suspect(mark, path, min(bad))
            _overwrite(fd, path, bad, config.mapped_file_size_commit_log)
    finally:
        disk.close(fd)
    if not bad:
        log.warning("read_fault_passed file=%s position=%d", path, fault.position)
    remove_file(note)
    return int(path.name) + min(bad) if bad else None


def _bad_pages(fd: int, first: int) -> list[int]:
    """The positions of pages that cannot be read, from `first` on."""
    bad = []
    size = os.fstat(fd).st_size
    for position in range(first, min(first + _PAGES_LOOKED_AT * _PAGE, size), _PAGE):
        try:
            disk.pread(fd, _PAGE, position)
        except OSError as error:
            log.error("page_unreadable position=%d error=%s", position, error)
            bad.append(position)
    return bad


def _suspect(mark: SuspectMark, path: Path, position: int) -> None:
    """Durable before anything is overwritten; from the segment's start until it can be scanned."""
    what = f"the disk cannot read what was written at position {position} of this file"
    start = int(path.name)
    log.error("bad_sector file=%s position=%d", path, position)
    if mark.report is None or (start < mark.report.offset and not mark.report.blocks_writes):
        mark.set(Suspicion(str(path), start, what, start, kind="rot", until_level=True))


def _overwrite(fd: int, path: Path, bad: list[int], size: int) -> None:
    try:
        for position in bad:
            if position < os.fstat(fd).st_size:
                write_all(fd, bytes(_PAGE), position)
        disk.ftruncate(fd, size)
        disk.fsync(fd)
    except OSError as error:
        if disk.is_full(error):
            raise
        what = f"cannot be read at position {bad[0]}, nor written there: {error}; replace the disk"
        raise StoreFormatError(path, what) from error


def narrow(commit_log: CommitLog, mark: SuspectMark, offset: int) -> None:
    """The log is open: the suspicion begins at the record that the bad page cut, not before."""
    report, segment = mark.report, commit_log.segment_at(offset)
    if report is None or report.kind != "rot" or segment is None:
        return
    boundary, _ = whole_records_end(commit_log, segment.start_offset, offset)
    end = max(report.end_offset, commit_log.max_offset)
    mark.set(replace(report, offset=boundary, end_offset=end))
