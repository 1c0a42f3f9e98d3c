"""Why this log may lack what it acknowledged (R17, R24), and the durable note of it.

Three things make a log suspect: damage found in it, a failed fdatasync, and an unclean stop under
another boot of the kernel, which lost the page cache (not if every ack followed an fdatasync:
SYNC_FLUSH with haSyncFlush). The file `abort` exists from start to clean stop, as in Java; its
lines are ours. `suspect` exists until the log has caught up with its master again, or an operator
repairs it.

If the last run ended at a page that the disk could not read, `runtime.read_faults` noted it. `mend`
reads it by `pread`, which gives an error and no signal. If it still fails, the log is suspect from
that record on, and the page is overwritten with zeros: the disk gives another sector, and the
record fails its CRC like other damage and is fetched from the master.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

from batonmq.protocol.codes import LONG_MAX
from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.numbers import natural_number
from batonmq.runtime import disk
from batonmq.runtime.durable_file import remove_file, replace_file, show_file, write_all
from batonmq.runtime.read_faults import ReadFault
from batonmq.store.commit_log import CommitLog
from batonmq.store.config import StoreConfig
from batonmq.store.errors import StoreFormatError
from batonmq.store.log_scan import whole_records_end

log = logging.getLogger(__name__)

_BOOT_ID_PATH: Final = Path("/proc/sys/kernel/random/boot_id")
_FLUSHED: Final = "flushed"
_CACHED: Final = "cached"
Kind = Literal["damage", "fsync", "reboot", "rot"]

_PAGE: Final = mmap.PAGESIZE
_PAGES_LOOKED_AT: Final = 256  # bad sectors come in groups


def kernel_boot_id() -> str:
    """The random id of this boot of the kernel; "" if unknown."""
    try:
        return _BOOT_ID_PATH.read_text("ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class RunMark:
    """What the `abort` file says of the run that left it. `acks_flushed`: nothing was acked before
    it was on this disk. `boot_id`: "" if unknown, as after a Java broker."""

    boot_id: str
    acks_flushed: bool

    @classmethod
    def read(cls, path: Path) -> RunMark | None:
        """None after a clean stop."""
        try:
            lines = disk.read_bytes(path).decode("ascii", errors="replace").split("\n")
        except FileNotFoundError:
            return None
        except OSError as error:
            disk.check_unreadable(error)
            log.error("abort_file_unreadable reason=%s", error)
            return cls("unknown", acks_flushed=False)  # no boot has this id, so the log is suspect
        lines += ["", ""]
        return cls(lines[1], lines[2] == _FLUSHED)

    def write(self, path: Path) -> None:
        """Durable on return. Raises OSError."""
        kind = _FLUSHED if self.acks_flushed else _CACHED
        replace_file(path, f"{os.getpid()}\n{self.boot_id}\n{kind}\n".encode())

    def survived(self, boot_id: str) -> bool:
        """Whether what that run acked is still there, although it did not end cleanly."""
        return self.acks_flushed or not self.boot_id or not boot_id or self.boot_id == boot_id


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The log may lack bytes at or above `offset`, a record boundary. `kind`: "damage" is at the
    log's end, where nothing can follow; "rot" is a bad record far below it. `end_offset`: the
    highest end that it may have vouched for. `discarded`: the untrusted part was cut, to be fetched
    from a master."""

    file: str
    offset: int
    what: str
    end_offset: int
    discarded: bool = False
    kind: Kind = "damage"
    until_level: bool = False
    """`end_offset` is only what can still be seen: only catching up with a master ends the
    suspicion."""

    @property
    def blocks_writes(self) -> bool:
        """Whether nothing may be appended before the bad bytes are gone."""
        return self.kind == "damage" and not self.discarded

    def __str__(self) -> str:
        if not self.file:  # no place in the log
            return self.what
        return f"{self.file} at offset {self.offset}: {self.what}"


class SuspectMark:
    """The newest suspicion; it outlives the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_stored = True
        self._disk_failed = False
        self.report: Suspicion | None = None
        if path.exists():
            self.report = _decoded(path)

    @property
    def reason(self) -> str:
        return "" if self.report is None else str(self.report)

    def set(self, report: Suspicion) -> None:
        """Durable on return; kept in memory even if the disk refuses. Raises OSError."""
        self.report = report
        self._is_stored = False
        replace_file(self._path, _encoded(report))
        self._is_stored = True

    def add(self, damage: Suspicion) -> None:
        """Damage was found at the log's end; what was bad below it stays bad. Durable on return.
        Raises OSError."""
        before = self.report
        if before is None:
            self.set(damage)
            return
        # A reboot has no place in the log; discarded bytes are fetched again, or missing.
        is_no_place = before.kind == "reboot" or before.discarded
        self.set(
            replace(
                damage if is_no_place or damage.offset <= before.offset else before,
                end_offset=max(before.end_offset, damage.end_offset),
                discarded=False,
                kind="damage",
                until_level=damage.until_level or before.until_level or before.kind == "reboot",
            )
        )

    def note_damage(self, error: CorruptLogError, end_offset: int, kind: Kind = "damage") -> None:
        """Damage in a running store is remembered, so that it is fetched again (R24)."""
        self._note(Suspicion(error.file, error.offset, error.what, end_offset, kind=kind))

    def note_disk_failure(self, error: OSError, commit_log: CommitLog, synced_offset: int) -> None:
        """A write or fdatasync failed. The kernel may show pages as clean that are on no disk, so
        nothing above the last good sync can be trusted. Nothing in this process ends that suspicion
        (R40)."""
        self._disk_failed = True
        what = f"the disk failed, what was written after its last good sync may be lost: {error}"
        before, offset, end = self.report, synced_offset, commit_log.max_offset
        if before is not None and before.blocks_writes:
            return  # the earlier reason covers more
        if before is not None and before.kind != "reboot":
            offset, end = min(offset, before.offset), max(end, before.end_offset)
        until_level = before is not None and (before.until_level or before.kind == "reboot")
        file = commit_log.file_of(offset)
        self._note(Suspicion(file, offset, what, end, kind="fsync", until_level=until_level))

    def _note(self, suspicion: Suspicion) -> None:
        log.error("log_suspect reason=%s", suspicion)
        try:
            self.set(suspicion)
        except OSError as error:
            log.error("suspicion_not_durable reason=%r", error)
            self.show()  # the page cache outlives the process

    def show(self) -> None:
        """Writes the suspicion for the next start, synced or not. Without a reboot that is enough;
        after one, what was lost shows itself."""
        if self._is_stored or self.report is None:
            return
        try:
            show_file(self._path, _encoded(self.report).decode())
        except OSError as error:
            log.error("suspicion_not_stored reason=%r", error)
        else:
            self._is_stored = True

    def set_discarded(self) -> None:
        if self.report is not None:
            self.set(replace(self.report, discarded=True))

    def clear(self) -> None:
        """The log is trusted again, except after a disk failure of this process. Raises OSError;
        then it stays suspect."""
        if self._disk_failed:
            return
        remove_file(self._path)
        self.report = None


def _decoded(path: Path) -> Suspicion:
    """What the file says. An unreadable one was written while the disk failed."""
    try:
        return Suspicion(**json.loads(disk.read_bytes(path)))
    except (ValueError, TypeError, OSError) as error:
        disk.check_unreadable(error)
        what = f"{path} was written while the disk failed, and cannot be read"
        # The strictest that it may have said. Where is unknown: the start checks and writes again
        # what is above the checkpoint.
        return Suspicion("", LONG_MAX, what, 0, kind="fsync", until_level=True)


def _encoded(report: Suspicion) -> bytes:
    return json.dumps(asdict(report)).encode()


def fault_note(root: Path) -> Path:
    """Where a process notes the page at which it died."""
    return root / "read_fault"


def mend(config: StoreConfig, mark: SuspectMark) -> int | None:
    """Before the log is opened: the offset of the first unreadable byte, made readable as zeros;
    None if there is none. Raises OSError, StoreFormatError if it cannot be written either."""
    note = fault_note(config.root)
    if not note.exists():
        return None
    fault = ReadFault.read(note)
    path = Path(fault.file if fault is not None else "")
    is_in_log = path.parent.resolve() == config.commit_log_folder.resolve()
    if fault is None or not (is_in_log and natural_number(path.name) is not None and path.exists()):
        log.warning("read_fault_elsewhere fault=%s", fault)
        remove_file(note)
        return None
    fd = disk.open(path, os.O_RDWR)
    try:
        # Only from the noted page on: to read all of the log would take minutes.
        bad = _bad_pages(fd, fault.position - fault.position % _PAGE)
        size = os.fstat(fd).st_size
        # A page behind the end of a file that was shortened under the map is SIGBUS, too.
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
    """Positions of unreadable pages from `first` on."""
    bad = []
    size = os.fstat(fd).st_size
    for position in range(first, min(first + _PAGES_LOOKED_AT * _PAGE, size), _PAGE):
        try:
            disk.pread(fd, _PAGE, position)
        except OSError as error:
            log.error("page_unreadable position=%d reason=%s", position, error)
            bad.append(position)
    return bad


def _suspect(mark: SuspectMark, path: Path, position: int) -> None:
    """Durable before anything is overwritten; from the segment's start until it can be scanned."""
    what = f"the disk cannot read what was written at position {position} of this file"
    start = int(path.name)
    log.error("bad_sector file=%s position=%d", path, position)
    # Damage at the log's end is more: it also stops all writes.
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
        if disk.is_short(error):
            raise
        what = f"cannot be read at position {bad[0]}, nor written there: {error}; replace the disk"
        raise StoreFormatError(path, what) from error


def narrow(commit_log: CommitLog, mark: SuspectMark, offset: int) -> None:
    """The log is open: the suspicion begins at the record that the bad page cut."""
    report, segment = mark.report, commit_log.segment_at(offset)
    if report is None or report.kind != "rot" or segment is None:
        return
    boundary, _ = whole_records_end(commit_log, segment.start_offset, offset)
    end = max(report.end_offset, commit_log.max_offset)
    mark.set(replace(report, offset=boundary, end_offset=end))
