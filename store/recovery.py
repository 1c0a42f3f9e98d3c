"""Where the log ends after a start, and whether what is there can be trusted.

R24: only a torn tail is cut, which is a place where whole records end, at or above the stored
confirmOffset and what consume queues show, where bytes are missing and no whole record lies behind.
Everything else (a flipped byte, be it in the last record, a missing file, a log that ends below
what it had confirmed) is damage: it is named, the bytes stay as they are, and the store opens only
up to it.

Our own recovery offset in the checkpoint says from where to look; without it (a Java store) the
place is found as Java finds it (`CommitLog.recoverNormally`, `recoverAbnormally`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from protocol.record import RecordHead
from store.checkpoint import StoreCheckpoint
from store.commit_log import CommitLog
from store.log_scan import LogScanner, find_valid_record, whole_records_end
from store.mapped_file import Segment
from store.suspicion import Suspicion
from store.torn_tail import is_complete_but_bad

log = logging.getLogger(__name__)


class Confirmed(NamedTuple):
    """Ends of what was confirmed before the stop: by the checkpoint, and by consume queues."""

    stored_offset: int
    visible_offset: int


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """The outcome: whole, verified records are in [start_offset, end_offset)."""

    start_offset: int
    end_offset: int
    damage: Suspicion | None


def recover_log(
    commit_log: CommitLog, start_offset: int, confirmed: Confirmed, *, was_clean: bool
) -> RecoveredLog:
    """Find the end of the log by reading it, CRCs checked, from `start_offset`, a record boundary.

    A torn tail is zeroed and durable on return; at damage nothing is touched. Sets the log's end.
    What was read after an unclean stop may be in the page cache only: it counts as flushed when it
    was flushed by this process.
    """
    end, problem = whole_records_end(commit_log, start_offset, commit_log.end_of_segments)
    damage = _find_damage(commit_log, end, problem, confirmed)
    if damage is None:
        cut_torn_tail(commit_log, end)
    else:
        log.error("commit_log_damaged file=%s offset=%d what=%s", *_fields(damage))
    commit_log.set_end(end, None if was_clean else start_offset)
    return RecoveredLog(start_offset, end, damage)


def _fields(damage: Suspicion) -> tuple[str, int, str]:
    return damage.file, damage.offset, damage.what


def _find_damage(
    commit_log: CommitLog, end: int, problem: str | None, confirmed: Confirmed
) -> Suspicion | None:
    if commit_log.gap is not None and end == commit_log.end_of_segments:
        path, offset = commit_log.gap
        return Suspicion(
            str(path), offset, "the file is missing, later ones are there", _end_of(commit_log)
        )
    what = problem or "the log ends"
    behind = find_valid_record(commit_log, end)
    if behind is None and commit_log.gap is not None:
        behind = commit_log.gap[1] + commit_log.segment_size
    if behind is not None:
        what = f"{what}, but there are records behind it, at {behind}"
    elif end < confirmed.stored_offset:
        what = f"{what}, below the confirmed offset {confirmed.stored_offset}"
    elif end < confirmed.visible_offset:
        what = f"{what}, below what consume queues show, {confirmed.visible_offset}"
    elif is_complete_but_bad(commit_log, end):
        what = f"{what}, and nothing of the record is missing"
    else:
        return None
    last = max(_end_of(commit_log), *confirmed)
    return Suspicion(commit_log.file_of(end), end, what, last)


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
