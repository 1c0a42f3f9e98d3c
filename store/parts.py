"""How a store is put together from its folder, and brought to a known state.

`load_parts` opens files, `recover_parts` decides where the log ends and makes the derived data
agree with it; `message_store` is then only what may be done with the parts. Origin: Java
`DefaultMessageStore.load` and `recover`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from epoch.file_cache import EpochFileCache
from store.appender import Appender
from store.checkpoint import StoreCheckpoint
from store.commit_log import CommitLog
from store.config import StoreConfig
from store.consume_queue_store import ConsumeQueueStore
from store.delay_level import DelayLevels
from store.dispatch import Dispatcher
from store.index_service import IndexService
from store.intake import Intake
from store.queries import StoreQueries
from store.queue_table import QueueTable
from store.reader_checks import VerifiedRecords
from store.recovery import Confirmed, java_start_offset, recover_log
from store.suspicion import RunMark, SuspectMark, Suspicion
from store.truncation import Truncation
from store.upkeep import CheckpointWriter, DiskUseOf, Expirer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreParts:
    """Everything a store works with. `last_run` is None if the process before ended in order."""

    last_run: RunMark | None
    has_damaged_queues: bool
    log: CommitLog
    checkpoint: StoreCheckpoint
    consume_queues: ConsumeQueueStore
    index: IndexService
    epochs: EpochFileCache
    suspect_mark: SuspectMark
    truncation: Truncation
    queues: QueueTable
    intake: Intake
    verified: VerifiedRecords
    dispatcher: Dispatcher
    appender: Appender
    queries: StoreQueries
    checkpoints: CheckpointWriter
    expirer: Expirer

    @property
    def was_clean(self) -> bool:
        return self.last_run is None

    def close_files(self) -> None:
        """Let go of all files; derived data goes to the page cache, nothing is synced."""
        self.consume_queues.close()
        self.index.close()
        self.checkpoint.close()
        self.log.close()


def abort_path(root: Path) -> Path:
    """The file that is there from start to clean stop."""
    return root / "abort"


def load_parts(
    config: StoreConfig,
    *,
    store_host: bytes,
    clock_ms: Callable[[], int],
    disk_use_of: DiskUseOf,
) -> StoreParts:
    """Open everything under the store's root; the log's end is not known yet.

    Raises StoreFormatError, CorruptLogError (an epoch file without a good copy), OSError.
    """
    root = config.root
    last_run = RunMark.read(abort_path(root))
    was_clean = last_run is None
    checkpoint = StoreCheckpoint(root / "checkpoint")
    commit_log = CommitLog(config.commit_log_folder, config.mapped_file_size_commit_log)
    commit_log.load()
    consume_queues = ConsumeQueueStore(
        root / "consumequeue", file_size=config.consume_queue_file_size
    )
    damaged_queues = consume_queues.load(checkpoint.recovery_offset or 0)
    index = IndexService(
        root / "index",
        slot_num=config.max_hash_slot_num,
        index_num=config.max_index_num,
        clock_ms=clock_ms,
    )
    index.load(
        clean=was_clean,
        safe_timestamp=checkpoint.index_msg_timestamp,
        safe_offset=checkpoint.recovery_offset or 0,
    )
    epochs = EpochFileCache(root / "epochFileCheckpoint")
    queues = QueueTable(consume_queues)
    verified = VerifiedRecords(commit_log)
    intake = Intake(commit_log)
    dispatcher = Dispatcher(
        commit_log,
        queues,
        index if config.message_index_enable else None,
        DelayLevels(config.message_delay_level),
        intake,
    )
    appender = Appender(
        commit_log,
        queues,
        dispatcher.pending,
        store_host=store_host,
        clock_ms=clock_ms,
        max_message_size=config.max_message_size,
        append_prop_crc=config.enabled_append_prop_crc,
    )
    return StoreParts(
        last_run=last_run,
        has_damaged_queues=bool(damaged_queues),
        log=commit_log,
        checkpoint=checkpoint,
        consume_queues=consume_queues,
        index=index,
        epochs=epochs,
        suspect_mark=SuspectMark(root / "suspect"),
        truncation=Truncation(
            root,
            commit_log,
            checkpoint,
            consume_queues,
            index,
            epochs,
            keep_sets=config.truncated_log_max_sets,
            keep_bytes=config.truncated_log_max_bytes,
        ),
        queues=queues,
        intake=intake,
        verified=verified,
        dispatcher=dispatcher,
        appender=appender,
        queries=StoreQueries(commit_log, queues, index, dispatcher, appender, verified, config),
        checkpoints=CheckpointWriter(commit_log, checkpoint, consume_queues, index, dispatcher),
        expirer=Expirer(
            config,
            commit_log,
            consume_queues,
            index,
            epochs,
            dispatcher,
            verified,
            disk_use_of=disk_use_of,
        ),
    )


def recover_parts(parts: StoreParts, *, controller_mode: bool, boot_id: str) -> None:
    """Find the end of the log, and build what derived data lacks up to the confirmed offset.

    An interrupted truncation is finished first. Outside controller mode all whole records count
    as confirmed, and consume queues ahead of the log are only cut: nobody has the bytes but us.
    Damage, and a stop in disorder under another boot, are put down in `suspect_mark`, not raised.
    """
    parts.truncation.resume()
    commit_log, consume_queues, dispatcher = parts.log, parts.consume_queues, parts.dispatcher
    stored_confirm = parts.checkpoint.confirm_phy_offset
    start = _start_offset(parts)
    # Units are made of confirmed records only, so they may tell of a newer confirmed offset.
    visible_end = consume_queues.last_physical_end
    rotten = False
    if not parts.was_clean:
        # What was built above this point may be half on disk; it is built again from the log.
        rotten = consume_queues.drop_rotten(start, expects_none=False)
        consume_queues.truncate_dirty(start)
    confirmed = Confirmed(stored_confirm, visible_end if controller_mode else 0)
    recovered = recover_log(commit_log, start, confirmed, was_clean=parts.was_clean)
    end = recovered.end_offset
    start = min(start, end)
    rebooted = parts.last_run is not None and not parts.last_run.survived(boot_id)
    if recovered.damage is not None:
        parts.suspect_mark.set(replace(recovered.damage, until_level=rebooted))
    elif rebooted and controller_mode:
        _suspect_a_reboot(parts, end)
    if visible_end > end:
        log.warning("consume_queues_ahead_of_log visible_end=%d log_end=%d", visible_end, end)
    if end == commit_log.min_offset:
        consume_queues.destroy_all()
    is_whole = parts.was_clean and recovered.damage is None
    rotten = consume_queues.drop_rotten(end, expects_none=is_whole) or rotten
    consume_queues.truncate_dirty(end)
    parts.index.truncate_to(end)
    if controller_mode:
        parts.epochs.drop_above(end)
    parts.queues.adopt_loaded()
    consume_queues.correct_min_offsets(commit_log.min_offset)
    parts.verified.restart(start)
    parts.intake.restart(end)
    dispatcher.restart_at(commit_log.min_offset if rotten else start)
    confirm = max(stored_confirm, visible_end) if controller_mode else end
    dispatcher.advance(min(confirm, end))
    log.info(
        "store_recovered clean=%s from_offset=%d end_offset=%d confirm_offset=%d",
        parts.was_clean, start, end, dispatcher.offset,
    )  # fmt: skip


def _suspect_a_reboot(parts: StoreParts, end: int) -> None:
    """R17: what was acknowledged out of the page cache went with it."""
    if parts.suspect_mark.report is not None:
        return
    what = "stopped uncleanly under another boot of this machine: acknowledged bytes may be missing"
    log.warning("log_suspect reason=%r log_end=%d", what, end)
    parts.suspect_mark.set(Suspicion("", end, what, end, kind="reboot"))


def _start_offset(parts: StoreParts) -> int:
    """A record boundary below which log, consume queues and index are whole."""
    commit_log, checkpoint, index = parts.log, parts.checkpoint, parts.index
    if parts.has_damaged_queues or not len(parts.consume_queues):
        return commit_log.min_offset
    if checkpoint.index_msg_timestamp and index.end_phy_offset < 0:
        return commit_log.min_offset
    offset = checkpoint.recovery_offset
    if offset is None or not commit_log.min_offset <= offset <= commit_log.end_of_segments:
        return java_start_offset(
            commit_log,
            checkpoint,
            dispatched_end=parts.consume_queues.last_physical_end,
            clean=parts.was_clean,
        )
    if index.was_cut:
        return max(min(offset, index.end_phy_offset), commit_log.min_offset)
    return offset
