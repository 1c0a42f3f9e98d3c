"""Regular work beside the hot path: derived data to disk, the checkpoint, expired segments.

The checkpoint follows what it speaks of: log, consume queues and index are synced first, in the
jobs thread, then it is written. A truncation that comes in between makes the running round void
(`void_running`), so that no checkpoint speaks of bytes that were cut. Origin: Java
`FlushConsumeQueueService`, `CleanCommitLogService`, `CleanConsumeQueueService`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from epoch.durable_file import sync_directory, sync_file
from epoch.file_cache import EpochFileCache
from store.checkpoint import StoreCheckpoint
from store.commit_log import CommitLog
from store.config import StoreConfig
from store.consume_queue_store import ConsumeQueueStore
from store.dispatch import Dispatcher
from store.expiry import DiskUse, ExpiryDecision, decide_expiry
from store.index_service import IndexService
from store.mapped_file import Segment
from store.reader_checks import VerifiedRecords

log = logging.getLogger(__name__)

DiskUseOf = Callable[[tuple[Path, ...]], DiskUse]


def disk_use(folders: tuple[Path, ...]) -> DiskUse:
    """How full the fullest file system of `folders` is."""
    ratios = []
    for folder in folders:
        space = os.statvfs(folder)
        ratios.append(1 - space.f_bavail / max(space.f_blocks, 1))
    return DiskUse(max(ratios))


@dataclass(frozen=True, slots=True)
class _Round:
    """What one round makes durable: files, and then this checkpoint."""

    paths: tuple[Path, ...]
    dispatched_offset: int
    log_timestamp: int
    index_timestamp: int
    generation: int


class CheckpointWriter:
    """Brings derived data and checkpoint to disk, in the order that recovery relies on."""

    def __init__(
        self,
        commit_log: CommitLog,
        checkpoint: StoreCheckpoint,
        consume_queues: ConsumeQueueStore,
        index: IndexService,
        dispatcher: Dispatcher,
    ) -> None:
        self._log = commit_log
        self._checkpoint = checkpoint
        self._consume_queues = consume_queues
        self._index = index
        self._dispatcher = dispatcher
        self._lock = threading.Lock()
        self._generation = 0
        self._is_running = False

    def begin(self) -> Callable[[], None] | None:
        """Start a round, in the owner's thread; the rest of it, for any thread, or None.

        None if the last round still runs or there is nothing new. The rest raises OSError.
        """
        if self._is_running:
            return None
        paths = (*self._consume_queues.write_back(), *self._index.write_back())
        dispatched = self._dispatcher.offset
        checkpoint = self._checkpoint
        is_level = (
            checkpoint.recovery_offset == dispatched == checkpoint.confirm_phy_offset and not paths
        )
        if is_level:
            return None
        self._is_running = True
        work = _Round(
            paths,
            dispatched,
            self._dispatcher.last_store_timestamp,
            self._index.end_timestamp,
            self._generation,
        )
        return lambda: self._finish(work)

    def _finish(self, work: _Round) -> None:
        try:
            self._log.datasync_to(work.dispatched_offset)
            for path in work.paths:
                sync_file(path)
            with self._lock:
                if work.generation == self._generation:
                    self._write(work)
        finally:
            self._is_running = False

    def _write(self, work: _Round) -> None:
        checkpoint = self._checkpoint
        # A damaged log is dispatched less far than it was; only a truncation lowers this.
        checkpoint.confirm_phy_offset = max(checkpoint.confirm_phy_offset, work.dispatched_offset)
        checkpoint.recovery_offset = work.dispatched_offset
        if work.log_timestamp:
            checkpoint.physic_msg_timestamp = work.log_timestamp
            checkpoint.logics_msg_timestamp = work.log_timestamp
        if work.index_timestamp:
            checkpoint.index_msg_timestamp = work.index_timestamp
        checkpoint.master_flushed_offset = self._log.flushed_offset
        checkpoint.flush()

    def void_running(self) -> None:
        """Let a round that is under way in another thread end without writing the checkpoint."""
        with self._lock:
            self._generation += 1


class Expirer:
    """Takes old segments off the log, with the units, entries and epochs that point into them."""

    def __init__(
        self,
        config: StoreConfig,
        commit_log: CommitLog,
        consume_queues: ConsumeQueueStore,
        index: IndexService,
        epochs: EpochFileCache,
        dispatcher: Dispatcher,
        verified: VerifiedRecords,
        *,
        disk_use_of: DiskUseOf,
    ) -> None:
        self._config = config
        self._log = commit_log
        self._consume_queues = consume_queues
        self._index = index
        self._epochs = epochs
        self._dispatcher = dispatcher
        self._verified = verified
        self._disk_use_of = disk_use_of

    def run(self, now_ms: int, *, manual: bool = False) -> tuple[ExpiryDecision, list[Segment]]:
        """Decide and take off; the segments returned are still to be closed and unlinked."""
        commit_log = self._log
        whole_below = self._dispatcher.offset  # what is not yet dispatched stays, whatever its age
        candidates = [s for s in commit_log.segments[:-1] if s.end_offset <= whole_below]
        decision = decide_expiry(
            self._config,
            [int(os.stat(segment.path).st_mtime * 1000) for segment in candidates],
            now_ms=now_ms,
            hour=datetime.fromtimestamp(now_ms / 1000).hour,
            disk=self._disk_use_of((commit_log.folder, self._config.root)),
            manual=manual,
        )
        removed = [commit_log.take_first_segment() for _ in range(decision.count)]
        if removed:
            self._trim(commit_log.min_offset)
            log.info(
                "segments_expired count=%d reason=%s min_offset=%d",
                len(removed), decision.reason, commit_log.min_offset,
            )  # fmt: skip
        return decision, removed

    def _trim(self, min_offset: int) -> None:
        self._consume_queues.delete_expired(min_offset)
        self._index.delete_expired(min_offset)
        self._epochs.truncate_prefix_by_offset(min_offset)
        self._verified.forget_below(min_offset)


def unlink_segments(segments: list[Segment]) -> None:
    """Close and unlink, oldest first; slow for large files, so meant for a thread."""
    for segment in segments:
        segment.close()
        try:
            os.unlink(segment.path)
        except OSError as error:
            log.warning("segment_unlink_failed file=%s error=%s", segment.path, error)
            return
    if segments:
        sync_directory(segments[0].path.parent)
