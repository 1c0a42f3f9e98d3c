"""The files of a store under its root folder, opened together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from batonmq.epoch.file_cache import EpochFileCache
from batonmq.runtime.durable_file import replace_file
from batonmq.store import suspicion
from batonmq.store.checkpoint import StoreCheckpoint
from batonmq.store.commit_log import CommitLog
from batonmq.store.config import StoreConfig
from batonmq.store.disk_health import StoreHealth
from batonmq.store.index_service import IndexService
from batonmq.store.log_scan import may_end_at, newest_timestamp
from batonmq.store.queue_positions import QueuePositions
from batonmq.store.queue_table import ConsumeQueueStore
from batonmq.store.suspicion import RunMark, SuspectMark

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StoreFiles:
    """What is on disk. `last_run`: None after a clean stop. `has_damaged_queues`: an unreadable
    consume queue was removed and must be rebuilt."""

    config: StoreConfig
    last_run: RunMark | None
    has_damaged_queues: bool
    log: CommitLog
    checkpoint: StoreCheckpoint
    consume_queues: ConsumeQueueStore
    index: IndexService
    epochs: EpochFileCache
    suspect_mark: SuspectMark
    positions: QueuePositions
    visible_end: int = 0
    """The highest end that consume queues showed, before the recovery cut them."""

    @property
    def was_clean(self) -> bool:
        return self.last_run is None

    @property
    def has_lost_epochs(self) -> bool:
        return not self.epochs.entries and _classic_note(self.config.root).exists()

    def drop_epochs(self) -> None:
        """Classic mode, before the first write: later bytes belong to no epoch, and those could not
        be distinguished later (R48). Durable on return; raises OSError."""
        if self.epochs.entries:
            listed = ",".join(f"{e.epoch}-{e.start_offset}" for e in self.epochs.entries)
            replace_file(_classic_note(self.config.root), f"{listed}\n".encode())
            log.warning("epochs_dropped log_end=%d epochs=%s", self.log.max_offset, listed)
            self.epochs.replace_all(())

    def close(self, *, write_back: bool = True) -> None:
        """Closes all files; derived data goes to the page cache or is dropped; nothing is synced.
        May be repeated. Raises OSError if derived data cannot be written."""
        self.consume_queues.close(write_back=write_back)
        self.index.close(write_back=write_back)
        self.checkpoint.close()
        self.log.close()


def _classic_note(root: Path) -> Path:
    """The epochs that the log had before it was opened in classic mode (R48)."""
    return root / "epochsBeforeClassic"


def abort_path(root: Path) -> Path:
    """The file that exists from start to clean stop."""
    return root / "abort"


def load_files(config: StoreConfig, clock_ms: Callable[[], int], health: StoreHealth) -> StoreFiles:
    """Opens everything under the store's root; the log's end is not known yet. Raises
    StoreFormatError, CorruptLogError (an epoch file without a good copy), OSError. Origin: Java
    `DefaultMessageStore.load`."""
    with ExitStack() as if_it_fails:
        files = _open_files(config, clock_ms, health, if_it_fails)
        if_it_fails.pop_all()
    return files


def _open_files(
    config: StoreConfig, clock_ms: Callable[[], int], health: StoreHealth, opened: ExitStack
) -> StoreFiles:
    root = config.root
    last_run = RunMark.read(abort_path(root))
    checkpoint = StoreCheckpoint(root / "checkpoint")
    opened.callback(checkpoint.close)
    commit_log = CommitLog(config.commit_log_folder, config.mapped_file_size_commit_log, health)
    opened.callback(commit_log.close)
    suspect_mark = SuspectMark(root / "suspect")
    # Before the log is mapped: an unreadable page would end this process, too (SIGBUS).
    unreadable = suspicion.mend(config, suspect_mark)
    commit_log.load()
    if unreadable is not None:
        suspicion.narrow(commit_log, suspect_mark, unreadable)
    _doubt_checkpoint(checkpoint, commit_log)
    positions = QueuePositions(root / "queuePositions")
    consume_queues = ConsumeQueueStore(
        root / "consumequeue",
        file_size=config.mapped_file_size_consume_queue,
        health=health,
        before_rebuild=partial(_dispatch_all_again, commit_log, checkpoint, positions),
    )
    opened.callback(consume_queues.close, write_back=False)
    damaged_queues = consume_queues.load(checkpoint.recovery_offset or 0)
    index = IndexService(
        root / "index",
        slot_num=config.max_hash_slot_num,
        index_num=config.max_index_num,
        clock_ms=clock_ms,
        health=health,
    )
    opened.callback(index.close, write_back=False)
    index.load(
        clean=last_run is None,
        safe_timestamp=checkpoint.index_msg_timestamp,
        safe_offset=checkpoint.recovery_offset or 0,
    )
    return StoreFiles(
        config,
        last_run,
        bool(damaged_queues),
        commit_log,
        checkpoint,
        consume_queues,
        index,
        EpochFileCache(root / "epochFileCheckpoint"),
        suspect_mark,
        positions,
    )


def _doubt_checkpoint(checkpoint: StoreCheckpoint, commit_log: CommitLog) -> None:
    """A checkpoint that the log contradicts is damaged or of another store: the start must not
    begin where it says. Its confirmed offset stays: the log may have lost its end (R24)."""
    # Not `log_id`, which would make one: an older log has none yet, and is no other log.
    log_id = commit_log.found_log_id
    if log_id and checkpoint.is_of_other_log(log_id):
        log.error("checkpoint_of_other_log log_id=%s", log_id)
        checkpoint.forget_all()
    offset = checkpoint.recovery_offset
    if offset is None:  # a Java broker's says only times
        newest_ms = newest_timestamp(commit_log)
        is_false = checkpoint.min_timestamp > 0 and checkpoint.physic_msg_timestamp > newest_ms
    else:
        is_false = not may_end_at(commit_log, offset)
    if is_false:
        log.error(
            "checkpoint_not_believed recovery_offset=%s physic_msg_timestamp=%d log_files_end=%d",
            offset, checkpoint.physic_msg_timestamp, commit_log.end_of_segments,
        )  # fmt: skip
        checkpoint.forget_start()


def _dispatch_all_again(
    commit_log: CommitLog, checkpoint: StoreCheckpoint, positions: QueuePositions
) -> None:
    """The next start, whenever it comes, reads the log from its beginning. Raises OSError."""
    positions.want_from(commit_log.min_offset)
    checkpoint.recovery_offset = commit_log.min_offset
    checkpoint.flush()
