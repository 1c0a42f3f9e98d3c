"""Regular work: derived data to disk, the checkpoint, expired segments.

The jobs thread syncs log, consume queues and index, and writes the checkpoint last. A truncation in
between voids the running round (`void_running`), so no checkpoint covers bytes that were cut.
`decide_expiry` is pure; the last segment never expires, and no segment because of a clock alone
(`LogTime`). Origin: Java `FlushConsumeQueueService`, `CleanCommitLogService`,
`CleanConsumeQueueService`.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

from batonmq.protocol.errors import CorruptLogError
from batonmq.runtime import disk
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.durable_file import sync_below, sync_directory
from batonmq.store.background import Background, DiskSpaceWatch
from batonmq.store.checkpoint import UNKNOWN, QueueTotals
from batonmq.store.commit_log import Segment
from batonmq.store.config import StoreConfig
from batonmq.store.consume_queue import ConsumeQueue, has_expired_file
from batonmq.store.dispatch import LogDispatcher
from batonmq.store.store_files import StoreFiles

log = logging.getLogger(__name__)

# The cost of a slice, in writes to a queue file (20 us each). With at most a hundred slices a
# second, upkeep takes at most a tenth of the loop.
_SLICE_COST: Final = 48
_FLUSH: Final = "flush-slices"
_TRIM: Final = "trim-slices"
_TRIM_EPOCHS: Final = "trim-epochs"
_TRIMMED_AT_ONCE: Final = 32
_NEW_FILE_COST: Final = 2
_FILES_AT_ONCE: Final = 192
_UNITS: Final = "KMGTPE"


def disk_use(folders: tuple[Path, ...]) -> float:
    """Used part of the fullest file system of `folders`, 0.0 to 1.0, as in `df`: reserved space and
    quotas count neither as used nor as free. Origin: UtilAll.getDiskPartitionSpaceUsedPercent."""
    ratios = []
    for folder in folders:
        space = os.statvfs(folder)
        used = space.f_blocks - space.f_bfree
        ratios.append(used / max(used + space.f_bavail, 1))
    return max(ratios)


def disk_space(folder: Path) -> tuple[int, int]:
    """(used, free) bytes of a file system, as `df` says it. Raises OSError."""
    space = os.statvfs(folder)
    return (space.f_blocks - space.f_bfree) * space.f_frsize, space.f_bavail * space.f_frsize


def disk_capacity(folder: Path) -> str:
    """Size and free space of a file system, in Java's words. Raises OSError."""
    space = os.statvfs(folder)
    # Java also counts what is reserved: a full disk then seems to have space.
    total, free = (
        byte_count(blocks * space.f_frsize) for blocks in (space.f_blocks, space.f_bavail)
    )
    return f"Total : {total}, Free : {free}."


def byte_count(count: int) -> str:
    """As Java shows bytes: 512 B, 1.5 KiB. Origin: MixAll.humanReadableByteCount."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(_UNITS))
    return f"{count / (1 << 10 * power):.1f} {_UNITS[power - 1]}iB"


@dataclass(frozen=True, slots=True)
class Round:
    """The checkpoint that one round of upkeep leads to."""

    dispatched_offset: int
    log_timestamp: int
    index_timestamp: int
    generation: int
    queue_totals: QueueTotals
    totals_generation: int


_HOUR_MS = 3_600_000


DiskUseOf = Callable[[tuple[Path, ...]], float]


@dataclass(frozen=True, slots=True)
class ExpiryDecision:
    """Remove the `count` oldest segments; refuse puts while `disk_full`."""

    count: int
    disk_full: bool
    reason: str


def decide_expiry(
    config: StoreConfig,
    modified_ms: Sequence[int],
    *,
    now_ms: int,
    hour: int,
    use: float,
    manual: bool = False,
) -> ExpiryDecision:
    """What to delete now. `modified_ms`: last write times of all segments but the last, oldest
    first; `hour`: the local hour; `use`: see `disk_use`; `manual`: an operator's order
    (DELETE_EXPIRED_COMMITLOG, 329)."""
    percent = use * 100
    disk_full = percent > config.disk_space_warning_level_ratio
    forced = config.clean_file_forcibly_enable and (
        disk_full or percent > config.disk_space_clean_forcibly_ratio
    )
    if forced:
        count, reason = len(modified_ms), "disk"
    elif percent > config.disk_max_used_space_ratio:
        count, reason = _expired(config, modified_ms, now_ms), "disk"
    elif manual:
        count, reason = _expired(config, modified_ms, now_ms), "manual"
    elif hour in config.delete_hours:
        count, reason = _expired(config, modified_ms, now_ms), "age"
    else:
        count, reason = 0, ""
    return ExpiryDecision(min(count, config.delete_file_batch_max), disk_full, reason)


def _expired(config: StoreConfig, modified_ms: Sequence[int], now_ms: int) -> int:
    """How many of the oldest segments are expired, up to the first that is not."""
    oldest_kept_ms = now_ms - config.file_reserved_time * _HOUR_MS
    kept = (at for at, modified in enumerate(modified_ms) if modified > oldest_kept_ms)
    return next(kept, len(modified_ms))


class LogTime:
    """The time that expiry uses: a clock that jumps deletes nothing. It is the newest store
    timestamp plus the run time of this process since that was seen, at most the wall clock."""

    def __init__(self, wall_ms: int, ran_ms: int) -> None:
        """`ran_ms`: `runtime.clock.boot_ms`, here and below."""
        self._wall_at_zero_ms = wall_ms - ran_ms
        self._newest_ms = 0
        self._seen_at_ms = ran_ms

    def now_ms(self, wall_ms: int, ran_ms: int, newest_stored_ms: int, *, manual: bool) -> int:
        """`manual`: an operator asks and has looked at the clock."""
        if newest_stored_ms > self._newest_ms:
            self._newest_ms, self._seen_at_ms = newest_stored_ms, ran_ms
        supported_ms = self._newest_ms + ran_ms - self._seen_at_ms
        if not manual:
            # The first message after a jump carries the jumped time. So no clock counts that gained
            # more than an hour on this process.
            supported_ms = min(supported_ms, self._wall_at_zero_ms + ran_ms + _HOUR_MS)
        return min(wall_ms, supported_ms)


class CheckpointWriter:
    """Writes derived data and checkpoint in the order that recovery relies on."""

    def __init__(
        self,
        files: StoreFiles,
        dispatcher: LogDispatcher,
        before_checkpoint: Callable[[], Iterable[Callable[[], None]]] | None,
        background: Background,
        space: DiskSpaceWatch,
    ) -> None:
        """`before_checkpoint`: see `MessageStore`."""
        self._space = space
        self._health = files.log.health
        self._files = files
        self._checkpoint = files.checkpoint
        self._dispatcher = dispatcher
        self.before_checkpoint = before_checkpoint
        self.background = background
        self._lock = threading.Lock()
        self._generation = 0
        self._totals_generation = 0
        self._files_expire = False
        # Written and not yet given to a job, for queues and index.
        self._queue_paths: list[Path] = []
        self._index_paths: list[Path] = []
        self._is_running = False

    def flush_derived(self) -> None:
        """Brings consume queues, index and checkpoint to disk: in slices and a thread while the
        loop runs, else at once. On a full disk nothing is lost, and the next call tries again
        (R45). A failed store writes nothing (R37)."""
        if self._health.has_failed:
            return
        background, epochs = self.background, self._files.epochs
        background.retry_jobs()
        if self._space.is_waiting or background.is_slicing(_FLUSH):
            return
        probe = self._space.begin_probe()
        if self.before_checkpoint is not None:
            for job in self.before_checkpoint():
                background.run_job(job)
        for job in self._files.positions.writes_due():
            background.run_job(job)
        if not epochs.is_settled:
            background.run_job(epochs.settle)
        background.in_slices(_FLUSH, self._round(probe))

    def _round(self, probe: int | None) -> Iterator[None]:
        """One round in the owner's thread, a slice per step. `probe`: of a disk that was full."""
        work = self.begin()
        if work is not None:
            try:
                yield from self._write_queues()
            except OSError as error:
                self._health.pause_or_raise(error)
            else:
                self._hand_over(work)
        if probe is not None:
            self.background.run_job(lambda: self._space.end_probe(probe))

    def begin(self) -> Round | None:
        """A round makes durable what is dispatched now; queues may get more meanwhile. None if the
        last round still runs, or the index has no disk space."""
        if self._is_running or self._health.has_failed:
            return None
        try:
            self._index_paths += self._files.index.write_back()
        except OSError as error:
            self._health.pause_or_raise(error)
            return None
        return Round(
            self._dispatcher.offset,
            self._dispatcher.last_store_timestamp,
            self._files.index.end_timestamp,
            self._generation,
            QueueTotals(
                self._dispatcher.offset,
                self._files.consume_queues.ends_total,
                UNKNOWN if self._files_expire else self._files.consume_queues.begins_total,
            ),
            self._totals_generation,
        )

    def _write_queues(self) -> Iterator[None]:
        """Writes every tail of the round to its file. Raises OSError; then the next round syncs
        what was written."""
        left = _SLICE_COST
        dirty = self._files.consume_queues.dirty()
        for start in range(0, len(dirty), _FILES_AT_ONCE):
            some = dirty[start : start + _FILES_AT_ONCE]
            yield from self._make_files(some)
            for queue in some:
                left -= 1 if queue.missing_file is None else _NEW_FILE_COST
                self._queue_paths += queue.write_back()
                if left <= 0:
                    yield
                    left = _SLICE_COST

    def _make_files(self, queues: Sequence[ConsumeQueue]) -> Iterator[None]:
        """The files that they need and lack, in the thread if there is one."""
        if not self.background.has_threads:
            return
        making = self._files.consume_queues.missing_files(queues)
        if making is not None:
            yield from self.background.job_in_slices(making.run)
            self._files.consume_queues.note_made(making)

    def _hand_over(self, work: Round) -> None:
        """The rest of a round waits for the disk, so it is a job; none if nothing is new."""
        checkpoint = self._checkpoint
        # An idle broker does not write its checkpoint again and again.
        is_covered = checkpoint.recovery_offset == work.dispatched_offset
        is_covered = is_covered and checkpoint.queue_totals == work.queue_totals
        is_covered = is_covered and checkpoint.confirm_phy_offset == work.dispatched_offset
        if is_covered and not self._queue_paths and not self._index_paths:
            return
        queues, index = self._queue_paths, self._index_paths
        self._queue_paths, self._index_paths = [], []
        self._is_running = True
        self.background.run_job(lambda: self.finish(work, queues, index))

    def finish(self, work: Round, queues: Sequence[Path], index: Sequence[Path]) -> None:
        """Makes durable what a round has written, then writes the checkpoint; in any thread. Raises
        OSError; on a full disk it can be repeated."""
        try:
            # The log first: no unit on the disk may point behind it.
            self._files.log.datasync_to(work.dispatched_offset)
            _sync_derived(self._files.consume_queues.root, queues)
            try:
                _sync_derived(self._files.index.root, index)
            except OSError as error:
                if disk.is_short(error):
                    raise
                self._files.index.fail(error)
            with self._lock:
                if work.generation == self._generation and self._files.index.may_be_passed():
                    self._write(work)
        except OSError as error:
            self._is_running = self._health.passes(error)  # then it is repeated
            raise
        self._is_running = False

    def _write(self, work: Round) -> None:
        self._files.log.health.check_usable()  # a failed store gets no checkpoint (R37, R40)
        checkpoint = self._checkpoint
        # A damaged log is dispatched less far than before; only a truncation lowers this.
        checkpoint.confirm_phy_offset = max(checkpoint.confirm_phy_offset, work.dispatched_offset)
        checkpoint.recovery_offset = work.dispatched_offset
        # A queue may have been removed since the round counted them.
        is_current = work.totals_generation == self._totals_generation
        checkpoint.queue_totals = work.queue_totals if is_current else None
        if work.log_timestamp:
            checkpoint.physic_msg_timestamp = work.log_timestamp
            checkpoint.logics_msg_timestamp = work.log_timestamp
        if work.index_timestamp:
            checkpoint.index_msg_timestamp = work.index_timestamp
        checkpoint.master_flushed_offset = self._files.log.flushed_offset
        checkpoint.flush()

    def forget_queue_totals(self) -> None:
        """Queues or files of them will be removed: a start must not take them for lost. Durable on
        return; in any thread. Raises OSError."""
        with self._lock:
            self._totals_generation += 1
            if self._checkpoint.queue_totals is not None:
                self._checkpoint.queue_totals = None
                self._checkpoint.flush()

    @contextmanager
    def files_expire(self) -> Iterator[None]:
        """Meanwhile no checkpoint says where the files of the queues begin."""
        self._files_expire = True
        try:
            yield
        finally:
            self._files_expire = False

    def void_running(self) -> None:
        """Lets a round in another thread end without writing the checkpoint."""
        with self._lock:
            self._generation += 1


def _sync_derived(folder: Path, paths: Sequence[Path]) -> None:
    """Raises OSError, but not a full disk's: what a write-back lost is lost (R40). Without file
    descriptors nothing was lost, as no sync was tried (R45)."""
    try:
        sync_below(folder, paths)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise OSError(errno.EIO, f"not written back: {error}", str(folder)) from error


class Expirer:
    """Removes old segments, with the units, entries and epochs that point into them."""

    def __init__(
        self,
        files: StoreFiles,
        dispatcher: LogDispatcher,
        checkpoints: CheckpointWriter,
        clock_ms: Callable[[], int],
        disk_use_of: DiskUseOf,
        may_expire_below: Callable[[], int],
        space: DiskSpaceWatch,
    ) -> None:
        """No segment that ends above `may_expire_below` goes, whatever the disk (R38)."""
        self._files = files
        self._dispatcher = dispatcher
        self._may_expire_below = may_expire_below
        self._space = space
        self._checkpoints = checkpoints
        self._background = checkpoints.background
        self._clock_ms = clock_ms
        self._disk_use_of = disk_use_of
        self._leaving: list[Segment] = []  # off the log, still on the disk; oldest first
        self._log_time = LogTime(clock_ms(), boot_ms())
        self._is_refusing = False

    def clean_expired(self, *, manual: bool = False) -> int:
        """Removes expired segments (`manual`: at any hour), refuses puts on a full disk; how many
        were removed. Files are unlinked in a thread, and queues follow in slices: until then they
        show units whose records are gone."""
        if self._background.is_slicing(_TRIM):
            return 0
        decision = self._decide(self._clock_ms(), manual=manual)
        commit_log = self._files.log
        # At once, so that no reader begins at a file that is about to go.
        removed = [commit_log.take_first_segment() for _ in range(decision.count)]
        self._refuse_puts(decision.disk_full)
        self._unlink(removed)
        if decision.count:
            log.info(
                "segments_expired count=%d reason=%s min_offset=%d",
                decision.count, decision.reason, commit_log.min_offset,
            )  # fmt: skip
            # Last: what is wrong with a queue must not keep the files on a disk that is full.
            self._background.in_slices(_TRIM, self._trim(commit_log.min_offset))
        return decision.count

    def notice_space(self) -> None:
        """Between rounds: takes puts again as soon as the disk is clearly below the level at which
        they are refused. At its edge the next segment would fill it again."""
        if not self._is_refusing:
            return
        if self._use() * 100 <= self._files.config.puts_again_percent:
            self._refuse_puts(False)

    def _refuse_puts(self, is_full: bool) -> None:
        self._is_refusing = is_full
        level = self._files.config.disk_space_warning_level_ratio
        self._space.set_watermark(f"more than {level} % of it is used" if is_full else "")

    def _use(self) -> float:
        return self._disk_use_of((self._files.log.folder, self._files.config.root))

    def _unlink(self, segments: list[Segment]) -> None:
        """Oldest first. What a start would read again, above the checkpoint, is written first: its
        records may be topic deletions that the log no longer shows (R39)."""
        covered = self._files.checkpoint.recovery_offset or 0
        free = [segment for segment in segments if segment.end_offset <= covered]
        rest = segments[len(free) :]
        if free or self._leaving:
            self._background.free_space(lambda: self._free(free))
        if rest:
            before = self._checkpoints.before_checkpoint
            for job in before() if before is not None else ():
                self._background.run_job(job)
            # In the order of jobs: the files go after what the jobs above have written.
            self._background.run_job(lambda: self._background.free_space(lambda: self._free(rest)))

    def _free(self, segments: list[Segment]) -> None:
        """In the thread that frees space. May be repeated: it takes each segment over once. If the
        sync of the folder fails, the sync after the next segments covers these too."""
        self._leaving += segments
        segments.clear()
        if gone_below := unlink_segments(self._leaving):
            epochs = self._trim_epochs(gone_below)
            self._background.in_loop(lambda: self._background.in_slices(_TRIM_EPOCHS, epochs))

    def _trim_epochs(self, gone_below: int) -> Iterator[None]:
        """After the files (R25): a start that still finds a segment needs its epochs to give its
        bytes to slaves."""
        try:
            self._files.epochs.truncate_prefix_by_offset(gone_below)
        except OSError as error:
            if not disk.is_short(error):
                raise
            log.warning("epochs_not_trimmed reason=%s", error)  # they go with the next segments
        yield

    def _decide(self, now_ms: int, *, manual: bool) -> ExpiryDecision:
        commit_log, config = self._files.log, self._files.config
        # What is not yet dispatched stays, whatever its age.
        whole_below = min(self._dispatcher.offset, self._may_expire_below())
        candidates = [s for s in commit_log.segments[:-1] if s.end_offset <= whole_below]
        return decide_expiry(
            config,
            [int(os.stat(segment.path).st_mtime * 1000) for segment in candidates],
            now_ms=self._log_time.now_ms(
                now_ms,
                boot_ms(),
                max(
                    self._dispatcher.last_store_timestamp,
                    self._files.checkpoint.physic_msg_timestamp,
                ),
                manual=manual,
            ),
            hour=datetime.fromtimestamp(now_ms / 1000).hour,
            use=self._use(),
            manual=manual,
        )

    def _trim(self, min_offset: int) -> Iterator[None]:
        self._files.index.delete_expired(min_offset)
        queues, expired = self._files.consume_queues, list[ConsumeQueue]()
        for number, queue in enumerate(queues.queues(), 1):
            try:
                queue.correct_min_offset(min_offset)
                if has_expired_file(queue, min_offset):
                    expired.append(queue)
            except CorruptLogError as error:  # the other queues do not wait for it
                log.error("consume_queue_not_trimmed reason=%s", error)
            if number % _TRIMMED_AT_ONCE == 0:
                yield
        if not expired:
            return
        with self._checkpoints.files_expire():
            # Else a start after a kill would miss these files, and read the whole log for them.
            try:
                for _ in self._background.job_in_slices(self._checkpoints.forget_queue_totals):
                    # It waits behind a job that needs space: the next segments must go first.
                    if self._files.log.health.full:
                        return
                    yield
            except OSError as error:
                if not disk.is_short(error):
                    raise
                log.warning("queue_files_not_trimmed reason=%s", error)  # they go with the next
                return
            for number, queue in enumerate(expired, 1):
                try:
                    queue.delete_expired(min_offset)
                except CorruptLogError as error:
                    log.error("queue_files_not_trimmed reason=%s", error)
                if number % _TRIMMED_AT_ONCE == 0:
                    yield
        folders = [queue.folder for queue in expired]
        self._background.run_job(partial(sync_below, queues.root, folders))


def unlink_segments(segments: list[Segment]) -> int:
    """Closes and unlinks, oldest first, in a thread (large files are slow), and takes them out of
    the list. The offset (exclusive) below which all are durably gone; 0 if none is."""
    gone = None
    while segments:
        segments[0].close()
        try:
            disk.unlink(segments[0].path)
        except FileNotFoundError:
            pass  # somebody else has made space
        except OSError as error:
            log.warning("segment_unlink_failed file=%s reason=%s", segments[0].path, error)
            break  # later ones wait: a start would take the hole before them for lost bytes (R24)
        gone = segments.pop(0)
    if gone is None:
        return 0
    sync_directory(gone.path.parent)
    return gone.end_offset
