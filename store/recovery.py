"""Where the log ends after a start, and whether what is there can be trusted.

R24: only a torn tail is cut, which is a place where whole records end, at or above the stored
confirmOffset, with no whole record anywhere behind it. Everything else (a flipped byte with records
behind it, a missing file, a log that ends below what it had confirmed) is damage: it is named, the
bytes stay as they are, and the store opens only up to it.

Our own recovery offset in the checkpoint says from where to look; without it (a Java store) the
place is found as Java finds it (`CommitLog.recoverNormally`, `recoverAbnormally`).
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from epoch.durable_file import remove_file, replace_file
from protocol.record import RecordHead
from store.checkpoint import StoreCheckpoint
from store.commit_log import CommitLog
from store.log_scan import LogScanner, find_valid_record, whole_records_end
from store.mapped_file import Segment

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DamageReport:
    """The log is not what it was: from `offset` on it cannot be read.

    `end_offset` is up to where it may once have vouched for bytes; `discarded` tells that the
    damaged part was cut off, to be fetched again from a master.
    """

    file: str
    offset: int
    what: str
    end_offset: int
    discarded: bool = False

    def __str__(self) -> str:
        return f"{self.file} at offset {self.offset}: {self.what}"


class SuspectMark:
    """The durable memory that this log may miss what it acknowledged, until it is level again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.report: DamageReport | None = None
        if path.exists():
            self.report = DamageReport(**json.loads(path.read_bytes()))

    def set(self, report: DamageReport) -> None:
        self.report = report
        replace_file(self._path, json.dumps(asdict(report)).encode())

    def set_discarded(self) -> None:
        if self.report is not None:
            self.set(replace(self.report, discarded=True))

    def clear(self) -> None:
        self.report = None
        remove_file(self._path)


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """The outcome: whole, verified records are in [start_offset, end_offset)."""

    start_offset: int
    end_offset: int
    damage: DamageReport | None


def recover_log(
    commit_log: CommitLog, start_offset: int, stored_confirm_offset: int, *, was_clean: bool
) -> RecoveredLog:
    """Find the end of the log by reading it, CRCs checked, from `start_offset`, a record boundary.

    A torn tail is zeroed and durable on return; at damage nothing is touched. Sets the log's end.
    What was read after an unclean stop may be in the page cache only: it counts as flushed when it
    was flushed by this process.
    """
    end, problem = whole_records_end(commit_log, start_offset, commit_log.end_of_segments)
    damage = _find_damage(commit_log, end, problem, stored_confirm_offset)
    if damage is None:
        cut_torn_tail(commit_log, end)
    else:
        log.error("commit_log_damaged file=%s offset=%d what=%s", *_fields(damage))
    commit_log.set_end(end, None if was_clean else start_offset)
    return RecoveredLog(start_offset, end, damage)


def _fields(damage: DamageReport) -> tuple[str, int, str]:
    return damage.file, damage.offset, damage.what


def _find_damage(
    commit_log: CommitLog, end: int, problem: str | None, stored_confirm_offset: int
) -> DamageReport | None:
    if commit_log.gap is not None and end == commit_log.end_of_segments:
        path, offset = commit_log.gap
        return DamageReport(
            str(path), offset, "the file is missing, later ones are there", _end_of(commit_log)
        )
    what = problem or "the log ends"
    behind = find_valid_record(commit_log, end)
    if behind is None and commit_log.gap is not None:
        behind = commit_log.gap[1] + commit_log.segment_size
    if behind is not None:
        what = f"{what}, but there are records behind it, at {behind}"
    elif end < stored_confirm_offset:
        what = f"{what}, below the confirmed offset {stored_confirm_offset}"
    else:
        return None
    last = max(_end_of(commit_log), stored_confirm_offset)
    return DamageReport(commit_log.file_of(end), end, what, last)


def _end_of(commit_log: CommitLog) -> int:
    """A bound above everything that the log ever held."""
    files = commit_log.detached_files
    if files:
        return int(files[-1].name) + commit_log.segment_size
    for segment in reversed(commit_log.segments):
        data_end = segment.data_end()
        if data_end:
            return segment.start_offset + data_end
    return commit_log.min_offset


def cut_torn_tail(commit_log: CommitLog, end: int) -> None:
    """Make everything behind `end` zero, durably: one empty segment ahead may stay."""
    keep = commit_log.segment_at(end)
    while commit_log.segments and commit_log.segments[-1] is not keep:
        last = commit_log.segments[-1]
        is_next = last.start_offset == (keep.end_offset if keep else end)
        if is_next and last.data_end() == 0:
            break
        commit_log.drop_last_segment(None)
    if keep is not None:
        data_end = keep.start_offset + keep.data_end(end - keep.start_offset)
        if data_end > end:
            log.warning("torn_tail_cut file=%s offset=%d bytes=%d", keep.path, end, data_end - end)
            commit_log.zero_from(end, data_end)


def java_start_offset(
    commit_log: CommitLog, checkpoint: StoreCheckpoint, *, dispatched_end: int, clean: bool
) -> int:
    """Where Java would begin to read the log: always the start of a segment.

    After a clean stop the newest segment whose first record is good and lies within what the
    consume queues have; else the newest whose first record is older than the checkpoint.
    """
    for segment in reversed(commit_log.segments):
        head = _first_record(commit_log, segment)
        if head is None:
            continue
        if clean:
            if segment.start_offset <= dispatched_end:
                return segment.start_offset
        elif 0 < head.store_timestamp <= checkpoint.min_timestamp:
            return segment.start_offset
    return commit_log.min_offset


def _first_record(commit_log: CommitLog, segment: Segment) -> RecordHead | None:
    return LogScanner(commit_log, segment.start_offset, segment.end_offset, check_crc=True).next()
